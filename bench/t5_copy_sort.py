"""Fine-tune a small T5 on copying and sorting, over two ranks of tensor and two of pipeline parallelism.

    python -m bench.t5_copy_sort --folder FOLDER [--json RESULT.json]

An input is a permutation of five of twelve symbols. Its target is the input, a bar, and the symbols in order.
So the encoder must tell the places of its tokens, the decoder must find a place and a symbol by
cross-attention, and a step of sorting depends on the symbols before it. Four processes of
`torchrun -m mega_train finetune --task TEXT2TEXT` train new weights: the encoder is on the first stage, the
decoder on the second. Printed is the share of held-out permutations whose greedy output is right in every
token, after each epoch, and the CPU time of all processes. Exits with 1 if the best share is below the goal.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mega_train.telemetry.event_log import read_events

SYMBOLS = "abcdefghijkl"
LENGTH = 5  # symbols of an input
GOAL = 0.99
MODEL = (
    "--num-layers 2 --decoder-num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 "
    "--tokenizer-type BertWordPieceCase --vocab-file vocab.txt"
)
PARALLEL = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-split-rank 1"
)
TRAINING = (
    "--task TEXT2TEXT --train-data train.jsonl --valid-data valid.jsonl --seq-length 8 "
    "--decoder-seq-length 16 --max-position-embeddings 16 --micro-batch-size 64 --global-batch-size 128 "
    "--lr 4e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 20 --clip-grad 1 "
    "--log-interval 50 --save run"
)


def write_data(folder: Path, train: int, valid: int, seed: int) -> None:
    """Write the vocabulary, and permutations of which none is in both files."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "|", *SYMBOLS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", "utf-8")
    generator = random.Random(seed)
    inputs = dict[str, None]()
    while len(inputs) < train + valid:
        inputs[" ".join(generator.sample(SYMBOLS, LENGTH))] = None
    texts = list(inputs)
    for name, part in (("train", texts[valid:]), ("valid", texts[:valid])):
        rows = ({"input": text, "target": f"{text} | {' '.join(sorted(text.split()))}"} for text in part)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def train(folder: Path, epochs: int, processes: int, options: Sequence[str]) -> dict[str, Any]:
    """Train, and return the scores of the epochs and the time."""
    begin, begin_cpu = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    words = f"torch.distributed.run --nproc-per-node {processes} --master-port 29717 -m mega_train finetune"
    words += f" {MODEL} {TRAINING} --epochs {epochs} {PARALLEL if processes == 4 else ''}"
    subprocess.run(
        [sys.executable, "-m", *words.split(), *options],
        check=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
    events = read_events(folder / "run")
    scores = [event["metrics"]["exact_match"] for event in events if event["event"] == "validation"]
    return {
        "parameters": next(event["parameters"] for event in events if event["event"] == "train_start"),
        "layout": next(event["layout"] for event in events if event["event"] == "train_start"),
        "iterations": max(event["iteration"] for event in events if event["event"] == "validation"),
        "exact_match_by_epoch": [round(score, 4) for score in scores],
        "best_exact_match": round(max(scores), 4),
        "cpu_seconds_of_all_processes": round(
            cpu.ru_utime + cpu.ru_stime - begin_cpu.ru_utime - begin_cpu.ru_stime, 1
        ),
        "wall_seconds": round(time.perf_counter() - begin, 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--train", type=int, default=16_000, help="permutations to train on")
    parser.add_argument("--valid", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--goal", type=float, default=GOAL)
    parser.add_argument("--processes", type=int, choices=(1, 4), default=4, help="1: without parallelism")
    parser.add_argument("--json", type=Path)
    arguments, options = parser.parse_known_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    write_data(arguments.folder, arguments.train, arguments.valid, seed=1234)
    load = os.getloadavg()[0]
    result = train(arguments.folder, arguments.epochs, arguments.processes, options)
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load_before": round(load, 1),
        "torch": version("torch"),
        "train_permutations": arguments.train,
        "held_out_permutations": arguments.valid,
        **result,
    }
    print(json.dumps(report, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    return 0 if result["best_exact_match"] >= arguments.goal else 1


if __name__ == "__main__":
    sys.exit(main())
