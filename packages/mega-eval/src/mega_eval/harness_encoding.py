"""Encode text, or a context and its continuation, as lm-evaluation-harness does (`HFLM`, release 0.4.13).

The special tokens around a text are those that the tokenizer's own post-processor adds, such as Llama's
`<s>`. A context and its continuation are encoded together and cut where the context alone ends, so that the
cut never changes the ids before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mega_eval.windows import Window, suffix_window
from mega_schema.errors import FormatError
from mega_schema.tokenizer.special_tokens import SpecialTokens, added_tokens
from mega_schema.tokenizer.tokenizer import Tokenizer


class HarnessEncoder:
    """Encodes contexts and continuations.

    Args:
        add_bos: begin texts with the tokenizer's bos; None adds what its post-processor adds.
        prefix_id: the token before a text without context. Default: bos, or eod if there is none.
        add_suffix: end texts with what the tokenizer's post-processor adds. A context then ends with it too,
            as in the harness.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        add_bos: bool | None = None,
        prefix_id: int | None = None,
        add_suffix: bool = True,
    ) -> None:
        identity = tokenizer.identity
        self._tokenizer = tokenizer
        if add_bos and identity.bos is None:
            raise FormatError("add_bos_token", "the tokenizer has no bos", hint="leave it out")
        around = added_tokens(tokenizer) if add_bos is None else SpecialTokens()
        self._before = [identity.bos] if add_bos and identity.bos is not None else list(around.prefix)
        self._after = list(around.suffix) if add_suffix else []
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
        stands the prefix token; if the continuation begins with it, it is not predicted. The context keeps
        its own ids where letters merge across its end.
        """
        spaced = [_move_space(context, continuation) for context, continuation in pairs]
        wholes = self.encode_texts([context + continuation for context, continuation in spaced])
        contexts = sorted({context for context, _ in spaced})  # the choices of a question share theirs
        context_ids = dict(zip(contexts, self.encode_texts(contexts), strict=True))
        encodings = []
        for (context, continuation), whole in zip(spaced, wholes, strict=True):
            if context:
                encodings.append((context_ids[context], whole[len(context_ids[context]) :]))
                continue
            ids = self.encode(continuation, add_special_tokens=False)
            begins = ids[:1] == [self.prefix_id]
            encodings.append((ids[:1], ids[1:]) if begins else ([self.prefix_id], ids))
        return encodings


@dataclass(frozen=True, slots=True)
class Continuation:
    """A text to score after a context.

    Attributes:
        where: the place in the file, for error messages.
        context, text: white space at the end of the context counts as the beginning of the text.
    """

    where: str
    context: str
    text: str


def build_continuation_windows(
    continuations: Sequence[Continuation], tokenizer: Tokenizer, max_length: int
) -> tuple[list[Window], list[bool]]:
    """Build a window for each continuation; a suffix of the tokenizer is left out.

    Args:
        max_length: tokens the model can read; a longer window loses its beginning.

    Returns:
        The windows, and whether each was truncated.

    Raises:
        FormatError: a text has no tokens of its own, or no context and the tokenizer neither bos nor eod.
    """
    encoder = HarnessEncoder(tokenizer, add_suffix=False)
    encodings = encoder.encode_pairs([(item.context, item.text) for item in continuations])
    windows, truncations = [], []
    for continuation, (context, targets) in zip(continuations, encodings, strict=True):
        if not targets:
            raise FormatError(
                continuation.where,
                "a choice has no tokens after its context",
                found=repr(continuation.text[:40]),
                wanted="a text that is not empty",
            )
        window, was_truncated = suffix_window(context, targets, max_length)
        windows.append(window)
        truncations.append(was_truncated)
    return windows, truncations


def _move_space(context: str, continuation: str) -> tuple[str, str]:
    stripped = context.rstrip()
    return stripped, context[len(stripped) :] + continuation
