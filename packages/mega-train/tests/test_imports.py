"""Modules of torch that a training process does not import, for their memory and their time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import sys
from mega_train.cli import main
try:
    main(sys.argv[1:])
except SystemExit as exit_:
    assert exit_.code == 0, exit_
print("modules:", *sorted(sys.modules))
"""


RECOMPUTE = ("--recompute-granularity", "selective", "--recompute-modules", "layernorm", "mlp_act")


@pytest.mark.parametrize("options", [(), ("--save", "run", "--bf16", *RECOMPUTE)])
def test_a_run_imports_neither_dynamo_nor_dtensor(
    corpus: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    model = ["--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "16"]
    steps = ["--train-iters", "1", "--lr", "0.02", "--eval-iters", "1", "--global-batch-size", "1"]
    command = [sys.executable, "-c", RUN, "gpt", "--data-path", str(corpus), *model, *steps, *options]
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    modules = process.stdout.splitlines()[-1].split()
    assert "torch" in modules
    assert not {"torch._dynamo", "torch.distributed.tensor", "sympy", "triton"} & set(modules)
