"""What a rank does in a few steps, call by call: --profile, in Megatron's words."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from mega_schema.atomic_io import atomic_write
from mega_train.config import Run

# the observers' threads, which wait for events: in the table they would come before what computes
_WAITING = ("<built-in method acquire of _thread", "threading.py(", "queue.py(")

log = logging.getLogger("mega.train")


class Profiler:
    """Records from when `start` steps are done until `end` are.

    With --use-pytorch-profiler, and on a CPU always, torch's profiler writes a trace for chrome://tracing or
    Perfetto, and a table of the operations that took longest, without threads that wait. Else CUDA's is
    switched on for that time, for `nsys profile --capture-range cudaProfilerApi`.
    """

    def __init__(self, start: int | None, end: int, device: torch.device, trace: Path | None) -> None:
        """
        Args:
            start: None records nothing.
            trace: where torch's profiler writes, without an ending; None leaves it to CUDA's.
        """
        self._start, self._end, self._trace = start, end, trace
        self._cuda = device.type == "cuda"
        self._now: profile | None = None
        self._running = False

    @classmethod
    def of(cls, run: Run, rank: int, device: torch.device) -> Profiler:
        """The one that this rank was asked for."""
        said = run.profile
        asked = said.on and rank in (said.numbers or (0,))
        folder = run.log.tensorboard_dir or run.checkpoint.save or Path()
        torchs = said.torch or device.type == "cpu"
        trace = folder / f"profile-rank-{rank}" if torchs else None
        return cls(said.start if asked else None, said.end, device, trace)

    def before(self, done: int) -> None:
        """A step comes, the first of which has 0 done before it."""
        if done != self._start or self._running:
            return
        self._running = True
        if self._trace is None:
            torch.cuda.profiler.start()
            return
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        self._now = profile(activities=kinds, record_shapes=True, with_stack=True)
        self._now.start()

    def after(self, done: int) -> None:
        """So many steps are done."""
        if done >= self._end:
            self.close()

    def close(self) -> None:
        """Write what was recorded; a file that cannot be written is no reason to end a run."""
        if not self._running:
            return
        self._running = False
        if self._trace is None:
            torch.cuda.profiler.stop()
            return
        assert self._now is not None
        self._now.stop()
        try:
            self._write(self._now, self._trace)
        except (OSError, RuntimeError) as error:
            log.warning("the profile cannot be written to %s: %s", self._trace, error)
        self._now = None

    def _write(self, made: profile, trace: Path) -> None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        made.export_chrome_trace(f"{trace}.json")
        by = "self_cuda_time_total" if self._cuda else "self_cpu_time_total"
        with atomic_write(trace.with_suffix(".txt")) as partial:
            rows = made.key_averages()
            rows[:] = [row for row in rows if not row.key.startswith(_WAITING)]
            partial.write_text(rows.table(sort_by=by, row_limit=30), "utf-8")
        log.info("profile written to %s.json and .txt", trace)
