"""LAMBADA (arXiv:1606.06031): predict the last word of a passage from all of it, as Megatron's task does.

Scores: `accuracy`, the share of passages whose every target token is the model's first choice, read in one
pass with the true tokens before it; `accuracy_stderr` of it; `target_perplexity`, exp of the mean negative
ln P of a passage's whole target (what lm-evaluation-harness calls perplexity for lambada_openai).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mega_eval.documents import Encoder
from mega_eval.result import Outcome
from mega_eval.scorer import Scorer
from mega_eval.windows import Window, ending
from mega_schema.errors import FormatError


def last_word(text: str) -> tuple[str, str]:
    """The text before the last word, stripped, and that word; the strict rule.

    A word is what white space bounds. It is looked for from the right, so white space after it is lost.
    """
    words = text.split()
    if not words:
        return "", ""
    return text[: text.rfind(words[-1])].strip(), words[-1]


def passages(
    lines: Sequence[tuple[str, str]], encoder: Encoder, *, strict: bool, longest: int
) -> tuple[list[Window], int]:
    """A window for every passage.

    Args:
        lines: where each passage came from, for an error to name, and its text.
        strict: the target is the last word, encoded with one space before it; otherwise the last token of the
            whole text, whatever word it belongs to.
        longest: tokens the model can read; of a longer passage the end is kept.

    Returns:
        The windows, and how many of the passages were cut.

    Raises:
        FormatError: a passage has nothing to predict its target from.
    """
    if strict:
        parts = [last_word(text) for _, text in lines]
        contexts = encoder.encode_batch([context for context, _ in parts])
        targets = encoder.encode_batch([" " + word for _, word in parts])
    else:
        whole = encoder.encode_batch([text for _, text in lines])
        contexts, targets = [ids[:-1] for ids in whole], [ids[-1:] for ids in whole]
    windows, cut = [], 0
    for (where, text), context, target in zip(lines, contexts, targets, strict=True):
        if not context or not target:
            raise FormatError(
                where,
                "nothing to predict the last word from",
                found=repr(text[:40]),
                wanted="two words at least",
            )
        window, shortened = ending(context, target, longest)
        windows.append(window)
        cut += shortened
    return windows, cut


def evaluate(scorer: Scorer, encoder: Encoder, lines: Sequence[tuple[str, str]], *, strict: bool) -> Outcome:
    """Score every passage; the arguments are those of `passages`."""
    windows, cut = passages(lines, encoder, strict=strict, longest=scorer.context)
    answers = scorer.score(windows)
    correct = sum(bool(answer.best.all()) for answer in answers)
    accuracy = correct / len(answers)
    mean = sum(float(answer.log.sum()) for answer in answers) / len(answers)
    return Outcome(
        "lambada",
        {
            "accuracy": accuracy,
            "accuracy_stderr": math.sqrt(accuracy * (1 - accuracy) / max(1, len(answers) - 1)),
            "target_perplexity": math.exp(min(700.0, -mean)),
        },
        {
            "correct": correct,
            "passages": len(answers),
            "target_tokens": sum(window.scored for window in windows),
            "passages_cut": cut,
        },
        sum(window.read for window in windows),
    )
