"""Remove the padding of a micro-batch: its rows become one row of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class UnpaddedRows:
    """The tokens of a micro-batch without the padding at the ends of its rows.

    Attributes:
        index_T: number of each token in the flattened micro-batch. Where the tokens must be a multiple of a
            number, the first token is repeated at the end, as a row of its own.
        lengths: tokens of each row, and of the repeats if there are any.
        begin_B: index of each row's first token.
    """

    index_T: NDArray[np.int64]
    lengths: tuple[int, ...]
    begin_B: NDArray[np.int64]

    @classmethod
    def from_real(cls, real_BS: NDArray[np.integer], multiple: int) -> UnpaddedRows:
        """Find the tokens of rows that each have a real token.

        Args:
            real_BS: 1 at real tokens, 0 at padding. A 0 before the last real token is no padding: it is a
                padding id in the text, which Megatron core's mask hides.
            multiple: the number of tokens is rounded up to a multiple of this.
        """
        length = real_BS.shape[1]
        length_B = length - np.argmax(real_BS[:, ::-1] == 1, axis=1)
        index_T = np.flatnonzero(np.arange(length) < length_B[:, None])
        begin_B = np.cumsum(length_B) - length_B
        repeats = -len(index_T) % multiple
        lengths = (*length_B.tolist(), *([repeats] if repeats else []))
        return cls(np.concatenate([index_T, np.zeros(repeats, np.int64)]), lengths, begin_B)
