"""Runs Megatron Core itself on CPUs, in processes of its own: it warns, forks, and keeps state by process."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.gpu.peers import OnCPU, without_gpu

ROOT = Path(__file__).parents[2]
SECONDS = 300.0  # a rank that waits for one that failed


def run(body: str, folder: Path, *, ranks: int = 1, **said: Any) -> None:
    """Run a function of these tests beside Megatron Core, a process per rank; raise what one printed.

    Args:
        body: "tests.megatron_core.module:function"; called as function(folder, **said) on every rank, which
            a group of gloo joins; what it finds out it leaves in the folder.
        said: values of JSON.
    """
    (folder / "meet").unlink(missing_ok=True)
    words = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.megatron_core.theirs",
        body,
        str(folder),
        json.dumps(said),
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "WORLD_SIZE": str(ranks),
    }
    with contextlib.ExitStack() as stack:
        logs = [
            stack.enter_context((folder / f"rank{rank}.txt").open("w+", encoding="utf-8"))
            for rank in range(ranks)
        ]
        processes = [
            subprocess.Popen(
                words, cwd=ROOT, env=environment | {"RANK": str(rank)}, stdout=log, stderr=subprocess.STDOUT
            )
            for rank, log in enumerate(logs)
        ]
        try:
            codes = [process.wait(SECONDS) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for rank, (code, log) in enumerate(zip(codes, logs, strict=True)):
            log.seek(0)
            assert code == 0, f"rank {rank} of {body}\n{log.read()[-6000:]}"


def _rank() -> None:
    body, folder, said = sys.argv[1:]
    torch.set_num_threads(1)
    without_gpu()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    module, function = body.split(":")
    with OnCPU():
        getattr(importlib.import_module(module), function)(Path(folder), **json.loads(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank()
