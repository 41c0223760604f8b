"""Which sequences of a corpus are for training, validation and test; both of Megatron's rules."""

from __future__ import annotations

import re
from typing import Literal

from mega_schema.errors import ConfigError

Rule = Literal["mcore", "legacy"]
Range = tuple[int, int]


def split_ranges(split: str, sequences: int, rule: Rule = "mcore") -> tuple[Range, Range, Range]:
    """First and last-plus-one sequence of training, validation and test.

    "mcore" rounds each boundary by itself; "legacy" (through October 2023) rounds each share and then moves
    all boundaries by what is left over. They differ by a sequence or so for small and odd counts, which
    changes every sample's order.

    Raises:
        ConfigError: the text holds no shares, or more than three.
    """
    text = split if rule == "mcore" else split.replace("/", ",")
    shares = [float(number) for number in re.findall(r"[.0-9]+", text)]
    if not 1 <= len(shares) <= 3 or sum(shares) <= 0:
        raise ConfigError("--split", "is not three shares", found=repr(split), wanted="such as 969,30,1")
    shares += [0.0] * (3 - len(shares))
    total = sum(shares)
    bounds = [0]
    if rule == "legacy":
        for share in shares:
            bounds.append(bounds[-1] + round(share / total * sequences))
        over = bounds[-1] - sequences
        bounds = [0] + [bound - over for bound in bounds[1:]]
    else:
        reached = 0.0
        for share in shares:
            reached += share / total
            bounds.append(round(reached * sequences))
    return (bounds[0], bounds[1]), (bounds[1], bounds[2]), (bounds[2], bounds[3])
