"""Run bodies on several processes that meet at a file.

Starting a process costs seconds on two cores, so one start per number of processes runs every case, and each
case is then a test of its own that asks how it went.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.multiprocessing

from mega_model.mesh import World

Body = Callable[[World, str, Path], None]  # the world, where to meet, a folder that all ranks share


def on_ranks(ranks: int, cases: Mapping[str, Body], folder: Path) -> dict[str, str]:
    """Run every case on `ranks` processes.

    Returns:
        for each case, the traceback of the first rank that failed, or an empty text. A case that fails on one
        rank only leaves the others waiting in a collective, so the cases after it fail too.
    """
    torch.multiprocessing.start_processes(
        _rank, (ranks, dict(cases), folder), nprocs=ranks, start_method="spawn"
    )
    found = {}
    for name in cases:
        texts = [(folder / f"{name}-{rank}.txt").read_text("utf-8") for rank in range(ranks)]
        found[name] = next((text for text in texts if text), "")
    return found


class Outcomes:
    """How cases went, by number of ranks; the first question about a number of ranks runs all its cases."""

    def __init__(self, cases: Mapping[int, Mapping[str, Body]], folders: pytest.TempPathFactory) -> None:
        self.cases, self.folders = cases, folders
        self.known: dict[int, dict[str, str]] = {}

    def of(self, ranks: int, case: str) -> str:
        if ranks not in self.known:
            folder = self.folders.mktemp(f"ranks{ranks}")
            self.known[ranks] = on_ranks(ranks, self.cases[ranks], folder)
        return self.known[ranks][case]


def _rank(rank: int, ranks: int, cases: Mapping[str, Body], folder: Path) -> None:
    torch.set_num_threads(1)
    for name, body in cases.items():
        shared = folder / name
        shared.mkdir(exist_ok=True)
        try:
            body(World(ranks, rank, rank), f"file://{folder / name}.meet", shared)
            text = ""
        except Exception:
            text = f"rank {rank}\n{traceback.format_exc()}"
        (folder / f"{name}-{rank}.txt").write_text(text, "utf-8")
