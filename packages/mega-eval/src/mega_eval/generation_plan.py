"""Group prompts into batches of similar ones. Integers without torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from mega_eval.window_trie import count_shared
from mega_eval.windows import Tokens, as_tokens


def plan_batches(
    prompts: Sequence[Sequence[int]],
    max_new: Sequence[int],
    *,
    max_tokens: int,
    max_cached: int,
    max_rows: int,
) -> list[list[int]]:
    """Return batches of prompts, by their numbers.

    Prompts of which one begins with at least half of the next are neighbours: a batch computes what they
    share once. Beyond that, prompts of similar length are neighbours, the longest first.

    Args:
        max_new: for each prompt, most tokens of its continuation.
        max_tokens: tokens of the prompts of a batch, shared ones once; a longer prompt has a batch of its
            own.
        max_cached: rows of a batch times the columns that the longest needs.
        max_rows: prompts of a batch.
    """
    batches: list[list[int]] = []
    tokens = columns = 0
    previous = as_tokens([])
    for number in _order_prompts(prompts):
        prompt = as_tokens(prompts[number])
        new = len(prompt) - count_shared(previous, prompt)
        widest = max(columns, len(prompt) + max_new[number])
        rows = len(batches[-1]) + 1 if batches else 0
        if not 0 < rows <= max_rows or tokens + new > max_tokens or rows * widest > max_cached:
            batches.append([])
            tokens, new, widest = 0, len(prompt), len(prompt) + max_new[number]
        batches[-1].append(number)
        tokens, columns, previous = tokens + new, widest, prompt
    return batches


def halve_batches(batches: Sequence[Sequence[int]], rows: int) -> list[list[int]]:
    """Cut batches into ones of at most half of these rows, in the same order."""
    most = rows // 2
    return [list(batch[start : start + most]) for batch in batches for start in range(0, len(batch), most)]


def _order_prompts(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return the numbers of the prompts, with neighbours that share tokens or have similar lengths."""
    arrays = [as_tokens(prompt) for prompt in prompts]
    # big-endian bytes have the order of the numbers
    order = sorted(range(len(arrays)), key=lambda number: arrays[number].astype(">i8").tobytes())
    families: list[list[int]] = []
    previous: Tokens = as_tokens([])
    for number in order:
        if not families or 2 * count_shared(previous, arrays[number]) < len(arrays[number]):
            families.append([])
        families[-1].append(number)
        previous = arrays[number]
    families.sort(key=lambda family: -max(len(arrays[number]) for number in family))
    return list(chain.from_iterable(families))
