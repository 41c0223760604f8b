"""Decide when a run exits, on all ranks after the same step."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from mega_model.distributed.mesh import Mesh
from mega_train.resolve import ResolvedConfig


@dataclass(frozen=True, slots=True)
class ExitReason:
    """The reason why a run exits.

    Attributes:
        name: its name in the event log.
        code: the exit code of every rank.
        message: the reason, for the user.
        is_urgent: the machine may be preempted: save first.
    """

    name: str
    code: int = 0
    message: str = ""
    is_urgent: bool = False


LAST_ITERATION = ExitReason("last iteration")
EVAL_ONLY = ExitReason("only validated")
INTERVAL = ExitReason("exit interval", message="--exit-interval divides it")
DURATION = ExitReason("exit duration", message="--exit-duration-in-mins is over")
KILL_SWITCH = ExitReason("kill switch", message="the file of --kill-switch-path exists")
SIGTERM = ExitReason("signal", 128 + signal.SIGTERM, "received SIGTERM", is_urgent=True)
SIGUSR1 = replace(SIGTERM, message="received SIGUSR1")
# in ascending priority: ranks all-reduce the maximum of their indices, so that the last one that any rank
# sees wins
_REASONS = (None, EVAL_ONLY, LAST_ITERATION, INTERVAL, DURATION, KILL_SWITCH, SIGUSR1, SIGTERM)


def _no_signal() -> None:
    """Stand in for the signal handler of a run without one."""


class ExitConditions:
    """Checks after every step whether all ranks exit.

    Ranks may differ in a clock, a file or a signal. If a run uses one of them, the ranks all-reduce the
    maximum of one integer after each step.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        mesh: Mesh,
        *,
        received_signal: Callable[[], signal.Signals | None] | None = None,
        start_time: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Build the conditions from the configuration.

        Args:
            received_signal: returns SIGTERM or SIGUSR1 once this process has received it.
            start_time: start of the run on `clock`; now, if not given.
        """
        train = config.run.train
        self._mesh = mesh
        self._received_signal = received_signal or _no_signal
        self._clock = clock
        self._last = config.iterations
        self._interval = train.exit_interval
        self._minutes = train.exit_minutes
        self._kill_switch = train.kill_switch if mesh.rank == 0 else None
        self._is_eval_only = config.is_eval_only
        self._start_time = clock() if start_time is None else start_time
        self._is_local = train.exit_minutes is None and train.kill_switch is None and received_signal is None

    def check_before_run(self, iteration: int) -> ExitReason | None:
        """Return the reason to exit without a step, after `iteration` steps; None to train."""
        local_reason = self._external_reason()
        if local_reason is None and self._is_eval_only:
            local_reason = EVAL_ONLY
        elif local_reason is None and iteration >= self._last:
            local_reason = LAST_ITERATION
        return self._all_reduce_reason(local_reason)

    def check_after_step(self, iteration: int) -> ExitReason | None:
        """Return the reason why all ranks exit after this step; None to continue."""
        local_reason = self._external_reason() or (LAST_ITERATION if iteration >= self._last else None)
        if local_reason is None and self._interval and iteration % self._interval == 0:
            local_reason = INTERVAL
        return self._all_reduce_reason(local_reason)

    def _external_reason(self) -> ExitReason | None:
        if (number := self._received_signal()) is not None:
            return SIGTERM if number == signal.SIGTERM else SIGUSR1
        if self._kill_switch is not None and self._kill_switch.exists():
            return KILL_SWITCH
        if self._minutes is not None and self._clock() - self._start_time > 60 * self._minutes:
            return DURATION
        return None

    def _all_reduce_reason(self, local_reason: ExitReason | None) -> ExitReason | None:
        if self._is_local:
            return local_reason
        return _REASONS[self._mesh.all_reduce_max(_REASONS.index(local_reason))]
