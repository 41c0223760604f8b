"""The samples of a server's /metrics, for tests of what reads them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator

import httpx
from prometheus_client.parser import text_string_to_metric_families

from mega_serve.engine.interfaces import EngineOverloadedError, ModelInfo
from mega_serve.engine.requests import EngineRequest, EngineStats, SequenceOutput
from mega_serve.http.config import ServerConfig
from tests.serving.echo_engine import MODEL
from tests.serving.echo_server import create_echo_app


class FullEngineClient:
    """An EngineClient whose queue is full."""

    model: ModelInfo = MODEL
    stats = EngineStats(waiting=7)
    is_alive = True

    async def generate(self, request: EngineRequest) -> AsyncIterator[SequenceOutput]:
        raise EngineOverloadedError("the queue is full", 3.0)
        yield


def served_samples() -> dict[str, list[dict[str, str]]]:
    """Return the labels of every sample by its name, after one request that the full queue refused."""
    app = create_echo_app(FullEngineClient(), ServerConfig()).asgi

    async def exchange() -> str:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            refused = await client.post("/echo", json={"prompt": "A"})
            assert refused.status_code == 429
            return (await client.get("/metrics")).text

    samples: dict[str, list[dict[str, str]]] = defaultdict(list)
    for family in text_string_to_metric_families(asyncio.run(exchange())):
        for sample in family.samples:
            samples[sample.name].append(sample.labels)
    return samples
