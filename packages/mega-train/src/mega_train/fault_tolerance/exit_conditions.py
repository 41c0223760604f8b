"""Why a run leaves, and that all its ranks do so after the same step."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from mega_model.distributed.mesh import Mesh
from mega_train.resolve import Plan


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a run leaves.

    Attributes:
        name: what the record calls it.
        code: the exit code of every rank.
        said: why, for a person.
        hasty: the machine is about to be taken away: save, and do nothing else before.
    """

    name: str
    code: int = 0
    said: str = ""
    hasty: bool = False


LAST = Reason("last iteration")
VALIDATED = Reason("only validated")
INTERVAL = Reason("exit interval", said="--exit-interval divides it")
DURATION = Reason("exit duration", said="--exit-duration-in-mins is over")
KILL_SWITCH = Reason("kill switch", said="the file of --kill-switch-path is there")
SIGNAL = Reason("signal", 128 + signal.SIGTERM, "told to end (SIGTERM or SIGUSR1)", hasty=True)
# where several hold, or ranks disagree, the last of them counts
_REASONS = (None, VALIDATED, LAST, INTERVAL, DURATION, KILL_SWITCH, SIGNAL)


def _never() -> bool:
    return False


class Leaving:
    """Says after every step whether all ranks leave now: the one place where that is decided.

    A clock, a file and a signal may be seen by one rank and not by another, so where one of them is asked for
    the ranks compare: the largest of a number each, a collective of a few bytes a step.
    """

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        *,
        told: Callable[[], bool] | None = None,
        began: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            told: whether this process was told to end.
            began: when the run's time began, on `clock`; now, if not given.
        """
        train = plan.run.train
        self._mesh, self._told, self._clock = mesh, told or _never, clock
        self._last, self._interval, self._minutes = plan.iterations, train.exit_interval, train.exit_minutes
        self._kill_switch = train.kill_switch if mesh.rank == 0 else None
        self._validates = plan.only_validates
        self._began = clock() if began is None else began
        self._alone = train.exit_minutes is None and train.kill_switch is None and told is None

    def before(self, iteration: int) -> Reason | None:
        """Why the run leaves without a step; `iteration` are done."""
        planned = VALIDATED if self._validates else LAST if iteration >= self._last else None
        return self._agreed(self._from_outside() or planned)

    def after(self, iteration: int) -> Reason | None:
        """Why all ranks leave after this step, or None where they go on."""
        mine = self._from_outside() or (LAST if iteration >= self._last else None)
        if mine is None and self._interval and iteration % self._interval == 0:
            mine = INTERVAL
        return self._agreed(mine)

    def _from_outside(self) -> Reason | None:
        if self._told():
            return SIGNAL
        if self._kill_switch is not None and self._kill_switch.exists():
            return KILL_SWITCH
        if self._minutes is not None and self._clock() - self._began > 60 * self._minutes:
            return DURATION
        return None

    def _agreed(self, mine: Reason | None) -> Reason | None:
        return mine if self._alone else _REASONS[self._mesh.all_reduce_max(_REASONS.index(mine))]
