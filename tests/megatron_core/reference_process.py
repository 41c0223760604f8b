"""Runs Megatron Core itself on CPUs, in processes of its own."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.gpu.peers import OnCPU, without_gpu
from tests.processes import on_ranks

IMPORTS = (
    "bench.gpu.peers",
    "torch._dynamo",
    "megatron.core.dist_checkpointing",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
)


def run(body: str, folder: Path, *, ranks: int = 1, **arguments: Any) -> None:
    """Run a function of these tests beside Megatron Core, a process per rank; raise what a lost one said.

    Args:
        body: "tests.megatron_core.module:function"; called as function(folder, **said) on every rank, which
            a group of gloo joins; what it finds out it leaves in the folder.
        said: values of JSON.
    """
    (folder / "meet").unlink(missing_ok=True)
    words = [body, str(folder), json.dumps(arguments)]
    on_ranks("tests.megatron_core.reference_process", words, ranks, folder, IMPORTS)


def _rank() -> None:
    body, folder, arguments = sys.argv[1:]
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
        getattr(importlib.import_module(module), function)(Path(folder), **json.loads(arguments))
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank()
