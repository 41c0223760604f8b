"""Benchmark `mega-data dedup --preset substrings` on a corpus, stage by stage, on one core.

    python bench/dedup_substrings.py CORPUS.jsonl[.zst] ... [--generated MEGABYTES] [--json RESULT.json]

`--generated` adds a corpus of bench/dedup_scale.py, in which three of ten documents copy an earlier one and
replace up to 5 % of its phrases. Seconds are of the processor, the fastest of REPEATS runs of all stages in
this process, after imports. Megabytes are of JSON lines, not compressed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dedup_scale import SHARD_BYTES, write_shard

from mega_data.dedup.corpus_shards import CorpusShards
from mega_data.dedup.span_tokens import Unit
from mega_data.dedup.substrings import SubstringDedup
from mega_data.jsonl_shards import file_bytes, read_lines
from mega_data.range_outputs import RangeOutputs
from mega_data.readers.ranges import whole_files
from mega_data.task_stages import run_task

REPEATS = 2
MEMORY = 256 << 20  # bytes
SPAN = 50  # tokens


def run_stages(inputs: tuple[Path, ...], unit: Unit, folder: Path) -> dict[str, Any]:
    """Run a deduplication; return its CPU seconds by stage, its results, and the bytes of its work files."""
    work = folder / "work"
    outputs = RangeOutputs(whole_files(inputs), folder / "out", work / "parts")
    job = SubstringDedup(CorpusShards((), outputs, "text", ""), work, unit, SPAN, None, MEMORY)
    job.begin()
    seconds = dict[str, float]()
    sizes = dict[str, int]()
    results = []
    for stage in job.stages():
        began = time.process_time()
        results = [run_task(stage, task, work) for task in range(stage.tasks)]
        seconds[stage.name] = time.process_time() - began
        sizes[stage.name] = sum(map(file_bytes, (work / stage.name).glob("*")))
    counts = {name: sum(result[name] for result in results) for name in results[0]}
    return {"seconds": seconds, "work_bytes": sizes, **counts}


def measure(inputs: tuple[Path, ...], unit: Unit) -> dict[str, Any]:
    """Return the fastest of some runs over a corpus, with its speed."""
    runs = []
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(run_stages(inputs, unit, Path(folder)))
    fastest = min(runs, key=lambda run: sum(run["seconds"].values()))
    total = sum(fastest["seconds"].values())
    totals = [round(sum(run["seconds"].values()), 2) for run in runs]
    return {"unit": unit, **fastest, "all_seconds": totals, "mb_per_second": fastest["bytes"] / 1e6 / total}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpora", nargs="+", type=Path)
    parser.add_argument("--generated", type=int, default=0, metavar="MEGABYTES")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        corpora: dict[str, tuple[Path, ...]] = {path.name: (path,) for path in options.corpora}
        if options.generated:
            shards = max(1, round(options.generated * 1e6 / SHARD_BYTES))
            folder = Path(temporary)
            for shard in range(shards):
                write_shard(folder, shards, shard)
            corpora[f"{shards} generated shards"] = tuple(sorted(folder.iterdir()))
        for name, inputs in corpora.items():
            for unit in ("words", "characters"):
                row = {"corpus": name, **measure(inputs, unit)}
                rows.append(row)
                remaining = row["kept_bytes"] / row["bytes"]
                stages = ", ".join(f"{stage} {value:.2f}" for stage, value in row["seconds"].items())
                print(
                    f"{name}, {unit}: {row['bytes'] / 1e6:.1f} MB, {row['mb_per_second']:.1f} MB/s; "
                    f"CPU seconds: {stages}; removed {row['spans']:,} spans, kept {remaining:.1%}"
                )
        began = time.process_time()
        size = sum(len(line) for path in options.corpora for line in read_lines(path))
        print(f"reading the lines alone: {size / 1e6 / (time.process_time() - began):.0f} MB/s")
    if options.json:
        machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        date = datetime.now(UTC).date().isoformat()
        result = {"date": date, "machine": machine, "span": SPAN, "memory": MEMORY, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
