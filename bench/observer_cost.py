"""Benchmark telemetry: CPU time of an event for the observers, and of timing a phase.

    python bench/observer_cost.py [--rounds 5] [--json FILE]

Observers are told of 2,000 steps with a line of the log every ten: the record and a log alone, and with them
TensorBoard (every step, every flag) and Prometheus. The CPU time is of all threads, so what observers do on
threads of their own counts; opening them does not. Prints median and spread.
"""

from __future__ import annotations

import argparse
import io
import json
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from mega_model.distributed.mesh import World
from mega_train.config import CheckpointConfig, LoggingConfig, RunConfig
from mega_train.telemetry.events import LogLine, StepEnd
from mega_train.telemetry.factory import open_observers
from mega_train.telemetry.timers import LEVELS, Timers

STEPS = 2000
STEP = StepEnd(
    iteration=0,
    consumed_samples=0,
    loss=2.5,
    learning_rate=3e-4,
    grad_norm=1.25,
    skipped_samples=0,
    loss_scale=1.0,
    global_batch_size=8,
    seq_length=1024,
    seconds=0.5,
)
LINE = LogLine(
    iteration=0,
    iterations=STEPS,
    consumed_samples=0,
    loss=2.5,
    learning_rate=3e-4,
    grad_norm=1.25,
    skipped=0,
    loss_scale=1.0,
    iteration_seconds=0.5,
    tokens_per_second=16384.0,
    seconds=10.0,
    global_batch_size=8,
    seq_length=1024,
    tflops=1.5,
    memory={"reserved": 1 << 30, "allocated": 1 << 29, "peak": 1 << 29, "allocated_count": 1000},
    timers=dict.fromkeys(LEVELS, 0.1),
    timers_of_ranks=dict.fromkeys(LEVELS, (0.1, 0.2)),
)


def observer_seconds(run: RunConfig) -> float:
    """Measure the CPU seconds of a step, including those of threads."""
    with open_observers(run, World(), io.StringIO()) as watch:
        started = time.process_time()
        for iteration in range(1, STEPS + 1):
            watch.on_event(replace(STEP, iteration=iteration, consumed_samples=8 * iteration))
            if iteration % 10 == 0:
                watch.on_event(replace(LINE, iteration=iteration, consumed_samples=8 * iteration))
                time.sleep(0.005)  # as steps do, lets other threads work
    return (time.process_time() - started) / STEPS


def phase(count: int = 100_000) -> float:
    """Measure the CPU seconds of timing one phase."""
    timers = Timers(torch.device("cpu"))
    started = time.process_time()
    for _ in range(count):
        with timers("optimizer"):
            pass
    return (time.process_time() - started) / count


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    durations: dict[str, list[float]] = {"the record and a log": [], "all": [], "timing a phase": []}
    with TemporaryDirectory() as place:
        for number in range(args.rounds):
            near = RunConfig(checkpoint=CheckpointConfig(save=Path(place) / f"near-{number}"))
            all_flags = LoggingConfig(
                tensorboard_dir=Path(place) / f"all-{number}",
                tensorboard_timers=True,
                tensorboard_memory=True,
                tensorboard_batch_size=True,
                tensorboard_world=True,
                prometheus_port=0,
            )
            far = RunConfig(checkpoint=CheckpointConfig(save=Path(place) / f"far-{number}"), log=all_flags)
            durations["the record and a log"].append(observer_seconds(near))
            durations["all"].append(observer_seconds(far))
            durations["timing a phase"].append(phase())
    for name, values in durations.items():
        spread = f"{1e6 * min(values):.2f} to {1e6 * max(values):.2f}"
        print(f"{name:22} {1e6 * statistics.median(values):8.2f} us  ({spread})")
    if args.json:
        machine = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        args.json.write_text(json.dumps(machine | {"seconds": durations}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
