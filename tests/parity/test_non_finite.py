"""The error of a non-finite number names the rank of origin or the model replica, and no other."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest

from mega_model.distributed.mesh import World
from mega_train.engine.optimizer_step import NonFiniteLossError
from tests.parity.ranks import Body, on_ranks
from tests.parity.runs import steps, trainer

LAYOUTS: dict[str, tuple[dict[str, object], int, str]] = {
    # the options, the rank on which it begins, and the ranks of its copy of the model
    "pipeline_2_data_2": ({"parallel__pipeline_model_parallel_size": 2}, 3, "1, 3"),
    "pipeline_4": ({"parallel__pipeline_model_parallel_size": 4}, 3, "0, 1, 2, 3"),
    "tensor_2_data_2": ({"parallel__tensor_model_parallel_size": 2}, 3, "2, 3"),
    "data_4": ({}, 2, "2"),
}


def _begins_on(values: dict[str, object], bad: int, copy: str, world: World, meet: str, folder: Path) -> None:
    run = trainer("gpt", world, meet, folder, **values)
    steps(run, 1)
    if world.rank == bad:
        run.loss_scaler.value = math.nan  # of the loss: its gradients are none, and its weights are sound
    with pytest.raises(NonFiniteLossError) as caught:
        run.step(run.state.lr)
    among = f", on rank {copy}" if copy == str(bad) else f", on one of ranks {copy}, a copy of the model"
    assert among in str(caught.value)
    run.loss_scaler.value = 1.0
    if world.rank == bad:
        run.params[0][1].data.view(-1)[0] = math.nan
    with pytest.raises(NonFiniteLossError) as caught:
        run.step(run.state.lr)
    assert f", on rank {bad}, whose weights are not finite" in str(caught.value)
    run.mesh.destroy()


def test_what_is_not_finite_is_blamed_on_where_it_began(tmp_path: Path) -> None:
    cases: dict[str, Body] = {name: partial(_begins_on, *arguments) for name, arguments in LAYOUTS.items()}
    assert on_ranks(4, cases, tmp_path) == dict.fromkeys(cases, "")
