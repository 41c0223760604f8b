"""Why a run leaves, and that all its ranks do so after the same step."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from mega_model.distributed.mesh import Mesh
from mega_train.resolve import ResolvedConfig


@dataclass(frozen=True, slots=True)
class ExitReason:
    """Why a run leaves.

    Attributes:
        name: what the record calls it.
        code: the exit code of every rank.
        said: why, for a person.
        hasty: the machine is about to be taken away: save, and do nothing else before.
    """

    name: str
    code: int = 0
    message: str = ""
    is_urgent: bool = False


LAST_ITERATION = ExitReason("last iteration")
EVAL_ONLY = ExitReason("only validated")
INTERVAL = ExitReason("exit interval", message="--exit-interval divides it")
DURATION = ExitReason("exit duration", message="--exit-duration-in-mins is over")
KILL_SWITCH = ExitReason("kill switch", message="the file of --kill-switch-path is there")
SIGNAL = ExitReason("signal", 128 + signal.SIGTERM, "told to end (SIGTERM or SIGUSR1)", is_urgent=True)
# where several hold, or ranks disagree, the last of them counts
_REASONS = (None, EVAL_ONLY, LAST_ITERATION, INTERVAL, DURATION, KILL_SWITCH, SIGNAL)


def _never() -> bool:
    return False


class ExitConditions:
    """Says after every step whether all ranks leave now: the one place where that is decided.

    A clock, a file and a signal may be seen by one rank and not by another, so where one of them is asked for
    the ranks compare: the largest of a number each, a collective of a few bytes a step.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        mesh: Mesh,
        *,
        received_signal: Callable[[], bool] | None = None,
        start_time: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            told: whether this process was told to end.
            began: when the run's time began, on `clock`; now, if not given.
        """
        train = config.run.train
        self._mesh = mesh
        self._received_signal = received_signal or _never
        self._clock = clock
        self._last = config.iterations
        self._interval = train.exit_interval
        self._minutes = train.exit_minutes
        self._kill_switch = train.kill_switch if mesh.rank == 0 else None
        self._is_eval_only = config.is_eval_only
        self._start_time = clock() if start_time is None else start_time
        self._is_local = train.exit_minutes is None and train.kill_switch is None and received_signal is None

    def check_before_run(self, iteration: int) -> ExitReason | None:
        """Why the run leaves without a step; `iteration` are done."""
        local_reason = (
            EVAL_ONLY if self._is_eval_only else LAST_ITERATION if iteration >= self._last else None
        )
        return self._all_reduce_reason(self._external_reason() or local_reason)

    def check_after_step(self, iteration: int) -> ExitReason | None:
        """Why all ranks leave after this step, or None where they go on."""
        local_reason = self._external_reason() or (LAST_ITERATION if iteration >= self._last else None)
        if local_reason is None and self._interval and iteration % self._interval == 0:
            local_reason = INTERVAL
        return self._all_reduce_reason(local_reason)

    def _external_reason(self) -> ExitReason | None:
        if self._received_signal():
            return SIGNAL
        if self._kill_switch is not None and self._kill_switch.exists():
            return KILL_SWITCH
        if self._minutes is not None and self._clock() - self._start_time > 60 * self._minutes:
            return DURATION
        return None

    def _all_reduce_reason(self, local_reason: ExitReason | None) -> ExitReason | None:
        return local_reason if self._is_local else _REASONS[self._mesh.largest(_REASONS.index(local_reason))]
