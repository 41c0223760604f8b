"""The loss scale equals Megatron's, and does not change the reported loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import pytest
import torch

from mega_schema.errors import ConfigError
from mega_train.config import TrainConfig
from mega_train.optim.loss_scaler import DynamicLossScaler, param_dtype, scale_loss
from mega_train.resolve import ResolvedConfig


class ResolveConfig(Protocol):
    def __call__(self, **values: Any) -> ResolvedConfig: ...


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"fp16": True, "bf16": True}, "--fp16: excludes --bf16: found both, wanted one of them"),
        ({"loss_scale": 8.0}, "--loss-scale: only float16 needs one: wanted --fp16; hint: leave it out"),
        ({"fp16": True, "loss_scale": 0.0}, "--loss-scale: not a scale: found 0.0, wanted a number above 0"),
        ({"fp16": True, "initial_loss_scale": 0.0}, "--initial-loss-scale: not a scale: found 0.0"),
        (
            {"fp16": True, "initial_loss_scale": 2.0, "min_loss_scale": 4.0},
            "--min-loss-scale: is above --initial-loss-scale: found 4.0, wanted at most 2",
        ),
        ({"fp16": True, "loss_scale_window": 0}, "--loss-scale-window: not a count: found 0"),
        ({"fp16": True, "hysteresis": 0}, "--hysteresis: not a count: found 0, wanted 1 or more"),
    ],
)
def test_an_arithmetic_that_cannot_be_is_refused(
    resolve_config: ResolveConfig, values: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(**{f"train__{name}": value for name, value in values.items()})
    assert str(caught.value).startswith(line)


def test_the_scale_is_a_float32() -> None:
    scale = DynamicLossScaler.from_config(
        TrainConfig(fp16=True, initial_loss_scale=12345.678, min_loss_scale=0.1)
    )
    assert (scale.value, scale.min_value) == (12345.677734375, 0.10000000149011612)
    assert (
        DynamicLossScaler.from_config(TrainConfig(fp16=True, loss_scale=12345.678)).value == 12345.677734375
    )


def test_the_scale_moves_as_megatrons_does(oracle: Callable[[str], Any]) -> None:
    known = oracle("loss_scaler.json")
    assert (known["growth"], known["backoff"]) == (2.0, 0.5)
    scale = DynamicLossScaler.from_config(
        TrainConfig(
            fp16=True,
            initial_loss_scale=float(known["initial"]),
            min_loss_scale=known["min"],
            loss_scale_window=known["window"],
            hysteresis=known["hysteresis"],
        )
    )
    rows = known["rows_foundinf_scale_growth_hyst"]
    assert len(rows) > 50
    for row in rows:
        scale.update(overflow=bool(row[0]))
        assert [scale.value, scale.growth_tracker, scale.hysteresis_tracker] == row[1:]


def test_the_scale_never_falls_below_its_least() -> None:
    scale = DynamicLossScaler.from_config(
        TrainConfig(fp16=True, initial_loss_scale=8.0, min_loss_scale=4.0, hysteresis=1)
    )
    seen = []
    for _ in range(3):
        scale.update(overflow=True)
        seen.append(scale.value)
    assert seen == [4.0, 4.0, 4.0]


@pytest.mark.parametrize(
    ("train", "value"),
    [(TrainConfig(), 1.0), (TrainConfig(bf16=True), 1.0), (TrainConfig(fp16=True, loss_scale=128.0), 128.0)],
)
def test_a_scale_that_is_not_dynamic_stays(train: TrainConfig, value: float) -> None:
    scale = DynamicLossScaler.from_config(train)
    for overflow in (True, False, True):
        scale.update(overflow=overflow)
    scale.load_state_dict(DynamicLossScaler(5.0).state_dict())
    assert scale.value == value


def test_a_loaded_state_resumes_where_it_was_saved() -> None:
    train = TrainConfig(fp16=True, loss_scale_window=3)
    first, second = DynamicLossScaler.from_config(train), DynamicLossScaler.from_config(train)
    for overflow in (True, True, False, False):
        first.update(overflow=overflow)
    assert first.state_dict() == {"value": 2.0**31, "growth_tracker": 2, "hysteresis_tracker": 0}
    second.load_state_dict(first.state_dict())
    first.update(overflow=False)
    second.update(overflow=False)
    assert first == second
    assert first.value == 2.0**32, "halved by the second overflow, doubled by the third good step"


def test_scaling_changes_the_gradient_and_not_the_loss() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    loss = scale_loss(x.square(), 8.0)
    loss.backward()
    assert loss.detach() == 9.0
    assert x.grad == 48.0


def test_a_run_has_one_dtype() -> None:
    assert param_dtype(TrainConfig()) == torch.float32
    assert param_dtype(TrainConfig(bf16=True)) == torch.bfloat16
    assert param_dtype(TrainConfig(fp16=True)) == torch.float16
