"""Files of OpenAI's batch API: one request a line, one answer a line.

{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hello"}}
{"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...",
 "body": {...}}, "error": null}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import orjson

from mega_schema.errors import FormatError, MegaError
from mega_serve.client.generation import CHAT_COMPLETIONS, COMPLETIONS
from mega_serve.client.http import error_text
from mega_serve.client.offline.batch_run import Line, WorkItem
from mega_serve.client.offline.resumable_lines import request_id
from mega_serve.engine.interfaces import EngineOverloadedError

URLS: Final = (COMPLETIONS, CHAT_COMPLETIONS, "/v1/responses", "/v1/embeddings")
_EXAMPLE: Final = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}'
_TOO_MANY_REQUESTS: Final = 429
_UNAVAILABLE: Final = 503


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request of a batch file."""

    url: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """The answer of an API.

    Attributes:
        body: the answer, or an OpenAI error object.
        retry_after: seconds to wait, of an answer with status 429.
    """

    status_code: int
    body: dict[str, Any]
    retry_after: float = 1.0


class BatchHandler(Protocol):
    """Answers the requests of a batch file."""

    async def __call__(self, url: str, body: Mapping[str, Any]) -> BatchAnswer:
        """Answer a request of one of URLS.

        Raises:
            EngineOverloadedError: the request can be sent again later.
            EngineUnavailableError, EngineDeadError: end the run.
        """


class BatchFailures:
    """Requests that the engine could not answer. They get no line, so the next run sends them again.

    Attributes:
        messages: by custom_id.
    """

    def __init__(self) -> None:
        self.messages: dict[str, str] = {}

    def raise_if_any(self) -> None:
        """Report the failures.

        Raises:
            MegaError: there are some.
        """
        if self.messages:
            custom_id, message = next(iter(self.messages.items()))
            raise MegaError(
                custom_id,
                f"failed, as did {len(self.messages) - 1} more" if len(self.messages) > 1 else "failed",
                found=message,
                hint="run the same command again: it sends only these",
            )


def read_batch(path: Path) -> list[WorkItem[BatchRequest]]:
    """Read and check a batch file.

    Raises:
        FormatError: a line is no request, or a custom_id is there twice.
    """
    items: dict[str, WorkItem[BatchRequest]] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                item = _read_request(f"{path}:{number}", line)
                if item.custom_id in items:
                    raise FormatError(
                        f"{path}:{number}",
                        "custom_id is used twice",
                        found=item.custom_id,
                        wanted="one that no other line has",
                        hint=f"{item.custom_id}-{number}",
                    )
                items[item.custom_id] = item
    if not items:
        raise FormatError(path, "has no requests", hint=_EXAMPLE)
    return list(items.values())


async def answer_item(
    item: WorkItem[BatchRequest], handler: BatchHandler, failures: BatchFailures
) -> Line | None:
    """Return the output line of a request; None if the engine failed, which `failures` then has.

    A refused request (status 4xx) is an answer.

    Raises:
        EngineOverloadedError: the request can be sent again later.
        MegaError: the engine is gone.
    """
    answer = await handler(item.request.url, item.request.body)
    if answer.status_code == _TOO_MANY_REQUESTS:
        raise EngineOverloadedError(error_text(answer.body), answer.retry_after)
    if answer.status_code == _UNAVAILABLE:
        hint = "run the same command again to resume"
        raise MegaError(item.custom_id, "the engine stopped", found=error_text(answer.body), hint=hint)
    if answer.status_code >= 500:
        failures.messages[item.custom_id] = error_text(answer.body) or f"status {answer.status_code}"
        return None
    response = {
        "status_code": answer.status_code,
        "request_id": str(answer.body.get("id", item.id)),
        "body": answer.body,
    }
    return {"id": item.id, "custom_id": item.custom_id, "response": response, "error": None}


def _read_request(where: str, line: bytes) -> WorkItem[BatchRequest]:
    try:
        values = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        wanted = "one object a line"
        raise FormatError(where, "is not JSON", found=error.msg, wanted=wanted, hint=_EXAMPLE) from None
    if not isinstance(values, dict):
        raise FormatError(where, "is not a JSON object", found=type(values).__name__, hint=_EXAMPLE)
    custom_id, url, body = (values.get(name) for name in ("custom_id", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise FormatError(where, "custom_id", found=custom_id, wanted="a text", hint=_EXAMPLE)
    if values.get("method", "POST") != "POST":
        raise FormatError(where, "method", found=values["method"], wanted="POST")
    if url not in URLS:
        raise FormatError(where, "url", found=url, wanted=" | ".join(URLS))
    if not isinstance(body, dict):
        raise FormatError(where, "body", found=type(body).__name__, wanted="a JSON object")
    if body.get("stream"):
        raise FormatError(where, "body.stream", found=True, wanted="false: a line is a whole answer")
    return WorkItem(custom_id, request_id("batch_req_", [url, body]), BatchRequest(url, body))
