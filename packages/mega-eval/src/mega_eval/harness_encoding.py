"""Encode text as lm-evaluation-harness does for a model of `transformers` (its `HFLM`, release 0.4.13).

The special tokens around a text are those that the tokenizer's own post-processor adds, such as Llama's
`<s>`. A context and its continuation are encoded together and cut where the context alone ends, so that the
cut never changes the ids before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from mega_schema.errors import FormatError
from mega_schema.tokenizer.special_tokens import SpecialTokens, added_tokens
from mega_schema.tokenizer.tokenizer import Tokenizer


class HarnessEncoder:
    """Encodes contexts and continuations.

    Args:
        add_bos: begin texts with the tokenizer's bos; None adds what its post-processor adds.
        prefix_id: the token before a text without context. Default: bos, or eod if there is none.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, add_bos: bool | None = None, prefix_id: int | None = None
    ) -> None:
        identity = tokenizer.identity
        self._tokenizer = tokenizer
        if add_bos and identity.bos is None:
            raise FormatError("add_bos_token", "the tokenizer has no bos", hint="leave it out")
        around = added_tokens(tokenizer) if add_bos is None else SpecialTokens()
        self._before = [identity.bos] if add_bos and identity.bos is not None else list(around.prefix)
        self._after = list(around.suffix)
        self._prefix_id = next((i for i in (prefix_id, identity.bos, identity.eod) if i is not None), None)

    @property
    def prefix_id(self) -> int:
        """The token that the first token of a text without context is predicted from.

        Raises:
            FormatError: the tokenizer has neither bos nor eod.
        """
        if self._prefix_id is None:
            raise FormatError("tokenizer", "has neither bos nor eod: the first token has no context")
        return self._prefix_id

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text with the special tokens around it."""
        ids = self._tokenizer.encode(text)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text with the special tokens around it."""
        return [[*self._before, *ids, *self._after] for ids in self._tokenizer.encode_batch(texts)]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Encode contexts and their continuations.

        White space at the end of a context moves to its continuation. Before a continuation without context
        stands the prefix token; if the continuation begins with it, it is not predicted.
        """
        spaced = [_move_space(context, continuation) for context, continuation in pairs]
        wholes = self.encode_texts([context + continuation for context, continuation in spaced])
        contexts = self.encode_texts([context for context, _ in spaced])
        encodings = []
        for (context, continuation), whole, context_ids in zip(pairs, wholes, contexts, strict=True):
            if context:
                encodings.append((context_ids, whole[len(context_ids) :]))
                continue
            ids = self.encode(continuation, add_special_tokens=False)
            begins = ids[:1] == [self.prefix_id]
            encodings.append((ids[:1], ids[1:]) if begins else ([self.prefix_id], ids))
        return encodings


def _move_space(context: str, continuation: str) -> tuple[str, str]:
    stripped = context.rstrip()
    return stripped, context[len(stripped) :] + continuation
