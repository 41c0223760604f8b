"""Kill a run repeatedly at random moments, and resume it each time.

    python -m tests.faults.kills [--kills 100] [--json FILE]

Every rank is killed by SIGKILL within a few hundredths of a second: while it starts, computes, copies, while
its writer writes, commits or removes an older checkpoint. Then the run finishes, and is compared bitwise with
an undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from mega_ckpt.checkpoint.verify import verify
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.checkpoint.tracker import latest_iteration
from mega_schema.errors import FormatError
from mega_train.telemetry.event_log import read_events
from tests.faults.ranks import start

EVERY = 4  # optimizer steps between checkpoints
PER_KILL = 20  # optimizer steps that a kill takes, about; so that there are enough of them
LAYOUTS: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {1: (), 2: ("parallel.pipeline_model_parallel_size=2",)}
)
SMALL = ("model.num_layers=2", "batch.micro_batch_size=4", "log.log_interval=100")


@dataclass(frozen=True)
class KillReport:
    """How it went.

    Attributes:
        kills: how often all ranks were killed.
        reached: the iteration a reader found after each.
        left: how many of them left a half-written checkpoint, or one that was being removed.
        seconds: that it took.
        wrong: files whose bytes are not those of the undisturbed run.
    """

    ranks: int
    iterations: int
    kills: int
    reached: list[int]
    left: int
    seconds: float
    wrong: list[str]


def run_with_kills(folder: Path, ranks: int, kills: int, seed: int = 5) -> KillReport:
    """A run on so many ranks that is killed so often."""
    began, rng, iterations = time.monotonic(), random.Random(seed), PER_KILL * kills
    training = (*LAYOUTS[ranks], *SMALL, f"train.train_iters={iterations}")
    undisturbed = start(
        folder / "whole", folder / "undisturbed", ranks, (*training, "checkpoint.save_interval=100000")
    )
    assert undisturbed.wait(120), undisturbed.stderr_text()
    assert set(undisturbed.codes.values()) == {0}, undisturbed.stderr_text()
    save, reached, left = folder / "save", [], 0
    settings = (*training, f"checkpoint.save_interval={EVERY}", "checkpoint.keep_last=2")
    for number in range(kills):
        running = start(folder / f"run{number}", save, ranks, settings)
        if rng.random() < 0.3:
            time.sleep(rng.uniform(0, 0.5))
        else:
            _wait_until(lambda: _latest(save) > (reached[-1] if reached else 0), 60)
            time.sleep(rng.uniform(0, 0.1))
        for pid in rng.sample(running.pids, ranks):
            os.kill(pid, signal.SIGKILL)
            time.sleep(rng.choice((0, 0.02)))
        assert running.wait(20), "a process that was killed"
        assert set(running.codes.values()) <= {-signal.SIGKILL, 3}, (running.codes, running.stderr_text())
        reached.append(_latest(save))
        left += any(save.glob(".iter_*"))
        if reached[-1]:
            verify(Checkpoint.open(save))
    starts = {event["iteration"] for event in read_events(save) if event["event"] == "train_start"}
    assert starts <= {0, *reached}, "each went on from what the one before had left"
    last = start(folder / "last", save, ranks, (*training, "checkpoint.save_interval=100"))
    try:
        assert last.wait(300), last.stderr_text()
    finally:
        last.kill()
    assert set(last.codes.values()) == {0}, last.stderr_text()
    ours, theirs = Checkpoint.open(save), Checkpoint.open(folder / "undisturbed")
    assert ours.iteration == theirs.iteration == iterations
    same = {
        name: (ours.folder / name).read_bytes() == (theirs.folder / name).read_bytes()
        for name in theirs.files
    }
    wrong = [name for name, equal in same.items() if not equal]
    return KillReport(ranks, iterations, kills, reached, left, time.monotonic() - began, wrong)


def _latest(save: Path) -> int:
    with suppress(FormatError):
        return latest_iteration(save)
    return 0


def _wait_until(true: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.002)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    reports = []
    for ranks in LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            report = run_with_kills(Path(folder), ranks, args.kills)
        reports.append(asdict(report))
        line = f"{ranks} ranks: {report.kills} kills over {report.iterations} iterations"
        line += f" in {report.seconds:.0f} s"
        half = f"{report.left} in the middle of a checkpoint"
        sys.stdout.write(f"{line}, {half}; files that differ at the end: {report.wrong or 'none'}\n")
    if args.json:
        args.json.write_text(json.dumps(reports, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
