"""Perplexity of held-out documents, compared with n-gram models.

The documents, each followed by the end-of-document token, form one stream. The model reads it in windows of
its whole context that overlap by half, so that after the first window every token has at least half a context
before it. Every token but the first is scored once.

Scores: `loss`, nats per token; `perplexity`, exp of the loss; `bits_per_byte`, the loss of the whole stream
in bits over the UTF-8 bytes of the texts, which is comparable between tokenizers; `last_word_accuracy`,
strict LAMBADA accuracy on the last word of every document. With a baseline, `unigram_…` and `kneser_ney_…`
are the first three scores of the n-gram models on the same tokens.
"""

from __future__ import annotations

import math

import numpy as np

from mega_eval.documents import Documents, concatenate
from mega_eval.ngram import KneserNey, Unigram
from mega_eval.result import TaskResult
from mega_eval.scorer import Scorer
from mega_eval.tasks.lambada import MAX_EXPONENT, build_windows, split_last_word
from mega_eval.windows import Tokens, Window, sliding_windows
from mega_schema.errors import FormatError
from mega_schema.tokenizer.tokenizer import Tokenizer


def evaluate(
    scorer: Scorer,
    tokenizer: Tokenizer,
    documents: Documents,
    *,
    baseline: Tokens | None = None,
    where: object = "--data",
) -> TaskResult:
    """Score the documents.

    Args:
        baseline: the training stream on which the n-gram models are counted, with an end-of-document token
            after each document.
        where: the name of the documents in an error.

    Raises:
        FormatError: the stream has fewer than two tokens.
    """
    stream = concatenate(documents.tokens, tokenizer.identity.eod)
    if len(stream) < 2:
        raise FormatError(where, "too short to score", found=f"{len(stream)} tokens", wanted="2 at least")
    context_length = scorer.context_length
    windows = sliding_windows(stream, context_length, max(1, context_length // 2))
    nats = -sum(float(score.logprobs.sum()) for score in scorer.score(windows))
    size = documents.bytes
    scores = _metrics("", nats, len(stream) - 1, size)
    counts = {
        "documents": len(documents.texts),
        "documents_empty": documents.empty,
        "bytes": size,
        "tokens": len(stream),
        "tokens_scored": sum(window.target_length for window in windows),
    }
    tokens_read = sum(window.input_length for window in windows if window.target_length)
    if baseline is not None:
        scores |= _baseline_metrics(baseline, stream, scorer.vocab_size, size)
        counts["baseline_tokens"] = len(baseline)
    last_words, skipped, truncated = _last_word_windows(tokenizer, documents, context_length)
    if last_words:
        correct = sum(bool(score.is_greedy.all()) for score in scorer.score(last_words))
        scores["last_word_accuracy"] = correct / len(last_words)
        counts["last_words_correct"] = correct
    counts |= {
        "last_words": len(last_words),
        "last_words_skipped": skipped,
        "last_words_cut": truncated,
    }
    tokens_read += sum(window.input_length for window in last_words)
    return TaskResult("perplexity", scores, counts, tokens_read)


def _last_word_windows(
    tokenizer: Tokenizer, documents: Documents, max_length: int
) -> tuple[list[Window], int, int]:
    """Return windows on the last words, the number of documents of one word, and of truncated documents."""
    texts = [text for text in documents.texts if split_last_word(text)[0]]
    lines = [("document", text) for text in texts]
    windows, truncated = build_windows(lines, tokenizer, strict=True, max_length=max_length)
    return windows, len(documents.texts) - len(texts), truncated


def _baseline_metrics(train: Tokens, stream: Tokens, vocab_size: int, size: int) -> dict[str, float]:
    """Return the metrics of the n-gram models on all tokens of the stream but the first."""
    contexts = stream[:-1]
    tokens = stream[1:]
    unigram_nats = -float(np.sum(Unigram(train, vocab_size).score(tokens)))
    bigram_nats = -float(np.sum(KneserNey(train, vocab_size).score(contexts, tokens)))
    unigram = _metrics("unigram_", unigram_nats, len(tokens), size)
    return unigram | _metrics("kneser_ney_", bigram_nats, len(tokens), size)


def _metrics(prefix: str, nats: float, targets: int, size: int) -> dict[str, float]:
    """Return loss, perplexity and bits per byte of `targets` tokens that come from `size` bytes of text."""
    loss = nats / targets
    return {
        f"{prefix}loss": loss,
        f"{prefix}perplexity": math.exp(min(MAX_EXPONENT, loss)),
        f"{prefix}bits_per_byte": nats / math.log(2) / size,
    }
