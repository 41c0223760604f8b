"""Read fairseq's dictionary and map its ids to those of GPT-2's tokenizer.

A line of dict.txt is a token and its count. Ids 0 to 3 are <s>, <pad>, </s> and <unk>, a line's id is its
number + 4, and padding ids follow the last one. The tokens of megatron_11b are GPT-2's ids in decimal, and
fillers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from mega_schema.checkpoint.foreign_files import MAX_TOKENIZER_BYTES, read_foreign
from mega_schema.errors import FormatError

FILE: Final = "dict.txt"
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
_END = _SPECIAL.index("</s>")
_FILLER = "madeupword"


def id_order(path: Path, rows: int) -> np.ndarray:
    """Return (rows,) int64: fairseq's id for every id of Mega.

    GPT-2's ids come first, then fairseq's special tokens and fillers in their order. `</s>`, fairseq's end of
    a text, and `<|endoftext|>`, GPT-2's last id, which fairseq's texts do not contain, are swapped: then the
    tokenizer's end-of-document token is the one that the model learned.

    Args:
        rows: rows of the embedding, all parts together.

    Raises:
        FormatError: the file is missing, or is not a dictionary of GPT-2's ids for `rows` rows.
    """
    words = _words(path)
    if len(words) + len(_SPECIAL) > rows:
        wanted = f"at most {rows - len(_SPECIAL)}, the rows of {rows} that are not special tokens"
        raise FormatError(path, "has more lines than the model has ids", found=len(words), wanted=wanted)
    place: dict[int, int] = {}
    for number, word in enumerate(words):
        if word.startswith(_FILLER):
            continue
        if not (word.isascii() and word.isdigit()):
            wanted = "GPT-2's ids in decimal, and fillers"
            raise FormatError(
                f"{path}:{number + 1}", "is not an id of GPT-2", found=repr(word), wanted=wanted
            )
        if place.setdefault(int(word), number + len(_SPECIAL)) != number + len(_SPECIAL):
            raise FormatError(f"{path}:{number + 1}", "duplicate id", found=word)
    lacking = next((i for i in range(len(place)) if i not in place), None)
    if not place or lacking is not None:
        raise FormatError(path, "lacks an id of GPT-2", wanted=lacking or 0)
    first = [place[i] for i in range(len(place))]
    used = set(first)
    ours = np.array([*first, *(i for i in range(rows) if i not in used)])
    last = len(first) - 1
    end = len(first) + _END
    ours[[last, end]] = ours[[end, last]]
    return ours


def _words(path: Path) -> Sequence[str]:
    try:
        lines = read_foreign(path, MAX_TOKENIZER_BYTES).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        found = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise FormatError(
            path, "not readable", found=found, wanted="fairseq's dictionary of the model"
        ) from None
    for number, line in enumerate(lines, 1):
        if len(line.split(" ")) != 2 or not line.split(" ")[1].isdigit():
            raise FormatError(
                f"{path}:{number}",
                "is not a line of a dictionary",
                found=repr(line[:40]),
                wanted="token count",
            )
    return [line.split(" ")[0] for line in lines]
