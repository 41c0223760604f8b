"""Special tokens of a tokenizer.json: those its post-processor adds, and those written in a text.

`FastTokenizer.encode` adds and finds none: it gives the ids of the text. Megatron's HuggingFaceTokenizer
adds and finds them, because it calls `tokenizer(text).input_ids`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from mega_schema.tokenizer.tokenizer import FastTokenizer, Tokenizer

_PROBES = ("a", "1", "the", ".", "\u4e2d")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids that are added before and after those of a text."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.prefix or self.suffix)


def post_processor_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """Return the ids (such as BOS) that the post-processor of a HuggingFaceTokenizer adds; else none.

    Raises:
        FormatError: it adds ids inside the text.
    """
    if not isinstance(tokenizer, FastTokenizer) or tokenizer.identity.type != "HuggingFaceTokenizer":
        return SpecialTokens()
    if (json.loads(tokenizer.source).get("post_processor") or {}).get("type") in (None, "ByteLevel"):
        return SpecialTokens()
    probe = next((text for text in _PROBES if tokenizer.encode(text)), "")
    before, after = tokenizer.special_tokens_around(probe)
    return SpecialTokens(tuple(before), tuple(after))


def added_tokens(tokenizer: Tokenizer, *, include: bool = True) -> SpecialTokens:
    """Return the ids that Megatron's tokenizer of this type adds to each text.

    Args:
        include: include the ids of a HuggingFaceTokenizer's post-processor. A Llama2Tokenizer always adds
            bos.
    """
    if tokenizer.identity.type == "Llama2Tokenizer" and tokenizer.identity.bos is not None:
        return SpecialTokens((tokenizer.identity.bos,))
    return post_processor_tokens(tokenizer) if include else SpecialTokens()


def with_special_text(tokenizer: FastTokenizer) -> FastTokenizer:
    """Return a tokenizer that recognises special tokens in text: `<|endoftext|>` becomes its id.

    It has the identity of `tokenizer`, and must not be saved.
    """
    content = json.loads(tokenizer.source)
    for token in content.get("added_tokens", []):
        token["special"] = False
    return FastTokenizer(json.dumps(content, ensure_ascii=False), tokenizer.identity)
