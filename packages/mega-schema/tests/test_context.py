"""The tokens of a row that each context-parallel rank holds."""

from __future__ import annotations

import pytest
import torch

from mega_model.context_parallel import token_positions
from mega_model.distributed.mesh import Axis


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_every_token_is_on_one_rank_and_ranks_have_equal_work(cp: int) -> None:
    positions = [token_positions(48, Axis("cp", cp, rank)) for rank in range(cp)]
    assert torch.cat(positions).sort().values.tolist() == list(range(48))
    pairs = {int((place + 1).sum()) for place in positions}  # a token sees the tokens up to itself
    assert len(pairs) == 1


def test_a_rank_holds_an_early_and_a_late_chunk() -> None:
    assert token_positions(8, Axis("cp", 2, 0)).tolist() == [0, 1, 6, 7]
    assert token_positions(8, Axis("cp", 2, 1)).tolist() == [2, 3, 4, 5]


def test_one_rank_alone_holds_rows_of_any_length() -> None:
    assert token_positions(7, Axis("cp")).tolist() == list(range(7))
