"""An encoder over tensor, sequence and pipeline parallel ranks computes what one process does: 1e-5."""

from __future__ import annotations

from functools import partial

import pytest

from tests.parity.encoder import SPECS, like_one_process
from tests.parity.ranks import Body, Outcomes

LAYOUTS = {"tp2": (2, 1, False), "tp2 sp": (2, 1, True), "pp2": (1, 2, False), "tp2 pp2 sp": (2, 2, True)}
CASES: dict[int, dict[str, Body]] = {2: {}, 4: {}}
for _layout, (_tp, _pp, _sequence) in LAYOUTS.items():
    for _spec in SPECS:
        CASES[_tp * _pp][f"{_spec}, {_layout}"] = partial(like_one_process, _spec, _tp, _pp, _sequence)


@pytest.mark.parametrize(("ranks", "case"), [(ranks, case) for ranks in CASES for case in CASES[ranks]])
def test_an_encoder_on_several_ranks_is_that_of_one_process(
    outcomes: Outcomes, ranks: int, case: str
) -> None:
    assert outcomes.outcome(ranks, case) == ""
