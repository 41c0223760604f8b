"""Perplexity of WikiText and Penn Treebank, as Megatron's task computes it (arXiv:1909.08053, appendix E).

Metrics: `loss`, nats per token; `perplexity`, exp of the loss; `adjusted_perplexity`, exp of the same nats
per word of the original file, which is comparable between tokenizers; `token_ratio`, tokens per such word;
`byte_perplexity` and `bits_per_byte`, the same nats per byte of the original file. Exponents of the first
three are clipped at 20, as Megatron's are.
"""

from __future__ import annotations

import math

from mega_eval import metrics
from mega_eval.conventions import OVERLAPPING
from mega_eval.detokenize import DETOKENIZERS
from mega_eval.metrics import Metric
from mega_eval.models.interface import Scorer
from mega_eval.task_result import TaskResult
from mega_eval.tasks.stream import score_stream
from mega_eval.windows import as_tokens, sliding_windows
from mega_schema.errors import ConfigError, FormatError
from mega_schema.tokenizer.tokenizer import Tokenizer

MAX_EXPONENT = 20.0  # nats


def count_words(text: str) -> int:
    """Count the strings between single spaces, as Megatron does for the adjusted perplexity."""
    return len(text.strip().split(" "))


def evaluate(
    scorer: Scorer,
    tokenizer: Tokenizer,
    text: str,
    *,
    task: str = "wikitext103",
    detokenizer: str,
    stride: int,
    seq_length: int | None = None,
    limit: int | None = None,
    where: object = "--data",
) -> TaskResult:
    """Score a text with overlapping windows.

    Args:
        text: the content of the file, before detokenizing.
        task: name of the task.
        detokenizer: a key of `DETOKENIZERS`.
        stride: tokens from the start of one window to the next (--overlapping-eval).
        seq_length: tokens of a window; None is the model's context.
        limit: score the first windows only.
        where: the name of the text in an error.

    Raises:
        ConfigError: the windows are longer than the model's context, or leave gaps between them.
        FormatError: the text is too short to score.
    """
    seq_length = check_seq_length(seq_length, scorer.context_length)
    _check_stride(stride, seq_length)
    words = count_words(text)
    size = len(text.encode())
    stream = as_tokens(tokenizer.encode(DETOKENIZERS[detokenizer](text)))
    if min(words, len(stream)) < 2:
        raise FormatError(
            where, "too short to score", found=f"{words} words, {len(stream)} tokens", wanted="2 of each"
        )
    windows = sliding_windows(stream, seq_length, stride)
    scored = score_stream(scorer, tokenizer, windows[:limit])
    return TaskResult(
        task=task,
        convention=f"{OVERLAPPING}{stride}",
        metrics=_metrics(scored.loss, len(stream) - 1, words - 1, size),
        counts={
            "tokens": len(stream),
            "original_words": words,
            "original_bytes": size,
            "tokens_scored": scored.tokens,
            "windows": scored.windows,
            "seq_length": seq_length,
        },
        examples=scored.examples,
        is_whole=scored.windows == len(windows),
        tokens_read=scored.tokens_read,
    )


def check_seq_length(seq_length: int | None, context_length: int) -> int:
    """Return the tokens of a window: `seq_length`, or the model's context.

    Raises:
        ConfigError: it is longer than the model's context.
    """
    if seq_length is None:
        seq_length = context_length
    if seq_length > context_length:
        raise ConfigError(
            "--seq-length",
            "longer than the model's context",
            found=f"{seq_length} tokens",
            wanted=f"at most {context_length}",
            hint=f"--seq-length {context_length}",
        )
    return seq_length


def _metrics(loss: Metric, targets: int, words: int, size: int) -> dict[str, Metric]:
    """Return the metrics of `targets` predictions for a file of `words` words and `size` bytes."""
    byte_ratio = targets / size
    return {
        "adjusted_perplexity": metrics.exponential(
            loss,
            "exp of the nats per word of the original file",
            scale=targets / words,
            max_exponent=MAX_EXPONENT,
        ),
        "perplexity": metrics.exponential(loss, "exp of the loss", max_exponent=MAX_EXPONENT),
        "byte_perplexity": metrics.exponential(
            loss, "exp of the nats per byte of the original file", scale=byte_ratio
        ),
        "bits_per_byte": metrics.scale_metric(
            loss, byte_ratio / math.log(2), "bits per byte of the original file, UTF-8"
        ),
        "loss": loss,
        "token_ratio": Metric(
            value=targets / words, definition="tokens per word of the original file", count=targets
        ),
    }


def _check_stride(stride: int, seq_length: int) -> None:
    if stride > seq_length:
        raise ConfigError(
            "--overlapping-eval",
            "windows this far apart leave tokens between them unscored",
            found=f"{stride} tokens",
            wanted=f"at most the sequence length, {seq_length}",
            hint=f"--overlapping-eval {seq_length}",
        )
