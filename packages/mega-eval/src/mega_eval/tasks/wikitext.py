"""WikiText-103 perplexity, as Megatron's task computes it (arXiv:1909.08053, appendix E).

Scores: `loss`, nats per token; `perplexity`, exp of it; `adjusted_perplexity`, exp of the same nats shared
out over the words of the original file instead of tokens, which makes tokenizers comparable; `token_ratio`,
tokens per such word. Exponents stop at 20, as Megatron's do.
"""

from __future__ import annotations

import math

from mega_eval.detokenize import DETOKENIZERS
from mega_eval.documents import Encoder
from mega_eval.result import Outcome
from mega_eval.scorer import Scorer
from mega_eval.windows import ids, sliding
from mega_schema.errors import ConfigError, FormatError

HIGHEST = 20.0  # nats


def words_of(text: str) -> int:
    """Words as Megatron counts them in the file it normalises by: what single spaces separate."""
    return len(text.strip().split(" "))


def evaluate(
    scorer: Scorer,
    encoder: Encoder,
    text: str,
    *,
    detokenizer: str,
    stride: int,
    length: int | None = None,
    where: object = "--data",
) -> Outcome:
    """Score a text with overlapping windows.

    Args:
        text: the file as it is, before detokenizing.
        detokenizer: a key of `DETOKENIZERS`.
        stride: --overlapping-eval, tokens from one window to the next; each window scores its last so many.
        length: tokens a window reads; None is the model's context.
        where: what to call the text in an error.

    Raises:
        ConfigError: the windows are longer than the model's context, or leave gaps.
        FormatError: the text is too short to score.
    """
    if length is None:
        length = scorer.context
    if length > scorer.context:
        raise ConfigError(
            "--seq-length",
            "longer than the model's context",
            found=f"{length} tokens",
            wanted=f"at most {scorer.context}",
            hint=f"--seq-length {scorer.context}",
        )
    if stride > length:
        raise ConfigError(
            "--overlapping-eval",
            "windows this far apart leave tokens between them unscored",
            found=f"{stride} tokens",
            wanted=f"at most the sequence length, {length}",
            hint=f"--overlapping-eval {length}",
        )
    words, stream = words_of(text), ids(encoder.encode(DETOKENIZERS[detokenizer](text)))
    if min(words, len(stream)) < 2:
        raise FormatError(
            where, "too short to score", found=f"{words} words, {len(stream)} tokens", wanted="2 of each"
        )
    windows = sliding(stream, length, stride)
    nats = -sum(float(answer.log.sum()) for answer in scorer.score(windows))
    targets = len(stream) - 1
    ratio = targets / (words - 1)
    return Outcome(
        "wikitext103",
        {
            "loss": nats / targets,
            "perplexity": math.exp(min(HIGHEST, nats / targets)),
            "adjusted_perplexity": math.exp(min(HIGHEST, nats / targets * ratio)),
            "token_ratio": ratio,
        },
        {
            "tokens": len(stream),
            "original_words": words,
            "tokens_scored": sum(window.scored for window in windows),
            "windows": len(windows),
            "seq_length": length,
        },
        sum(window.read for window in windows if window.scored),
    )
