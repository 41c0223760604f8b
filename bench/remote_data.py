"""Benchmark training on a dataset behind a slow server against the same dataset on this machine.

    python bench/remote_data.py [--iterations 30] [--latency-ms 40] [--rounds 2] [--json RESULT.json]

A web server in a process of its own sends byte ranges of the dataset, each after a wait, as an object store
does. `mega-train gpt` (2 layers, hidden size 128, 8 samples of 512 tokens a step) reads it at its URL with
an empty cache ("cold") and with the cache that this left ("kept"), and from the disk ("local"), in turns.
The dataset has 100 million random tokens, so that every sample is in blocks that no other sample needs.
Printed are the median seconds of an iteration without the first, the sum of the seconds that the steps waited
for data, and how many losses are those of the local run.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from mega_schema.dataset.indexed_dataset import IndexedWriter
from mega_train.telemetry.event_log import read_events

DOCUMENTS, TOKENS = 1000, 100_000  # of each
MODEL = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 512 --micro-batch-size 4 "
    "--global-batch-size 8 --vocab-size 1000 --lr 1e-3 --eval-iters 0 --log-interval 1"
)


def serve(folder: Path, latency: float) -> None:
    """Serve byte ranges of a folder's files for ever, each after `latency` seconds; print the port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(sends_body=False)

        def do_GET(self) -> None:
            self.answer(sends_body=True)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

        def answer(self, *, sends_body: bool) -> None:
            time.sleep(latency)
            path = folder / self.path.lstrip("/")
            exists = path.is_file()
            size = path.stat().st_size if exists else 0
            match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            start, end = (int(match[1]), min(int(match[2]) + 1, size)) if match else (0, size)
            self.send_response((206 if match else 200) if exists else 404)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(end - start))
            if match:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
            self.end_headers()
            if sends_body and exists:
                with path.open("rb") as file:
                    file.seek(start)
                    self.wfile.write(file.read(end - start))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


def write_dataset(prefix: Path) -> None:
    """Write a dataset of random tokens."""
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16) as out:
        for _ in range(DOCUMENTS):
            out.add(rng.integers(0, 1000, TOKENS, dtype=np.uint16))
            out.end_document()


def train(data: str, folder: Path, iterations: int) -> dict[str, Any]:
    """Train from a dataset with the cache of remote datasets in `folder`, and return its times and losses."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    words = f"gpt {MODEL} --train-iters {iterations} --data-path {data} --save {folder / 'run'} "
    words += f"--object-storage-cache-path {folder / 'cache'} --data-cache-path {folder / 'order'}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", "mega_train", *words.split()],
        check=True,
        stdout=subprocess.DEVNULL,
        env=environment,
    )
    steps = [event for event in read_events(folder / "run") if event["event"] == "train_log"]
    seconds = [event["iteration_seconds"] for event in steps[1:]]
    waits = [event["timers"]["batch-generator"] for event in steps]
    return {
        "iteration_seconds": round(statistics.median(seconds), 4),
        "first_iteration_seconds": round(steps[0]["iteration_seconds"], 4),
        "seconds_of_all_waits": round(sum(waits[1:]), 4),
        "losses": [event["loss"] for event in steps],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--latency-ms", type=float, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve, options.latency_ms / 1000)
        return
    report: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load_before": os.getloadavg()[0],
        "torch": version("torch"),
        "latency_ms": options.latency_ms,
        "iterations": options.iterations,
        "rounds": [],
    }
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        (root / "data").mkdir()
        write_dataset(root / "data" / "corpus")
        words = [
            sys.executable,
            __file__,
            "--serve",
            str(root / "data"),
            "--latency-ms",
            str(options.latency_ms),
        ]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{server.stdout.readline().strip()}/corpus"
            for _ in range(options.rounds):
                shutil.rmtree(root / "cache", ignore_errors=True)
                ways = {"local": str(root / "data" / "corpus"), "cold": url, "kept": url}
                results = {way: train(data, root, options.iterations) for way, data in ways.items()}
                losses = results["local"]["losses"]
                row = {
                    way: {
                        **result,
                        "losses": f"{sum(map(operator.eq, losses, result['losses']))} equal",
                    }
                    for way, result in results.items()
                }
                report["rounds"].append(row)
                print(json.dumps(row, indent=1), flush=True)
            server.kill()
    for way in ("cold", "kept"):
        report[f"{way}_over_local"] = round(
            min(row[way]["iteration_seconds"] for row in report["rounds"])
            / min(row["local"]["iteration_seconds"] for row in report["rounds"]),
            3,
        )
    print({key: value for key, value in report.items() if key != "rounds"})
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
