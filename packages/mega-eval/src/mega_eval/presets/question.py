"""A multiple-choice question as the model reads it. Imports no numpy, for `--help`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from mega_eval.records import TaskRecord
from mega_schema.errors import FormatError

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class ChoiceQuestion:
    """A question with its choices.

    The model scores each `delimiter + continuations[i]` after `contexts[i]`. All contexts are one text,
    except in partial evaluation (Winogrande), in which all continuations are one text.

    Attributes:
        contexts, continuations: a text for each choice.
        gold: index of the correct choice.
        labels: the choices as a reader sees them; lengths are those of `continuations`.
        description: text before the few-shot examples.
        tags: what subsets may be formed by, such as the subject.
        delimiter: text between context and continuation.
    """

    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    gold: int
    labels: tuple[str, ...]
    description: str = ""
    tags: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    delimiter: str = " "

    @property
    def example(self) -> str:
        """The question with its answer, as a few-shot example."""
        return self.contexts[self.gold] + self.delimiter + self.continuations[self.gold]


def ask(
    record: TaskRecord,
    context: str,
    choices: Sequence[str],
    gold: int,
    *,
    labels: Sequence[str] | None = None,
    description: str = "",
    tags: Mapping[str, str] | None = None,
) -> ChoiceQuestion:
    """Build a question whose choices follow one context.

    Raises:
        FormatError: there are fewer than two choices, or the answer is none of them.
    """
    check_choices(record, choices, gold)
    return ChoiceQuestion(
        contexts=(context,) * len(choices),
        continuations=tuple(choices),
        gold=gold,
        labels=tuple(labels or choices),
        description=description,
        tags=tags or {},
    )


def ask_letters(
    record: TaskRecord,
    context: str,
    choices: Sequence[str],
    gold: int,
    *,
    indent: str = " ",
    description: str = "",
    tags: Mapping[str, str] | None = None,
) -> ChoiceQuestion:
    """Build a question that lists its choices with letters; the letters are what the model scores.

    Args:
        indent: before each listed letter. OLMES (arXiv:2406.08446) writes a space, so that the letter has
            the token that it has as an answer.
    """
    check_choices(record, choices, gold)
    listed = "".join(
        f"{indent}{letter}. {choice}\n" for letter, choice in zip(LETTERS, choices, strict=False)
    )
    letters = LETTERS[: len(choices)]
    return ask(
        record,
        f"{context}\n{listed}Answer:",
        tuple(letters),
        gold,
        labels=[f"{letter}. {choice}" for letter, choice in zip(letters, choices, strict=True)],
        description=description,
        tags=tags,
    )


def check_choices(record: TaskRecord, choices: Sequence[str], gold: int) -> None:
    """Check that a question has choices and that the answer is one of them.

    Raises:
        FormatError: it has not.
    """
    if not 2 <= len(choices) <= len(LETTERS):
        raise FormatError(
            record.where, "cannot choose", found=f"{len(choices)} choices", wanted=f"2 to {len(LETTERS)}"
        )
    if not 0 <= gold < len(choices):
        raise FormatError(
            record.where,
            "the answer is none of the choices",
            found=f"choice {gold}",
            wanted=f"0 to {len(choices) - 1}",
        )


def parse_index(record: TaskRecord, key: str, *, first: int = 0) -> int:
    """Return the number under `key` as an index of a choice.

    Args:
        first: the number of the first choice.

    Raises:
        FormatError: it is not a whole number, or is smaller than `first`.
    """
    value = record.value(key)
    number = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
    if isinstance(number, bool) or not isinstance(number, int) or number < first:
        raise FormatError(
            f"{record.where} {key}",
            "not the number of a choice",
            found=repr(value),
            wanted=f"a whole number from {first} on",
        )
    return number - first


def parse_letter(record: TaskRecord, key: str, letters: Sequence[str] = LETTERS) -> int:
    """Return the letter under `key` as an index into `letters`.

    Raises:
        FormatError: it is none of them.
    """
    value = record.text(key).strip()
    if value not in letters or not value:
        raise FormatError(
            f"{record.where} {key}",
            "not the letter of a choice",
            found=repr(value),
            wanted=" | ".join(letters[:5]) + (" ..." if len(letters) > 5 else ""),
        )
    return letters.index(value)
