"""Turn the records of a file into questions with their few-shot examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mega_eval.presets.question import ChoiceQuestion
from mega_eval.records import TaskRecord
from mega_eval.tasks.choice import ChoiceItem
from mega_eval.tasks.fewshot import ExamplePool, FewShot
from mega_schema.errors import FormatError

SEPARATOR = "\n\n"  # after an example, as in lm-evaluation-harness


def build_items(
    records: Sequence[TaskRecord],
    read: Callable[[TaskRecord], ChoiceQuestion | None],
    fewshot: FewShot,
    candidates: Sequence[TaskRecord] | None = None,
    *,
    group: str | None = None,
    draws_spare: bool = True,
    limit: int | None = None,
) -> tuple[list[ChoiceItem], int]:
    """Build the questions of a task, in the order of the file.

    Args:
        read: builds the question of a record; None for one without an answer.
        candidates: records of the examples; None: the questions themselves.
        group: the tag by which examples are chosen: those of a question have its value.
        draws_spare: that of `ExamplePool`.
        limit: build the first questions only.

    Returns:
        The items, and the number of records that were skipped because they have no answer.

    Raises:
        FormatError: a record is malformed, or none has an answer.
        ConfigError: there are too few examples.
    """
    questions = [(record, read(record)) for record in records]
    pool = _build_pool(questions if candidates is None else [(row, read(row)) for row in candidates], group)
    examples = {record.where: question.example for rows in pool.values() for record, question in rows}
    draws = ExamplePool(
        fewshot,
        {value: [record for record, _ in rows] for value, rows in pool.items()},
        draws_spare=draws_spare,
    )
    items = []
    skipped = 0
    for record, question in questions[:limit]:
        if question is None:
            skipped += 1
            continue
        drawn = draws.draw(record, _group_of(question, group))
        prefix = "".join(examples[example.where] + SEPARATOR for example in drawn)
        items.append(ChoiceItem(record.id, record.where, question, question.description + prefix))
    if not items:
        raise FormatError(records[0].where, "no question has an answer", wanted="a file with labels")
    return items, skipped


def _build_pool(
    questions: Sequence[tuple[TaskRecord, ChoiceQuestion | None]], group: str | None
) -> dict[str, list[tuple[TaskRecord, ChoiceQuestion]]]:
    pool: dict[str, list[tuple[TaskRecord, ChoiceQuestion]]] = {}
    for record, question in questions:
        if question is not None:
            pool.setdefault(_group_of(question, group), []).append((record, question))
    return pool


def _group_of(question: ChoiceQuestion, group: str | None) -> str:
    return question.tags.get(group, "") if group else ""
