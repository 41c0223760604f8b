"""Health, readiness, metrics, load and version."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from mega_serve import __version__
from mega_serve.engine.interfaces import EngineClient, EngineUnavailableError
from mega_serve.http.accounts import Lifecycle
from mega_serve.http.errors import UNAVAILABLE_RETRY_SECONDS, retry_after


def build_probe_router(client: EngineClient, lifecycle: Lifecycle) -> APIRouter:
    """Return the routes for an orchestrator's probes. They need no key and tell a state only.

    /livez       200 while the process answers: a restart would not help while a model loads
    /health      200 while the engine steps or waits for work; 503 loading, restarting, hung or dead
    /ready       the same, and 503 while draining (also /readyz)
    """
    router = APIRouter(tags=["Server"])

    def is_loaded() -> bool:
        try:
            return bool(client.model)
        except EngineUnavailableError:
            return False

    def engine_state() -> str:
        status = getattr(client, "status", "ready" if is_loaded() else "loading")
        return "hung" if status == "ready" and not client.is_alive else status

    @router.get("/livez", summary="The process answers")
    async def get_livez() -> Response:
        return JSONResponse({"status": "ok"})

    @router.get("/health", summary="The engine steps")
    async def get_health() -> Response:
        return _state_response("ok" if client.is_alive else engine_state())

    @router.get("/ready", summary="New requests are accepted")
    @router.get("/readyz", summary="New requests are accepted")
    async def get_ready() -> Response:
        if lifecycle.is_draining:
            return _state_response("draining")
        return _state_response("ok" if client.is_alive else engine_state())

    return router


def build_load_router(client: EngineClient, lifecycle: Lifecycle) -> APIRouter:
    """Return /load and /version."""
    router = APIRouter(tags=["Server"])

    @router.get("/load", summary="Requests in progress and the engine's load")
    async def get_load() -> Response:
        load = {"server_load": lifecycle.active_requests, **asdict(client.stats)}
        del load["last_step"]  # by the clock of the engine process: it tells clients nothing
        del load["step_counts"], load["step_tokens"]  # /metrics has the histogram
        return JSONResponse(load)

    @router.get("/version", summary="The version of mega-serve")
    async def get_version() -> Response:
        return JSONResponse({"version": __version__})

    return router


def build_metrics_router(render: Callable[[], bytes]) -> APIRouter:
    """Return /metrics."""
    router = APIRouter(tags=["Server"])

    @router.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
    async def get_metrics() -> Response:
        return Response(render(), media_type=CONTENT_TYPE_LATEST)

    return router


def _state_response(state: str) -> Response:
    if state == "ok":
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": state}, 503, retry_after(UNAVAILABLE_RETRY_SECONDS))
