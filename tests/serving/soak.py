"""A server under random load for minutes: cancels, disconnects, bad requests, a killed engine."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx
import psutil

from tests.serving.mixed_requests import build_mixed_request
from tests.serving.server_program import ServerProgram

CLIENTS = 16
# between two ends of the engine; the server waits longer before each restart of one that died within a minute
KILL_SECONDS = 70.0
_LAST_SECONDS = 20.0  # without a kill
_SAMPLE_SECONDS = 0.5
_GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{",
    b"PUT /api HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /api HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
)


@dataclass(slots=True)
class SoakReport:
    """What happened.

    Attributes:
        answers: statuses, and "left" for requests that the client gave up on purpose.
        failures: requests without an answer, or with one that they do not deserve.
        slowest: seconds of the slowest complete answer.
        kills: of the engine.
        memory: resident bytes of the HTTP process, sampled while no engine was loading.
        descriptors: of the HTTP process, likewise.
    """

    answers: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest: float = 0.0
    kills: int = 0
    memory: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def memory_growth(self) -> float:
        """Return the growth of memory from the second quarter of the soak to the last, as a fraction."""
        quarter = len(self.memory) // 4
        early = statistics.median(self.memory[quarter : 2 * quarter])
        return statistics.median(self.memory[-quarter:]) / early - 1

    def summary(self) -> str:
        """Return the figures in a line."""
        return (
            f"{sum(self.answers.values()):,} requests {dict(sorted(self.answers.items()))}, "
            f"{len(self.failures)} failures, slowest {self.slowest:.2f} s, {self.kills} kills, "
            f"memory {min(self.memory) / 1e6:.0f}-{max(self.memory) / 1e6:.0f} MB "
            f"({100 * self.memory_growth():+.1f} %), descriptors {min(self.descriptors)}-"
            f"{max(self.descriptors)}"
        )


def soak(server: ServerProgram, seconds: float, seed: int = 1) -> SoakReport:
    """Run the load, and return what happened."""
    report = SoakReport()
    asyncio.run(_soak(server, seconds, seed, report))
    return report


async def _soak(server: ServerProgram, seconds: float, seed: int, report: SoakReport) -> None:
    end = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=2 * CLIENTS)
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits, trust_env=False) as http,
        asyncio.TaskGroup() as tasks,
    ):
        for client in range(CLIENTS):
            rng = random.Random(seed * 1000 + client)
            tasks.create_task(_run_client(server, http, rng, end, report))
        tasks.create_task(_kill_engines(server, end, report))
        tasks.create_task(_sample(server, http, end, report))


async def _run_client(
    server: ServerProgram, http: httpx.AsyncClient, rng: random.Random, end: float, report: SoakReport
) -> None:
    while time.monotonic() < end:
        kind = rng.choices(["complete", "leave", "garbage", "large"], [70, 20, 8, 2])[0]
        if kind == "complete":
            await _complete(http, rng, report)
        elif kind == "leave":
            await _leave(http, rng)
            report.answers["left"] += 1
        elif kind == "garbage":
            await _send_garbage(server.port, rng)
            report.answers["left"] += 1
        else:
            response = await http.post("/api", content=b" " * (3 << 20), headers={"Content-Type": "a/json"})
            report.answers[str(response.status_code)] += 1
            if response.status_code not in (413, 415, 503):
                report.failures.append(f"3 MB: {response.status_code}")
        if rng.random() < 0.2:
            await asyncio.sleep(rng.random() * 0.3)


async def _complete(http: httpx.AsyncClient, rng: random.Random, report: SoakReport) -> None:
    path, body, status = build_mixed_request(rng)
    start = time.monotonic()
    try:
        response = await http.post(path, json=body)
    except httpx.HTTPError as error:
        report.failures.append(f"{path} {body}: {error!r}")
        return
    report.slowest = max(report.slowest, time.monotonic() - start)
    report.answers[str(response.status_code)] += 1
    # an engine that was killed fails its requests with 500; while it loads there is a 503
    if response.status_code not in (status, 500, 503):
        report.failures.append(f"{path} {body}: {response.status_code} {response.text[:200]}")
    is_ended = response.text.endswith("data: [DONE]\n\n") or '"error"' in response.text
    if response.status_code == 200 and body.get("stream") and not is_ended:
        report.failures.append(f"{path} {body}: a stream without its end: {response.text[-200:]}")


async def _leave(http: httpx.AsyncClient, rng: random.Random) -> None:
    """Close the connection of a long request before its end."""
    body = {
        "prompt": "ab" * rng.randint(1, 50),
        "max_tokens": 350,
        "ignore_eos": True,
        "n": rng.randint(1, 4),
    }
    body["stream"] = rng.random() < 0.5
    with contextlib.suppress(httpx.HTTPError, TimeoutError):
        async with asyncio.timeout(rng.random() * 0.5):
            await http.post("/v1/completions", json=body)


async def _send_garbage(port: int, rng: random.Random) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError, TimeoutError):
        writer.write(rng.choice(_GARBAGE))
        async with asyncio.timeout(rng.random()):
            await reader.read(1000)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def _kill_engines(server: ServerProgram, end: float, report: SoakReport) -> None:
    while end - time.monotonic() > KILL_SECONDS + _LAST_SECONDS:
        await asyncio.sleep(KILL_SECONDS)
        server.find_engine().kill()
        report.kills += 1


async def _sample(server: ServerProgram, http: httpx.AsyncClient, end: float, report: SoakReport) -> None:
    process = psutil.Process(server.process.pid)
    while time.monotonic() < end:
        await asyncio.sleep(_SAMPLE_SECONDS)
        if (await http.get("/health")).status_code == 200:
            report.memory.append(process.memory_info().rss)
            report.descriptors.append(process.num_fds())
