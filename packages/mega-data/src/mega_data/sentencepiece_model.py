"""Write a unigram vocabulary as a SentencePiece model file, with only the required protocol buffer fields.

Field numbers are those of sentencepiece_model.proto; a field is its number and wire type as a varint, then a
varint (type 0), four bytes (type 5), or a length and as many bytes (type 2).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6  # kinds of a piece
_UNIGRAM = 1


def model_proto(pieces: Sequence[tuple[str, float]], specials: int) -> bytes:
    """Return the bytes of a SentencePiece `.model`: no normalization, spaces as U+2581, one before the text.

    Args:
        pieces: text and log probability of each id.
        specials: number of special pieces at the start: unknown, begin, end and padding, in this order.
    """
    out = bytearray()
    for number, (piece, score) in enumerate(pieces):
        kind = _CONTROL if number else _UNKNOWN
        if number >= specials:
            kind = _BYTE if re.fullmatch(r"<0x[0-9A-F]{2}>", piece) else _NORMAL
        score = score if kind == _NORMAL else 0.0
        out += _block(1, _block(1, piece.encode()) + _float(2, score) + _number(3, kind))
    trainer = _number(3, _UNIGRAM) + _number(4, len(pieces)) + _number(35, 1)  # 35: byte fallback
    for place, field in enumerate((40, 41, 42, 43)):  # unk, bos, eos, pad
        trainer += _number(field, place)
    normalizer = _block(1, b"identity") + _number(3, 1) + _number(4, 0) + _number(5, 1)
    return bytes(out) + _block(2, trainer) + _block(3, normalizer)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _block(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value
