"""Answers that a model generates: exact match and F1 with the accepted answers (SQuAD, NQ-open).

Answers are normalized as SQuAD's evaluation script does (arXiv:1606.05250): lower case, no punctuation, no
articles, single spaces. A question takes the best of its accepted answers.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass

from mega_eval import metrics
from mega_eval.metrics import Metric
from mega_eval.models.interface import GenerationRequest, LanguageModel
from mega_eval.task_result import Example, TaskResult
from mega_schema.errors import ConfigError
from mega_schema.tasks.answer_text import normalize_answer, word_f1
from mega_schema.tokenizer.special_tokens import added_tokens

PROMPT_CHARACTERS = 2000  # of a prompt in the samples; its end
_PUNCTUATION = str.maketrans("", "", string.punctuation)
# the expression of lm-evaluation-harness' nq_open: an article is removed with the space after it
_HARNESS_ARTICLES = re.compile(r"\b(?:The |the |An |A |a |an )")


@dataclass(frozen=True, slots=True)
class AnswerItem:
    """A question with everything that comes before it.

    Attributes:
        id: unique within the task.
        prompt: description, few-shot examples and question.
        answers: the accepted answers.
    """

    id: str
    prompt: str
    answers: tuple[str, ...]


def normalize_like_harness(text: str) -> str:
    """Normalize a text as lm-evaluation-harness' nq_open does."""
    return _HARNESS_ARTICLES.sub("", text).lower().translate(_PUNCTUATION)


def score_answer(prediction: str, answers: Sequence[str]) -> dict[str, float]:
    """Return exact match and F1 of a generated text with the best of the accepted answers."""
    text = normalize_answer(prediction)
    gold = [normalize_answer(answer) for answer in answers]
    harness = normalize_like_harness(prediction.strip())
    return {
        "exact": float(text in gold),
        "f1": max(word_f1(text, answer) for answer in gold),
        "exact_harness": float(harness in [normalize_like_harness(answer) for answer in answers]),
    }


def evaluate(
    model: LanguageModel,
    items: Sequence[AnswerItem],
    *,
    task: str,
    convention: str,
    max_tokens: int,
    stop: tuple[str, ...],
    counts: dict[str, int] | None = None,
    is_whole: bool = True,
) -> TaskResult:
    """Generate an answer to every question and compare it.

    Args:
        max_tokens: most tokens of an answer; a prompt that leaves no room for them loses its beginning.
        stop: strings that end an answer.
        counts: further counts of the result.
        is_whole: whether the items are all questions of the data.

    Raises:
        ConfigError: the model's context has no room for a prompt.
    """
    if max_tokens >= model.context_length:
        raise ConfigError(
            "--max-tokens",
            "the model's context has no room for a prompt",
            found=max_tokens,
            wanted=f"less than {model.context_length}",
        )
    prefix = tuple(added_tokens(model.tokenizer).prefix)
    prompts = [prefix + tuple(ids) for ids in model.tokenizer.encode_batch([item.prompt for item in items])]
    texts = model.generate([GenerationRequest(prompt, max_tokens, stop) for prompt in prompts])
    room = model.context_length - max_tokens
    examples = [
        Example(
            id=item.id,
            prompt=item.prompt[-PROMPT_CHARACTERS:],
            expected=" | ".join(item.answers),
            prediction=text.strip(),
            scores=score_answer(text, item.answers),
        )
        for item, text in zip(items, texts, strict=True)
    ]
    return TaskResult(
        task=task,
        convention=convention,
        metrics=measure_answers(examples),
        counts={
            "questions": len(items),
            "exact_matches": sum(example.scores["exact"] == 1 for example in examples),
            "empty_answers": sum(not example.prediction for example in examples),
            "prompts_cut": sum(len(prompt) > room for prompt in prompts),
            **(counts or {}),
        },
        examples=examples,
        is_whole=is_whole,
        tokens_read=sum(min(len(prompt), room) for prompt in prompts),
    )


def measure_answers(examples: Sequence[Example]) -> dict[str, Metric]:
    """Return the metrics of scored answers."""
    return {
        "exact_match": metrics.proportion(
            [example.scores["exact"] == 1 for example in examples],
            "questions whose answer equals an accepted one after SQuAD's normalization",
            example_score="exact",
        ),
        "f1": metrics.mean(
            [example.scores["f1"] for example in examples],
            "mean over questions of the word F1 with the best accepted answer, SQuAD's normalization",
            higher_is_better=True,
            example_score="f1",
        ),
        "exact_match_harness": metrics.proportion(
            [example.scores["exact_harness"] == 1 for example in examples],
            "questions whose answer equals an accepted one after the normalization of "
            "lm-evaluation-harness' nq_open",
            example_score="exact_harness",
        ),
    }
