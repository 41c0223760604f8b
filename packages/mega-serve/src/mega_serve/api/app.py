"""The HTTP application around an engine. It holds no global state.

PUT /api       Megatron's text generation request and response
GET /health    200 as long as the server accepts requests
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
from mega_serve.api.megatron import BadRequest, GenerationRequest, parse_request
from mega_serve.limits import MAX_BODY_BYTES

logger = logging.getLogger("mega.serve")

_BODY_TIMEOUT = 30.0  # seconds a client has to send its body
_DISCONNECT_POLL = 0.25  # seconds between two checks that the client is connected
_CLIENT_CLOSED_REQUEST = 499  # nginx's status; the client never sees it, the log does


class ClientDisconnected(Exception):
    """The client closed the connection, or the server is stopping: no response is needed."""


class Engine(Protocol):
    """The interface of a text generator. The application calls it from one thread at a time."""

    def generate(self, request: GenerationRequest, should_abort: Callable[[], bool]) -> dict[str, object]:
        """Return the JSON object of the response.

        Args:
            should_abort: checked between two tokens; generation stops once it returns true.

        Raises:
            RequestError: the model does not support the request.
            ClientDisconnected: `should_abort` returned true.
        """


def create_app(
    engine: Engine, *, legacy: bool = False, max_body_bytes: int = MAX_BODY_BYTES, log_prompts: bool = False
) -> FastAPI:
    """Create the application around an engine that has loaded its model.

    Args:
        legacy: answer a bad request like Megatron's server, mostly with status 200 and a bare JSON string.
            Otherwise: status 400 and an object with `message` and an OpenAI-style `error`.
        max_body_bytes: a longer body is refused.
        log_prompts: write prompts to the log, except for requests with "no_log": true.
    """
    app = FastAPI(title="mega-serve", docs_url=None, redoc_url=None, openapi_url=None)
    page = resources.files("mega_serve").joinpath("web/index.html").read_text("utf-8")
    engine_lock = asyncio.Lock()

    @app.get("/")
    @app.get("/index.html")
    async def get_page() -> HTMLResponse:
        return HTMLResponse(page)

    @app.get("/health")
    async def get_health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/api")
    async def get_api() -> None:
        raise HTTPException(404, "/api accepts PUT only")

    @app.put("/api")
    async def put_api(http_request: Request) -> Response:
        start = time.monotonic()
        request = parse_request(await _read_json(http_request, max_body_bytes), legacy=legacy)
        if log_prompts and not request.no_log:
            logger.info("prompts %r", request.prompts)
        async with engine_lock:
            response = await _run_engine(engine, request, http_request)
        milliseconds = 1000 * (time.monotonic() - start)
        summary = f"prompts={len(request.prompts)} tokens_to_generate={request.tokens_to_generate}"
        logger.info("PUT /api 200: %s, %.0f ms", summary, milliseconds)
        return JSONResponse(response)

    @app.exception_handler(RequestError)
    async def handle_request_error(_: Request, error: RequestError) -> Response:
        message = error.message if isinstance(error, BadRequest) else str(error)
        status = error.legacy_status if isinstance(error, BadRequest) else 200
        logger.info("PUT /api refused: %s", error.where)
        if legacy:
            return JSONResponse(message, status)
        code = error.code if isinstance(error, BadRequest) else "invalid_value"
        return _error_response(400, message, param=str(error.where), code=code)

    @app.exception_handler(HTTPException)
    async def handle_http_exception(_: Request, error: HTTPException) -> Response:
        return _error_response(error.status_code, error.detail, headers=error.headers)

    @app.exception_handler(ClientDisconnected)
    async def handle_disconnect(_: Request, error: ClientDisconnected) -> Response:
        logger.info("PUT /api %d: the client disconnected", _CLIENT_CLOSED_REQUEST)
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    @app.exception_handler(Exception)
    async def handle_exception(_: Request, error: Exception) -> Response:
        return _error_response(500, "internal server error; see the server's log", type="server_error")

    return app


async def _read_json(http_request: Request, max_bytes: int) -> object:
    """Read and decode the body.

    Raises:
        HTTPException: 415 content type is not JSON, 413 too long, 408 too slow, 400 not JSON.
    """
    content_type = http_request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not (
        content_type.startswith("application/") and content_type.endswith("+json")
    ):
        raise HTTPException(415, f"Content-Type must be application/json, not {content_type or 'absent'}")
    too_long = HTTPException(413, f"the body is longer than {max_bytes:,} bytes", {"Connection": "close"})
    length = http_request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and len(length) < 20 and int(length) > max_bytes:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT):
            async for chunk in http_request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise too_long
    except TimeoutError:
        message = f"the body took longer than {_BODY_TIMEOUT:.0f} seconds"
        raise HTTPException(408, message, {"Connection": "close"}) from None
    try:
        decoded: object = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is not JSON: {_describe_json_error(error)}") from None
    return decoded


def _describe_json_error(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno}, column {error.colno}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else "it cannot be decoded"


async def _run_engine(engine: Engine, request: GenerationRequest, http_request: Request) -> dict[str, object]:
    """Run the engine in a thread, and abort it when the client disconnects."""
    abort = threading.Event()
    if await http_request.is_disconnected():
        raise ClientDisconnected
    task = asyncio.create_task(run_in_threadpool(engine.generate, request, abort.is_set))
    try:
        while not (await asyncio.wait({task}, timeout=_DISCONNECT_POLL))[0]:
            if await http_request.is_disconnected():
                abort.set()
        return task.result()
    finally:
        abort.set()


def _error_response(
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
