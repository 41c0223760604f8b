"""WikiText-103 perplexity as fairseq's README for megatron_11b measures it.

Each line of `wiki.test.raw` (or .tokens) is detokenized by Moses' rules and a few more, empty lines are
dropped, and each other line ends in the end-of-document token. `fairseq-eval-lm --context-window C` scores
blocks of context - C tokens, each after the C tokens before its own; the first token follows the
end-of-document token, and every token counts, those that end lines too.

Metrics: `perplexity`, exp of the nats per token; `renormalized_perplexity`, exp of the nats per word of the
original file. The README's figures are 8.46 over 270,847 tokens of 245,566 words: 10.54.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from mega_eval import metrics
from mega_eval.metrics import Metric
from mega_eval.models.interface import Scorer
from mega_eval.task_result import TaskResult
from mega_eval.tasks.stream import score_stream
from mega_eval.tasks.wikitext import count_words
from mega_eval.windows import Tokens, Window, as_tokens
from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError, FormatError
from mega_schema.tokenizer.tokenizer import Tokenizer

# of the README, for the test set of WikiText-103
PUBLISHED_TOKENS: Final = 270_847
PUBLISHED_WORDS: Final = 245_566

CONVENTION: Final = "context-window"


def renormalize(perplexity: float, tokens: int, words: int) -> float:
    """Return 2^(log2(perplexity) · tokens / words): a perplexity per word from that per token."""
    return float(2 ** (math.log2(perplexity) * tokens / words))


def load_detokenizer() -> Callable[[str], str]:
    """Return the function that detokenizes a line.

    Raises:
        ConfigError: sacremoses is not installed.
    """
    try:
        import sacremoses
    except ImportError:
        hint = install_hint("mega-eval", "moses")
        raise ConfigError("mega-eval megatron11b", "sacremoses is not installed", hint=hint) from None
    moses = sacremoses.MosesDetokenizer()

    def detokenize(line: str) -> str:
        text = str(moses.detokenize(line.strip().split(" ")))
        for old, new in ((" @", ""), ("@ ", ""), (" =", "="), ("= ", "="), (" – ", "–")):
            text = text.replace(old, new)
        return text.strip()

    return detokenize


def context_windows(stream: Tokens, block: int, context: int) -> list[Window]:
    """Cut a stream into windows that score `block` tokens each, after at most `context` tokens before them.

    The block's first prediction also reads the token before it, so a window reads up to `block` + `context`
    tokens. Every token but the first is scored once.
    """
    last = len(stream) - 1
    windows = []
    for start in range(0, last, block):
        end = min(start + block, last)
        windows.append(Window(stream[max(0, start - context) : end + 1], end - start))
    return windows


def evaluate(
    scorer: Scorer,
    tokenizer: Tokenizer,
    text: str,
    *,
    detokenize: Callable[[str], str],
    context_window: int,
    limit: int | None = None,
    where: object = "--data",
) -> TaskResult:
    """Score a word-level file.

    Args:
        text: the content of the file.
        detokenize: applied to each line.
        context_window: tokens of context before each block.
        limit: score the first windows only.
        where: the name of the text in an error.

    Raises:
        ConfigError: the model's context leaves no room for a block.
        FormatError: the text has no tokens, or the tokenizer has no end-of-document token.
    """
    block = scorer.context_length - context_window
    if block < 1:
        raise ConfigError(
            "--context-window",
            "leaves no token to score",
            found=f"{context_window} tokens",
            wanted=f"less than the model's context, {scorer.context_length}",
            hint=f"--context-window {scorer.context_length - max(1, scorer.context_length // 32)}",
        )
    eod = tokenizer.identity.eod
    if eod is None:
        raise FormatError("tokenizer", "has no end-of-document token, which ends each line")
    lines = [line for line in map(detokenize, text.split("\n")) if line]
    ids = [token for line_ids in tokenizer.encode_batch(lines) for token in (*line_ids, eod)]
    if not ids:
        raise FormatError(where, "too short to score", found="no tokens", wanted="one at least")
    windows = context_windows(as_tokens([eod, *ids]), block, context_window)
    scored = score_stream(scorer, tokenizer, windows[:limit])
    words = count_words(text)
    return TaskResult(
        task="megatron11b",
        convention=f"{CONVENTION}{context_window}",
        metrics={
            "renormalized_perplexity": metrics.exponential(
                scored.loss, "exp of the nats per word of the original file", scale=len(ids) / words
            ),
            "perplexity": metrics.exponential(scored.loss, "exp of the loss"),
            "loss": scored.loss,
            "token_ratio": Metric(
                value=len(ids) / words, definition="tokens per word of the original file", count=len(ids)
            ),
        },
        counts={
            "tokens": len(ids),
            "lines": len(lines),
            "original_words": words,
            "tokens_scored": scored.tokens,
            "windows": scored.windows,
            "context_window": context_window,
        },
        examples=scored.examples,
        is_whole=scored.windows == len(windows),
        tokens_read=scored.tokens_read,
    )
