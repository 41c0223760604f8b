"""The application around an engine: routes translate, the engine decides. Nothing is global.

PUT /api       Megatron's text generation request and answer
GET /health    whether requests are taken
GET /          a page with a prompt box (also /index.html)
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Protocol

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from mega_schema.errors import RequestError
from mega_serve.api.megatron import BeamSearch, Refused, Sampling, parse

logger = logging.getLogger("mega.serve")

MOST_BODY = 2 * 1024 * 1024  # bytes
_SLOWEST_BODY = 30.0  # seconds a client has to send its body
_LOOK = 0.25  # seconds between two looks whether the client is still there
_CLIENT_LEFT = 499  # nginx' number; nobody is there to read it, but the log is


class Gone(Exception):
    """The client left, or the server stops: nobody wants the answer any more."""


class Engine(Protocol):
    """What answers. The application calls it from one thread at a time."""

    def answer(self, ask: Sampling | BeamSearch, gone: Callable[[], bool]) -> dict[str, object]:
        """The answer's JSON.

        Args:
            gone: whether to give up; looked at between two tokens.

        Raises:
            RequestError: the request asks for what the model cannot do.
            Gone: `gone` said so.
        """


def create_app(
    engine: Engine, *, legacy: bool = False, most_body: int = MOST_BODY, log_prompts: bool = False
) -> FastAPI:
    """An application around an engine that is ready.

    Args:
        legacy: give mistakes the statuses and bodies that Megatron's server gives them, a bare JSON string
            with status 200 for most. Otherwise: 400 and an object with `message` and an OpenAI style `error`.
        most_body: bytes of the longest body that is read.
        log_prompts: write prompts to the log, except for requests with "no_log": true.
    """
    app = FastAPI(title="mega-serve", docs_url=None, redoc_url=None, openapi_url=None)
    page = resources.files("mega_serve").joinpath("web/index.html").read_text("utf-8")
    one_at_a_time = asyncio.Lock()

    @app.get("/")
    @app.get("/index.html")
    async def index() -> HTMLResponse:
        return HTMLResponse(page)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/api")
    async def not_for_reading() -> None:
        raise HTTPException(404, "PUT a request to /api; there is nothing to GET")

    @app.put("/api")
    async def put(request: Request) -> Response:
        began = time.monotonic()
        ask = parse(await _json(request, most_body), legacy=legacy)
        if log_prompts and not ask.no_log:
            logger.info("prompts %r", ask.prompts)
        async with one_at_a_time:
            answer = await _answer(engine, ask, request)
        milliseconds = 1000 * (time.monotonic() - began)
        asked = f"prompts={len(ask.prompts)} tokens_to_generate={ask.tokens_to_generate}"
        logger.info("PUT /api 200: %s, %.0f ms", asked, milliseconds)
        return JSONResponse(answer)

    @app.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> Response:
        message = error.message if isinstance(error, Refused) else str(error)
        status = error.legacy_status if isinstance(error, Refused) else 200
        logger.info("PUT /api refused: %s", error.where)
        if legacy:
            return JSONResponse(message, status)
        code = error.code if isinstance(error, Refused) else "invalid_value"
        return _error(400, message, param=str(error.where), code=code)

    @app.exception_handler(HTTPException)
    async def wrong(_: Request, error: HTTPException) -> Response:
        return _error(error.status_code, error.detail, headers=error.headers)

    @app.exception_handler(Gone)
    async def gone(_: Request, error: Gone) -> Response:
        logger.info("PUT /api %d: the client left", _CLIENT_LEFT)
        return Response(status_code=_CLIENT_LEFT)

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:
        return _error(500, "the server failed; its log says where", type="server_error")

    return app


async def _json(request: Request, most: int) -> object:
    """The decoded body.

    Raises:
        HTTPException: 415 not announced as JSON, 413 too long, 408 too slow, 400 not JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise HTTPException(415, f"Content-Type must be application/json, not {kind or 'absent'}")
    too_long = HTTPException(413, f"the body is longer than {most:,} bytes", {"Connection": "close"})
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and len(announced) < 20 and int(announced) > most:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(_SLOWEST_BODY):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise too_long
    except TimeoutError:
        late = f"the body took longer than {_SLOWEST_BODY:.0f} seconds"
        raise HTTPException(408, late, {"Connection": "close"}) from None
    try:
        decoded: object = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is not JSON: {_shown(error)}") from None
    return decoded


def _shown(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno}, column {error.colno}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else "it cannot be decoded"


async def _answer(engine: Engine, ask: Sampling | BeamSearch, request: Request) -> dict[str, object]:
    """The engine's answer, worked out beside the event loop and given up when the client leaves."""
    left = threading.Event()
    if await request.is_disconnected():
        raise Gone
    work = asyncio.create_task(run_in_threadpool(engine.answer, ask, left.is_set))
    try:
        while not (await asyncio.wait({work}, timeout=_LOOK))[0]:
            if await request.is_disconnected():
                left.set()
        return work.result()
    finally:
        left.set()


def _error(
    status: int,
    message: str,
    *,
    type: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    error = {"message": message, "type": type, "param": param, "code": code}
    return JSONResponse({"message": message, "error": error}, status, headers)
