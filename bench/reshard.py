"""Benchmark resharding and conversion against `cp` of the same bytes and other writers.

    python bench/reshard.py [--rounds 5] [--layers 6] [--folder FOLDER] [--note WORDS] [--json FILE]

A Llama (hidden 1024; six layers: 1.24 GB of weights and moments in float32, as tp 2 x pp 2 wrote them). In
turn, each round in another order: `reshard` to tp 1 and to tp 4, `cp -r` of the checkpoint; all of it to
Megatron's files of tp 2 x pp 2 and from them; its weights to Hugging Face's format and from it, and to
Meta's, `cp` of the weights' files; and the same tensors, in memory already, by
`torch.distributed.checkpoint.save` and by safetensors' `save_file`, one file for a namespace. What is read is
in the page cache. All that is written is flushed to the disk within the time (`cp`: fsync of each file after
it), and removed before the next. Ours also reads its source, checks its checksums and takes new ones
where it writes a checkpoint. Seconds of the clock; a ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_by_torch

from mega_ckpt.checkpoint.verify import verify
from mega_ckpt.checkpoint.writer import rank_shares, saving_checkpoint, write_shares
from mega_ckpt.formats.interface import WriteOptions
from mega_ckpt.name_maps.alias import whole_slab
from mega_ckpt.operations.convert import convert
from mega_ckpt.operations.reshard import reshard
from mega_ckpt.tensors.row_stream import RowChunk, row_slabs
from mega_schema.arch import table
from mega_schema.checkpoint.reader import MODEL, MOMENTS, Checkpoint
from mega_schema.parallel_layout import Layout
from mega_schema.spec import llama

CUT = Layout(tp=2, pp=2)
# what is compared with what: a ratio above 1 says that ours is faster
PAIRS = (
    ("reshard to tp 1", "cp -r"),
    ("reshard to tp 4", "cp -r"),
    ("verify", "cp -r"),
    ("reshard to tp 1", "torch.distributed.checkpoint.save"),
    ("reshard to tp 1", "safetensors save_file"),
    ("mega to hf", "cp of the weights"),
    ("hf to mega", "cp of the weights"),
    ("mega to meta", "cp of the weights"),
    ("mega to megatron", "cp -r"),
    ("megatron to mega", "cp -r"),
    ("mega to hf", "safetensors save_file of the weights"),
)
WEIGHTS = ("mega to hf", "hf to mega", "mega to meta")  # alone are converted


def make_checkpoint(run: Path, layers: int) -> Checkpoint:
    """Write a checkpoint with random weights."""
    shape = {"hidden": 1024, "heads": 16, "kv_heads": 8, "ffn": 2816, "vocab": 16_000, "max_seq_len": 1024}
    spec, rng = llama(layers=layers, **shape), np.random.default_rng(1)
    shapes = {row.name: row.shape for row in table(spec) if row.tied_to is None}
    block = rng.standard_normal(1 << 22, np.float32)

    def read_rows(_: str, name: str) -> Iterator[RowChunk]:
        for slab in row_slabs(shapes[name], 1024):
            yield RowChunk(slab.start[0], np.resize(block, slab.shape))

    cut = rank_shares(spec, CUT, dict.fromkeys(shapes, "F32"))
    with saving_checkpoint(run, 1) as save:
        write_shares(save, dict.fromkeys((MODEL, *MOMENTS), cut), read_rows)
        return Checkpoint(save.commit(spec, layout=CUT, trainer={"iteration": 1, "consumed_samples": 0}))


def copy_files(files: list[Path], folder: Path) -> None:
    """Run `cp` and flush every copy."""
    folder.mkdir()
    subprocess.run(["cp", *map(str, files), str(folder)], check=True)
    for file in folder.iterdir():
        _flush(file)


def by_dcp(tensors: dict[str, dict[str, torch.Tensor]], folder: Path) -> None:
    """Write with torch's DCP writer, which flushes."""
    writer = FileSystemWriter(folder, thread_count=os.cpu_count() or 1, sync_files=True)
    save_by_torch(tensors, storage_writer=writer, no_dist=True)


def by_safetensors(tensors: dict[str, dict[str, torch.Tensor]], folder: Path) -> None:
    """Write with the safetensors library, and flush."""
    folder.mkdir()
    for space, values in tensors.items():
        save_file(values, folder / f"{space}.safetensors")
        _flush(folder / f"{space}.safetensors")


def _flush(file: Path) -> None:
    with file.open("rb") as written:
        os.fsync(written.fileno())


def measure(ways: dict[str, Callable[[Path], object]], folder: Path, rounds: int) -> dict[str, list[float]]:
    """Measure the seconds of each variant in every round, after a warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order = random.Random(1)
    for number in range(rounds + 1):
        for name in order.sample([*ways], len(ways)):
            os.sync()
            began = time.perf_counter()
            ways[name](folder / "new")
            if number:
                seconds[name].append(time.perf_counter() - began)
            shutil.rmtree(folder / "new", ignore_errors=True)
    return seconds


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument(
        "--folder", type=Path, help="on the disk to be measured; a temporary one if not given"
    )
    parser.add_argument("--note", default="", help="of the machine, for the result")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch.distributed")  # that there is one process
    load = [os.getloadavg()[0]]
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        run = make_checkpoint(folder / "run", args.layers)
        convert(run.folder, folder / "hf", "mega", "hf")
        theirs = WriteOptions(layout=CUT)
        convert(run.folder, folder / "megatron", "mega", "megatron", target=theirs)
        tensors = {
            space: {
                name: torch.from_numpy(run.read_raw(space, name, whole_slab(t.shape)))
                for name, t in values.items()
            }
            for space, values in run.tensors.items()
        }
        files = [run.folder / name for name in run.files]
        weights = [file for file in files if file.name.startswith(MODEL)]
        ways: dict[str, Callable[[Path], object]] = {
            "reshard to tp 1": lambda new: reshard(run, new, Layout()),
            "reshard to tp 4": lambda new: reshard(run, new, Layout(tp=4)),
            "verify": lambda _: verify(run),
            "cp -r": lambda new: copy_files(files, new),
            "torch.distributed.checkpoint.save": lambda new: by_dcp(tensors, new),
            "safetensors save_file": lambda new: by_safetensors(tensors, new),
            "mega to hf": lambda new: convert(run.folder, new, "mega", "hf"),
            "hf to mega": lambda new: convert(folder / "hf", new, "hf", "mega"),
            "mega to meta": lambda new: convert(run.folder, new, "mega", "meta"),
            "mega to megatron": lambda new: convert(run.folder, new, "mega", "megatron", target=theirs),
            "megatron to mega": lambda new: convert(folder / "megatron", new, "megatron", "mega"),
            "cp of the weights": lambda new: copy_files(weights, new),
            "safetensors save_file of the weights": lambda new: by_safetensors({MODEL: tensors[MODEL]}, new),
        }
        sizes = {"all": sum(run.files.values()), "weights": sum(file.stat().st_size for file in weights)}
        seconds = measure(ways, folder, args.rounds)
    finally:
        shutil.rmtree(folder)
    load.append(os.getloadavg()[0])
    ratios = {}
    for name, values in seconds.items():
        size = sizes["weights" if name in WEIGHTS or "weights" in name else "all"]
        middle = statistics.median(values)
        print(
            f"{name:38} {middle:6.2f} s ({min(values):.2f} to {max(values):.2f})"
            f"  {size / middle / 1e6:6.0f} MB/s"
        )
    for ours, theirs in PAIRS:
        ratios_of_round = [b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True)]
        ratios[f"{ours} over {theirs}"] = ratio = statistics.median(ratios_of_round)
        print(f"{ours} over {theirs}: {ratio:.2f} ({min(ratios_of_round):.2f} to {max(ratios_of_round):.2f})")
    if args.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
        report = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": machine + (f", {args.note}" if args.note else ""),
            "load": load,
            "bytes": sizes,
            "seconds": seconds,
            "ratios": ratios,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
