"""Time that a rank spends in each phase of a step, under the names of Megatron's timers.

On a CPU the clock measures a phase. On a GPU the CPU only launches work, so a phase is the time between two
events of the stream; they are read once they have completed, and nothing waits for them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType, TracebackType
from typing import Any, Protocol

import torch

from mega_model.distributed.mesh import Mesh
from mega_train.config.logging import TimingOption

# --timing-log-level from which a phase is shown: 1 what happens once a step, 2 what happens per micro-batch
LEVELS: Mapping[str, int] = MappingProxyType(
    {
        "forward-backward": 1,
        "forward-compute": 2,
        "backward-compute": 2,
        "batch-generator": 2,
        "forward-recv": 2,  # waiting for the previous stage
        "backward-recv": 2,  # waiting for the next stage
        "all-grads-sync": 1,
        "optimizer-unscale-and-check-inf": 1,  # the norm, which is not finite if a gradient is not
        "optimizer-count-zeros": 1,
        "optimizer-clip-main-grad": 1,
        "optimizer-inner-step": 1,
        "optimizer-copy-main-to-model-params": 1,  # and the all-gather of sharded weights
        "optimizer": 1,
    }
)

Clock = Callable[[], float]
TimerFactory = Callable[[str], AbstractContextManager[object]]


def no_timer(name: str) -> AbstractContextManager[object]:
    """Return a context that measures nothing."""
    return nullcontext()


class _TimingEvent(Protocol):
    """A point in a stream, as torch.cuda.Event is."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...  # milliseconds


class Timers:
    """Accumulates the seconds of phases; call it with a name for a context to time."""

    def __init__(self, device: torch.device, clock: Clock = time.perf_counter) -> None:
        self._gpu = device.type == "cuda"
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._pending: deque[tuple[str, _TimingEvent, _TimingEvent]] = deque()

    def __call__(self, name: str) -> AbstractContextManager[object]:
        assert name in LEVELS, name
        return _GpuTimer(self, name) if self._gpu else _CpuTimer(self, name)

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def add_pending(self, name: str, begin: _TimingEvent, end: _TimingEvent) -> None:
        """Add two events to read once both have completed."""
        self._pending.append((name, begin, end))
        while self._pending[0][2].query() and len(self._pending) > 1:
            self._read_oldest()

    def pop(self) -> dict[str, float]:
        """Return and reset the seconds by phase; on a GPU it waits for the last event."""
        if self._pending:
            self._pending[-1][2].synchronize()
        while self._pending:
            self._read_oldest()
        seconds, self._seconds = self._seconds, {}
        return seconds

    def now(self) -> float:
        return self._clock()

    def _read_oldest(self) -> None:
        name, begin, end = self._pending.popleft()
        self.add(name, begin.elapsed_time(end) / 1000)


class _CpuTimer:
    __slots__ = ("_start", "_name", "_timers")

    def __init__(self, timers: Timers, name: str) -> None:
        self._timers = timers
        self._name = name

    def __enter__(self) -> None:
        self._start = self._timers.now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timers.add(self._name, self._timers.now() - self._start)


class _GpuTimer:
    __slots__ = ("_start", "_name", "_timers")

    def __init__(self, timers: Timers, name: str) -> None:
        self._timers = timers
        self._name = name

    def __enter__(self) -> None:
        self._start = torch.cuda.Event(enable_timing=True)
        self._start.record()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._timers.add_pending(self._name, self._start, end)


def reduce_timers(
    own_seconds: Mapping[str, float], level: int, option: TimingOption, mesh: Mesh
) -> dict[str, Sequence[float]]:
    """Collect the seconds of all ranks in the phases of this level; every rank must call it.

    Returns:
        by phase the maximum of all ranks, minimum and maximum, or every rank's. Phases that no rank entered
        are left out.
    """
    names = [name for name, values in LEVELS.items() if values <= level]
    if not names:
        return {}
    table_WP = torch.zeros(mesh.layout.world, len(names), dtype=torch.float64, device=mesh.device)
    table_WP[mesh.rank] = torch.tensor([own_seconds.get(name, 0.0) for name in names], dtype=torch.float64)
    for axis in (mesh.tp, mesh.replicas, mesh.pp):
        axis.reduce(table_WP)
    by_phase = zip(names, table_WP.T.tolist(), strict=True)
    reduction = {
        "max": lambda values: [max(values)],
        "minmax": lambda values: [min(values), max(values)],
        "all": list,
    }[option]
    return {name: reduction(values_of_ranks) for name, values_of_ranks in by_phase if any(values_of_ranks)}
