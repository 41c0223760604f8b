"""Train a tokenizer on text by the `tokenizers` library, and on counts of words, in one run.

    python bench/train_tokenizer.py CORPUS.jsonl [--rounds 2] [--vocab-size 32000] [--json RESULT]

Both are the command `mega-data train-tokenizer`, with one worker; they take turns. CPU seconds of a process,
the start of the program included. The files of both are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

VARIANTS = {"text": [], "counts": ["--executor", "local"]}
KINDS = {"bpe": ["--type", "bpe"], "wordpiece": ["--type", "wordpiece", "--lowercase"]}


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    environment = {**os.environ, "RAYON_NUM_THREADS": "1"}
    seconds: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for kind, type_options in KINDS.items():
            seconds[kind] = {variant: [] for variant in VARIANTS}
            for _ in range(arguments.rounds):
                for variant, options in VARIANTS.items():
                    words = ["train-tokenizer", "--input", str(arguments.corpus), *type_options, *options]
                    words += ["--vocab-size", str(arguments.vocab_size)]
                    command = [sys.executable, "-m", "mega_data", *words]
                    before = cpu_seconds()
                    folder = f"{temporary}/{kind}-{variant}"
                    subprocess.run([*command, "--output", folder], check=True, env=environment)
                    seconds[kind][variant].append(round(cpu_seconds() - before, 2))
            folders = [Path(temporary, f"{kind}-{variant}") for variant in VARIANTS]
            contents = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders]
            assert contents[0] == contents[1], "the two tokenizers differ"
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "command": f"train-tokenizer --vocab-size {arguments.vocab_size}",
        "MB": round(arguments.corpus.stat().st_size / 1e6, 1),
        "cpu_seconds": seconds,
        "files": "equal",
    }
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
