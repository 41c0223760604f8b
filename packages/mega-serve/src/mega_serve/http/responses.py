"""Responses for errors, and the headers of every response."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType

import orjson
from starlette.responses import Response

from mega_serve.engine.interfaces import EngineClient, EngineUnavailableError
from mega_serve.http.errors import HttpError

_POLICY = b"default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
SECURITY_HEADERS: Mapping[bytes, bytes] = MappingProxyType(
    {
        b"content-security-policy": _POLICY,
        b"x-content-type-options": b"nosniff",
        b"x-frame-options": b"DENY",
        b"referrer-policy": b"no-referrer",
        b"cross-origin-opener-policy": b"same-origin",
        b"cache-control": b"no-store",
    }
)


def error_response(error: HttpError, *, megatron: bool = False) -> Response:
    """Return the response to an error.

    Args:
        megatron: for `/api`: Megatron's clients print the field `message`.
    """
    body = {"message": error.message, **error.body} if megatron else error.body
    return Response(orjson.dumps(body), error.status, error.headers, media_type="application/json")


def identity_headers(request_id: str, client: EngineClient) -> list[tuple[bytes, bytes]]:
    """Return the request's id and, once a model was loaded, the iteration of its checkpoint."""
    headers = [(b"x-request-id", request_id.encode())]
    with contextlib.suppress(EngineUnavailableError):
        headers.append((b"x-mega-iteration", str(client.model.iteration).encode()))
    return headers


def encode_refusal(error: HttpError, request_id: str, client: EngineClient) -> bytes:
    """Return a whole HTTP/1.1 response to a connection that sent no request, and is closed after it."""
    body = orjson.dumps(error.body)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        *((name.lower().encode(), value.encode()) for name, value in error.headers.items()),
        *SECURITY_HEADERS.items(),
        *identity_headers(request_id, client),
    ]
    status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n".encode()
    return status + b"".join(b"%s: %s\r\n" % header for header in headers) + b"\r\n" + body
