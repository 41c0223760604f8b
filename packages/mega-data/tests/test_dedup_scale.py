"""Near-duplicate search reads the keys a bounded number of times and equals brute force at any memory."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from mega_data.cli import commands
from mega_data.dedup import pipeline
from mega_data.dedup.band_store import open_column_writer
from mega_data.dedup.components import write_roots
from mega_data.dedup.io_estimate import estimate_io
from mega_data.dedup.minhash import NO_KEY
from mega_data.dedup.pipeline import Deduplication, count_ranges, group_shards
from mega_data.dedup.presets import PRESETS, Preset
from mega_data.dedup.sorted_runs import MAX_CELLS
from mega_data.dedup.stages import BandPairs, PairFlags, SortedKeys
from mega_data.dedup.union_find import find_roots, union
from mega_data.dedup.work_files import WorkFiles
from mega_data.executors.local import run
from mega_data.jsonl_shards import find_shards
from mega_data.range_outputs import RangeOutputs
from mega_data.readers.ranges import whole_files
from mega_schema.errors import ConfigError

BANDS = Preset("words", 5, bands=3, rows=8)


def write_keys(files: WorkFiles, tables: Sequence[np.ndarray[Any, Any]]) -> None:
    for shard, table in enumerate(tables):
        with open_column_writer(files.keys(shard), files.columns) as put:
            if len(table):
                put(table)


def find_pairs(files: WorkFiles, groups: Sequence[range], memory: int) -> list[list[list[int]]]:
    """Run the stages; return the pairs of each band."""
    for group in range(files.groups):
        SortedKeys(files, tuple(groups), memory).run(group)
    for task in reversed(range(files.preset.bands * files.ranges)):
        BandPairs(files, memory).run(task)
    bands = list[list[list[int]]]()
    for band in range(files.preset.bands):
        parts = [np.fromfile(files.pairs(band, part), "<u8") for part in range(files.ranges)]
        bands.append(np.concatenate(parts).reshape(-1, 2).tolist())
    return bands


def pairs_by_dictionary(column: Sequence[int], checks: Sequence[int] | None = None) -> list[list[int]]:
    documents = defaultdict[int, list[int]](list)
    for document, key in enumerate(column):
        if key != NO_KEY:
            documents[key].append(document)
    return [
        [first, document]
        for key in sorted(documents)
        for first in documents[key][:1]
        for document in documents[key][1:]
        if checks is None or checks[first] == checks[document]
    ]


@pytest.mark.parametrize("seed", range(12))
def test_pairs_are_those_of_a_dictionary_in_the_order_of_keys(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    preset = rng.choice([BANDS, BANDS, PRESETS["exact"]])
    ranges = rng.choice([1, 2, 16])
    total = rng.choice([0, 1, 90, 700])
    values = [*(rng.randrange(1, 2**64) for _ in range(total // 2)), int(NO_KEY), 2**64 - 1]
    values += [rng.randrange(1 << 40) + (77 << 50) for _ in range(20)]  # in one cell
    columns = 2 if preset.unit == "text" else preset.bands
    table = np.array([[rng.choice(values) for _ in range(columns)] for _ in range(total)], np.uint64)
    table = table.reshape(-1, columns)
    table[rng.randrange(total + 1) :: 3, 0] = 2**63 + 12345  # one key of a third of the documents
    if columns > preset.bands:
        table[:, 1] %= 2
    cuts = sorted(rng.randrange(total + 1) for _ in range(rng.randrange(8)))
    tables = np.split(table, cuts)
    groups = group_shards([rng.choice([0, 1 << 30, 3 << 30]) for _ in tables])
    files = WorkFiles(tmp_path, preset, len(groups), ranges)
    write_keys(files, tables)
    pairs = find_pairs(files, groups, rng.choice([1, 200, 5000, 1 << 30]))
    checks = table[:, 1].tolist() if columns > preset.bands else None
    assert pairs == [pairs_by_dictionary(table[:, band].tolist(), checks) for band in range(preset.bands)]
    assert files.read_firsts() == [0, *np.cumsum([len(part) for part in tables]).tolist()]


def bytes_read() -> int:
    counters = Path("/proc/self/io")
    if not counters.exists():
        pytest.skip("no /proc to read the bytes from")
    return int(counters.read_text().split()[1])  # rchar: bytes of all read calls


@pytest.mark.parametrize("memory", [1 << 17, 1 << 19, 1 << 30])
def test_the_keys_are_read_at_most_three_times_at_any_memory(tmp_path: Path, memory: int) -> None:
    rng = np.random.default_rng(0)
    total = 60_000
    table = rng.integers(1, 2**64, (total, 3), dtype=np.uint64)
    table[rng.integers(0, total, total // 2)] = table[rng.integers(0, total, total // 2)]
    groups = group_shards([1 << 29] * 24)
    assert len(groups) == 6
    files = WorkFiles(tmp_path, BANDS, len(groups), 4)
    write_keys(files, np.split(table, np.sort(rng.integers(0, total, 23))))
    before = bytes_read()
    for group in range(files.groups):
        SortedKeys(files, groups, memory).run(group)
    for task in range(12):
        BandPairs(files, memory).run(task)
    runs = -(-total * 64 // memory) + len(groups)
    assert runs > 7 or memory > 1 << 19
    assert 2 * table.nbytes < bytes_read() - before <= 3 * table.nbytes


@pytest.mark.parametrize("seed", range(12))
def test_roots_are_those_of_union_find_at_any_memory(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    total = int(rng.integers(1, 400))
    pairs = [
        np.sort(rng.integers(0, total, (int(rng.integers(0, 60)), 2)), axis=1).astype(np.uint64)
        for _ in range(int(rng.integers(1, 6)))
    ]
    chain = np.arange(total, dtype=np.uint64)[:: int(rng.integers(1, 9))]
    pairs.append(np.stack([chain[:-1], chain[1:]], axis=1))
    parents = np.arange(total, dtype=np.uint64)
    for pair in pairs:
        union(parents, pair)
    for memory in (48 * 13, 48 * 64, 1 << 20):
        write_roots(pairs, total, tmp_path / "roots", tmp_path / "scratch", memory)
        assert np.fromfile(tmp_path / "roots", "<u8").tolist() == find_roots(parents, range(total)).tolist()
    assert not (tmp_path / "scratch").exists()


@pytest.mark.parametrize("memory", [1, 2, 1 << 20])
def test_the_flags_are_those_of_documents_in_pairs(tmp_path: Path, memory: int) -> None:
    files = WorkFiles(tmp_path, BANDS, 1, 1)
    rng = np.random.default_rng(memory)
    keys = rng.integers(1, 90, (53, 3)).astype(np.uint64)
    write_keys(files, [keys])
    wanted = {
        document for band in find_pairs(files, [range(1)], 1 << 20) for pair in band for document in pair
    }
    PairFlags(files, memory).run(0)
    bits = np.unpackbits(np.fromfile(files.pair_flags, np.uint8), bitorder="little")
    assert set(np.flatnonzero(bits).tolist()) == wanted


def write_shards(folder: Path, shards: int, seed: int = 0) -> Path:
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(500)]
    originals = [rng.choices(words, k=60) for _ in range(shards)]
    folder.mkdir()
    for shard in range(shards):
        texts = [originals[shard], rng.choice(originals), rng.choice(originals)[:50]]
        lines = "".join(json.dumps({"text": " ".join(text)}) + "\n" for text in texts)
        (folder / f"{shard:04d}.jsonl").write_text(lines)
    return folder


@pytest.mark.parametrize("name", ["megatron", "datatrove", "exact"])
def test_the_kept_lines_do_not_depend_on_memory_groups_and_ranges(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_shards(tmp_path / "in", 12)
    outputs = RangeOutputs(whole_files(find_shards([folder])), tmp_path / "a", tmp_path / "wa/parts")
    job = Deduplication(outputs, tmp_path / "wa", PRESETS[name])
    job.begin()
    run(job.stages(), job.work, workers=1)
    monkeypatch.setattr(pipeline, "GROUP_BYTES", 2000)
    monkeypatch.setattr(pipeline, "RANGE_BYTES", 3000)
    divided = replace(job, outputs=replace(outputs, output=tmp_path / "b"), work=tmp_path / "wb", memory=500)
    divided.begin()
    stages = {stage.name: stage.tasks for stage in divided.stages()}
    assert stages["sort"] > 3
    assert stages["pairs"] > 3 * PRESETS[name].bands
    run(divided.stages(), divided.work, workers=1)
    kept_lines = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    assert kept_lines == {file.name: file.read_bytes() for file in (tmp_path / "b").iterdir()}
    assert sum(len(lines.splitlines()) for lines in kept_lines.values()) < 36


def test_more_shards_than_a_process_may_open_files(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "in", 60)
    code = """
import resource, sys
import mega_data.dedup.jaccard
from mega_data.cli import commands
mega_data.dedup.jaccard.MAX_MAPPED_SHARDS = 8
resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50))
commands.main(["dedup", *sys.argv[1:]])
"""
    words = ["--input", str(folder), "--output", str(tmp_path / "out"), "--preset", "megatron"]
    process = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "of 180 documents" in process.stdout


def test_groups_and_ranges_grow_with_the_corpus_up_to_a_limit() -> None:
    assert group_shards([]) == (range(0),)
    assert group_shards([5 << 30, 1, 1 << 30, 1 << 30, 1]) == (range(1), range(1, 3), range(3, 5))
    groups = group_shards([111 << 20] * 90_000)
    assert 900 < len(groups) <= 1100
    assert [shard for group in groups for shard in group] == [*range(90_000)]
    assert count_ranges(10**9) == 1
    assert count_ranges(10 * 10**12) == 256
    assert count_ranges(10**18) == MAX_CELLS


def keep_lines(output: Path, *words: str) -> dict[str, bytes]:
    outcome = CliRunner().invoke(commands, ["dedup", "--output", str(output), *words])
    if outcome.exit_code:
        raise outcome.exception or AssertionError(outcome.output)
    return {file.name: file.read_bytes() for file in output.glob("*.jsonl*")}


@pytest.mark.parametrize(
    ("name", "keeps_keys"), [("megatron", True), ("datatrove", True), ("exact", True), ("exact", False)]
)
def test_a_dump_against_an_earlier_output_keeps_what_their_concatenation_keeps(
    tmp_path: Path, name: str, keeps_keys: bool
) -> None:
    old = write_shards(tmp_path / "old", 9)
    new = write_shards(tmp_path / "new", 12)  # of the same words: its first documents are those of `old`
    lines = [file.read_bytes() for file in sorted(new.iterdir())]
    (new / "0001.jsonl").write_bytes(lines[0] + b"\n\n" + lines[1])  # blank lines have no keys
    options = ["--preset", name]
    old_lines = keep_lines(tmp_path / "a", "--input", str(old), *options, *["--keep-keys"][: int(keeps_keys)])
    assert (tmp_path / "a/dedup-keys").is_dir() == keeps_keys
    both = tmp_path / "both"
    both.mkdir()
    for file_name, text in old_lines.items():
        (both / f"a{file_name}").write_bytes(text)
    for file in new.iterdir():
        shutil.copy(file, both / f"b{file.name}")
    wanted = keep_lines(tmp_path / "c", "--input", str(both), *options)
    if keeps_keys and name != "megatron":  # the documents themselves are not read
        for file_name in old_lines:
            (tmp_path / "a" / file_name).unlink()
    words = ["--input", str(new), *options, "--against", str(tmp_path / "a")]
    kept_lines = keep_lines(tmp_path / "b", *words, "--keep-dropped", "--keep-keys")
    assert kept_lines == {file[1:]: text for file, text in wanted.items() if file.startswith("b")}
    dropped = "".join(file.read_text() for file in (tmp_path / "b/dropped").iterdir())
    assert f"like {tmp_path}/a/0000.jsonl:" in dropped
    words[-1:] = [str(tmp_path / "a"), str(tmp_path / "b")]
    outcome = CliRunner().invoke(commands, ["dedup", "--output", str(tmp_path / "d"), *words])
    assert outcome.exit_code == 1, outcome.output  # each document duplicates one of the two outputs
    assert "of 39 documents is left" in outcome.output


def test_an_earlier_output_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "in", 3)
    old = tmp_path / "old"
    keep_lines(old, "--input", str(folder), "--keep-keys", "--preset", "megatron")
    dump = write_shards(tmp_path / "new", 4)
    words = ["--input", str(dump), "--against"]
    output, empty = tmp_path / "out", tmp_path / "empty"
    output.mkdir()
    empty.mkdir()
    inside = ["--input", str(old / "0000.jsonl"), "--against", str(old), "--preset", "megatron"]
    for options, message in (
        ([*words, str(old)], "dedup-keys: keys of another preset: found {'unit': 'characters'"),
        (inside, "--against: contains an input"),
        ([*words, str(empty)], "--against: no files"),
        ([*words, str(output)], "--against: is --output"),
    ):
        with pytest.raises(ConfigError) as refused:
            keep_lines(output, *options)
        assert message in str(refused.value)
        assert [*output.iterdir()] == []
    next(iter(old.glob("*.jsonl"))).unlink()
    with pytest.raises(ConfigError, match="needed to compare documents"):
        keep_lines(output, *words, str(old), "--preset", "megatron")


def test_earlier_keys_that_change_during_a_run_are_named(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "in", 3)
    old = tmp_path / "old"
    keep_lines(old, "--input", str(folder), "--keep-keys")
    words = ["--input", str(write_shards(tmp_path / "new", 3)), "--against", str(old)]
    flags = [*words, "--output", str(tmp_path / "out"), "--work-dir", str(tmp_path / "work")]
    assert CliRunner().invoke(commands, ["dedup", *flags, "--stage", "keys"]).exit_code == 0
    (old / "dedup-keys/0000.jsonl.keys").write_bytes(b"")
    outcome = CliRunner().invoke(commands, ["dedup", *flags])
    assert "contains a run with other inputs" in str(outcome.exception)


def bytes_of_process() -> tuple[int, int]:
    read, written = Path("/proc/self/io").read_text().split()[1:4:2]
    return int(read), int(written)


@pytest.mark.parametrize("name", ["datatrove", "exact"])
def test_the_estimate_of_bytes_and_files_is_what_a_run_reads_and_writes(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bytes_read()  # skips without /proc
    monkeypatch.setattr(pipeline, "GROUP_BYTES", 300_000)
    monkeypatch.setattr(pipeline, "RANGE_BYTES", 300_000)
    rng = np.random.default_rng(0)
    words = np.array([f"w{number}" for number in range(5000)], object)
    (tmp_path / "in").mkdir()
    for shard in range(6):
        with (tmp_path / f"in/{shard}.jsonl").open("w") as file:
            for _ in range(1000):
                seed = int(rng.integers(1000)) if rng.random() < 0.2 else int(rng.integers(1000, 1 << 40))
                chosen = words[np.random.default_rng(seed).integers(0, 5000, 30)]
                file.write(json.dumps({"text": " ".join(chosen.tolist())}) + "\n")
    inputs = whole_files(find_shards([tmp_path / "in"]))
    memory = 1 << 16
    outputs = RangeOutputs(inputs, tmp_path / "out", tmp_path / "work/parts")
    job = Deduplication(outputs, tmp_path / "work", PRESETS[name], memory=memory)
    job.begin()
    counted = list[tuple[int, int]]()
    edges = dict[str, int]()
    for stage in job.stages():
        before = bytes_of_process()
        results = run([stage], job.work, workers=1)[0]
        counted.append(tuple(np.subtract(bytes_of_process(), before).tolist()))
        if stage.name == "pairs":
            pairs = sum(result["pairs"] for result in results)
        edges[stage.name] = sum(result.get("edges", 0) for result in results)
    stages = estimate_io(
        [part.size for part in inputs],
        sum(result["documents"] for result in results),
        PRESETS[name],
        memory,
        pairs=pairs,
        dropped=sum(result["documents"] - result["kept"] for result in results),
        output_bytes=sum(result["kept_bytes"] for result in results),
        edges=[edges[name] for name in ("stars-1", "stars-2", "stars-3")],
        residual=edges["settle"],
    )
    assert [stage.name for stage in stages] == [stage.name for stage in job.stages()]
    assert [stage.tasks for stage in stages] == [stage.tasks for stage in job.stages()]
    for stage, (read, written) in zip(stages, counted, strict=True):
        # roots are read through a memory map; plans, results and the index of shards are small
        assert read == pytest.approx(stage.read_bytes, rel=0.1, abs=30_000), stage
        assert written == pytest.approx(stage.written_bytes, rel=0.1, abs=30_000), stage
    assert stages[1].files == len([*(tmp_path / "work/sorted").iterdir()])
    assert stages[2].files == len([*(tmp_path / "work/edges/0").iterdir()]) + 1
