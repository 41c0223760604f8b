"""Divide a dataset's sequences into training, validation and test, by either of Megatron's rules."""

from __future__ import annotations

import math
import re

from mega_schema.errors import ConfigError
from mega_train.config.data import SplitRule

Range = tuple[int, int]


def parse_split(split: str) -> list[float]:
    """Parse the fractions of a text such as "969, 30, 1"; missing ones are 0.

    Raises:
        ConfigError: the text holds something else, or more than three.
    """
    try:
        fractions = [float(number) for number in re.findall(r"[^,/;\s]+", split)]
    except ValueError:
        fractions = []
    if (
        not 1 <= len(fractions) <= 3
        or not all(0 <= fraction < math.inf for fraction in fractions)
        or sum(fractions) == 0
    ):
        raise ConfigError("--split", "is not three shares", found=repr(split), wanted="such as 969,30,1")
    return fractions + [0.0] * (3 - len(fractions))


def fraction_range(begin: float, end: float, sequences: int) -> Range:
    """Return the sequences between two fractions, with the rounding of Megatron core and BigScience."""
    return round(begin * sequences), round(end * sequences)


def split_ranges(split: str, sequences: int, rule: SplitRule = "mcore") -> tuple[Range, Range, Range]:
    """Return the first and last-plus-one sequence of training, validation and test.

    "mcore" rounds each boundary by itself; "legacy" (through October 2023) rounds each share and then moves
    all boundaries by what is left over. They differ by a sequence or so for small and odd counts, which
    changes every sample's order.

    Raises:
        ConfigError: the text is not shares.
    """
    fractions = parse_split(split)
    total = sum(fractions)
    bounds = [0]
    if rule == "legacy":
        for fraction in fractions:
            bounds.append(bounds[-1] + round(fraction / total * sequences))
        excess = bounds[-1] - sequences
        # Megatron's boundary is negative if the first share is 0: it would read the last sequence as -1
        bounds = [0] + [max(0, bound - excess) for bound in bounds[1:]]
    else:
        cumulative = 0.0
        for fraction in fractions:
            cumulative += fraction / total
            bounds.append(round(cumulative * sequences))
    return (bounds[0], bounds[1]), (bounds[1], bounds[2]), (bounds[2], bounds[3])
