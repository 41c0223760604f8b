"""Responses for errors."""

from __future__ import annotations

import orjson
from starlette.responses import Response

from mega_serve.http.errors import HttpError


def error_response(error: HttpError, *, megatron: bool = False) -> Response:
    """Return the response to an error.

    Args:
        megatron: for `/api`: Megatron's clients print the field `message`.
    """
    body = {"message": error.message, **error.body} if megatron else error.body
    return Response(orjson.dumps(body), error.status, error.headers, media_type="application/json")
