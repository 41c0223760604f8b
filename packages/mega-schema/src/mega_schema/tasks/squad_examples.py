"""Questions with passages that contain their answers, from JSON in the layout of SQuAD 1.1 and 2.0.

    data[].paragraphs[].context
    data[].paragraphs[].qas[].{id, question, answers[].{text, answer_start}, is_impossible}

A file without `answers` and `is_impossible` is a test set.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mega_schema.errors import FormatError
from mega_schema.tasks.pair_examples import UNREADABLE, open_text, unreadable_error


@dataclass(frozen=True, slots=True)
class Answer:
    """A part of a passage.

    Attributes:
        begin: its first character in the passage.
    """

    text: str
    begin: int


@dataclass(frozen=True, slots=True)
class SpanExample:
    """A question about a passage.

    Attributes:
        id: unique within its file.
        answers: the accepted answers; empty if the passage has none, None in a test set.
        where: the file and the question, for messages.
    """

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...] | None
    where: str


def has_unanswerable(examples: Sequence[SpanExample]) -> bool:
    """Whether some questions have no answer, as in SQuAD 2.0."""
    return any(example.answers == () for example in examples)


def read_squad(path: Path) -> list[SpanExample]:
    """Read a file in the layout of SQuAD, also compressed by gzip.

    Raises:
        FormatError: the file has another layout, or an answer is not in its passage at its place.
    """
    with open_text(path) as file:
        try:
            content = json.loads(file.read().removeprefix("\ufeff"))
        except UNREADABLE as error:
            raise unreadable_error(path, error) from None
        except (ValueError, RecursionError) as error:
            raise FormatError(path, "is not JSON", found=error) from None
    examples = list(_read_articles(str(path), content))
    if not examples:
        wanted = "questions under data[].paragraphs[].qas"
        raise FormatError(path, "contains no example", found="no question", wanted=wanted)
    _check_ids(examples)
    unlabelled = next((example for example in examples if example.answers is None), None)
    if unlabelled is not None and any(example.answers is not None for example in examples):
        raise FormatError(unlabelled.where, "no key 'answers'", wanted="answers, as other questions have")
    return examples


def _read_articles(path: str, content: object) -> Iterator[SpanExample]:
    for article_number, article in enumerate(_list(path, _object(path, content), "data")):
        at_article = f"{path}: data[{article_number}]"
        for number, paragraph in enumerate(_list(at_article, _object(at_article, article), "paragraphs")):
            at_paragraph = f"{at_article}.paragraphs[{number}]"
            values = _object(at_paragraph, paragraph)
            context = _text(at_paragraph, values, "context")
            if not context.strip():
                raise FormatError(f"{at_paragraph}.context", "is empty", wanted="a passage")
            for question_number, question in enumerate(_list(at_paragraph, values, "qas")):
                where = f"{at_paragraph}.qas[{question_number}]"
                yield _build_example(where, _object(where, question), context)


def _build_example(where: str, question: Mapping[str, object], context: str) -> SpanExample:
    id = question.get("id")
    if not isinstance(id, str | int) or isinstance(id, bool):
        raise FormatError(where, "no id under 'id'", found=_list_keys(question))
    where = f"{where} ({id})"
    text = _text(where, question, "question")
    is_impossible = question.get("is_impossible", False)
    if not isinstance(is_impossible, bool):
        raise FormatError(f"{where}.is_impossible", "is not true or false", found=json.dumps(is_impossible))
    if "answers" not in question and not is_impossible:
        return SpanExample(str(id), text, context, None, where)
    answers = _list(where, question, "answers") if "answers" in question else []
    if is_impossible == bool(answers):
        found = "is_impossible is true" if is_impossible else "none, and is_impossible is not true"
        wanted = "no answers" if is_impossible else "one or more answers"
        raise FormatError(f"{where}.answers", "disagree with is_impossible", found=found, wanted=wanted)
    accepted = tuple(
        _build_answer(f"{where}.answers[{number}]", answer, context) for number, answer in enumerate(answers)
    )
    return SpanExample(str(id), text, context, accepted, where)


def _build_answer(where: str, value: object, context: str) -> Answer:
    answer = _object(where, value)
    text, begin = _text(where, answer, "text"), answer.get("answer_start")
    if not text.strip():
        raise FormatError(f"{where}.text", "is empty", wanted="a part of the passage")
    if type(begin) is not int:
        found = _list_keys(answer) if begin is None else type(begin).__name__
        raise FormatError(where, "no number under 'answer_start'", found=found)
    if not 0 <= begin <= begin + len(text) <= len(context):
        raise FormatError(
            f"{where}.answer_start",
            "is outside the passage",
            found=f"{len(text)} characters from {begin}",
            wanted=f"at most {len(context)} characters from 0",
        )
    if context[begin : begin + len(text)] != text:
        place = context.find(text)
        hint = f"the passage has it from character {place}" if place >= 0 else ""
        found = json.dumps(context[begin : begin + len(text)][:40], ensure_ascii=False)
        wanted = json.dumps(text[:40], ensure_ascii=False)
        raise FormatError(
            f"{where}.answer_start", "is not where the answer begins", found=found, wanted=wanted, hint=hint
        )
    return Answer(text, begin)


def _check_ids(examples: Sequence[SpanExample]) -> None:
    places = dict[str, str]()
    for example in examples:
        if example.id in places:
            raise FormatError(example.where, "has the id of another question", found=places[example.id])
        places[example.id] = example.where


def _object(where: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise FormatError(where, "is not an object", found=type(value).__name__, wanted="{...}")
    return value


def _text(where: str, values: Mapping[str, object], key: str) -> str:
    value = values.get(key)
    if not isinstance(value, str):
        found = _list_keys(values) if key not in values else type(value).__name__
        raise FormatError(where, f"no text under {key!r}", found=found)
    return value


def _list(where: str, values: Mapping[str, object], key: str) -> list[object]:
    value = values.get(key)
    if not isinstance(value, list):
        found = _list_keys(values) if key not in values else type(value).__name__
        raise FormatError(where, f"no list under {key!r}", found=found)
    return value


def _list_keys(values: Mapping[str, object]) -> str:
    return ", ".join(sorted(map(str, values))) or "no key"
