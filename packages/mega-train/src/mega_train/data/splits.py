"""Which sequences of a corpus are for training, validation and test; both of Megatron's rules."""

from __future__ import annotations

import math
import re
from typing import Literal

from mega_schema.errors import ConfigError

Rule = Literal["mcore", "legacy"]
Range = tuple[int, int]


def shares(split: str) -> list[float]:
    """The three numbers of a text such as "969, 30, 1", those that are left out as 0.

    Raises:
        ConfigError: the text holds something else, or more than three.
    """
    try:
        parts = [float(number) for number in re.findall(r"[^,/;\s]+", split)]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or not all(0 <= part < math.inf for part in parts) or sum(parts) == 0:
        raise ConfigError("--split", "is not three shares", found=repr(split), wanted="such as 969,30,1")
    return parts + [0.0] * (3 - len(parts))


def range_of(begin: float, end: float, sequences: int) -> Range:
    """The sequences between two shares of 1, by Megatron core's rounding and BigScience's."""
    return round(begin * sequences), round(end * sequences)


def split_ranges(split: str, sequences: int, rule: Rule = "mcore") -> tuple[Range, Range, Range]:
    """First and last-plus-one sequence of training, validation and test.

    "mcore" rounds each boundary by itself; "legacy" (through October 2023) rounds each share and then moves
    all boundaries by what is left over. They differ by a sequence or so for small and odd counts, which
    changes every sample's order.

    Raises:
        ConfigError: the text is not shares.
    """
    parts = shares(split)
    total = sum(parts)
    bounds = [0]
    if rule == "legacy":
        for part in parts:
            bounds.append(bounds[-1] + round(part / total * sequences))
        over = bounds[-1] - sequences
        # Megatron goes below zero where the first share is 0, and would read the last sequence as number -1
        bounds = [0] + [max(0, bound - over) for bound in bounds[1:]]
    else:
        reached = 0.0
        for part in parts:
            reached += part / total
            bounds.append(round(reached * sequences))
    return (bounds[0], bounds[1]), (bounds[1], bounds[2]), (bounds[2], bounds[3])
