"""LAMBADA (arXiv:1606.06031): predict the last word of a passage, as Megatron's task does.

Scores: `accuracy`, the fraction of passages whose target tokens are all the model's greedy choice, each
given the true tokens before it; `accuracy_stderr`, its standard error; `target_perplexity`, exp of the mean
negative ln P of a passage's whole target (lm-evaluation-harness calls it perplexity in lambada_openai).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mega_eval.result import TaskResult
from mega_eval.scorer import Scorer
from mega_eval.windows import Window, suffix_window
from mega_schema.errors import FormatError
from mega_schema.tokenizer.tokenizer import Tokenizer

MAX_EXPONENT = 700.0  # nats; exp of more overflows a float64


def split_last_word(text: str) -> tuple[str, str]:
    """Split a text into the stripped text before its last word, and the last word.

    White space delimits words; white space after the last one is dropped.
    """
    words = text.split()
    if not words:
        return "", ""
    return text[: text.rfind(words[-1])].strip(), words[-1]


def build_windows(
    lines: Sequence[tuple[str, str]], tokenizer: Tokenizer, *, strict: bool, max_length: int
) -> tuple[list[Window], int]:
    """Build a window for every passage.

    Args:
        lines: for every passage its location for error messages, and its text.
        strict: the target is the last word, encoded with one space before it; otherwise the last token of the
            text, whichever word it belongs to.
        max_length: tokens the model can read; a longer passage loses its beginning.

    Returns:
        The windows, and the number of truncated passages.

    Raises:
        FormatError: a passage has no tokens before its target, or no target.
    """
    if strict:
        parts = [split_last_word(text) for _, text in lines]
        contexts = tokenizer.encode_batch([context for context, _ in parts])
        targets = tokenizer.encode_batch([" " + word for _, word in parts])
    else:
        passages = tokenizer.encode_batch([text for _, text in lines])
        contexts = [ids[:-1] for ids in passages]
        targets = [ids[-1:] for ids in passages]
    windows = []
    truncated = 0
    for (where, text), context, target in zip(lines, contexts, targets, strict=True):
        if not context or not target:
            raise FormatError(
                where,
                "nothing to predict the last word from",
                found=repr(text[:40]),
                wanted="two words at least",
            )
        window, was_truncated = suffix_window(context, target, max_length)
        windows.append(window)
        truncated += was_truncated
    return windows, truncated


def evaluate(
    scorer: Scorer, tokenizer: Tokenizer, lines: Sequence[tuple[str, str]], *, strict: bool
) -> TaskResult:
    """Score every passage; `lines` and `strict` are those of `build_windows`."""
    windows, truncated = build_windows(lines, tokenizer, strict=strict, max_length=scorer.context_length)
    scores = scorer.score(windows)
    correct = sum(bool(score.is_greedy.all()) for score in scores)
    accuracy = correct / len(scores)
    mean_logprob = sum(float(score.logprobs.sum()) for score in scores) / len(scores)
    return TaskResult(
        "lambada",
        {
            "accuracy": accuracy,
            "accuracy_stderr": math.sqrt(accuracy * (1 - accuracy) / max(1, len(scores) - 1)),
            "target_perplexity": math.exp(min(MAX_EXPONENT, -mean_logprob)),
        },
        {
            "correct": correct,
            "passages": len(scores),
            "target_tokens": sum(window.target_length for window in windows),
            "passages_cut": truncated,
        },
        sum(window.input_length for window in windows),
    )
