"""Reduce the gradients of a step, check them, and update the weights."""

from __future__ import annotations

import math

from mega_schema.errors import MegaError
from mega_train.distributed.grad_sync import GradientSync
from mega_train.engine.forward_backward import MeanLosses
from mega_train.engine.train_state import TrainState
from mega_train.optim.base import Optimizer
from mega_train.optim.loss_scaler import DynamicLossScaler
from mega_train.resolve import ResolvedConfig
from mega_train.telemetry.timers import Timers


class NonFiniteLossError(MegaError):
    """The loss or the gradient is not finite; all ranks raise it in the same step."""


class OptimizerStep:
    """The part of a step that follows the backward pass.

    Attributes:
        loss_terms: terms of the last step's loss, by Megatron's names; empty if it has one.
        extra: further numbers of the last step for the log, by Megatron's names.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        grad_sync: GradientSync,
        optimizer: Optimizer,
        loss_scaler: DynamicLossScaler,
        timers: Timers,
    ) -> None:
        self._config = config
        self._grad_sync = grad_sync
        self._optimizer = optimizer
        self._loss_scaler = loss_scaler
        self._timers = timers
        self.loss_terms: dict[str, float] = {}
        self.extra: dict[str, float] = {}

    def run(self, losses: MeanLosses, lr: float, state: TrainState) -> tuple[float, float]:
        """Update the weights, unless the loss or the gradient is not finite on some rank.

        Returns:
            the loss, and the gradient norm before clipping; the norm of a skipped update is not finite.

        Raises:
            NonFiniteLossError: loss or gradient are not finite, and no float16 loss scale explains it.
                Nothing was updated.
        """
        train, log = self._config.run.train, self._config.run.log
        with self._timers("all-grads-sync"):
            self._grad_sync.reduce(self._loss_scaler.value)
        # read late: reading a number from a GPU waits for all work launched before
        with self._timers("optimizer-unscale-and-check-inf"):
            norm = self._grad_sync.norm()
            loss = float(losses.total)
            self.loss_terms = {name: float(term) for name, term in losses.terms.items()}
        finite = math.isfinite(loss) and math.isfinite(norm)
        overflow = train.fp16 and math.isfinite(loss)  # of a scaled gradient: a lower scale fixes it
        if not finite and not overflow and train.on_non_finite == "stop":
            raise self._non_finite_error(state.iteration + 1, loss, norm)
        self._loss_scaler.update(overflow=not finite)
        self.extra = {}
        if finite and log.zeros:
            with self._timers("optimizer-count-zeros"):
                self.extra["num-zeros"] = self._grad_sync.num_zeros()
        if finite:
            with self._timers("optimizer"):
                self._update(norm, lr, state)
        if log.params_norm:
            self.extra["params-norm"] = self._grad_sync.params_norm()
        return loss, norm if math.isfinite(loss) else math.nan

    def _update(self, norm: float, lr: float, state: TrainState) -> None:
        with self._timers("optimizer-clip-main-grad"):
            self._grad_sync.clip(norm, self._config.run.optimizer.clip)
        with self._timers("optimizer-inner-step"):
            self._optimizer.step(self._grad_sync.shards, lr, state.weight_decay, state.decoupled_lr)
        with self._timers("optimizer-copy-main-to-model-params"):
            self._grad_sync.weights.copy_main_to_model_params()

    def _non_finite_error(self, iteration: int, loss: float, norm: float) -> NonFiniteLossError:
        return NonFiniteLossError(
            f"iteration {iteration}",
            "loss or gradient is not finite",
            found=f"loss {loss:.4g}, gradient norm {norm:.4g}, first in {self._grad_sync.first_non_finite()}",
            wanted="numbers",
            hint="a lower --lr, a longer --lr-warmup-iters, --load the checkpoint before, "
            "or --on-non-finite skip",
        )
