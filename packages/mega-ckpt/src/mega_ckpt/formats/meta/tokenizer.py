"""Convert Llama 3's tokenizer.model, a tiktoken vocabulary, to tokenizer.json.

A line is a token's bytes in base64, a space and its rank, from 0 up. The 256 ids after the last one are
special tokens, whose names are not in the file.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from mega_ckpt.formats.user_overrides import NO_TOKENIZER
from mega_schema.errors import FormatError
from mega_schema.tokenizer.files import byte_level, tokenizer_json
from mega_schema.tokenizer.identity import content_sha256
from mega_schema.tokenizer.tokenizer import FastTokenizer, TokenizerIdentity

_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIALS: Final = 256
_BEGIN, _END = "<|begin_of_text|>", "<|end_of_text|>"
# by offset from the first; unused ones are numbered
_NAMED: Mapping[int, str] = MappingProxyType(
    {0: _BEGIN, 1: _END, 6: "<|start_header_id|>", 7: "<|end_header_id|>", 9: "<|eot_id|>"}
)


def read_tokenizer(path: Path, vocab: int) -> FastTokenizer:
    """Read the tokenizer of a model with `vocab` ids.

    Raises:
        FormatError: the file is not such a vocabulary, or has another number of ids.
    """
    ranks = _ranks(path)
    if len(ranks) + _SPECIALS != vocab:
        found = f"{len(ranks):,} and {_SPECIALS} special ones"
        raise FormatError(path, "tokens", found=found, wanted=f"the model's {vocab:,}", hint=NO_TOKENIZER)
    others = (f"<|reserved_special_token_{i}|>" for i in range(_SPECIALS))
    names = [_NAMED.get(i) or next(others) for i in range(_SPECIALS)]
    special = {name: len(ranks) + i for i, name in enumerate(names)}
    words, merges = byte_level(ranks, 0)
    split = {"type": "Split", "pattern": {"Regex": _PATTERN}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    begin = {"SpecialToken": {"id": _BEGIN, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    content = tokenizer_json(
        special=special,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [split, level]},
        post_processor={
            "type": "TemplateProcessing",
            "single": [begin, first],
            "pair": [begin, first, {"SpecialToken": {"id": _BEGIN, "type_id": 1}}, second],
            "special_tokens": {_BEGIN: {"id": _BEGIN, "ids": [special[_BEGIN]], "tokens": [_BEGIN]}},
        },
        decoder=level,
        model={"type": "BPE", "ignore_merges": True, "vocab": words, "merges": merges},
    )
    bos = special[_BEGIN]
    eod = special[_END]
    sha256 = content_sha256(content)
    identity = TokenizerIdentity("HuggingFaceTokenizer", vocab, eod, bos, None, sha256)
    return FastTokenizer(json.dumps(content, ensure_ascii=False), identity)


def _ranks(path: Path) -> dict[bytes, int]:
    ranks = dict[bytes, int]()
    for number, line in enumerate(path.read_bytes().splitlines()):
        word, _, rank = line.partition(b" ")
        try:
            token = base64.b64decode(word, validate=True)
        except binascii.Error:
            token = b""
        if not token or rank != b"%d" % number or token in ranks:
            found, wanted = repr(line[:40]), f"a token of its own in base64, and {number}"
            raise FormatError(f"{path}:{number + 1}", "is not a token", found=found, wanted=wanted)
        ranks[token] = number
    return ranks
