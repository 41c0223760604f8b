"""Threads that encode texts: short ones at the same time, long ones one after another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# 32 texts of this size at the same time take about as much memory as one of 2 MiB
LONG_TEXT_CHARACTERS = 1 << 16

T = TypeVar("T")


class EncodingThreads:
    """Encode texts outside the event loop, without the interpreter's lock.

    The `tokenizers` library takes up to 320 bytes of memory for each byte of a text while it encodes it: 570
    MiB for a body of 1.8 MB. So long texts wait for each other. Short ones never wait for a long one.
    """

    def __init__(self) -> None:
        self._long_texts = ThreadPoolExecutor(1, "long-texts")

    async def run(self, characters: int, encode: Callable[..., T], *args: object) -> T:
        """Call `encode` in a thread.

        Args:
            characters: of all texts that it encodes.
        """
        if characters <= LONG_TEXT_CHARACTERS:
            return await asyncio.to_thread(encode, *args)
        return await asyncio.get_running_loop().run_in_executor(self._long_texts, encode, *args)
