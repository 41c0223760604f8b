"""The HTTP application: routers of the APIs behind keys, limits and drain; errors; health and metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from mega_schema.errors import RequestError
from mega_serve import __version__
from mega_serve.engine.interfaces import (
    EngineClient,
    EngineDeadError,
    EngineOverloadedError,
    EngineUnavailableError,
)
from mega_serve.http.accounts import Lifecycle, RequestAccount
from mega_serve.http.config import ServerConfig
from mega_serve.http.errors import SERVER_ERROR, HttpError, as_http_error, describe_errors, retry_after
from mega_serve.http.exchange import ExchangeMiddleware
from mega_serve.http.hosts import HostMiddleware
from mega_serve.http.metrics import ServerMetrics
from mega_serve.http.openapi_page import render_page
from mega_serve.http.rate_limit import RateLimiter
from mega_serve.http.responses import error_response
from mega_serve.http.status_routes import build_load_router, build_metrics_router, build_probe_router
from mega_serve.http.telemetry import telemetry_config

_DRAIN_RETRY_SECONDS = 30.0  # for an orchestrator to bring a new server up


@dataclass(frozen=True, slots=True, kw_only=True)
class Application:
    """The ASGI application and what its server needs of it."""

    asgi: FastAPI
    client: EngineClient
    lifecycle: Lifecycle
    metrics: ServerMetrics


def create_app(
    client: EngineClient,
    config: ServerConfig,
    *,
    apis: Sequence[APIRouter],
    pages: Sequence[APIRouter] = (),
    connections: Callable[[], int] = lambda: 0,
    clock: Callable[[], float] = time.monotonic,
) -> Application:
    """Assemble the application.

    Args:
        apis: routers that run the engine: key, rate limits, not while draining.
        pages: routers that only need a key, which a browser sends as a password.
        connections: returns the number of open connections, for a metric.
        clock: seconds, monotonic.
    """
    lifecycle = Lifecycle()
    metrics = ServerMetrics(client, vllm_names=config.vllm_metrics, connections=connections)
    rates = RateLimiter(config.rate_limits)
    app = _build_app(config)
    # the last one added is the outermost
    app.add_middleware(
        ExchangeMiddleware,
        client=client,
        config=config,
        lifecycle=lifecycle,
        metrics=metrics,
        rates=rates,
        clock=clock,
    )
    _add_error_handlers(app)

    async def require_key(request: Request) -> None:
        account_of(request).key_id = config.keys.authenticate(request.headers)

    # dependencies of routes, not tests of paths: no spelling of a path or a Host gets around them
    locked = [Depends(require_key)]
    app.include_router(build_probe_router(client, lifecycle))
    app.include_router(
        build_metrics_router(metrics.render),
        dependencies=[] if config.public_metrics else locked,
        responses=describe_errors(401),
    )
    app.include_router(
        build_load_router(client, lifecycle), dependencies=locked, responses=describe_errors(401)
    )
    app.include_router(_build_docs_router(app), dependencies=locked)
    for router in pages:
        app.include_router(router, dependencies=locked)
    for router in apis:
        app.include_router(
            router,
            dependencies=[*locked, Depends(_build_admission(lifecycle, rates, clock))],
            responses=describe_errors(400, 401, 404, 408, 413, 415, 429, 500, 503, 504),
        )
    return Application(asgi=app, client=client, lifecycle=lifecycle, metrics=metrics)


def _build_admission(
    lifecycle: Lifecycle, rates: RateLimiter, clock: Callable[[], float]
) -> Callable[[Request], Awaitable[None]]:
    """Return the dependency that refuses a request while draining and above the rate of its key."""

    async def admit(request: Request) -> None:
        account = account_of(request)
        if lifecycle.is_draining:
            account.rejection = "draining"
            headers = retry_after(_DRAIN_RETRY_SECONDS)
            raise HttpError(
                503, "the server is stopping", type=SERVER_ERROR, code="shutting_down", headers=headers
            )
        now = clock()
        seconds = rates.admit(account.key_id, now)
        if seconds:
            account.rejection = "rate_limit"
            message = rates.describe(account.key_id, now)
            message += f"; hint: try again in {math.ceil(seconds)} s"
            raise HttpError(
                429,
                message,
                type="rate_limit_error",
                code="rate_limit_exceeded",
                headers=retry_after(seconds),
            )
        account.is_admitted = True

    return admit


def _build_app(config: ServerConfig) -> FastAPI:
    """Make the application without routes, with the checks of hosts and origins."""
    app = FastAPI(
        title="mega-serve",
        version=__version__,
        description="Text generation over HTTP: Megatron-LM's and OpenAI's APIs.",
        docs_url=None,  # FastAPI's pages load scripts from a CDN
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,  # a redirect would be built from the Host header
        root_path=config.root_path,
        responses=describe_errors(421),
        telemetry=telemetry_config(config.traces_endpoint),
    )
    app.add_middleware(HostMiddleware, hosts=config.allowed_hosts, origins=config.allowed_origins)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "PUT", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id", "X-Mega-Iteration", "Retry-After"],
        )
    return app


def account_of(request: Request) -> RequestAccount:
    """Return the books of a request, which the outermost middleware opened."""
    account: RequestAccount = request.state.account
    return account


def _build_docs_router(app: FastAPI) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/openapi.json")
    async def get_schema() -> Response:
        return JSONResponse(app.openapi())

    @router.get("/docs")
    async def get_docs() -> Response:
        page, policy = render_page(app.openapi())
        return Response(page, media_type="text/html", headers={"Content-Security-Policy": policy})

    return router


def _wrong_method(path: str, headers: Mapping[str, str]) -> HttpError:
    """Return the 405 with the methods that a path accepts; where GET is one, HEAD is too."""
    methods = [name for name in headers.get("Allow", "").split(", ") if name]
    if "GET" in methods:
        methods.append("HEAD")
    allow = ", ".join(sorted(methods))
    message = f"{path} accepts {allow or 'other methods'} only"
    return HttpError(405, message, headers={**headers, "Allow": allow})


def _add_error_handlers(app: FastAPI) -> None:
    """Answer every error with OpenAI's object. Exceptions of no class here go to ExchangeMiddleware."""

    def respond(request: Request, error: HttpError) -> Response:
        return error_response(error, megatron=request.url.path == "/api")

    async def handle(request: Request, error: Exception) -> Response:
        return respond(request, as_http_error(error, account_of(request).request_id))

    async def handle_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code == 404 and message == HTTPStatus.NOT_FOUND.phrase:  # of no route
            message = f"there is no {request.url.path}; hint: GET /docs lists the routes"
        elif error.status_code == 405:
            return respond(request, _wrong_method(request.url.path, error.headers or {}))
        return respond(request, HttpError(error.status_code, message, headers=error.headers))

    async def handle_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:]) or None
        return respond(request, HttpError(400, first["msg"], param=param, code=first["type"]))

    for kind in (HttpError, RequestError, EngineOverloadedError, EngineUnavailableError, EngineDeadError):
        app.add_exception_handler(kind, handle)
    app.add_exception_handler(HTTPException, handle_http_exception)
    app.add_exception_handler(RequestValidationError, handle_validation)
