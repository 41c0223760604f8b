"""Read pairs of an input and a target text, and compare predictions with targets."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from mega_schema.errors import FormatError
from mega_schema.tasks.labelled_files import find_text, read_records


@dataclass(frozen=True, slots=True)
class TextPair:
    """An input text, and the text that a model is to answer it with.

    Attributes:
        id: unique within its file.
        target: None in a test set.
        where: "file:line", for messages.
    """

    id: str
    input: str
    target: str | None
    where: str


def read_text_pairs(path: Path, input_key: str, target_key: str) -> list[TextPair]:
    """Read the pair of every record; a file without targets is a test set.

    Raises:
        FormatError: a record lacks the input, or only some records lack the target.
    """
    pairs = []
    for where, record in read_records(path):
        text = find_text(where, record, input_key, hint="--input-key KEY")
        has_target = record.get(target_key) is not None
        target = find_text(where, record, target_key, hint="--target-key KEY") if has_target else None
        pairs.append(TextPair(str(record.get("id", where.rpartition(":")[2])), text, target, where))
    if not pairs:
        raise FormatError(path, "contains no example", found="no record", wanted="one on each line")
    without_target = next((pair for pair in pairs if pair.target is None), None)
    if without_target is not None and any(pair.target is not None for pair in pairs):
        wanted = "a target, as other records have"
        raise FormatError(without_target.where, f"no key {target_key!r}", wanted=wanted)
    return pairs


def is_exact_match(prediction: str, target: str) -> bool:
    """Whether two texts have the same words in the same order."""
    return prediction.split() == target.split()


def token_f1(prediction: str, target: str) -> float:
    """Return F1 of the prediction's words, each counted as often as it occurs (arXiv:1606.05250)."""
    words, target_words = prediction.split(), target.split()
    if not words or not target_words:
        return float(words == target_words)
    common = (Counter(words) & Counter(target_words)).total()
    return 2 * common / (len(words) + len(target_words))
