"""An application of the APIs' routers alone, for tests without a server around it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from mega_schema.errors import RequestError
from mega_serve.api.context import ApiContext
from mega_serve.api.routers import build_routers
from mega_serve.api.services import ApiServices
from mega_serve.engine.interfaces import EngineDeadError, EngineOverloadedError, EngineUnavailableError
from mega_serve.http.errors import HttpError, as_http_error

JSON = {"Content-Type": "application/json"}
EXPECTED_ERRORS = (
    HttpError,
    RequestError,
    EngineOverloadedError,
    EngineUnavailableError,
    EngineDeadError,
    Exception,
)


def build_app(
    context: ApiContext, services: ApiServices | None = None, routers: Sequence[APIRouter] | None = None
) -> FastAPI:
    """Return an application with routers and a handler of their errors.

    Args:
        routers: by default those of all APIs.
    """
    app = FastAPI(title="mega-serve")
    for router in build_routers(context, services) if routers is None else routers:
        app.include_router(router)

    async def handle(_: Request, error: Exception) -> Response:
        http_error = as_http_error(error)
        return JSONResponse(http_error.body, http_error.status, http_error.headers)

    for kind in EXPECTED_ERRORS:
        app.add_exception_handler(kind, handle)
    return app


def send(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    """Send one request to the application, without a socket."""

    async def exchange() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(exchange())
