"""Texts are encoded in threads: long ones one after another, short ones at once."""

from __future__ import annotations

import asyncio
import threading
import time

from mega_serve.api.encoding_threads import LONG_TEXT_CHARACTERS, EncodingThreads


class Encoder:
    """Counts the calls that run at the same time."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self.calls = 0
        self.lock = threading.Lock()

    def encode(self, seconds: float) -> int:
        with self.lock:
            self.running += 1
            self.calls += 1
            self.most = max(self.most, self.running)
        time.sleep(seconds)
        with self.lock:
            self.running -= 1
        return 7


def test_long_texts_are_encoded_one_after_another() -> None:
    """Each takes 320 times its size while it is encoded: six of 2 MiB took 3.4 GB at once."""
    encoder, threads = Encoder(), EncodingThreads()

    async def encode_all() -> list[int]:
        calls = [threads.run(LONG_TEXT_CHARACTERS + 1, encoder.encode, 0.01) for _ in range(5)]
        return await asyncio.gather(*calls)

    assert asyncio.run(encode_all()) == [7] * 5
    assert (encoder.calls, encoder.most) == (5, 1)


def test_a_short_text_does_not_wait_for_a_long_one() -> None:
    encoder, threads = Encoder(), EncodingThreads()

    async def encode_both() -> float:
        long = asyncio.create_task(threads.run(1 << 21, encoder.encode, 0.5))
        await asyncio.sleep(0.05)
        start = time.monotonic()
        await threads.run(LONG_TEXT_CHARACTERS, encoder.encode, 0.0)
        waited = time.monotonic() - start
        await long
        return waited

    assert asyncio.run(encode_both()) < 0.3
    assert encoder.most == 2


def test_a_request_that_was_cancelled_is_not_encoded() -> None:
    encoder, threads = Encoder(), EncodingThreads()

    async def cancel_one() -> None:
        first = asyncio.create_task(threads.run(1 << 21, encoder.encode, 0.1))
        second = asyncio.create_task(threads.run(1 << 21, encoder.encode, 0.0))
        await asyncio.sleep(0.02)
        second.cancel()
        await first
        await threads.run(1 << 21, encoder.encode, 0.0)

    asyncio.run(cancel_one())
    assert encoder.calls == 2
