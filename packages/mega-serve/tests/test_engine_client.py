"""The engine process and its client: requests, cancel, queue, failures, restarts."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from mega_serve.engine.interfaces import EngineDeadError, EngineOverloadedError, EngineUnavailableError
from mega_serve.engine.requests import EngineRequest, SamplingParams, SequenceOutput, TokenLogprob
from mega_serve.process.engine_client import EngineProcessClient
from mega_serve.process.engine_process import Connection, EngineLoop
from mega_serve.process.frames import encode_frame
from mega_serve.process.output_buffer import OutputBuffer, join_outputs
from tests import fork_server
from tests.serving.echo_engine import CRASH, HANG, LOSE_RANK, MODEL, REFUSE, build_echo_engine
from tests.serving.echo_server import echo_settings


def build_request(prompt: tuple[int, ...] = (65, 66), max_tokens: int = 4, **fields: Any) -> EngineRequest:
    return EngineRequest(
        **{"request_id": "r", "prompt_token_ids": prompt, "params": SamplingParams(max_tokens=max_tokens)}
        | fields
    )


@asynccontextmanager
async def run_engine(
    options: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[EngineProcessClient]:
    client = EngineProcessClient(echo_settings(options or {}, **{"first_delay": 0.05, **settings}))
    await client.start()
    try:
        await client.wait_status("ready", "dead")
        yield client
    finally:
        await client.close()


async def collect(client: EngineProcessClient, request: EngineRequest) -> list[SequenceOutput]:
    return [output async for output in client.generate(request)]


async def wait_until(condition: Any, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def test_outputs_of_concurrent_requests_reach_their_callers() -> None:
    async def scenario() -> None:
        async with run_engine() as client:
            assert client.model == MODEL
            assert client.is_alive
            requests = [build_request((65 + i,), max_tokens=1 + i, request_id=f"r{i}") for i in range(20)]
            results = await asyncio.gather(*(collect(client, request) for request in requests))
            for i, outputs in enumerate(results):
                assert "".join(output.text for output in outputs) == chr(65 + i) * (1 + i)
                assert outputs[-1].finish_reason == "length"
                assert {output.request_id for output in outputs} == {f"r{i}"}
            assert client.pending_requests == 0

    asyncio.run(scenario())


def test_two_requests_may_have_the_same_id() -> None:
    async def scenario() -> None:
        async with run_engine({"step_seconds": 0.01}) as client:
            results = await asyncio.gather(
                collect(client, build_request((65,))), collect(client, build_request((66,)))
            )
            texts = ["".join(output.text for output in outputs) for outputs in results]
            assert texts == ["AAAA", "BBBB"]
            assert {output.request_id for outputs in results for output in outputs} == {"r"}

    asyncio.run(scenario())


def test_closing_or_cancelling_a_request_frees_it_in_the_engine() -> None:
    async def scenario() -> None:
        async with run_engine({"step_seconds": 0.01}) as client:
            async with aclosing(client.generate(build_request(max_tokens=10_000))) as outputs:
                await anext(outputs)
                await wait_until(lambda: client.stats.running == 1)
            await wait_until(lambda: client.stats.running == 0)
            task = asyncio.create_task(collect(client, build_request(max_tokens=10_000)))
            await wait_until(lambda: client.stats.running == 1)
            task.cancel()
            await wait_until(lambda: client.stats.running == 0)
            assert client.pending_requests == 0

    asyncio.run(scenario())


def test_a_request_that_the_engine_refuses_ends_alone() -> None:
    async def scenario() -> None:
        async with run_engine({"step_seconds": 0.01}) as client:
            good = asyncio.create_task(collect(client, build_request(max_tokens=20)))
            (output,) = await collect(client, build_request((REFUSE,), request_id="bad"))
            assert output.finish_reason == "error"
            assert "error" in (output.error or "")
            assert "".join(output.text for output in await good) == "AB" * 10
            assert client.restarts == 0

    asyncio.run(scenario())


def test_a_step_that_raises_ends_its_requests_with_an_id_and_the_engine_is_started_again() -> None:
    async def scenario() -> None:
        async with run_engine({"step_seconds": 0.01}) as client:
            pid = client.pid
            neighbour = asyncio.create_task(collect(client, build_request(max_tokens=10_000)))
            await wait_until(lambda: client.stats.running == 1)
            (output,) = await collect(client, build_request((CRASH,), request_id="bad"))
            assert output.finish_reason == "error"
            assert (await neighbour)[-1].error == output.error
            await wait_until(lambda: client.restarts == 1 and client.status == "ready")
            assert client.pid != pid
            assert len(await collect(client, build_request())) > 0

    asyncio.run(scenario())


@pytest.mark.parametrize("log_prompts", [False, True])
def test_a_failure_quotes_its_request_in_the_log_only_if_prompts_are_logged(
    log_prompts: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with run_engine({"step_seconds": 0.01}, log_prompts=log_prompts) as client:
            for prompt in ((REFUSE, 77777), (CRASH, 77777)):
                await collect(client, build_request(prompt, request_id=f"bad-{prompt[0]}"))

    asyncio.run(scenario())
    text = capfd.readouterr().err  # of the engine's process
    assert text.count("77777") == (2 if log_prompts else 0)
    assert text.count("(message withheld: it may quote a request)") == (0 if log_prompts else 2)
    assert "ValueError: " in text
    assert "RuntimeError: " in text
    assert 'echo_engine.py", line' in text


def test_a_failure_between_two_steps_ends_the_engine_without_quoting_a_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(encode_frame({"add": {"my secret": "prompt"}}))
        loop = EngineLoop(build_echo_engine({}), Connection(theirs))
        assert loop.run() == 1
    (message,) = caplog.messages
    assert "the engine failed between two steps" in message
    assert "secret" not in caplog.text


@pytest.mark.parametrize("event", ["killed", "stopped", "hung"])
def test_a_dead_or_hung_engine_fails_its_requests_within_the_limit(event: str) -> None:
    async def scenario() -> None:
        async with run_engine({"step_seconds": 0.01}, heartbeat_timeout=0.6) as client:
            assert client.pid
            process = psutil.Process(client.pid)
            prompt = (65, HANG) if event == "hung" else (65,)
            task = asyncio.create_task(collect(client, build_request(prompt, max_tokens=10_000)))
            await wait_until(lambda: client.pending_requests == 1)
            await asyncio.sleep(0.1)
            start = time.monotonic()
            if event != "hung":
                process.send_signal(signal.SIGKILL if event == "killed" else signal.SIGSTOP)
            with pytest.raises(
                EngineDeadError, match="signal 9" if event == "killed" else "no step for 0.6 s"
            ):
                await task
            assert time.monotonic() - start < 2.5
            assert not client.is_alive
            await wait_until(lambda: client.status == "ready")
            assert not process.is_running()
            assert len(await collect(client, build_request())) > 0

    asyncio.run(scenario())


def test_an_engine_whose_end_is_first_seen_by_a_write_is_started_again() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(30), run_engine() as client:
            assert client.pid
            process = psutil.Process(client.pid)
            process.kill()
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)  # the event loop stands still, and does not see the end of the stream
            with pytest.raises(EngineDeadError, match="signal 9"):
                await collect(client, build_request())
            await client.wait_status("ready")
            assert len(await collect(client, build_request())) > 0

    asyncio.run(scenario())


def test_an_unforeseen_error_in_watching_the_engine_starts_it_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(30), run_engine() as client:
            with monkeypatch.context() as patch:
                patch.setattr(client, "_handle", None)
                with pytest.raises(EngineDeadError, match="it cannot be watched, see the log"):
                    await collect(client, build_request())
            await client.wait_status("ready")
            assert len(await collect(client, build_request())) > 0

    asyncio.run(scenario())
    assert "TypeError: 'NoneType' object is not callable" in caplog.text


def test_without_restart_a_dead_engine_stays_dead() -> None:
    async def scenario() -> None:
        async with run_engine(restart=False) as client:
            assert client.pid
            os.kill(client.pid, signal.SIGKILL)
            await client.wait_status("dead")
            assert client.failure == "its process got signal 9"
            with pytest.raises(EngineUnavailableError, match="dead"):
                await collect(client, build_request())

    asyncio.run(scenario())


def test_a_model_that_cannot_be_loaded_is_not_tried_again() -> None:
    async def scenario() -> None:
        async with run_engine({"refuse": True}) as client:
            assert client.status == "dead"
            assert client.is_refused
            assert client.failure == "--load: no checkpoint: found here"

    asyncio.run(scenario())


def test_an_engine_that_dies_in_its_first_load_is_not_started_again() -> None:
    async def scenario() -> None:
        async with run_engine({"crash": True}) as client:
            assert client.status == "dead"
            assert not client.is_refused
            assert client.restarts == 0
            assert client.failure == "its process exited with code 1"

    asyncio.run(scenario())


def test_a_rank_that_ends_is_named_without_a_traceback(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with run_engine({"lose_rank": True}) as client:
            assert client.status == "dead"
            assert not client.is_refused  # another attempt may succeed
            assert client.failure == "rank 1, at its start, got signal 9"
        async with run_engine() as client:
            with pytest.raises(EngineDeadError, match="the engine stopped: rank 1 has ended"):
                await collect(client, build_request((LOSE_RANK,)))
            await client.wait_status("ready")

    asyncio.run(scenario())
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "the engine stopped: rank 1, at its start, got signal 9",
        "the engine stopped: rank 1 has ended",
    ]
    assert "Traceback" not in capfd.readouterr().err


def test_a_process_that_cannot_be_started_is_a_failure_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def spawn(*words: Any, **options: Any) -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    async def scenario() -> None:
        async with run_engine() as client:
            assert client.pid is not None
            start = asyncio.create_subprocess_exec
            monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn)
            os.kill(client.pid, signal.SIGKILL)
            await wait_until(lambda: client.restarts == 2)  # it tries again
            monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
            await client.wait_status("ready")
            monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn)
            client = EngineProcessClient(echo_settings({}))
            await client.start()
            await client.wait_status("dead")
            assert client.failure == "its process cannot be started: Cannot allocate memory"
            await client.close()

    asyncio.run(scenario())


def test_while_loading_requests_are_refused_and_no_model_is_known() -> None:
    async def scenario() -> None:
        client = EngineProcessClient(echo_settings({"load_seconds": 60.0}))
        await client.start()
        with pytest.raises(EngineUnavailableError, match="loading"):
            await collect(client, build_request())
        with pytest.raises(EngineUnavailableError, match="loading"):
            _ = client.model
        assert not client.is_alive
        await client.close()

    asyncio.run(scenario())


def test_a_full_queue_tells_when_to_come_again() -> None:
    async def scenario() -> None:
        async with run_engine({"step_seconds": 0.02}, queue_requests=2, queue_tokens=1000) as client:
            await wait_until(lambda: client.stats.tokens_per_second > 0)
            long = asyncio.create_task(collect(client, build_request(max_tokens=898)))
            await wait_until(lambda: client.pending_requests == 1)
            with pytest.raises(EngineOverloadedError, match="900 \\+ 102 tokens of at most 1,000") as error:
                await collect(client, build_request(max_tokens=100))
            assert 8.0 <= error.value.retry_after <= 9.0  # 900 tokens at 100 a second
            short = asyncio.create_task(collect(client, build_request(max_tokens=50)))
            await wait_until(lambda: client.pending_requests == 2)
            with pytest.raises(EngineOverloadedError, match="2 requests of at most 2"):
                await collect(client, build_request(max_tokens=1))
            assert client.rejections == 2
            await short
            long.cancel()

    asyncio.run(scenario())


def test_an_idle_engine_accepts_a_request_above_the_queues_bound() -> None:
    async def scenario() -> None:
        async with run_engine(queue_tokens=10) as client:
            assert len(await collect(client, build_request(max_tokens=50))) > 0

    asyncio.run(scenario())


def test_a_slow_reader_neither_stalls_the_engine_nor_holds_more_than_one_output_per_sequence() -> None:
    async def scenario() -> None:
        async with run_engine() as client:
            async with aclosing(client.generate(build_request(max_tokens=2000, n=2))) as outputs:
                first = await anext(outputs)
                fast = await collect(client, build_request(max_tokens=2000, request_id="fast"))
                assert sum(len(output.token_ids) for output in fast) == 2000
                await wait_until(lambda: client.stats.running == 0)
                rest = [output async for output in outputs]
            assert len(rest) <= 4
            assert sum(len(output.token_ids) for output in [first, *rest]) == 4000

    asyncio.run(scenario())


def test_cut_requests_raise_and_leave_the_engine() -> None:
    async def scenario() -> None:
        async with run_engine({"step_seconds": 0.01}) as client:
            task = asyncio.create_task(collect(client, build_request(max_tokens=10_000)))
            await wait_until(lambda: client.stats.running == 1)
            client.cut_requests("stopping")
            with pytest.raises(EngineUnavailableError, match="stopping"):
                await task
            await wait_until(lambda: client.stats.running == 0)

    asyncio.run(scenario())


def test_restarts_leave_no_process_and_no_descriptor() -> None:
    async def scenario() -> None:
        process = psutil.Process()
        others = set(process.children(recursive=True))  # of other tests
        async with run_engine() as client:
            descriptors = process.num_fds()
            for count in range(1, 4):
                assert client.pid
                os.kill(client.pid, signal.SIGKILL)
                await wait_until(lambda count=count: client.restarts == count and client.status == "ready")
            assert process.num_fds() == descriptors
            assert len({*process.children(recursive=True)} - others) == 1
        assert not {*process.children(recursive=True)} - others

    asyncio.run(scenario())


def test_the_engine_ends_with_its_parent_even_while_it_is_stuck(tmp_path: Path) -> None:
    program = """
import asyncio, os, signal, sys
from mega_serve.process.engine_client import EngineProcessClient
from tests.serving.echo_server import echo_settings

async def main():
    client = EngineProcessClient(echo_settings({"load_seconds": 3600.0}))
    await client.start()
    while client.pid is None:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    print(client.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": fork_server.module_path()}
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    pid = int(result.stdout)
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the engine outlived its parent"
        time.sleep(0.02)


def test_joined_outputs_lose_nothing() -> None:
    logprob = TokenLogprob(1, -0.5)
    first = SequenceOutput(request_id="r", token_ids=(1,), text="a", logprobs=(logprob,), cached_tokens=3)
    last = SequenceOutput(
        request_id="r", token_ids=(2,), text="b", logprobs=(logprob,), finish_reason="stop", stop_reason="c"
    )
    assert join_outputs([first, last]) == SequenceOutput(
        request_id="r",
        token_ids=(1, 2),
        text="ab",
        logprobs=(logprob, logprob),
        cached_tokens=3,
        finish_reason="stop",
        stop_reason="c",
    )


def test_outputs_before_a_failure_are_still_delivered() -> None:
    async def scenario() -> None:
        buffer = OutputBuffer()
        buffer.put(SequenceOutput(request_id="r", text="a"))
        buffer.fail(EngineDeadError("dead"))
        assert [output.text for output in await buffer.take()] == ["a"]
        with pytest.raises(EngineDeadError):
            await buffer.take()

    asyncio.run(scenario())
