"""WikiText-103 perplexity, as Megatron's task computes it (arXiv:1909.08053, appendix E).

Metrics: `loss`, nats per token; `perplexity`, exp of the loss; `adjusted_perplexity`, exp of the same nats
per word of the original file, which is comparable between tokenizers; `token_ratio`, tokens per such word.
Exponents are clipped at 20, as Megatron's are.
"""

from __future__ import annotations

from mega_eval import metrics
from mega_eval.detokenize import DETOKENIZERS
from mega_eval.metrics import Metric
from mega_eval.models.interface import Scorer
from mega_eval.task_result import TaskResult
from mega_eval.tasks.stream import score_stream
from mega_eval.windows import as_tokens
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
    detokenizer: str,
    stride: int,
    seq_length: int | None = None,
    limit: int | None = None,
    where: object = "--data",
) -> TaskResult:
    """Score a text with overlapping windows.

    Args:
        text: the content of the file, before detokenizing.
        detokenizer: a key of `DETOKENIZERS`.
        stride: tokens from the start of one window to the next (--overlapping-eval).
        seq_length: tokens of a window; None is the model's context.
        limit: score the first windows only.
        where: the name of the text in an error.

    Raises:
        ConfigError: the windows are longer than the model's context, or leave gaps between them.
        FormatError: the text is too short to score.
    """
    seq_length = _check_windows(seq_length, stride, scorer.context_length)
    words = count_words(text)
    stream = as_tokens(tokenizer.encode(DETOKENIZERS[detokenizer](text)))
    if min(words, len(stream)) < 2:
        raise FormatError(
            where, "too short to score", found=f"{words} words, {len(stream)} tokens", wanted="2 of each"
        )
    scored = score_stream(scorer, tokenizer, stream, length=seq_length, stride=stride, limit=limit)
    targets = len(stream) - 1
    token_ratio = targets / (words - 1)
    return TaskResult(
        task="wikitext103",
        convention=f"overlapping{stride}",
        metrics={
            "adjusted_perplexity": metrics.exponential(
                scored.loss,
                "exp of the nats per word of the original file",
                scale=token_ratio,
                max_exponent=MAX_EXPONENT,
            ),
            "perplexity": metrics.exponential(scored.loss, "exp of the loss", max_exponent=MAX_EXPONENT),
            "loss": scored.loss,
            "token_ratio": Metric(
                value=token_ratio, definition="tokens per word of the original file", count=targets
            ),
        },
        counts={
            "tokens": len(stream),
            "original_words": words,
            "tokens_scored": scored.tokens,
            "windows": scored.windows,
            "seq_length": seq_length,
        },
        examples=scored.examples,
        tokens_read=scored.tokens_read,
    )


def _check_windows(seq_length: int | None, stride: int, context_length: int) -> int:
    """Return the tokens of a window: `seq_length`, or the model's context."""
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
    if stride > seq_length:
        raise ConfigError(
            "--overlapping-eval",
            "windows this far apart leave tokens between them unscored",
            found=f"{stride} tokens",
            wanted=f"at most the sequence length, {seq_length}",
            hint=f"--overlapping-eval {seq_length}",
        )
    return seq_length
