"""What every API is made of. A module of an API has `build_router(context: ApiContext) -> APIRouter`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from starlette.requests import Request

from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_serve.api.encoding_threads import EncodingThreads
from mega_serve.engine.interfaces import EngineClient
from mega_serve.engine.requests import NO_TOKEN_ALLOWED, EngineRequest, Pooling, SequenceOutput
from mega_serve.http.errors import SERVER_ERROR, HttpError
from mega_serve.http.limits import Limits


class Account(Protocol):
    """The books of one HTTP request, at `request.state.account`: who sent it and what it used.

    Attributes:
        key_id: name of the API key; "" where the server has none.
        request_id: the x-request-id.
    """

    key_id: str
    request_id: str

    def charge(self, request: EngineRequest) -> None:
        """Count a request of the engine against the key's limits.

        Raises:
            HttpError: 429, the key has used up its tokens.
        """

    def track(self, outputs: AsyncIterator[SequenceOutput]) -> None:
        """Close the outputs of the engine when the response is over, however it ends."""

    def record(self, request: EngineRequest, output: SequenceOutput) -> None:
        """Count an output for the metrics and the audit line."""

    def record_failure(self, error: Exception) -> None:
        """Note for the audit line what ended the answer; a stream has sent its status before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiContext:
    """The engine, the tokenizer and the settings that the APIs share.

    Routers raise `HttpError` (mega_serve.http.errors) or a `RequestError`; the application writes the
    response. Exceptions of `generate` may pass through as they are; in a stream that has begun,
    `as_http_error(error).body` is the object of the error event. A router does not read bodies itself:
    `await request.body()` has the limit of size and time already. Tokenizing runs in `encoding_threads` by
    `tokenizer.encode_batch`, which gives up the GIL.

    Attributes:
        chat_template: the source text of the Jinja template; None where the checkpoint has none.
        log_prompts: prompts may be written to the log.
        legacy_status: `/api` answers bad requests as Megatron does.
        served_model_name: the id in /v1/models; None: that of the engine.
        lenient: unknown fields are ignored, not refused.
        pooling: which hidden states are an embedding.
    """

    client: EngineClient
    tokenizer: Tokenizer
    limits: Limits
    chat_template: str | None = None
    log_prompts: bool = False
    legacy_status: bool = False
    served_model_name: str | None = None
    lenient: bool = False
    pooling: Pooling = "last"
    encoding_threads: EncodingThreads = field(default_factory=EncodingThreads)

    async def generate(self, request: EngineRequest, http_request: Request) -> AsyncIterator[SequenceOutput]:
        """Run a request of the engine for a client: the only way by which a router reaches the engine.

        The prefix cache is separate per API key (on top of `cache_namespace`, which the router fills from
        `cache_salt`), the tokens count against the key's limits, and the request has a deadline.

        An output whose `finish_reason` is "error" or "timeout" is raised, not yielded: an answer that was cut
        must not look whole.

        Raises:
            HttpError: 429, before the first output; 400, 500 and 504, at any time.
            EngineOverloadedError, EngineUnavailableError, EngineDeadError: as `EngineClient.generate`.
        """
        account: Account | None = getattr(http_request.state, "account", None)
        timeout = min(request.timeout or self.limits.request_timeout, self.limits.request_timeout)
        if account is None:  # an API's router without the application around it
            outputs = self.client.generate(replace(request, timeout=timeout))
        else:
            # the length keeps "a" + "bc" apart from "ab" + "c"
            namespace = f"{len(account.key_id)}:{account.key_id}{request.cache_namespace}"
            request = replace(request, timeout=timeout, cache_namespace=namespace)
            account.charge(request)
            outputs = self.client.generate(request)
            account.track(outputs)
        try:
            async for output in outputs:
                if account is not None:
                    account.record(request, output)
                if output.error == NO_TOKEN_ALLOWED:  # a contradiction in the request
                    raise HttpError(400, output.error, code="no_token_allowed")
                if output.finish_reason == "error":
                    raise HttpError(
                        500, output.error or "the engine failed", type=SERVER_ERROR, code="engine_error"
                    )
                if output.finish_reason == "timeout":
                    message = f"the request took longer than {timeout:g} seconds"
                    raise HttpError(504, message, type=SERVER_ERROR, code="timeout")
                yield output
        except Exception as error:
            if account is not None:
                account.record_failure(error)
            raise
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]  # of every asynchronous generator
