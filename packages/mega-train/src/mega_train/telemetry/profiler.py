"""Profile a few steps of a rank: --profile, with Megatron's flags."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from mega_schema.atomic_io import atomic_write
from mega_train.config import RunConfig

# calls of the observers' waiting threads, which would come first in the table
_WAITING_THREADS = ("<built-in method acquire of _thread", "threading.py(", "queue.py(")

log = logging.getLogger("mega.train")


class Profiler:
    """Profiles the steps after `start` up to `end`.

    With --use-pytorch-profiler, and on a CPU always, torch's profiler writes a trace for chrome://tracing or
    Perfetto, and a table of the slowest operations without waiting threads. Otherwise CUDA's profiler is
    switched on for that time, for `nsys profile --capture-range cudaProfilerApi`.
    """

    def __init__(self, start: int | None, end: int, device: torch.device, trace: Path | None) -> None:
        """Prepare to profile a range of steps.

        Args:
            start: None disables it.
            trace: path of torch's trace without a suffix; None uses CUDA's profiler.
        """
        self._start = start
        self._end = end
        self._trace = trace
        self._cuda = device.type == "cuda"
        self._profile: profile | None = None
        self._is_running = False

    @classmethod
    def from_config(cls, run: RunConfig, rank: int, device: torch.device) -> Profiler:
        """Build the profiler of this rank."""
        config = run.profile
        is_selected = config.on and rank in (config.rank_numbers or (0,))
        folder = run.log.tensorboard_dir or run.checkpoint.save or Path()
        uses_torch = config.torch or device.type == "cpu"
        trace = folder / f"profile-rank-{rank}" if uses_torch else None
        return cls(config.start if is_selected else None, config.end, device, trace)

    def before_step(self, steps_done: int) -> None:
        """Start the profiler if `steps_done` steps precede the first profiled one."""
        if steps_done != self._start or self._is_running:
            return
        self._is_running = True
        if self._trace is None:
            torch.cuda.profiler.start()
            return
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        self._profile = profile(activities=kinds, record_shapes=True, with_stack=True)
        self._profile.start()

    def after_step(self, steps_done: int) -> None:
        """Stop the profiler after the last profiled step."""
        if steps_done >= self._end:
            self.close()

    def close(self) -> None:
        """Write the profile; a file that cannot be written does not end the run."""
        if not self._is_running:
            return
        self._is_running = False
        if self._trace is None:
            torch.cuda.profiler.stop()
            return
        assert self._profile is not None
        self._profile.stop()
        try:
            self._write(self._profile, self._trace)
        except (OSError, RuntimeError) as error:
            log.warning("the profile cannot be written to %s: %s", self._trace, error)
        self._profile = None

    def _write(self, profiled: profile, trace: Path) -> None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiled.export_chrome_trace(f"{trace}.json")
        by = "self_cuda_time_total" if self._cuda else "self_cpu_time_total"
        with atomic_write(trace.with_suffix(".txt")) as partial:
            rows = profiled.key_averages()
            rows[:] = [row for row in rows if not row.key.startswith(_WAITING_THREADS)]
            partial.write_text(rows.table(sort_by=by, row_limit=30), "utf-8")
        log.info("profile written to %s.json and .txt", trace)
