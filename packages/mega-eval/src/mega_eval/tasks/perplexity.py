"""Perplexity of held-out documents, next to models that only count.

The documents, each ended by the end-of-document token, make one stream, read in windows of the model's whole
context that overlap by half: after the first window every token has at least half a context before it. Every
token but the very first is scored once.

Scores: `loss`, nats per token; `perplexity`, exp of it; `bits_per_byte`, all those nats as bits over the
UTF-8 bytes of the texts, which no tokenizer can flatter; `last_word_accuracy`, strict LAMBADA on the end of
every document. With a baseline the first three come again for the same tokens as `unigram_…` and
`kneser_ney_…`.
"""

from __future__ import annotations

import math

import numpy as np

from mega_eval.documents import Documents, Encoder, joined
from mega_eval.ngram import KneserNey, Unigram
from mega_eval.result import Outcome
from mega_eval.scorer import Scorer
from mega_eval.tasks.lambada import last_word, passages
from mega_eval.windows import Tokens, Window, sliding
from mega_schema.errors import FormatError


def evaluate(
    scorer: Scorer,
    encoder: Encoder,
    documents: Documents,
    *,
    baseline: Tokens | None = None,
    where: object = "--data",
) -> Outcome:
    """Score the documents.

    Args:
        baseline: a training stream, documents ended as above; what the counted models are counted from.
        where: what to call the documents in an error.

    Raises:
        FormatError: there is only one token, and so nothing to score.
    """
    stream = joined(documents.tokens, encoder.identity.eod)
    if len(stream) < 2:
        raise FormatError(where, "too short to score", found=f"{len(stream)} tokens", wanted="2 at least")
    windows = sliding(stream, scorer.context, max(1, scorer.context // 2))
    nats = -sum(float(answer.log.sum()) for answer in scorer.score(windows))
    size, targets = documents.bytes, len(stream) - 1
    scores = _measures("", nats, targets, size)
    counts = {
        "documents": len(documents.texts),
        "documents_empty": documents.empty,
        "bytes": size,
        "tokens": len(stream),
        "tokens_scored": sum(window.scored for window in windows),
    }
    read = sum(window.read for window in windows if window.scored)
    if baseline is not None:
        scores |= _baselines(baseline, stream, scorer.vocab, size)
        counts["baseline_tokens"] = len(baseline)
    endings, skipped, cut = _endings(encoder, documents, scorer.context)
    if endings:
        correct = sum(bool(answer.best.all()) for answer in scorer.score(endings))
        scores["last_word_accuracy"] = correct / len(endings)
        counts |= {"last_words_correct": correct}
    counts |= {"last_words": len(endings), "last_words_skipped": skipped, "last_words_cut": cut}
    return Outcome("perplexity", scores, counts, read + sum(window.read for window in endings))


def _endings(encoder: Encoder, documents: Documents, longest: int) -> tuple[list[Window], int, int]:
    """Windows on the last words, how many documents have no word before their last, and how many were cut."""
    texts = [text for text in documents.texts if last_word(text)[0]]
    windows, cut = passages([("document", text) for text in texts], encoder, strict=True, longest=longest)
    return windows, len(documents.texts) - len(texts), cut


def _baselines(train: Tokens, stream: Tokens, vocab: int, size: int) -> dict[str, float]:
    """The counted models' measures of all tokens of the stream but the first."""
    before, tokens = stream[:-1], stream[1:]
    unigram = -float(np.sum(Unigram(train, vocab).score(tokens)))
    bigram = -float(np.sum(KneserNey(train, vocab).score(before, tokens)))
    return _measures("unigram_", unigram, len(tokens), size) | _measures(
        "kneser_ney_", bigram, len(tokens), size
    )


def _measures(name: str, nats: float, targets: int, size: int) -> dict[str, float]:
    loss = nats / targets
    return {
        f"{name}loss": loss,
        f"{name}perplexity": math.exp(min(700.0, loss)),
        f"{name}bits_per_byte": nats / math.log(2) / size,
    }
