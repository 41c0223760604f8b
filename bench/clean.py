"""Measure the steps of `mega-data clean` on one core, and datatrove's filters on a part of the documents.

    python bench/clean.py CORPUS.jsonl [--every 20] [--repeats 3] [--json RESULT.json]

Seconds are of the processor, after imports and the first document. Each step reads all documents, so nothing
is dropped before it; then one command runs all steps in the order of docs/howto/web-crawl.md, from file to
files. datatrove (`pip install datatrove ftfy spacy fasttext-predict`) is much slower, so it reads every n-th
document; its language filter downloads a model and is left out, and so is its sentence deduplication, which
keeps files of its own format.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

import orjson

from mega_data.clean.registry import step_from_flag
from mega_data.clean.sentence_dedup import span_keys, split_sentences
from mega_data.clean.step import Row
from mega_data.clean.words import word_table

STEPS = ("fix-text", "language", "c4", "gopher-quality", "gopher-repetition")
COMMAND_STEPS = (*STEPS, "spans")
DATATROVE = {
    "fix-text": ("formatters", "FTFYFormatter"),
    "c4": ("filters", "C4QualityFilter"),
    "gopher-quality": ("filters", "GopherQualityFilter"),
    "gopher-repetition": ("filters", "GopherRepetitionFilter"),
}


def measure(work: Callable[[str], object], texts: Sequence[str]) -> float:
    """Return CPU seconds for all texts."""
    work(texts[0])
    began = time.process_time()
    for text in texts:
        work(text)
    return time.process_time() - began


def own_steps() -> dict[str, Callable[[str], object]]:
    def make(flag: str) -> Callable[[str], object]:
        work = step_from_flag(flag).step.start()

        def run(text: str) -> object:
            word_table.cache_clear()  # each step pays for its words; the command shares them
            return work(Row({"text": text}, "text", 0, 1))

        return run

    return {name: make(name) for name in STEPS} | {"spans": lambda text: span_keys(split_sentences(text), 3)}


def datatrove_steps() -> dict[str, Callable[[str], object]]:
    try:
        document = import_module("datatrove.data").Document
    except ImportError:
        return {}
    steps = dict[str, Callable[[str], object]]()
    for name, (module, class_name) in DATATROVE.items():
        step = getattr(import_module(f"datatrove.pipeline.{module}"), class_name)()
        if module == "formatters":
            steps[name] = step.format
        else:
            steps[name] = lambda text, step=step: step.filter(document(text=text, id=""))
    return steps


def command_seconds(corpus: Path) -> float:
    """Return CPU seconds of one `clean` with all steps, the interpreter's start included."""
    flags = [word for name in COMMAND_STEPS for word in ("--step", name)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mega_data", "clean", "--input", str(corpus)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*command, "--output", f"{folder}/out", *flags], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--every", type=int, default=20, help="Documents of which datatrove reads one.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with arguments.corpus.open("rb") as file:
        texts = [orjson.loads(line)["text"] for line in file]
    sample = texts[:: arguments.every]
    megabytes, sample_megabytes = (sum(len(text.encode()) for text in part) / 1e6 for part in (texts, sample))
    seconds: dict[str, list[float]] = {}
    for _ in range(arguments.repeats):
        for name, work in own_steps().items():
            seconds.setdefault(name, []).append(measure(work, texts))
        seconds.setdefault("command", []).append(command_seconds(arguments.corpus))
    rates = {name: megabytes / statistics.median(values) for name, values in seconds.items()}
    rates["all steps, each on all documents"] = megabytes / sum(
        statistics.median(values) for name, values in seconds.items() if name != "command"
    )
    theirs = {name: sample_megabytes / measure(work, sample) for name, work in datatrove_steps().items()}
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg(),
        "megabytes": megabytes,
        "documents": len(texts),
        "seconds": seconds,
        "megabytes_per_cpu_second": rates,
        "datatrove_megabytes_per_cpu_second": theirs,
        "datatrove_megabytes": sample_megabytes,
    }
    for name, rate in rates.items():
        ratio = f", datatrove {theirs[name]:.2f}, {rate / theirs[name]:.0f} times" if name in theirs else ""
        sys.stdout.write(f"{name}: {rate:.1f} MB/s{ratio}\n")
    if shared := [name for name in theirs if name in rates]:
        own, datatrove = (sum(1 / part[name] for name in shared) for part in (rates, theirs))
        result["ratio_of_shared_steps"] = datatrove / own
        sys.stdout.write(f"{', '.join(shared)}: {datatrove / own:.1f} times datatrove\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
