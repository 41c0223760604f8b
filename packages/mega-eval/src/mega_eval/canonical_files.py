"""Published files of tasks and their hashes. Imports no numpy, for `--help`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mega_eval.records import read_bytes_of


@dataclass(frozen=True, slots=True)
class CanonicalFile:
    """A file that published numbers come from.

    Attributes:
        task: the command that reads it.
        name: its usual name; it may also be compressed, with .gz at the end.
        sha256: of its content, uncompressed.
        description: which file it is.
    """

    task: str
    name: str
    sha256: str
    description: str


_WIKITEXT103 = "56db52eb157b1ab5c89646eef70510c1eca6e12a3bfdb99f0d6b05b4eacb75b9"
_WIKITEXT2 = "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"

CANONICAL_FILES = (
    CanonicalFile(
        "lambada",
        "lambada_test.jsonl",
        "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226",
        "5,153 passages as OpenAI published them with GPT-2",
    ),
    CanonicalFile("wikitext103", "wiki.test.tokens", _WIKITEXT103, "WikiText-103 test set, word level"),
    CanonicalFile("wikitext2", "wiki.test.tokens", _WIKITEXT2, "WikiText-2 test set, word level with <unk>"),
    CanonicalFile(
        "boolq",
        "boolq.validation.jsonl",
        "dbad2984e58eaa2184b6d0acfe2e94a73b9868381046255d6be6c3bed9088b68",
        "3,270 questions of google/boolq's validation set, converted to JSON lines",
    ),
    CanonicalFile(
        "cosmosqa",
        "valid.csv",
        "a6a94fc1463ca82bb10f98ef68ed535405e6f5c36e044ff8e136b5c19dea63f3",
        "2,985 questions of the authors' validation set",
    ),
    CanonicalFile(
        "nq",
        "nq_open.validation.jsonl",
        "16bbae2e30bdb39c1f8e62d42fd9333a57216bc8d23084f64bc3db183f10fdbb",
        "3,610 questions of nq_open's validation set, converted to JSON lines",
    ),
)


def find_canonical_files(task: str) -> list[CanonicalFile]:
    """Return the published files of a task; none if no hash is known."""
    return [file for file in CANONICAL_FILES if file.task == task]


def is_canonical(task: str, files: Sequence[Path]) -> bool | None:
    """Return whether the data is a published file of the task; None if no hash of one is known."""
    known = {file.sha256 for file in find_canonical_files(task)}
    if not known:
        return None
    return len(files) == 1 and hashlib.sha256(read_bytes_of(files[0])).hexdigest() in known
