"""Examples of RACE (arXiv:1704.04683) from its folders: passages with questions of four options."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mega_schema.errors import FormatError
from mega_schema.tasks.pair_examples import PairExample, clean_text, read_lines

RACE_LABELS = ("A", "B", "C", "D")


@dataclass(frozen=True, slots=True)
class ChoiceExample:
    """A passage, and a question with each of its options.

    Attributes:
        id: unique within its folder.
        choices: the question completed by each option.
        label: the letter of the right option.
        where: "file:line", for messages.
    """

    id: str
    article: str
    choices: tuple[str, ...]
    label: str | None
    where: str


LabelledExample = PairExample | ChoiceExample


def read_race(folder: Path) -> list[ChoiceExample]:
    """Read the passages of all `*.txt` files of a folder and of the folders below it.

    Raises:
        FormatError: there is none, or one is not a passage of RACE.
    """
    files = sorted(folder.rglob("*.txt")) if folder.is_dir() else []
    if not files:
        found = "no *.txt below it" if folder.is_dir() else "a file" if folder.exists() else "no such folder"
        raise FormatError(folder, "contains no passages of RACE", found=found, wanted="a folder with *.txt")
    return [example for file in files for example in _read_passages(file, folder)]


def _read_passages(file: Path, folder: Path) -> Iterator[ChoiceExample]:
    name = str(file.relative_to(folder).with_suffix(""))
    number = 0
    for where, line in read_lines(file):
        if not line.strip():
            continue
        passage = _parse(where, line)
        article = clean_text(_text(where, passage, "article"))
        questions, options, answers = (
            _list(where, passage, key) for key in ("questions", "options", "answers")
        )
        if not len(questions) == len(options) == len(answers):
            found = f"{len(questions)}, {len(options)} and {len(answers)}"
            raise FormatError(where, "questions, options and answers differ in number", found=found)
        for question, choices, answer in zip(questions, options, answers, strict=True):
            number += 1
            yield _build_example(f"{name}-{number}", where, article, question, choices, answer)


def _build_example(
    id: str, where: str, article: str, question: object, choices: object, answer: object
) -> ChoiceExample:
    if not isinstance(question, str):
        raise FormatError(where, "a question is not text", found=type(question).__name__)
    is_list = isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)
    if not isinstance(choices, list) or not is_list or len(choices) != len(RACE_LABELS):
        raise FormatError(where, "a question does not have four options", found=str(choices)[:80])
    if answer not in RACE_LABELS:
        raise FormatError(where, "unknown label", found=answer, wanted=" | ".join(RACE_LABELS))
    texts = tuple(_complete(question, choice) for choice in choices)
    return ChoiceExample(id, article, texts, str(answer), where)


def _complete(question: str, option: str) -> str:
    """Return the question with the option in its blank, or after it, as Megatron does."""
    return clean_text(question.replace("_", option) if "_" in question else f"{question} {option}")


def _parse(where: str, line: str) -> Mapping[str, object]:
    try:
        passage = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FormatError(where, "is not JSON", found=error) from None
    if not isinstance(passage, dict):
        raise FormatError(where, "is not an object", found=type(passage).__name__, wanted="{...}")
    return passage


def _text(where: str, passage: Mapping[str, object], key: str) -> str:
    value = passage.get(key)
    if not isinstance(value, str):
        raise FormatError(where, f"no text under {key!r}", found=", ".join(sorted(passage)))
    return value


def _list(where: str, passage: Mapping[str, object], key: str) -> list[object]:
    value = passage.get(key)
    if not isinstance(value, list):
        raise FormatError(where, f"no list under {key!r}", found=", ".join(sorted(passage)))
    return value
