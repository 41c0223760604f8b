"""WikiText-103 perplexity, as Megatron's task computes it (arXiv:1909.08053, appendix E).

Scores: `loss`, nats per token; `perplexity`, exp of the loss; `adjusted_perplexity`, exp of the same nats per
word of the original file, which is comparable between tokenizers; `token_ratio`, tokens per such word.
Exponents are clipped at 20, as Megatron's are.
"""

from __future__ import annotations

import math

from mega_eval.detokenize import DETOKENIZERS
from mega_eval.result import TaskResult
from mega_eval.scorer import Scorer
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
    detokenizer: str,
    stride: int,
    seq_length: int | None = None,
    where: object = "--data",
) -> TaskResult:
    """Score a text with overlapping windows.

    Args:
        text: the content of the file, before detokenizing.
        detokenizer: a key of `DETOKENIZERS`.
        stride: tokens from the start of one window to the next (--overlapping-eval).
        seq_length: tokens of a window; None is the model's context.
        where: the name of the text in an error.

    Raises:
        ConfigError: the windows are longer than the model's context, or leave gaps between them.
        FormatError: the text is too short to score.
    """
    if seq_length is None:
        seq_length = scorer.context_length
    if seq_length > scorer.context_length:
        raise ConfigError(
            "--seq-length",
            "longer than the model's context",
            found=f"{seq_length} tokens",
            wanted=f"at most {scorer.context_length}",
            hint=f"--seq-length {scorer.context_length}",
        )
    if stride > seq_length:
        raise ConfigError(
            "--overlapping-eval",
            "windows this far apart leave tokens between them unscored",
            found=f"{stride} tokens",
            wanted=f"at most the sequence length, {seq_length}",
            hint=f"--overlapping-eval {seq_length}",
        )
    words = count_words(text)
    stream = as_tokens(tokenizer.encode(DETOKENIZERS[detokenizer](text)))
    if min(words, len(stream)) < 2:
        raise FormatError(
            where, "too short to score", found=f"{words} words, {len(stream)} tokens", wanted="2 of each"
        )
    windows = sliding_windows(stream, seq_length, stride)
    nats = -sum(float(score.logprobs.sum()) for score in scorer.score(windows))
    targets = len(stream) - 1
    token_ratio = targets / (words - 1)
    return TaskResult(
        "wikitext103",
        {
            "loss": nats / targets,
            "perplexity": math.exp(min(MAX_EXPONENT, nats / targets)),
            "adjusted_perplexity": math.exp(min(MAX_EXPONENT, nats / targets * token_ratio)),
            "token_ratio": token_ratio,
        },
        {
            "tokens": len(stream),
            "original_words": words,
            "tokens_scored": sum(window.target_length for window in windows),
            "windows": len(windows),
            "seq_length": seq_length,
        },
        sum(window.input_length for window in windows if window.target_length),
    )
