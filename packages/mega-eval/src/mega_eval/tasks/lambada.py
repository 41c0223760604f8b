"""LAMBADA (arXiv:1606.06031): predict the last word of a passage.

Four conventions are in use:

    last-token   Megatron's default: the target is the last token of the text, whichever word it belongs to
    strict       Megatron's --strict-lambada: the last word, delimited by any white space, encoded with one
                 space before it, after the stripped text before it
    openai       lm-evaluation-harness's lambada_openai: the last word, delimited by single spaces, encoded
                 together with the text before it. The file is the detokenized one, published with GPT-2
    standard     the same rule on the original, tokenized passages (lambada_standard)

Metrics: `accuracy`, the fraction of passages whose target tokens are all the model's greedy choice, each
given the true tokens before it; `target_perplexity`, exp of the mean negative ln P of a passage's whole
target (lm-evaluation-harness calls it perplexity).
"""

from __future__ import annotations

from collections.abc import Sequence

from mega_eval import metrics
from mega_eval.conventions import LAMBADA, LAST_TOKEN, STRICT
from mega_eval.harness_encoding import HarnessEncoder
from mega_eval.models.interface import Scorer
from mega_eval.task_result import Example, TaskResult
from mega_eval.tasks.token_scores import score_tokens
from mega_eval.windows import Window, suffix_window
from mega_schema.errors import FormatError
from mega_schema.tokenizer.tokenizer import Tokenizer


def split_last_word(text: str) -> tuple[str, str]:
    """Split a text into the stripped text before its last word, and the last word.

    White space delimits words; white space after the last one is dropped.
    """
    words = text.split()
    if not words:
        return "", ""
    return text[: text.rfind(words[-1])].strip(), words[-1]


def split_at_space(text: str) -> tuple[str, str]:
    """Split a text at its last single space into its context, and its last word with the space before it."""
    context, _, word = text.rpartition(" ")
    return context, " " + word


def build_windows(
    lines: Sequence[tuple[str, str]], tokenizer: Tokenizer, *, convention: str, max_length: int
) -> tuple[list[Window], int]:
    """Build a window for every passage.

    Args:
        lines: for every passage its location for error messages, and its text.
        convention: one of `mega_eval.conventions.LAMBADA`.
        max_length: tokens the model can read; a longer passage loses its beginning.

    Returns:
        The windows, and the number of truncated passages.

    Raises:
        FormatError: a passage has no tokens before its target, or no target.
    """
    encodings = _encode_targets([text for _, text in lines], tokenizer, convention)
    windows = []
    truncated = 0
    for (where, text), (context, target) in zip(lines, encodings, strict=True):
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


def _encode_targets(
    texts: Sequence[str], tokenizer: Tokenizer, convention: str
) -> list[tuple[list[int], list[int]]]:
    """Return the ids of the context and of the target of each passage."""
    if convention == LAST_TOKEN:
        return [(ids[:-1], ids[-1:]) for ids in tokenizer.encode_batch(texts)]
    if convention == STRICT:
        parts = [split_last_word(text) for text in texts]
        contexts = tokenizer.encode_batch([context for context, _ in parts])
        targets = tokenizer.encode_batch([" " + word for _, word in parts])
        return list(zip(contexts, targets, strict=True))
    assert convention in LAMBADA, convention
    return HarnessEncoder(tokenizer).encode_pairs([split_at_space(text) for text in texts])


def evaluate(
    scorer: Scorer, tokenizer: Tokenizer, lines: Sequence[tuple[str, str]], *, convention: str
) -> TaskResult:
    """Score every passage; `lines` and `convention` are those of `build_windows`."""
    windows, truncated = build_windows(
        lines, tokenizer, convention=convention, max_length=scorer.context_length
    )
    examples = []
    for (where, _), window, score in zip(lines, windows, scorer.score(windows), strict=True):
        context, target = window.tokens[: -window.target_length], window.targets
        examples.append(
            Example(
                id=where.rpartition("/")[2],
                prompt=tokenizer.decode(context.tolist()),
                expected=tokenizer.decode(target.tolist()),
                prediction=tokenizer.decode(score.greedy_ids.tolist()),
                scores={
                    "correct": float(score.is_greedy.all()),
                    "target_nats": -float(score.logprobs.sum()),
                },
                tokens=score_tokens(tokenizer, target, score),
            )
        )
    correct = [example.scores["correct"] == 1 for example in examples]
    name = "last token" if convention == LAST_TOKEN else "last word"
    nats = metrics.mean(
        [example.scores["target_nats"] for example in examples],
        f"mean negative ln P of the {name}",
        higher_is_better=False,
        example_score="target_nats",
    )
    return TaskResult(
        task="lambada",
        convention=convention,
        metrics={
            "accuracy": metrics.proportion(
                correct,
                f"passages whose {name} is the greedy choice, token by token, given the true tokens before",
                example_score="correct",
            ),
            "target_perplexity": metrics.exponential(nats, f"exp of the mean negative ln P of the {name}"),
        },
        counts={
            "correct": sum(correct),
            "passages": len(examples),
            "target_tokens": sum(window.target_length for window in windows),
            "passages_cut": truncated,
        },
        examples=examples,
        tokens_read=sum(window.input_length for window in windows),
    )
