"""Fixed segments of the inputs of a product that is split over tp, so that every layout adds in one order.

The inputs are cut into segments of equal width. Each segment is summed in order, and the sums are combined in
a binary tree over neighbours: of four, (s0 + s1) + (s2 + s3). The number of segments is a power of two that
does not depend on tp. The inputs of a rank are the leaves of one subtree, so a rank combines its own, and the
ranks' sums are combined in the upper part of the same tree.
"""

from __future__ import annotations

import math

from mega_schema.errors import LayoutError
from mega_schema.spec import ModelSpec

MAX_SEGMENTS = 8


def count_segments(width: int) -> int:
    """Return the segments of `width` inputs: a power of two. Each has an even number of inputs, if it can."""
    return math.gcd(width // 2, MAX_SEGMENTS) if width % 2 == 0 else 1


def count_local_segments(local_width: int, tp: int) -> int:
    """Return the segments of one rank of tp, which holds `local_width` inputs.

    Raises:
        LayoutError: the inputs of a rank are not a whole number of segments.
    """
    segments = count_segments(local_width * tp)
    if segments % tp:
        raise LayoutError(
            "--batch-invariant",
            f"sums {local_width * tp} inputs in {segments} segments, which tp does not divide",
            found=f"tp {tp}",
            wanted=" | ".join(str(1 << power) for power in range(segments.bit_length())),
        )
    return segments // tp


def check_segments(spec: ModelSpec, tp: int) -> None:
    """Check that tp divides the segments of every product of a model whose inputs it splits.

    Raises:
        LayoutError: it does not.
    """
    for width in (spec.heads * spec.head_dim, spec.ffn):
        count_local_segments(width // tp, tp)
