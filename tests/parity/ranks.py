"""Run test bodies on several processes that rendezvous by a file.

One start per number of processes runs all cases. Each test then looks up the outcome of its case.
"""

from __future__ import annotations

import pickle
import select
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import pytest
import torch

from mega_model.distributed.mesh import World
from tests import fork_server

Body = Callable[[World, str, Path], None]  # the world, where to meet, a folder that all ranks share


def on_ranks(ranks: int, cases: Mapping[str, Body], folder: Path) -> dict[str, str]:
    """Run every case on `ranks` processes.

    Returns:
        for each case, the traceback of the first rank that failed, or an empty text. A rank that fails ends
        all of them, since they may be waiting for it: the cases after it are not run, and say so.
    """
    (folder / "cases.pickle").write_bytes(pickle.dumps(dict(cases)))
    # as under torchrun, ranks do not agree on the order of a set
    words = [[str(rank), str(ranks), str(folder)] for rank in range(ranks)]
    running = {
        fork_server.start("tests.parity.ranks:be_rank", arguments, hash_seed=int(arguments[0]) % 2)
        for arguments in words
    }
    try:
        while running:
            ended = select.select(running, [], [])[0][0]
            running.remove(ended)
            if ended.wait() != 0:
                break
    finally:
        for rank in running:
            rank.kill()
        for rank in running:
            rank.wait()
    errors: dict[str, str] = {}
    failed = ""
    for name in cases:
        files = [folder / f"{name}-{rank}.txt" for rank in range(ranks)]
        texts = [file.read_text("utf-8") if file.exists() else None for file in files]
        errors[name] = next((text for text in texts if text), "a rank ended without a word" * (None in texts))
        if failed:
            errors[name] = f"not run: {failed} failed"
        elif errors[name]:
            failed = name
    return errors


class Outcomes:
    """How cases went, by number of ranks; the first question about a number of ranks runs all its cases.

    Args (of the class): `names` are the cases that the tests of this run ask for; the others are left out.
    """

    def __init__(
        self,
        cases: Mapping[int, Mapping[str, Body]],
        folders: pytest.TempPathFactory,
        names: Collection[str],
    ) -> None:
        self.cases = {
            ranks: {name: body for name, body in bodies.items() if name in names}
            for ranks, bodies in cases.items()
        }
        self.folders = folders
        self.known: dict[int, dict[str, str]] = {}

    def outcome(self, ranks: int, case: str) -> str:
        if ranks not in self.known:
            folder = self.folders.mktemp(f"ranks{ranks}")
            self.known[ranks] = on_ranks(ranks, self.cases[ranks], folder)
        return self.known[ranks][case]


def be_rank() -> None:
    """Run the rank that the arguments name, for `on_ranks`."""
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    cases: dict[str, Body] = pickle.loads((folder / "cases.pickle").read_bytes())
    for name, body in cases.items():
        shared = folder / name
        shared.mkdir(exist_ok=True)
        try:
            body(World(ranks, rank, rank), f"file://{folder / name}.meet", shared)
            text = ""
        except Exception:
            text = f"rank {rank}\n{traceback.format_exc()}"
        (folder / f"{name}-{rank}.txt").write_text(text, "utf-8")
        if text:
            sys.exit(1)
