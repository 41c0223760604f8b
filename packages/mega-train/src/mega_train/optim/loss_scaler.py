"""The parameters' dtype, and the loss scaler that keeps float16 gradients from underflow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mega_train.config import TrainConfig


def param_dtype(config: TrainConfig) -> torch.dtype:
    """Return the dtype of weights and activations; main weights and gradients are always float32."""
    return torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else torch.float32


@dataclass(slots=True)
class DynamicLossScaler:
    """Loss scaler (arXiv:1710.03740 §3.2) with Megatron's rules.

    The scale is halved once `hysteresis` gradients have overflowed; from then on each overflow halves it,
    until `growth_interval` steps without one double it.

    Attributes:
        value: the scale; 1 if none is needed.
        growth_interval: steps without an overflow after which the scale doubles; 0 for a constant scale.
        growth_tracker: steps since the last overflow or growth.
        hysteresis_tracker: overflows still tolerated; it may become negative, as in Megatron.
    """

    value: float = 1.0
    min_value: float = 1.0
    growth_interval: int = 0
    hysteresis: int = 2
    growth_tracker: int = 0
    hysteresis_tracker: int = 2

    def __post_init__(self) -> None:
        self.value, self.min_value = (
            float(np.float32(self.value)),
            float(np.float32(self.min_value)),
        )  # as Megatron's

    @classmethod
    def from_config(cls, config: TrainConfig) -> DynamicLossScaler:
        """Build the scaler of a new run."""
        if not config.fp16:
            return cls()
        if config.loss_scale is not None:
            return cls(config.loss_scale)
        return cls(
            config.initial_loss_scale,
            config.min_loss_scale,
            config.loss_scale_window,
            config.hysteresis,
            hysteresis_tracker=config.hysteresis,
        )

    def update(self, *, overflow: bool) -> None:
        """Update the scale after a step."""
        if not self.growth_interval:
            return
        if overflow:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.value = max(self.value * 0.5, self.min_value)
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.growth_interval:
            self.growth_tracker, self.hysteresis_tracker = 0, self.hysteresis
            self.value *= 2

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint; empty for a constant scale."""
        return (
            {
                "value": self.value,
                "growth_tracker": self.growth_tracker,
                "hysteresis_tracker": self.hysteresis_tracker,
            }
            if self.growth_interval
            else {}
        )

    @staticmethod
    def is_valid_state(state: object) -> bool:
        """Whether `load_state_dict` can read the state."""
        if not isinstance(state, dict) or not state:
            return state == {}
        value = state.get("value")
        counts = (state.get("growth_tracker"), state.get("hysteresis_tracker"))
        number = isinstance(value, int | float) and 0 < value < math.inf
        return number and all(type(count) is int for count in counts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state, if both scales are dynamic."""
        if self.growth_interval and state:
            self.value = float(state["value"])
            self.growth_tracker = int(state["growth_tracker"])
            self.hysteresis_tracker = int(state["hysteresis_tracker"])


def scale_loss(loss: Tensor, scale: float) -> Tensor:
    """Return the loss with its gradient multiplied by `scale`."""
    return loss if scale == 1 else _ScaleGradient.apply(loss, scale)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale  # type: ignore[attr-defined]
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.scale, None  # type: ignore[attr-defined]
