"""Every command needs memory for a few row chunks, for any tensor size. Mapped pages count too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LARGEST = 200 << 20  # bytes of the largest tensor
ALLOWED = 100 << 20  # bytes beside what the program is: less than half of that tensor

# it makes a checkpoint whose embedding is LARGEST, forgets what that took, and runs a command
CHILD = """
import resource, sys
from pathlib import Path
import numpy as np
from mega_ckpt.tensors.row_stream import RowChunk, row_slabs
from mega_ckpt.cli import cli
from mega_ckpt.checkpoint.writer import rank_shares, saving_checkpoint, write_shares
from mega_schema.arch import table
from mega_schema.parallel_layout import Layout
from mega_schema.spec import llama

def make(run, largest):
    spec = llama(layers=1, hidden=1024, heads=8, vocab=largest // 4096, max_seq_len=8, ffn=64, tied=True)
    shapes = {row.name: row.shape for row in table(spec) if row.tied_to is None}
    def read_rows(space, name):
        for slab in row_slabs(shapes[name], 1000):
            values = np.full(slab.shape, slab.start[0] % 251, np.float32)
            yield RowChunk(slab.start[0], values)
    with saving_checkpoint(run, 1) as save:
        shares = rank_shares(spec, Layout(tp=2), dict.fromkeys(shapes, "F32"))
        write_shares(save, {"model": shares}, read_rows)
        save.commit(spec, layout=Layout(tp=2), trainer={"iteration": 1, "consumed_samples": 0})

if sys.argv[1] == "make":
    make(Path(sys.argv[2]), int(sys.argv[3]))
else:
    import mega_ckpt.operations.average, mega_ckpt.operations.convert, mega_ckpt.operations.diff
    import mega_ckpt.operations.reshard, mega_ckpt.operations.stats
    import mega_ckpt.formats.huggingface.format, mega_ckpt.formats.mega.format
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cli(sys.argv[1:], standalone_mode=False)
    print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


def _child(*words: object) -> str:
    command = [sys.executable, "-c", CHILD, *map(str, words)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    _child("make", folder / "run", LARGEST)
    return folder


@pytest.mark.parametrize(
    "words",
    [
        "reshard --load {0}/run --save {1}/cut --tp 4",
        "reshard --load {0}/run --save {1}/narrow --dtype bf16",
        "verify {0}/run",
        "inspect {0}/run --stats",
        "average {0}/run {0}/run --save {1}/mean",
        "diff {0}/run {0}/run",
        "convert --from mega --to hf --no-check-logits --load {0}/run --save {1}/hf",
    ],
    ids=lambda words: words.split()[0],
)
def test_memory_is_that_of_some_bands(large: Path, tmp_path: Path, words: str) -> None:
    peak = int(_child(*words.format(large, tmp_path).split()).splitlines()[-1])
    assert peak < ALLOWED, f"{peak / 2**20:.0f} MiB"
    if words.startswith("convert"):  # and back
        back = f"convert --from hf --to mega --load {tmp_path}/hf --save {tmp_path}/back"
        for more in (back, f"inspect {tmp_path}/hf --stats"):
            peak = int(_child(*more.split()).splitlines()[-1])
            assert peak < ALLOWED, f"{peak / 2**20:.0f} MiB"
        assert "the same" in _child("diff", large / "run", tmp_path / "back")
