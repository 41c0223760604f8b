"""Benchmark near-deduplication against datatrove's four stages, on one core, in one run.

    python bench/dedup.py CORPUS.jsonl[.zst] [--near 100] [--json RESULT.json]

Both read the same file of JSON lines with 5-word shingles in 14 bands of 8, and write the lines that stay.
Seconds are of the processor, all processes together, after imports. Recall and precision come from a part of
the corpus with planted near-duplicates, against the Jaccard similarity of all pairs. `--near` adds a made-up
corpus of so many megabytes in which seven documents of ten are copies. datatrove is left out, and the result
says so, where it is not installed (`pip install "datatrove[processing]" spacy`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any

from mega_data.dedup.pipeline import Deduplication
from mega_data.dedup.presets import PRESETS
from mega_data.executors.local import run
from mega_data.jsonl_shards import read_lines
from mega_data.range_outputs import RangeOutputs
from mega_data.readers.ranges import whole_files

REPEATS = 3
ALIKE = (0.7, 0.8, 0.9)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its finished children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def run_timed(work: Callable[[Path], int]) -> tuple[float, int]:
    """Return seconds and number of kept documents."""
    with tempfile.TemporaryDirectory() as folder:
        began = cpu_seconds()
        documents = work(Path(folder))
        return cpu_seconds() - began, documents


def run_mega(corpus: Path, name: str) -> Callable[[Path], int]:
    def work(folder: Path) -> int:
        outputs = RangeOutputs(whole_files([corpus]), folder / "out", folder / "work/parts")
        job = Deduplication(outputs, folder / "work", PRESETS[name])
        job.begin()
        (result,) = run(job.stages(), job.work, workers=1)[-1]
        return int(result["kept"])

    return work


def datatrove(corpus: Path) -> Callable[[Path], int] | None:
    """Run datatrove's stages as in its examples/minhash_deduplication.py, in this process."""
    try:
        from datatrove.data import DocumentsPipeline
        from datatrove.pipeline.dedup import (
            MinhashDedupBuckets,
            MinhashDedupCluster,
            MinhashDedupFilter,
            MinhashDedupSignature,
        )
        from datatrove.pipeline.dedup.minhash import MinhashConfig
        from datatrove.pipeline.readers import JsonlReader
        from datatrove.pipeline.writers import JsonlWriter
        from datatrove.utils.word_tokenizers import load_word_tokenizer

        load_word_tokenizer("eng").word_tokenize("one two")  # made once, as start-up is not what is compared
    except ImportError as error:
        print(f"datatrove: not measured: {error}", file=sys.stderr)
        return None

    def work(folder: Path) -> int:
        config = MinhashConfig()
        place = {name: str(folder / name) for name in ("sigs", "buckets", "remove", "out")}

        def read() -> DocumentsPipeline:
            return JsonlReader(str(corpus.parent), glob_pattern=corpus.name)(None, 0, 1)

        for _ in MinhashDedupSignature(place["sigs"], config=config, language="eng")(read(), 0, 1) or ():
            pass
        for band in range(config.num_buckets):
            buckets = MinhashDedupBuckets(place["sigs"], place["buckets"], config=config)
            buckets(None, band, config.num_buckets)
        MinhashDedupCluster(place["buckets"], place["remove"], config=config)(None, 0, 1)
        documents = MinhashDedupFilter(place["remove"])(read(), 0, 1)
        return sum(1 for _ in JsonlWriter(place["out"], compression=None)(documents, 0, 1))

    return work


def plant_duplicates(corpus: Path, documents: int, seed: int) -> list[str]:
    """Return the first documents, truncated to 300 words, with a modified copy after every third."""
    rng, texts = random.Random(seed), list[str]()
    for line in read_lines(corpus):
        words = json.loads(line)["text"].split()[:300]
        if len(words) < 30:
            continue
        texts.append(" ".join(words))
        if len(texts) % 3 == 1:
            for place in rng.sample(range(len(words)), rng.choice([1, 2, 4, 8, 16]) * len(words) // 300):
                words[place] = words[rng.randrange(len(words))]
            texts.append(" ".join(words))
        if len(texts) >= documents:
            break
    return texts


def make_near_corpus(path: Path, megabytes: int) -> None:
    """Write documents of random words; seven of ten are copies with up to 30 % of words replaced."""
    rng, originals, size = random.Random(5), list[list[str]](), 0
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(1, 10))) for _ in range(20_000)]
    with path.open("w") as out:
        while size < megabytes * 1_000_000:
            if originals and rng.random() < 0.7:
                text = list(rng.choice(originals))
                for _ in range(int(rng.choice((0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3)) * len(text))):
                    text[rng.randrange(len(text))] = rng.choice(words)
            else:
                text = rng.choices(words, k=int(rng.lognormvariate(5.8, 0.9)) + 10)
                originals = [*originals[-2999:], text]
            size += out.write(json.dumps({"text": " ".join(text)}) + "\n")


def near_rates(folder: Path, megabytes: int) -> dict[str, Any]:
    """Measure the CPU seconds and MB/s of each preset, once."""
    corpus = folder / "near.jsonl"
    make_near_corpus(corpus, megabytes)
    size, rates = corpus.stat().st_size / 1e6, {}
    for name in ("megatron", "datatrove"):
        took, documents = run_timed(run_mega(corpus, name))
        rates[name] = {
            "cpu_seconds": round(took, 2),
            "MB_per_cpu_second": round(size / took, 2),
            "kept": documents,
        }
    return {"corpus_MB": round(size, 2), **rates}


def quality(texts: list[str], name: str) -> dict[str, Any]:
    """Compute recall by similarity, and precision, against all pairs."""
    preset = PRESETS[name]
    if preset.unit == "words":
        units = [text.split() for text in texts]
        sets = [{tuple(u[i : i + 5]) for i in range(len(u) - 4)} for u in units]
    else:
        sets = [{text[i : i + 5] for i in range(len(text) - 5)} for text in texts]
    with tempfile.TemporaryDirectory() as work_folder:
        folder = Path(work_folder)
        corpus = folder / "texts.jsonl"
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        outputs = RangeOutputs(whole_files([corpus]), folder / "out", folder / "work/parts")
        job = Deduplication(outputs, folder / "work", preset)
        job.begin()
        run(job.stages(), job.work, workers=1)
        root = memoryview((folder / "work/roots").read_bytes()).cast("Q").tolist()
    met = dict.fromkeys(ALIKE, 0)
    all_of = dict.fromkeys(ALIKE, 0)
    true_pairs = right = 0
    for a, b in combinations(range(len(texts)), 2):
        # sizes alone bound the similarity, which spares most of the work
        small, large = sorted((len(sets[a]), len(sets[b])))
        together = root[a] == root[b]
        if small < 0.5 * large and not together:
            continue
        shared = len(sets[a] & sets[b])
        similar = shared / max(1, small + large - shared)
        true_pairs, right = true_pairs + together, right + (together and similar >= 0.5)
        for least in ALIKE:
            all_of[least] += similar >= least
            met[least] += together and similar >= least
    recall = {f"{least:g}": met[least] / max(1, all_of[least]) for least in ALIKE}
    return {
        "documents": len(texts),
        "pairs_alike": {f"{least:g}": all_of[least] for least in ALIKE},
        "recall_from_similarity": recall,
        "pairs_found": true_pairs,
        "precision_at_similarity_0.5": right / max(1, true_pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--planted", type=int, default=2000)
    parser.add_argument("--near", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        with corpus.open("wb") as out:
            out.writelines(read_lines(args.corpus))
        size = corpus.stat().st_size / 1e6
        sides: dict[str, Callable[[Path], int] | None] = {
            "mega-data, datatrove preset": run_mega(corpus, "datatrove"),
            "datatrove": datatrove(corpus),
            "mega-data, megatron preset": run_mega(corpus, "megatron"),
        }
        seconds: dict[str, list[float]] = {name: [] for name, side in sides.items() if side}
        documents = {}
        for repeat in range(REPEATS):
            for name, side in sides.items():
                if side and not (name == "datatrove" and repeat):  # a minute each: once tells enough
                    took, documents[name] = run_timed(side)
                    seconds[name].append(took)
        rates = {name: size / statistics.median(took) for name, took in seconds.items()}
        result = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "corpus_MB": round(size, 2),
            "cpu_seconds": {name: [round(s, 2) for s in took] for name, took in seconds.items()},
            "MB_per_cpu_second": {name: round(rate, 2) for name, rate in rates.items()},
            "kept": documents,
            "quality": {
                n: quality(plant_duplicates(corpus, args.planted, 7), n) for n in ("datatrove", "megatron")
            },
        }
        if args.near:
            result["near"] = near_rates(Path(folder), args.near)
        if "datatrove" in rates:
            result["ratio"] = round(rates["mega-data, datatrove preset"] / rates["datatrove"], 1)
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    shutil.rmtree(Path("logs/datatrove"), ignore_errors=True)


if __name__ == "__main__":
    main()
