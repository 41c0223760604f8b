"""Near-duplicates equal those of brute force, for any workers and order of the inputs."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from mega_data.cli import commands
from mega_data.dedup.band_store import count_documents, open_column_writer, read_column
from mega_data.dedup.kernels.reference import HASH_BITS
from mega_data.dedup.minhash import EMPTY, NO_KEY, band_keys, minhash_signatures
from mega_data.dedup.pipeline import Deduplication
from mega_data.dedup.presets import PRESETS, Preset
from mega_data.dedup.shingles import Shingles
from mega_data.dedup.union_find import MAX_COMPARED, find_root, union, union_similar
from mega_data.executors.local import run
from mega_data.jsonl_shards import find_shards, read_lines
from mega_data.range_outputs import RangeOutputs
from mega_data.readers.ranges import whole_files
from mega_data.task_stages import TaskStage
from mega_schema.errors import ConfigError, FormatError, MegaError


def words(rng: random.Random, count: int) -> list[str]:
    return ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(count)]


def plant_duplicates(seed: int, originals: int = 60, copies: int = 2) -> list[str]:
    """Documents, and copies of them with a few to many words exchanged, in any order."""
    rng, texts = random.Random(seed), list[str]()
    for _ in range(originals):
        text = words(rng, rng.randint(40, 200))
        texts.append(" ".join(text))
        for _ in range(copies):
            copy, changes = list(text), rng.choice([0, 1, 2, 20])
            for place in rng.sample(range(len(copy)), changes):
                copy[place] = "".join(rng.choices("klmnop", k=5))
            texts.append(" ".join(copy))
    rng.shuffle(texts)
    return texts


def write(folder: Path, texts: list[str], files: int) -> Path:
    folder.mkdir(parents=True)
    size = -(-len(texts) // files)
    for number in range(files):
        part = texts[number * size : (number + 1) * size]
        (folder / f"{number:02d}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in part))
    return folder


def kept_texts(output: Path) -> list[str]:
    return [
        json.loads(line)["text"]
        for file in sorted(output.glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]


def deduplicate(inputs: list[Path], output: Path, preset: Preset, workers: int = 1) -> list[str]:
    outputs = RangeOutputs(whole_files(find_shards(inputs)), output, output / ".work/parts")
    job = Deduplication(outputs, output / ".work", preset, memory=1 << 14)
    job.begin()
    run(job.stages(), job.work, workers=workers)
    return kept_texts(output)


def jaccard(a: set[object], b: set[object]) -> float:
    return len(a & b) / max(1, len(a | b))


def characters(text: str) -> set[object]:
    return {text[i : i + 5] for i in range(len(text) - 5)}


def word_shingles(text: str) -> set[object]:
    split = text.split()
    return {tuple(split[i : i + 5]) for i in range(len(split) - 4)}


def sets(preset: Preset, texts: list[str]) -> list[set[int]]:
    keys = Shingles(preset).keys(texts)
    shingle_sets: list[set[int]] = [set() for _ in texts]
    for key in keys.tolist():
        shingle_sets[key >> HASH_BITS].add(key & ((1 << HASH_BITS) - 1))
    return shingle_sets


@pytest.mark.parametrize("name", ["megatron", "datatrove"])
def test_shingle_sets_have_the_sizes_and_similarities_of_the_sets_of_strings(name: str) -> None:
    texts = ["", "a", "abcde", "abcdef", "çığ öş üü", "x" * 40, *plant_duplicates(3, 8)]
    cut = characters if name == "megatron" else word_shingles
    ours, theirs = sets(PRESETS[name], texts), [cut(text) for text in texts]
    assert [len(s) for s in ours] == [len(s) for s in theirs]
    for a, b in itertools.combinations(range(len(texts)), 2):
        assert len(ours[a] & ours[b]) == len(theirs[a] & theirs[b])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("The Cat, sat: on the mat", "the cat sat on   the\nmat!"),
        ("in 1999 we sold 25 cars today", "in 7 we sold 301 cars today"),
        ("un café déjà vu ici là", "un cafe deja vu ici la"),
    ],
)
def test_words_differ_neither_by_case_nor_marks_nor_numbers(first: str, second: str) -> None:
    a, b = sets(PRESETS["datatrove"], [first, second])
    assert a == b != set()


def test_each_ideograph_is_a_word() -> None:
    (shingles,) = sets(PRESETS["datatrove"], ["我们都是学生"])
    assert len(shingles) == 2


def test_a_set_does_not_depend_on_the_documents_beside_it() -> None:
    texts = plant_duplicates(5, 10)
    for preset in (PRESETS["megatron"], PRESETS["datatrove"]):
        together = sets(preset, texts)
        assert together == [sets(preset, [text])[0] for text in texts]


@pytest.mark.parametrize("size", [3, 30, 3000])
def test_signature_values_agree_as_often_as_the_sets_overlap(size: int) -> None:
    rng, bins, trials = np.random.default_rng(size), 100, 60
    agreed = 0.0
    for _ in range(trials):
        hashes = rng.integers(0, 1 << HASH_BITS, 3 * size, dtype=np.uint64)
        head, tail = hashes[: 2 * size], hashes[size:]
        second = tail | np.uint64(1 << HASH_BITS)
        table = minhash_signatures([np.sort(np.concatenate([head, second]))], 2, bins)
        agreed += float(np.mean(table[0] == table[1])) / trials
    assert agreed == pytest.approx(1 / 3, abs=0.08)


PARTS = (
    "word ",
    "12 345",
    "\u03a3\u03a3 ",
    "e\u0301\u00e9\u1ea1",
    "\u4e2d\u6587",
    "\u304b\u3099",
    "\n\n",
    "x" * 40,
    ", ",
    "\u0130",
)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", ["megatron", "datatrove"])
def test_a_text_has_the_same_shingles_whatever_the_size_of_its_pieces(name: str, seed: int) -> None:
    rng, preset = random.Random(seed), PRESETS[name]
    texts = ["".join(rng.choices(PARTS, k=rng.choice((0, 1, 5, 200)))) for _ in range(12)]
    shingles = Shingles(preset)
    whole, table = shingles.keys(texts), minhash_signatures([shingles.keys(texts)], len(texts), preset.bins)
    for piece in (1, 2, 7, 50, 1000):
        assert (
            minhash_signatures(shingles.keys_in_pieces(texts, piece), len(texts), preset.bins) == table
        ).all()
        assert sorted(np.concatenate([*shingles.keys_in_pieces(texts, piece)]).tolist()) == sorted(
            whole.tolist()
        )
        assert np.unique(shingles.shingle_sets(texts, piece)).tolist() == np.unique(whole).tolist()


# getrusage counts what the process that started this one had before it: a worker of pytest has a gigabyte
MEASURE = """
import pathlib, sys
from mega_data.cli import commands
commands.main(["dedup", *sys.argv[1:], "--workers", "1"], standalone_mode=False)
status = pathlib.Path("/proc/self/status").read_text()
print(next(int(line.split()[1]) >> 10 for line in status.splitlines() if line.startswith("VmHWM:")))
"""


@pytest.mark.parametrize("name", ["megatron", "datatrove"])
def test_a_document_of_20_megabytes_needs_memory_for_its_text_and_its_shingle_set(
    tmp_path: Path, name: str
) -> None:
    rng = random.Random(1)
    text = " ".join(rng.choices(words(rng, 4000), k=3_600_000))
    assert len(text) > 18e6
    (tmp_path / "in.jsonl").write_text(2 * (json.dumps({"text": text}) + "\n"))
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc to read a process's memory from")
    words_ = [sys.executable, "-c", MEASURE, "--input", str(tmp_path / "in.jsonl"), "--preset", name]
    words_ += ["--output", str(tmp_path / "out")]
    process = subprocess.run(words_, check=True, capture_output=True, text=True)
    assert int(process.stdout.split()[-1]) < 500  # MB; all shingles at once take more than 1,000
    outputs = [*(tmp_path / "out").rglob("*.jsonl")]
    assert sum(len(output.read_bytes().splitlines()) for output in outputs) == 1


def test_a_document_without_shingles_has_no_key() -> None:
    table = minhash_signatures([np.array([1 << HASH_BITS], np.uint64)], 3, 10)
    assert (table[0] == EMPTY).all()
    assert (table[1] == 0).all()
    assert band_keys(table, 5)[[0, 2]].tolist() == [[NO_KEY] * 5] * 2


@pytest.mark.parametrize("seed", range(20))
def test_groups_are_the_connected_parts_with_their_smallest_member_as_root(seed: int) -> None:
    rng, count = random.Random(seed), 40
    edges = [(rng.randrange(count), rng.randrange(count)) for _ in range(rng.randrange(1, 60))]
    parents = np.arange(count, dtype=np.uint64)
    for start in range(0, len(edges), 7):
        union(parents, np.array(edges[start : start + 7], np.uint64))
    smallest = list(range(count))
    for _ in range(count):
        for a, b in edges:
            smallest[a] = smallest[b] = min(smallest[a], smallest[b])
    assert [find_root(parents, document) for document in range(count)] == smallest


@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 40])
def test_a_column_is_read_as_it_was_written_whatever_the_batches(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mega_data.dedup.band_store.BLOCK_DOCUMENTS", 7)
    rng = np.random.default_rng(count)
    table = rng.integers(0, 2**64, (count, 3), dtype=np.uint64)
    with open_column_writer(tmp_path / "keys", 3) as put:
        start = 0
        while start < count:
            size = int(rng.integers(1, 20))
            put(table[start : start + size])
            start += size
    assert count_documents(tmp_path / "keys", 3) == count
    for number in range(3):
        read = [*read_column(tmp_path / "keys", number, 3), np.empty(0, np.uint64)]
        assert np.concatenate(read).tolist() == table[:, number].tolist()
        start = count // 3
        part = np.concatenate([*read_column(tmp_path / "keys", number, 3, start, count), read[-1]])
        assert part.tolist() == table[start:, number].tolist()


@pytest.mark.parametrize("seed", range(20))
def test_documents_of_one_key_are_joined_as_by_comparing_all_with_all(seed: int) -> None:
    rng = random.Random(seed)
    points = [
        rng.random() for _ in range(MAX_COMPARED + 1)
    ]  # of one key; alike are those that lie near each other
    keys = [range(MAX_COMPARED + 1), sorted(rng.sample(range(MAX_COMPARED + 1), 9))]

    def alike(a: int, b: int) -> bool:
        return abs(points[a] - points[b]) < 0.02

    parents = np.arange(len(points), dtype=np.uint64)
    union_similar(parents, (np.array([(key[0], b) for b in key[1:]]) for key in keys), alike)
    edges = [pair for pair in itertools.combinations(range(len(points)), 2) if alike(*pair)]
    wanted = np.arange(len(points), dtype=np.uint64)
    union(wanted, np.array(edges or np.empty((0, 2)), np.int64))
    assert [find_root(parents, n) for n in range(len(points))] == [
        find_root(wanted, n) for n in range(len(points))
    ]


def test_a_key_of_very_many_documents_costs_a_bounded_number_of_comparisons() -> None:
    asked = 0

    def alike(a: int, b: int) -> bool:
        nonlocal asked
        asked += 1
        return False

    count = 2000
    union_similar(np.arange(count, dtype=np.uint64), [np.array([(0, n) for n in range(1, count)])], alike)
    assert asked <= count * (MAX_COMPARED + 1)


@pytest.mark.parametrize(("name", "cut"), [("megatron", characters), ("datatrove", word_shingles)])
def test_planted_near_duplicates_are_found_as_by_brute_force(tmp_path: Path, name: str, cut: object) -> None:
    texts = plant_duplicates(11)
    assert callable(cut)
    shingle_sets = [cut(text) for text in texts]
    survivors = set(deduplicate([write(tmp_path / "in", texts, 3)], tmp_path / "out", PRESETS[name]))
    close = apart = 0
    for place, text in enumerate(texts):
        earlier = [jaccard(shingle_sets[place], shingle_sets[before]) for before in range(place)]
        if max(earlier, default=0) >= 0.9:
            close += text not in survivors or text in texts[:place]
        elif max(earlier, default=0) < 0.4:
            apart += text in survivors
    alike = sum(
        max((jaccard(f, shingle_sets[b]) for b in range(n)), default=0) >= 0.9
        for n, f in enumerate(shingle_sets)
    )
    different = sum(
        max((jaccard(f, shingle_sets[b]) for b in range(n)), default=0) < 0.4
        for n, f in enumerate(shingle_sets)
    )
    assert alike > 40
    assert close >= 0.98 * alike
    assert apart == different > 40


@pytest.mark.parametrize("name", ["megatron", "datatrove", "exact"])
def test_the_same_bytes_come_out_whatever_the_workers_and_the_order_of_files(
    tmp_path: Path, name: str
) -> None:
    folder = write(tmp_path / "in", plant_duplicates(2), 4)
    files = sorted(folder.iterdir())
    once = deduplicate(files, tmp_path / "one", PRESETS[name])
    assert 60 <= len(once) < len(plant_duplicates(2))
    second = deduplicate(files[::-1], tmp_path / "two", PRESETS[name], workers=2)
    assert second == once
    for file in files:
        assert (tmp_path / "one" / file.name).read_bytes() == (tmp_path / "two" / file.name).read_bytes()


def test_exact_keeps_the_first_of_equal_texts_and_everything_else(tmp_path: Path) -> None:
    texts = ["a", "b", "a", "", "a ", "b", "", "c"]
    out = deduplicate([write(tmp_path / "in", texts, 2)], tmp_path / "out", PRESETS["exact"])
    assert out == ["a", "b", "", "a ", "", "c"]  # an empty text is like no other


def test_a_run_goes_on_where_finished_tasks_end(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", plant_duplicates(4), 4)
    whole = deduplicate([folder], tmp_path / "whole", PRESETS["megatron"])
    outputs = RangeOutputs(whole_files(find_shards([folder])), tmp_path / "o", tmp_path / "w/parts")
    job = Deduplication(outputs, tmp_path / "w", PRESETS["megatron"], memory=1 << 14)
    rng = random.Random(0)
    for _ in range(60):  # a process that ends at any task is one that did only some of them
        job.begin()
        stage = rng.choice(job.stages())
        try:
            run([stage], job.work, workers=1, progress=lambda stage, tasks: lambda result: _stop(rng))
        except (KeyboardInterrupt, ConfigError):
            continue  # a stage asked for before its turn names the one that is missing
    job.begin()
    run(job.stages(), job.work, workers=1)
    assert kept_texts(tmp_path / "o") == whole


def _stop(rng: random.Random) -> None:
    if rng.random() < 0.5:
        raise KeyboardInterrupt


def test_one_task_at_a_time_as_in_a_job_array_gives_the_same(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", plant_duplicates(4), 3)
    whole = deduplicate([folder], tmp_path / "whole", PRESETS["megatron"])
    flags = ["--input", str(folder), "--output", str(tmp_path / "o"), "--work-dir", str(tmp_path / "w")]
    flags += ["--preset", "megatron"]
    tasks = {"keys": 3, "sort": 1, "pairs": 10, "paired": 1, "sets": 3, "groups": 1, "filter": 3}
    for only in ["plan", *(f"{stage}:{n}" for stage, count in tasks.items() for n in reversed(range(count)))]:
        outcome = CliRunner().invoke(commands, ["dedup", *flags, "--stage", only])
        assert outcome.exit_code == 0, outcome.output
    assert not list((tmp_path / "o").glob("*.jsonl"))  # files get their names when the run is whole
    assert CliRunner().invoke(commands, ["dedup", *flags]).exit_code == 0
    assert kept_texts(tmp_path / "o") == whole


def test_the_command_tells_what_it_kept_and_keeps_what_it_dropped(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", ["one and the same text"] * 3 + ["another"], 1)
    packed = folder / "00.jsonl.gz"
    packed.write_bytes(gzip.compress((folder / "00.jsonl").read_bytes()))
    (folder / "00.jsonl").unlink()
    output = tmp_path / "out"
    outcome = CliRunner().invoke(
        commands,
        ["dedup", "--input", str(packed), "--output", str(output), "--preset", "exact", "--keep-dropped"],
    )
    assert outcome.exit_code == 0, outcome.output
    assert "kept 2 of 4 documents" in outcome.output
    dropped = [json.loads(line) for line in (output / "dropped/00.jsonl").read_text().splitlines()]
    assert dropped == [{"text": "one and the same text", "dropped": "like 00.jsonl.gz:1"}] * 2
    assert not (output / ".work").exists()


def dedup(*arguments: str) -> MegaError:
    outcome = CliRunner().invoke(commands, ["dedup", *arguments])
    assert isinstance(outcome.exception, MegaError), outcome.output
    return outcome.exception


def test_a_line_that_is_wrong_is_named(tmp_path: Path) -> None:
    for name, line in (("a", '{"text": 3}'), ("b", "{"), ("c", "[]")):
        folder = write(tmp_path / name, ["fine", "fine"], 1)
        with (folder / "00.jsonl").open("a") as file:
            file.write(line + "\n")
        error = dedup("--input", str(folder), "--output", str(tmp_path / f"out-{name}"))
        assert isinstance(error, FormatError)
        assert str(error).startswith(f"{folder}/00.jsonl:3: ")


def test_mistakes_are_answered_by_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", ["x", "y"], 1)
    put = ("--input", str(folder), "--output", str(tmp_path / "out"), "--work-dir", str(tmp_path / "w"))
    assert "found nothing" in str(dedup(*put, "--stage", "nothing"))
    assert "wanted 0 to 0" in str(dedup(*put, "--stage", "keys:1"))
    assert "is not done yet" in str(dedup(*put, "--stage", "filter:0"))
    assert "contains a run with other preset" in str(dedup(*put, "--preset", "exact"))
    assert "--jaccard" in str(dedup(*put, "--preset", "exact", "--jaccard", "0.5"))
    (tmp_path / "empty").mkdir()
    assert "no files" in str(dedup("--input", str(tmp_path / "empty"), "--output", str(tmp_path / "o")))
    shutil.copytree(folder, tmp_path / "twin")
    both = ("--input", str(folder), "--input", str(tmp_path / "twin"), "--output", str(tmp_path / "o"))
    assert "two files of one name" in str(dedup(*both))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("mine")
    full = ("--input", str(folder), "--output", str(tmp_path / "o"), "--work-dir", str(tmp_path / "full"))
    assert "--work-dir: contains files that this command did not write" in str(dedup(*full))


def test_a_command_killed_at_random_moments_ends_with_the_same_bytes(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", plant_duplicates(6, originals=120), 16)
    whole = deduplicate([folder], tmp_path / "whole", PRESETS["megatron"])
    output, rng, killed = tmp_path / "out", random.Random(1), 0
    command = [sys.executable, "-m", "mega_data", "dedup", "--input", str(folder), "--output", str(output)]
    for _ in range(8):
        process = subprocess.Popen(
            [*command, "--preset", "megatron"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        assert process.stderr is not None
        with process.stderr:
            for _ in range(rng.randrange(1, 14)):  # tasks it may end
                process.stderr.readline()
            process.kill()
        killed += process.wait() == -signal.SIGKILL
    assert killed > 4
    for file in output.glob("*.jsonl"):  # what has its name is whole, at any moment
        assert file.read_bytes() == (tmp_path / "whole" / file.name).read_bytes()
    subprocess.run([*command, "--preset", "megatron"], check=True, capture_output=True)
    assert kept_texts(output) == whole
    names = [".mega-data.json", *(f"{n:02d}.jsonl" for n in range(16))]
    assert sorted(file.name for file in output.iterdir()) == names


def test_a_worker_that_is_killed_is_told_in_one_line(tmp_path: Path) -> None:
    stage = TaskStage("fatal", 3, _kill_oneself)
    with pytest.raises(MegaError, match="--workers: a process was killed: found fatal"):
        run([stage], tmp_path, workers=2)


def _kill_oneself(_: int) -> dict[str, int]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def test_a_corpus_larger_than_the_memory_allowed_is_done(tmp_path: Path) -> None:
    rng, folder = random.Random(0), tmp_path / "in"
    folder.mkdir()
    for shard in range(4):
        with (folder / f"{shard}.jsonl").open("w") as file:
            for _ in range(1500):
                file.write(json.dumps({"text": rng.randbytes(5000).hex(" ", 3)}) + "\n")
    allowed = int(0.7 * sum(file.stat().st_size for file in folder.iterdir()))
    code = f"""
import resource
import mega_data.dedup.pipeline
from mega_data.cli import commands
used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + {allowed}, used + {allowed}))
folder, output = {str(folder)!r}, {str(tmp_path / "o")!r}
commands.main(['dedup', '--input', folder, '--output', output, '--preset', 'megatron'])
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "kept 6,000 of 6,000" in process.stdout


@pytest.mark.parametrize("ending", ["gz", "xz", "bz2", "zst"])
@pytest.mark.parametrize("harm", ["cut", "flipped"])
def test_damaged_compression_is_named(tmp_path: Path, ending: str, harm: str) -> None:
    rng = random.Random(0)
    text = "".join(json.dumps({"text": rng.randbytes(40).hex()}) + "\n" for _ in range(1000)).encode()
    if ending == "zst":
        zstandard = pytest.importorskip("zstandard")
        whole = zstandard.ZstdCompressor(write_checksum=True).compress(text)  # as the zstd program does
    else:
        whole = {"gz": gzip, "xz": lzma, "bz2": bz2}[ending].compress(text)
    middle = len(whole) // 2
    cut, flipped = whole[:middle], whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
    name = tmp_path / f"a.jsonl.{ending}"
    name.write_bytes(cut if harm == "cut" else flipped)
    error = dedup("--input", str(name), "--output", str(tmp_path / "out"))
    assert str(error).startswith(f"{name}: damaged" if harm == "cut" else f"{name}:")


def test_zstandard_frames_are_read_one_after_another(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    text = b"".join(b"line %d\n" % n for n in range(60_000))
    packed = b"".join(
        zstandard.compress(text[start : start + 250_000]) for start in range(0, len(text), 250_000)
    )
    (tmp_path / "a.zst").write_bytes(packed)
    assert b"".join(read_lines(tmp_path / "a.zst")) == text
