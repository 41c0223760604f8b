"""CORE (arXiv:2406.11794), the mean of centered accuracies, as nanochat computes it.

    centered = (accuracy - baseline) / (1 - baseline)

Types of tasks:

    multiple_choice    the answer has the highest mean ln P per token. The tokens with which all choices of a
                       question begin, few-shot examples included, are context.
    schema             the same for one continuation after several contexts; the tokens with which all
                       prompts end are scored.
    language_modeling  every token of the continuation is the greedy choice.

Order and draws are nanochat's: records are shuffled with seed 1337, and the examples of record i of that
order are drawn from all others with seed 1234 + i. Each prompt begins with BOS, or with the end-of-document
token. A prompt longer than the context loses its beginning.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mega_eval import metrics
from mega_eval.metrics import Z95, Metric
from mega_eval.models.interface import LanguageModel, WindowScores
from mega_eval.presets.core_bundle import LANGUAGE_MODELING, SCHEMA, CoreTask
from mega_eval.presets.question import check_choices, parse_index
from mega_eval.records import TaskRecord
from mega_eval.task_result import Example, TaskResult
from mega_eval.windows import Window, as_tokens
from mega_schema.errors import FormatError
from mega_schema.tokenizer.tokenizer import Tokenizer

SHUFFLE_SEED = 1337
EXAMPLE_SEED = 1234
PROMPT_CHARACTERS = 2000  # of a prompt in the samples; its end


@dataclass(frozen=True, slots=True)
class CoreQuestion:
    """A question as the model reads it.

    Attributes:
        prompts: a whole text for each choice; of language modeling, the context and the whole text.
        choices: what a reader sees.
        gold: index of the answer.
    """

    prompts: tuple[str, ...]
    choices: tuple[str, ...]
    gold: int


def evaluate(
    model: LanguageModel, tasks: Sequence[tuple[CoreTask, Sequence[TaskRecord]]], *, limit: int | None = None
) -> TaskResult:
    """Evaluate every task.

    Args:
        tasks: each with its records, in the order of the file.
        limit: take the first records of each task after shuffling, as nanochat does; they are the candidates
            of the few-shot examples too.
    """
    accuracies, examples = {}, []
    cut = tokens_read = 0
    for task, records in tasks:
        task_examples, task_cut, task_tokens = _evaluate_task(model, task, records, limit)
        accuracies[task.label] = metrics.proportion(
            [example.scores["correct"] == 1 for example in task_examples],
            f"accuracy of {task.label}, {task.num_fewshot} examples",
            example_score=f"correct_{task.label}",
        )
        examples += task_examples
        cut += task_cut
        tokens_read += task_tokens
    baselines = {task.label: task.baseline for task, _ in tasks}
    centered = {label: center(accuracy, baselines[label]) for label, accuracy in accuracies.items()}
    return TaskResult(
        task="core",
        convention="nanochat",
        metrics={
            "core": average(list(centered.values())),
            **{f"centered_{label}": metric for label, metric in centered.items()},
            **{f"accuracy_{label}": metric for label, metric in accuracies.items()},
        },
        counts={"tasks": len(tasks), "questions": len(examples), "questions_cut": cut},
        examples=examples,
        is_whole=limit is None or all(limit >= len(records) for _, records in tasks),
        tokens_read=tokens_read,
    )


def center(accuracy: Metric, baseline: float) -> Metric:
    """Return an accuracy on the scale on which guessing is 0 and always right is 1."""

    def scale(value: float) -> float:
        return (value - baseline) / (1 - baseline)

    assert accuracy.stderr is not None
    assert accuracy.interval is not None
    return Metric(
        value=scale(accuracy.value),
        definition=f"(accuracy - {baseline:g}) / (1 - {baseline:g}): guessing is 0",
        count=accuracy.count,
        stderr=accuracy.stderr / (1 - baseline),
        interval=(scale(accuracy.interval[0]), scale(accuracy.interval[1])),
        higher_is_better=True,
    )


def average(centered: Sequence[Metric]) -> Metric:
    """Return the mean of the tasks; its variance is that of a mean of independent tasks."""
    value = sum(metric.value for metric in centered) / len(centered)
    stderr = math.sqrt(sum((metric.stderr or 0.0) ** 2 for metric in centered)) / len(centered)
    return Metric(
        value=value,
        definition=f"mean of the centered accuracies of {len(centered)} tasks, each of equal weight",
        count=sum(metric.count for metric in centered),
        stderr=stderr,
        interval=(value - Z95 * stderr, value + Z95 * stderr) if stderr else None,
        higher_is_better=True,
        example_score="core",
    )


def _evaluate_task(
    model: LanguageModel, task: CoreTask, records: Sequence[TaskRecord], limit: int | None
) -> tuple[list[Example], int, int]:
    """Return the examples of a task, the number of truncated questions, and of tokens read."""
    order = list(records)
    random.Random(SHUFFLE_SEED).shuffle(order)
    order = order[:limit]
    if limit is None and task.num_fewshot >= len(order):
        raise FormatError(
            task.path,
            "too few records",
            found=len(order),
            wanted=f"more than num_fewshot, {task.num_fewshot}",
        )
    questions = [build_question(task, order, number) for number in range(len(order))]
    groups = [build_core_windows(task, question, model) for question in questions]
    scores = iter(model.score([window for windows, _ in groups for window in windows]))
    examples = [
        _build_example(task, record, question, [next(scores) for _ in windows], len(order))
        for record, question, (windows, _) in zip(order, questions, groups, strict=True)
    ]
    tokens = sum(window.input_length for windows, _ in groups for window in windows)
    return examples, sum(was_cut for _, was_cut in groups), tokens


def build_question(task: CoreTask, order: Sequence[TaskRecord], number: int) -> CoreQuestion:
    """Build question `number` of a task with its few-shot examples.

    Args:
        order: the records after shuffling.

    Raises:
        FormatError: a record is malformed.
    """
    others = [index for index in range(len(order)) if index != number]
    count = min(task.num_fewshot, len(others))  # fewer only under --limit
    drawn = random.Random(EXAMPLE_SEED + number).sample(others, count) if count else []
    before = "".join(_write_example(task, order[index]) + "\n\n" for index in drawn)
    record = order[number]
    if task.task_type == LANGUAGE_MODELING:
        context = before + record.text("context").strip() + task.delimiter
        continuation = record.text("continuation")
        if not continuation.strip():
            raise FormatError(f"{record.where} continuation", "nothing to predict", found=repr(continuation))
        # the space of the delimiter belongs to the first token of the continuation
        return CoreQuestion((context.strip(), context + continuation), (continuation,), 0)
    contexts, continuations, choices, gold = _read_choices(task, record)
    prompts = tuple(
        before + context + task.delimiter + continuation
        for context, continuation in zip(contexts, continuations, strict=True)
    )
    return CoreQuestion(prompts, choices, gold)


def _write_example(task: CoreTask, record: TaskRecord) -> str:
    if task.task_type == LANGUAGE_MODELING:
        return record.text("context").strip() + task.delimiter + record.text("continuation")
    contexts, continuations, _, gold = _read_choices(task, record)
    return contexts[gold] + task.delimiter + continuations[gold]


def _read_choices(
    task: CoreTask, record: TaskRecord
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], int]:
    """Return context and continuation of every choice, the choices as texts, and the index of the answer."""
    is_schema = task.task_type == SCHEMA
    choices = tuple(record.texts("context_options" if is_schema else "choices"))
    gold = parse_index(record, "gold")
    check_choices(record, choices, gold)
    same = (record.text("continuation" if is_schema else "query"),) * len(choices)
    return (choices, same, choices, gold) if is_schema else (same, choices, choices, gold)


def build_core_windows(
    task: CoreTask, question: CoreQuestion, model: LanguageModel
) -> tuple[list[Window], bool]:
    """Return a window for each choice, or one of language modeling, and whether any was truncated."""
    first = _first_tokens(model.tokenizer)
    rows = [[*first, *ids] for ids in model.tokenizer.encode_batch(list(question.prompts))]
    if task.task_type == SCHEMA:
        length = _common_prefix([row[::-1] for row in rows])
        lengths = [length] * len(rows)
    else:
        start = _common_prefix(rows)
        lengths = [len(row) - start for row in rows]
        if task.task_type == LANGUAGE_MODELING:
            rows, lengths = rows[1:], lengths[1:]
    # nanochat cuts to as many tokens as the context, and not to one more, the last target
    suffixes = [as_tokens(row[-model.context_length :]) for row in rows]
    windows = [
        Window(suffix, max(1, min(length, len(suffix) - 1)))
        for suffix, length in zip(suffixes, lengths, strict=True)
    ]
    return windows, any(len(row) > model.context_length for row in rows)


def _first_tokens(tokenizer: Tokenizer) -> list[int]:
    token = tokenizer.identity.eod if tokenizer.identity.bos is None else tokenizer.identity.bos
    return [] if token is None else [token]


def _common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens with which all rows begin."""
    for index, column in enumerate(zip(*rows, strict=False)):
        if len(set(column)) > 1:
            return index
    return min(map(len, rows))


def _build_example(
    task: CoreTask,
    record: TaskRecord,
    question: CoreQuestion,
    scores: Sequence[WindowScores],
    task_questions: int,
) -> Example:
    """Build an example; its share of CORE weighs all tasks equally, whatever their number of questions."""
    rates = [float(score.logprobs.mean()) for score in scores]
    best = int(np.argmax(rates))
    if task.task_type == LANGUAGE_MODELING:
        is_correct = bool(scores[0].is_greedy.all())
        prediction = question.choices[0] if is_correct else ""
    else:
        is_correct, prediction = best == question.gold, question.choices[best]
    return Example(
        id=f"{task.label}/{record.id}",
        prompt=question.prompts[question.gold][-PROMPT_CHARACTERS:],
        expected=question.choices[question.gold],
        prediction=prediction,
        scores={
            "correct": float(is_correct),
            f"correct_{task.label}": float(is_correct),
            "core": (is_correct - task.baseline) / (1 - task.baseline) / task_questions,
            "core_weight": 1 / task_questions,
            "nats_per_token": -rates[question.gold],
        },
        choices=list(zip(question.choices, (float(score.logprobs.sum()) for score in scores), strict=True)),
        tags={"core_task": task.label},
    )
