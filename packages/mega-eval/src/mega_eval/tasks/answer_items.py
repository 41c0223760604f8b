"""Turn records of questions and answers into prompts with few-shot examples."""

from __future__ import annotations

from collections.abc import Sequence

from mega_eval.presets.answer_prompts import AnswerPrompt, read_answers
from mega_eval.records import TaskRecord
from mega_eval.tasks.fewshot import ExamplePool, FewShot
from mega_eval.tasks.generated_answers import AnswerItem


def build_answer_items(
    records: Sequence[TaskRecord],
    prompt: AnswerPrompt,
    fewshot: FewShot,
    candidates: Sequence[TaskRecord] | None = None,
    *,
    limit: int | None = None,
) -> list[AnswerItem]:
    """Build the prompts of a task, in the order of the file.

    Args:
        candidates: records of the examples; None: the questions themselves.
        limit: build the first prompts only.

    Raises:
        FormatError: a record is malformed.
        ConfigError: there are too few examples.
    """
    pool = ExamplePool(fewshot, {"": records if candidates is None else candidates})
    items = []
    for record in records[:limit]:
        examples = "".join(
            f"{prompt.fill(example)} {read_answers(example)[0]}{prompt.separator}"
            for example in pool.draw(record)
        )
        text = prompt.description + examples + prompt.fill(record)
        items.append(AnswerItem(record.id, text, tuple(read_answers(record))))
    return items
