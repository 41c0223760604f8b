"""Planned bytes sent by a rank against those that bench/comm.py counted in real steps."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from bench.comm import COMMON, LAYOUTS, _name
from mega_schema.app.config import load_config
from mega_train.commands.plan import build_workload
from mega_train.config import RunConfig
from mega_train.planning.communication import comm_volume

RESULT = Path(__file__).parents[3] / "bench/results/2026-11-21-comm.md"
CASES = {_name(ranks, values): (ranks, values) for ranks, cases in LAYOUTS.items() for values in cases}


def measured_bytes() -> dict[str, dict[str, float]]:
    """Of every layout and axis, bytes that the rank with most to send sends in a step, on a ring."""
    ranks: dict[str, dict[str, dict[int, float]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(float))
    )
    for line in RESULT.read_text("utf-8").splitlines():
        if not re.match(r"\| \d: ", line):
            continue
        name, rank, what, _, _, size, _ = (cell.strip() for cell in line.strip("|").split("|"))
        axis, operation = what.split()
        run = load_config(RunConfig, None, {}, [*COMMON, *CASES[name][1]])
        if run.parallel.sequence and (axis, operation) == ("tp", "all-reduce"):
            continue  # the loss's few numbers per token, and gradients of norms: a plan leaves them out
        layout = build_workload(run, "gpt", CASES[name][0]).layout
        n = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp}.get(axis, layout.dp * layout.cp)
        share = {"all-reduce": 2 * (n - 1) / n, "send": 1, "receive": 0}.get(operation, (n - 1) / n)
        if axis == "replicas" or (axis, operation) == ("cp", "all-reduce"):
            axis = "dp"  # gradients
        ranks[name][axis][int(rank)] += share * int(size.replace(",", ""))
    return {
        name: {axis: max(by_rank.values()) for axis, by_rank in axes.items()} for name, axes in ranks.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_what_a_plan_says_a_rank_sends_was_counted(name: str) -> None:
    ranks, values = CASES[name]
    planned = comm_volume(build_workload(load_config(RunConfig, None, {}, [*COMMON, *values]), "gpt", ranks))
    measured = measured_bytes()[name]
    for axis, sent in measured.items():
        assert getattr(planned, axis) == pytest.approx(sent, rel=0.05), axis
    assert {axis for axis in ("tp", "cp", "pp", "dp") if getattr(planned, axis)} == set(measured)
