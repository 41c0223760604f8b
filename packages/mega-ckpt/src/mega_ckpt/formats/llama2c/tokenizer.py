"""Convert llama2.c's tokenizer files, a SentencePiece BPE with scores, to tokenizer.json.

    int32                    bytes of the longest piece
    float32, int32, bytes    score, length and text of a piece, for every id; spaces are not escaped

All little endian. Ids 0, 1 and 2 are unknown, beginning and end, the next 256 are the bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mega_schema.checkpoint.foreign_files import MAX_TOKENIZER_BYTES, read_foreign
from mega_schema.errors import FormatError
from mega_schema.tokenizer.identity import content_sha256
from mega_schema.tokenizer.tokenizer import FastTokenizer, TokenizerIdentity

_SPECIAL = ("<unk>", "<s>", "</s>")
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_LONGEST, _HEAD = struct.Struct("<i"), struct.Struct("<fi")
_SPACE = "▁"


def find_tokenizer(model: Path, vocab: int) -> FastTokenizer | None:
    """Read `tok512.bin` (of 512 ids) or `tokenizer.bin` in the model's folder; None if there is neither.

    Raises:
        FormatError: it is truncated, or is no tokenizer of `vocab` ids.
    """
    for name in (f"tok{vocab}.bin", "tokenizer.bin"):
        if (model.parent / name).is_file():
            return read_tokenizer(model.parent / name, vocab)
    return None


def read_tokenizer(path: Path, vocab: int) -> FastTokenizer:
    """Read the tokenizer of a file with `vocab` pieces.

    Raises:
        FormatError: it is truncated, or is no tokenizer of `vocab` ids.
    """
    pieces, scores = _pieces(path, read_foreign(path, MAX_TOKENIZER_BYTES), vocab)
    content = _content(pieces, scores)
    bos, eod = _SPECIAL.index("<s>"), _SPECIAL.index("</s>")
    identity = TokenizerIdentity("HuggingFaceTokenizer", vocab, eod, bos, None, content_sha256(content))
    return FastTokenizer(json.dumps(content, ensure_ascii=False), identity)


def _pieces(path: Path, data: bytes, vocab: int) -> tuple[list[str], list[float]]:
    """Return all pieces, special ones by their names, and all scores."""
    pieces = list[str]()
    scores = list[float]()
    end = _LONGEST.size
    for number in range(vocab):
        try:
            score, length = _HEAD.unpack_from(data, end)
            begin, end = end + _HEAD.size, end + _HEAD.size + length
            if not begin <= end <= len(data):
                raise ValueError
            text = data[begin:end].decode("utf-8")
        except (struct.error, ValueError):
            found, wanted = f"{len(data):,} bytes", f"{vocab:,} pieces"
            raise FormatError(path, f"has no piece {number}", found=found, wanted=wanted) from None
        pieces.append(text.replace(" ", _SPACE))
        scores.append(score)
    if end != len(data):
        more = f"{len(data) - end:,} bytes more"
        raise FormatError(path, "has more than the model's ids", found=more, wanted=f"{vocab:,} pieces")
    first = (*_SPECIAL, *_BYTES)
    pieces[: len(_SPECIAL)] = [piece.strip() for piece in pieces[: len(_SPECIAL)]]
    if (*pieces[: len(first)],) != first or len(set(pieces)) != vocab:
        wanted = f"{' '.join(_SPECIAL)}, every byte, and other pieces, each once"
        raise FormatError(path, "is not a llama2.c tokenizer", found=pieces[:4], wanted=wanted)
    return pieces, scores


def _content(pieces: Sequence[str], scores: Sequence[float]) -> dict[str, Any]:
    """Build tokenizer.json with a merge for every split of a piece into known pieces, best score first."""
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merged = range(len(_SPECIAL) + len(_BYTES), len(pieces))
    merges = [
        [piece[:cut], piece[cut:]]
        for piece in (pieces[i] for i in sorted(merged, key=lambda i: -scores[i]))
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": vocab[word], "content": word, **flags, "special": True} for word in _SPECIAL]
    space = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": _SPACE},
                {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, text],
            "pair": [begin, text, begin, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [vocab["<s>"]], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                space,
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": merges,
        },
    }
