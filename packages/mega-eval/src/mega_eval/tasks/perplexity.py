"""Perplexity of held-out documents, compared with n-gram models.

The documents, each followed by the end-of-document token, form one stream. The model reads it in windows of
its whole context that overlap by half, so that after the first window every token has at least half a context
before it. Every token but the first is scored once.

Metrics: `loss`, nats per token; `perplexity`, exp of the loss; `bits_per_byte`, the loss of the whole stream
in bits over the UTF-8 bytes of the texts, which is comparable between tokenizers; `last_word_accuracy`,
strict LAMBADA accuracy on the last word of every document. With a baseline, `unigram_…` and `kneser_ney_…`
are the first three scores of the n-gram models on the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mega_eval import metrics
from mega_eval.conventions import STRICT
from mega_eval.documents import Documents, concatenate
from mega_eval.metrics import Metric
from mega_eval.models.interface import Scorer
from mega_eval.ngram import KneserNey, Unigram
from mega_eval.task_result import Example, TaskResult
from mega_eval.tasks.lambada import build_windows, split_last_word
from mega_eval.tasks.stream import score_stream
from mega_eval.tasks.token_scores import score_tokens
from mega_eval.windows import Tokens, Window, sliding_windows
from mega_schema.errors import FormatError
from mega_schema.tokenizer.tokenizer import Tokenizer

LAST_WORD = "last_word_correct"  # score of a document


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
    scored = score_stream(scorer, tokenizer, windows)
    size = documents.bytes
    computed = _metrics("", scored.loss, scored.tokens, size)
    counts = {
        "documents": len(documents.texts),
        "documents_empty": documents.empty,
        "bytes": size,
        "tokens": len(stream),
        "tokens_scored": scored.tokens,
    }
    if baseline is not None:
        computed |= _baseline_metrics(baseline, stream, scorer.vocab_size, size)
        counts["baseline_tokens"] = len(baseline)
    ids, last_words, truncated = _last_word_windows(tokenizer, documents, context_length)
    examples = _build_last_word_examples(scorer, tokenizer, ids, last_words)
    if examples:
        correct = [example.scores[LAST_WORD] == 1 for example in examples]
        computed["last_word_accuracy"] = metrics.proportion(
            correct,
            "documents whose last word is the greedy choice at each of its tokens",
            example_score=LAST_WORD,
        )
        counts["last_words_correct"] = sum(correct)
    skipped = len(documents.texts) - len(last_words)
    counts |= {
        "last_words": len(last_words),
        "last_words_skipped": skipped,
        "last_words_cut": truncated,
    }
    return TaskResult(
        task="perplexity",
        convention="half-overlap",
        metrics=computed,
        counts=counts,
        examples=[*scored.examples, *examples],
        tokens_read=scored.tokens_read + sum(window.input_length for window in last_words),
    )


def _last_word_windows(
    tokenizer: Tokenizer, documents: Documents, max_length: int
) -> tuple[list[str], list[Window], int]:
    """Return ids of the documents of two words or more, windows on their last words, and the number cut."""
    texts = {
        f"document {number}": text for number, text in enumerate(documents.texts) if split_last_word(text)[0]
    }
    windows, truncated = build_windows(
        list(texts.items()), tokenizer, convention=STRICT, max_length=max_length
    )
    return list(texts), windows, truncated


def _build_last_word_examples(
    scorer: Scorer, tokenizer: Tokenizer, ids: Sequence[str], windows: Sequence[Window]
) -> list[Example]:
    examples = []
    for name, window, score in zip(ids, windows, scorer.score(windows) if windows else [], strict=True):
        context, target = window.tokens[: -window.target_length], window.targets
        examples.append(
            Example(
                id=name,
                prompt=tokenizer.decode(context.tolist()),
                expected=tokenizer.decode(target.tolist()),
                prediction=tokenizer.decode(score.greedy_ids.tolist()),
                scores={LAST_WORD: float(score.is_greedy.all())},
                tokens=score_tokens(tokenizer, target, score),
            )
        )
    return examples


def _baseline_metrics(train: Tokens, stream: Tokens, vocab_size: int, size: int) -> dict[str, Metric]:
    """Return the metrics of the n-gram models on all tokens of the stream but the first."""
    contexts = stream[:-1]
    tokens = stream[1:]
    unigram = Unigram(train, vocab_size).score(tokens)
    bigram = KneserNey(train, vocab_size).score(contexts, tokens)
    computed: dict[str, Metric] = {}
    for name, logprobs in (("unigram_", unigram), ("kneser_ney_", bigram)):
        loss = Metric(
            value=-float(np.mean(logprobs)),
            definition="nats per token",
            count=len(tokens),
            higher_is_better=False,
        )
        computed |= _metrics(name, loss, len(tokens), size)
    return computed


def _metrics(prefix: str, loss: Metric, targets: int, size: int) -> dict[str, Metric]:
    """Return bits per byte, perplexity and loss of `targets` tokens that come from `size` bytes of text."""
    bits = targets / math.log(2) / size
    return {
        f"{prefix}bits_per_byte": metrics.scale_metric(
            loss, bits, "bits of the whole stream over the bytes of the texts"
        ),
        f"{prefix}perplexity": metrics.exponential(loss, "exp of the loss"),
        f"{prefix}loss": loss,
    }
