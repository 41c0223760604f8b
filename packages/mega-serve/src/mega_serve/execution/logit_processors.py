"""Change the logits of one row: penalties, bias, and ids that must not be sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from mega_serve.engine.interfaces import SamplingRow
from mega_serve.engine.requests import SamplingParams

Row = NDArray[np.float32]


def has_penalties(params: SamplingParams) -> bool:
    """Return whether logits depend on the tokens before."""
    is_neutral = params.repetition_penalty == 1.0 and not params.presence_penalty
    return not is_neutral or params.frequency_penalty != 0.0


def has_masks(row: SamplingRow) -> bool:
    """Return whether ids may be excluded from the row."""
    params = row.params
    return (
        params.allowed_token_ids is not None
        or bool(params.bad_words)
        or params.banned_bigram is not None
        or len(row.output_token_ids) < params.min_tokens
    )


def apply_penalties(logits: Row, row: SamplingRow) -> None:
    """Apply repetition, presence and frequency penalties in place."""
    params = row.params
    output = _ids_below(row.output_token_ids, len(logits))
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate([_ids_below(row.prompt_token_ids, len(logits)), output]))
        penalty = np.float32(params.repetition_penalty)
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = np.unique(output, return_counts=True)
        penalties = params.presence_penalty + params.frequency_penalty * counts
        logits[ids] -= penalties.astype(np.float32)


def apply_bias(logits: Row, bias: Sequence[tuple[int, float]]) -> None:
    """Add each bias to the logit of its id, in place."""
    for token_id, value in bias:
        if 0 <= token_id < len(logits):
            logits[token_id] += np.float32(value)


def mask_ids(logits: Row, row: SamplingRow, eod: int | None) -> None:
    """Set logits of ids that the parameters exclude to -inf, in place.

    Args:
        eod: end-of-document, which `min_tokens` excludes too.
    """
    if row.params.allowed_token_ids is not None:
        allowed = _ids_below(row.params.allowed_token_ids, len(logits))
        values = logits[allowed]
        logits.fill(-np.inf)
        logits[allowed] = values
    banned = [*_banned_words(row), *_banned_stops(row, eod)]
    logits[_ids_below(banned, len(logits))] = -np.inf


def _banned_words(row: SamplingRow) -> Iterator[int]:
    """Yield the last id of each bad word whose other ids end the text, and that of the bigram."""
    bigram = row.params.banned_bigram
    if bigram is not None and _ends_with(row, bigram[:1]):
        yield bigram[1]
    for word in row.params.bad_words:
        if word and _ends_with(row, word[:-1]):
            yield word[-1]


def _banned_stops(row: SamplingRow, eod: int | None) -> Iterator[int]:
    """Yield the ids that would end the sequence before `min_tokens`."""
    params = row.params
    if len(row.output_token_ids) >= params.min_tokens:
        return
    yield from params.stop_token_ids
    if eod is not None and not params.ignore_eos:
        yield eod
    if params.stop_repeated_id is not None and _ends_with(row, (params.stop_repeated_id,)):
        yield params.stop_repeated_id


def _ends_with(row: SamplingRow, ids: Sequence[int]) -> bool:
    """Return whether prompt and output end with the ids."""
    size = len(ids)
    if not size:
        return True
    tail = list(row.output_token_ids[-size:])
    if missing := size - len(tail):
        tail = [*row.prompt_token_ids[-missing:], *tail]
    return tail == list(ids)


def _ids_below(ids: Sequence[int], limit: int) -> NDArray[np.intp]:
    array = np.fromiter(ids, np.intp, len(ids))
    return array[(array >= 0) & (array < limit)]
