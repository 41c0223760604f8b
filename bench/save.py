"""Benchmark checkpoint saves: seconds that training is blocked, and slower steps during the save.

    python bench/save.py [--rounds 3] [--folder FOLDER] [--json FILE]

One process on a CPU trains a GPT of 6 layers, hidden 768 (46 M parameters: 0.55 GB of weights and moments)
and saves the same tensors in turn by: ours in the background (the default), ours in place (--no-async-save),
`torch.save`, and `torch.distributed.checkpoint.async_save` with its thread. All of them are flushed to the
disk; ours also checksums and commits. `lost` is all that a save costs: standing still, and what the steps
beside it take longer than the steps before. Seconds of the clock, medians over the rounds; the first round,
in which memory is touched for the first time, is beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from mega_model.distributed.mesh import Mesh
from mega_schema.app.config import load_config as configured
from mega_schema.dataset.indexed_dataset import IndexedWriter
from mega_train.checkpointing.async_save import CheckpointSaver
from mega_train.config import RunConfig
from mega_train.data.datasets import Datasets
from mega_train.engine.train import tune_malloc
from mega_train.engine.trainer import Trainer
from mega_train.resolve import resolve

SETTINGS = (
    "model.num_layers=6",
    "model.hidden_size=768",
    "model.num_attention_heads=12",
    "model.vocab_size=4096",
    "batch.seq_length=256",
    "batch.global_batch_size=1",
    "train.train_iters=1000",
    "train.device=cpu",
    "optimizer.lr=1e-4",
    "evaluation.eval_iters=0",
)
IDLE = 3  # steps between two saves

Wait = Callable[[], bool]  # whether what was begun is done


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one save, in seconds.

    Attributes:
        stall: until the next step could begin.
        beside: median of the steps while it was written; None if there was none.
        idle: of the steps before it.
        written: until it was on the disk.
        lost: the stall, and what those steps took longer.
    """

    stall: float
    beside: float | None
    idle: float
    written: float
    lost: float


def trainer(folder: Path) -> Trainer:
    """Build a run over random tokens."""
    prefix, rng = folder / "corpus", np.random.default_rng(1)
    with IndexedWriter(prefix, "uint16") as out:
        for _ in range(200):
            out.add(rng.integers(0, 4096, 2000))
            out.end_document()
    sets = [*SETTINGS, f'data.data_path="{prefix}"', f'checkpoint.save="{folder / "run"}"']
    run = configured(RunConfig, None, {}, sets)
    corpora = Datasets.open(run.data)
    plan = resolve(run, "gpt", 1, corpus=None, loaded_spec=None, cuda=False)
    return Trainer(plan, Mesh(), corpora)


def tensors(run: Trainer) -> dict[str, Tensor]:
    """Return the content of a checkpoint by name."""
    main = zip(run.sharding.shard_ranges, run.sharding.main_params, strict=True)
    values_by_name = {f"model.{stretch.row.name}": values for stretch, values in main}
    return values_by_name | {
        f"{space}.{stretch.row.name}": values for space, stretch, values in run.optimizer.state_shards()
    }


def begin_mega_save(run: Trainer) -> Wait:
    """Start a Mega checkpoint."""
    run.save()

    def is_done() -> bool:
        run.saver.poll()
        return not run.saver.is_saving

    return is_done


def torch_save(run: Trainer, folder: Path) -> Wait:
    """Write with torch.save, and flush."""
    with (folder / f"torch-{run.state.iteration}.pt").open("wb") as file:
        torch.save(tensors(run), file)
        file.flush()
        os.fsync(file.fileno())
    return lambda: True


def dcp_async(run: Trainer, folder: Path) -> Wait:
    """Start torch's asynchronous checkpoint; its writer flushes."""
    where = folder / f"dcp-{run.state.iteration}"
    pending: Any = dcp.async_save(tensors(run), checkpoint_id=where, no_dist=True)
    assert isinstance(pending, Future)

    def is_done() -> bool:
        if pending.done():
            pending.result()
        return pending.done()

    return is_done


def cost(run: Trainer, begin: Callable[[], Wait]) -> Cost:
    """Measure one save between steps."""

    def step() -> float:
        began = time.perf_counter()
        run.step(run.state.lr)
        return time.perf_counter() - began

    idle = statistics.median(step() for _ in range(IDLE))
    began = time.perf_counter()
    is_done = begin()
    stall = time.perf_counter() - began
    beside = []
    while not is_done():
        beside.append(step())
    written = time.perf_counter() - began
    lost = stall + sum(seconds - idle for seconds in beside)
    return Cost(stall, statistics.median(beside) if beside else None, idle, written, lost)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="on the disk to be measured; a temporary one if not given"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tune_malloc()
    load = [os.getloadavg()[0]]  # of everything on the machine, before and after
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")  # that there is one process
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        run = trainer(folder)
        checkpoint_options = run.config.run.checkpoint
        background, in_place = (
            CheckpointSaver(replace(checkpoint_options, async_save=on), run.mesh) for on in (True, False)
        )
        size = sum(values.nbytes for values in tensors(run).values())
        print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {size / 1e9:.2f} GB")

        def with_saves(saves: CheckpointSaver) -> Wait:
            run.saver = saves
            return begin_mega_save(run)

        ways: dict[str, Callable[[], Wait]] = {
            "ours, background": lambda: with_saves(background),
            "ours, in place": lambda: with_saves(in_place),
            "torch.save": lambda: torch_save(run, folder),
            "dcp.async_save": lambda: dcp_async(run, folder),
        }
        costs: dict[str, list[Cost]] = {name: [] for name in ways}
        for _ in range(1 + args.rounds):
            for name, begin in ways.items():
                costs[name].append(cost(run, begin))
    finally:
        shutil.rmtree(folder)
    load.append(os.getloadavg()[0])
    results = [summary(name, costs_of_way) for name, costs_of_way in costs.items()]
    if args.json:
        machine = {"machine": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
        report = machine | {"load": load, "gigabytes": size / 1e9, "rounds": args.rounds, "ways": results}
        args.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


def summary(name: str, costs: list[Cost]) -> dict[str, object]:
    """Print medians over the rounds after the first, and the stall of the first."""
    first, *rest = costs
    stall, written, lost = (
        statistics.median(getattr(cost, key) for cost in rest) for key in ("stall", "written", "lost")
    )
    slower = [cost.beside / cost.idle - 1 for cost in rest if cost.beside is not None]
    slowdown = statistics.median(slower) if slower else None
    beside = f"steps {slowdown:+4.0%}" if slowdown is not None else "          "
    still = f"stall {stall:6.3f} s (first {first.stall:6.3f})"
    print(f"{name:17} {still}  {beside}  lost {lost:6.3f} s  done {written:6.2f} s")
    rows = [{key: getattr(cost, key) for key in Cost.__slots__} for cost in costs]
    return {
        "name": name,
        "stall": stall,
        "slowdown": slowdown,
        "lost": lost,
        "written": written,
        "rounds": rows,
    }


if __name__ == "__main__":
    main()
