"""Errors with an HTTP status, and the JSON objects that describe them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from mega_schema.errors import RequestError
from mega_serve.engine.interfaces import EngineDeadError, EngineOverloadedError, EngineUnavailableError

INVALID = "invalid_request_error"
SERVER_ERROR = "server_error"
UNAVAILABLE_RETRY_SECONDS = 5.0  # loading, restarting and draining have no measured end


class HttpError(Exception):
    """A response other than 200, in OpenAI's words.

    Args:
        status: HTTP status.
        message: one line for the user of the API.
        type: the family of the error, as OpenAI names it.
        param: the field with the error.
        code: the kind of error, for programs.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, object]:
        """OpenAI's error object: of a JSON response and of an `error` event in a stream."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


def as_http_error(error: Exception, request_id: str = "") -> HttpError:
    """Return the response to an exception of an API or of the engine.

    Any other exception becomes a 500 that tells the client nothing but the request's id.
    """
    match error:
        case HttpError():
            return error
        case EngineOverloadedError():
            headers = retry_after(error.retry_after)
            return HttpError(
                429, str(error), type="rate_limit_error", code="engine_overloaded", headers=headers
            )
        case EngineUnavailableError():
            headers = retry_after(UNAVAILABLE_RETRY_SECONDS)
            return HttpError(503, str(error), type=SERVER_ERROR, code="engine_unavailable", headers=headers)
        case EngineDeadError():
            return HttpError(500, f"{error} (request {request_id})", type=SERVER_ERROR, code="engine_dead")
        case RequestError():
            message = getattr(error, "message", str(error))
            code = getattr(error, "code", "invalid_value")
            return HttpError(400, message, param=str(error.where), code=code)
        case _:
            message = f"internal server error (request {request_id}); see the server's log"
            return HttpError(500, message, type=SERVER_ERROR, code="internal_error")


def describe_errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the responses with an error object, for the OpenAPI schema."""
    text = {"type": ["string", "null"]}
    error = {
        "type": "object",
        "required": ["message", "type", "param", "code"],
        "properties": {
            "message": {"type": "string"},
            "type": {"type": "string"},
            "param": text,
            "code": text,
        },
    }
    schema = {"type": "object", "required": ["error"], "properties": {"error": error}}
    return {
        status: {
            "description": HTTPStatus(status).phrase,
            "content": {"application/json": {"schema": schema}},
        }
        for status in statuses
    }


def retry_after(seconds: float) -> dict[str, str]:
    """Return the header Retry-After: whole seconds, at least one (RFC 9110 10.2.3)."""
    return {"Retry-After": str(max(1, math.ceil(seconds)))}
