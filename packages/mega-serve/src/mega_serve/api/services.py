"""What the routers share beside the context: the chat template's process and the check of grammars."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from mega_schema.errors import RequestError
from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_serve.api.bodies import name_field
from mega_serve.api.chat_templates import ChatTemplate
from mega_serve.api.context import ApiContext
from mega_serve.engine.grammar import GrammarCompiler
from mega_serve.engine.requests import GrammarSpec


class GrammarValidator:
    """Checks grammars of requests before the engine sees them, in threads.

    The engine would refuse them too, but only after the response has begun.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()

    async def check(self, spec: GrammarSpec | None) -> None:
        """Compile a grammar, if there is one.

        Raises:
            RequestError: the grammar cannot be compiled, or the server lacks the library.
        """
        if spec is not None:
            await asyncio.to_thread(self._check, spec)

    def close(self) -> None:
        """End the process that checks grammars."""
        with self._lock:
            if self._compiler is not None:
                self._compiler.close()
                self._compiler = None

    def _check(self, spec: GrammarSpec) -> None:
        try:
            with self._lock:
                if self._compiler is None:
                    with name_field("response_format"):
                        self._compiler = GrammarCompiler(self._tokenizer)
                compiler = self._compiler
        except ImportError:
            hint = "pip install llguidance"
            raise RequestError("response_format", "the server has no structured output", hint=hint) from None
        compiler.validate(spec)


@dataclass(frozen=True, slots=True)
class ApiServices:
    """Services of all routers.

    Attributes:
        template: None where the checkpoint has no chat template.
        clock: seconds since 1970, for `created`.
    """

    template: ChatTemplate | None
    grammars: GrammarValidator
    clock: Callable[[], float] = time.time

    @classmethod
    def from_context(cls, context: ApiContext) -> ApiServices:
        """Return the services; processes and libraries start with the first request that needs them."""
        source = context.chat_template
        threads = context.encoding_threads
        template = (
            None if source is None else ChatTemplate(source, context.tokenizer, encoding_threads=threads)
        )
        return cls(template, GrammarValidator(context.tokenizer))

    def close(self) -> None:
        """End the processes of the chat template and of the grammars."""
        self.grammars.close()
        if self.template is not None:
            self.template.close()
