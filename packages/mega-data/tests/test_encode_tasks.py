"""Tasks of preprocess give the bytes of one stream, from any cut of the inputs and whoever is killed."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import random
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner

from mega_data import encode_tasks
from mega_data.cli import commands
from mega_data.commands.preprocess_tasks import Placement, preprocess_tasks
from mega_data.encode_tasks import EncodingTasks
from mega_data.error_limit import ErrorLimit, TooManyErrors
from mega_data.preprocess import Options, PreprocessResult, preprocess
from mega_data.readers import ranges
from mega_data.readers.blocks import Block
from mega_data.readers.inputs import InputFile, expand_inputs
from mega_data.readers.ranges import InputRange, read_range, split_inputs
from mega_data.resumable_output import lock_unfinished
from mega_data.task_stages import TaskStage
from mega_schema.errors import ConfigError, FormatError, MegaError
from mega_schema.tokenizer.tokenizer import open_tokenizer
from tests.shared_data import SHARED

SLURM = Path(__file__).resolve().parents[3] / "infra/slurm"
STAGES = "encode index join"
TOKENIZER = open_tokenizer("NullTokenizer", vocab_size=100)
KEYS = Options(("text", "title"), append_eod=True)


def row(rng: random.Random) -> dict[str, object]:
    words = " ".join(str(rng.randrange(100)) for _ in range(rng.choice([0, 1, 5, 40])))
    return {"text": words, "title": rng.choice(["", "7 8", ["1 2", "", "3"]])}


def text_row(rng: random.Random) -> dict[str, object]:
    return row(rng) | {"title": "7"}


def corpus(folder: Path) -> list[InputFile]:
    """Inputs of all kinds: plain lines with blank ones and without a last line break, compressed, tables."""
    rng = random.Random(3)
    folder.mkdir()
    lines = [json.dumps(row(rng)) if rng.random() < 0.9 else " " for _ in range(200)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    with gzip.open(folder / "b.jsonl.gz", "wt") as out:
        out.writelines(json.dumps(row(rng)) + "\n" for _ in range(50))
    table = pyarrow.Table.from_pylist([text_row(rng) for _ in range(230)])
    pyarrow.parquet.write_table(table, folder / "c.parquet", row_group_size=20)
    rows = "".join(f"{n % 100},{n % 7}\n" for n in range(40))
    (folder / "d.csv").write_text(f"text,title\n{rows}")
    (folder / "e.jsonl").write_bytes(b"")
    (folder / "f.txt").write_text("1 2\n3\n")
    return expand_inputs([str(folder)])


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def encode(
    inputs: list[InputFile], prefix: Path, options: Options = KEYS, workers: int = 1, size: int = 700
) -> PreprocessResult:
    result = preprocess_tasks(inputs, prefix, TOKENIZER, options, Placement("local", workers, None, size))
    assert result is not None
    return result


@pytest.mark.parametrize(("size", "workers"), [(200, 1), (3000, 2), (10**9, 1)])
def test_tasks_of_any_size_give_the_bytes_of_one_stream(size: int, workers: int, tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in")
    stream = preprocess(inputs, tmp_path / "stream/p", TOKENIZER, KEYS)
    tasks = encode(inputs, tmp_path / "tasks/p", KEYS, workers, size)
    assert files(tmp_path / "tasks") == files(tmp_path / "stream")
    assert (tasks.documents, tasks.tokens, tasks.size) == (stream.documents, stream.tokens, stream.size)
    assert (len(split_inputs(inputs, size)) > 6) == (size < 10**9)


def test_every_cut_of_a_file_gives_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    data = b'{"text": "1"}\n\n{"text": "22"}\n{"text": "333"}'
    path.write_bytes(data)
    for size in range(1, len(data) + 1):
        ranges = split_inputs([InputFile(path, "jsonl")], size)
        blocks = [block for part in ranges for block in read_range(part, ["text"], 8, "file")]
        rows = [block.rows(["text"]) for block in blocks]
        assert [text for block_rows in rows for text in block_rows.texts] == [("1",), ("22",), ("333",)]
        assert sum(block_rows.count for block_rows in rows) == 4
        assert sum(part.size for part in ranges) == len(data)


@pytest.mark.parametrize("size", [300, 10**9])
def test_skipped_rows_have_their_numbers_in_the_file(size: int, tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in")
    with (tmp_path / "in/a.jsonl").open("a") as out:
        out.write('\n{"text": 1}\n{"text": "5", "title": ""}\nnot JSON\n')
    (tmp_path / "in/b.jsonl.gz").write_bytes((tmp_path / "in/b.jsonl.gz").read_bytes()[:-20])
    options = Options(("text", "title"), skip=True)
    stream = preprocess(inputs, tmp_path / "stream/p", TOKENIZER, options)
    tasks = encode(inputs, tmp_path / "tasks/p", options, 1, size)
    assert stream.skipped == tasks.skipped == 3
    assert files(tmp_path / "tasks") == files(tmp_path / "stream")
    limited = Options(("text", "title"), skip=True, max_errors=ErrorLimit(count=1))
    with pytest.raises(TooManyErrors, match=r"the first is .*a\.jsonl.* not JSON|no key"):
        encode(inputs, tmp_path / "limited/p", limited, 1, size)


def test_a_wrong_row_is_named_and_after_its_correction_only_its_file_is_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = corpus(tmp_path / "in")
    path = tmp_path / "in/e.jsonl"
    path.write_text('{"text": "1", "title": "2"}\n' * 70 + '{"text": 1}\n')
    with pytest.raises(FormatError, match=r"e\.jsonl:71: no key 'title'.*hint: correct or delete the line"):
        encode(inputs, tmp_path / "out/p")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["p.unfinished"]
    path.write_text('{"text": "1", "title": "2"}\n' * 70 + '{"text": "", "title": ""}\n')
    names = list[str]()
    open_range = encode_tasks.read_range

    def record(part: InputRange, *rest: object) -> Iterator[Block]:
        names.append(part.item.path.name)
        return open_range(part, *rest)

    monkeypatch.setattr(encode_tasks, "read_range", record)
    encode(inputs, tmp_path / "out/p")
    assert set(names) == {"e.jsonl", "f.txt"}
    preprocess(inputs, tmp_path / "stream/p", TOKENIZER, KEYS)
    assert files(tmp_path / "out") == files(tmp_path / "stream")


def test_a_wrong_row_in_the_first_task_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": 5}\n')
    (tmp_path / "out").mkdir()
    with pytest.raises(FormatError, match=r"a\.jsonl:1: the value of 'text': found int, wanted a string"):
        encode(expand_inputs([str(tmp_path / "a.jsonl")]), tmp_path / "out/p", Options())
    assert not any((tmp_path / "out").iterdir())


def test_a_run_killed_between_any_two_steps_of_a_join_or_of_publishing_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = corpus(tmp_path / "in")
    preprocess(inputs, tmp_path / "stream/p", TOKENIZER, KEYS)
    replace, steps = Path.replace, 0

    def replace_or_die(path: Path, target: Path) -> Path:
        nonlocal steps
        steps -= 1
        if not steps:
            raise KeyboardInterrupt
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", replace_or_die)
    for kills in range(100):  # noqa: B007
        steps = 3  # names that a run gives before it is killed
        try:
            encode(inputs, tmp_path / "tasks/p", size=4000)
        except KeyboardInterrupt:
            continue
        break
    monkeypatch.undo()
    assert kills > 15
    assert files(tmp_path / "tasks") == files(tmp_path / "stream")


def test_parts_are_not_on_the_disk_after_they_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, blocks = corpus(tmp_path / "in"), list[int]()

    def record(job: EncodingTasks, *rest: object) -> None:
        blocks.extend(path.stat().st_size for path in job.folder.rglob("parts/*/*.joined"))
        publish(job, *rest)

    publish = EncodingTasks.publish
    monkeypatch.setattr(EncodingTasks, "publish", record)
    encode(inputs, tmp_path / "out/p")
    assert blocks
    assert not any(blocks)


def test_what_is_not_a_file_is_refused_before_it_writes(tmp_path: Path) -> None:
    for word, name in (("-", "stdin"), ("hf:a/b", "a dataset by name")):
        with pytest.raises(ConfigError, match=f"--input: {name} cannot be divided into tasks"):
            encode(expand_inputs([word]), tmp_path / "out/p")
    assert not (tmp_path / "out").exists()


def words(inputs: Path, prefix: Path) -> list[str]:
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--append-eod"]
    keys = ["--json-keys", "text", "title"]
    return ["preprocess", "--input", str(inputs), "--output-prefix", str(prefix), *tokenizer, *keys]


def run(*arguments: str) -> str:
    outcome = CliRunner().invoke(commands, arguments)
    if isinstance(outcome.exception, MegaError):
        raise outcome.exception
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def test_an_element_of_an_array_without_a_stage_is_refused_and_two_runs_at_once_too(tmp_path: Path) -> None:
    corpus(tmp_path / "in")
    line = words(tmp_path / "in", tmp_path / "out/p")
    with pytest.raises(ConfigError, match=r"--stage: an element.*wanted encode \| index \| join"):
        run(*line, "--executor", "slurm-array")
    assert not (tmp_path / "out").exists()
    run(*line, "--stage", "encode")
    with pytest.raises(ConfigError, match="--stage: no such stage: found pass, wanted plan | encode"):
        run(*line, "--stage", "pass")
    with lock_unfinished(tmp_path / "out/p.unfinished"), pytest.raises(ConfigError, match="another run"):
        run(*line)
    assert "encode" not in run(*line)  # goes on with the tasks, without a flag
    preprocess(expand_inputs([str(tmp_path / "in")]), tmp_path / "stream/p", TOKENIZER, KEYS)
    assert files(tmp_path / "out") == files(tmp_path / "stream")


def test_a_dry_run_tells_tasks_and_an_estimate_and_writes_nothing(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in")
    size = sum(item.size for item in inputs) / 1e6
    lines = run(*words(tmp_path / "in", tmp_path / "out/p"), "--dry-run", "--workers", "2").splitlines()
    assert lines[0] == f"1 task, 6 files, {size:.2f} MB on disk"
    estimate = re.fullmatch(
        r"estimate from 0\.01 MB: (\d+) documents, 0\.01 million tokens, "
        r"0\.0\d MB written, 0:0\d with 2 workers",
        lines[1],
    )
    assert estimate is not None, lines
    assert abs(int(estimate[1]) - 500) < 25  # of a compressed file only a part is known to be read
    assert not (tmp_path / "out").exists()
    (tmp_path / "e.jsonl").write_bytes(b"")
    line = words(tmp_path / "e.jsonl", tmp_path / "out/p")
    assert run(*line, "--dry-run").splitlines()[1:] == ["the sample has no bytes: no estimate"]
    with pytest.raises(ConfigError, match="--input: stdin cannot be divided"):
        run(*words(Path("-"), tmp_path / "out/p"), "--dry-run")


def programs(folder: Path) -> dict[str, str]:
    """The environment of a machine with sbatch and mega-data."""
    folder.mkdir()
    sbatch = str(Path(__file__).with_name("sbatch.py"))
    for name, command in (("sbatch", sbatch), ("mega-data", "-m mega_data")):
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n')
        program.chmod(stat.S_IRWXU)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "JOBS": str(folder)}


def test_an_array_per_stage_gives_the_bytes_of_one_stream(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in")
    preprocess(inputs, tmp_path / "stream/p", TOKENIZER, KEYS)
    line = ["bash", str(SLURM / "data.sh"), "2", STAGES, *words(tmp_path / "in", tmp_path / "out/p")]
    environment = programs(tmp_path / "bin")
    process = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    logs = [path.read_text() for path in sorted((tmp_path / "bin").glob("*.said"))]
    assert process.returncode == 0, process.stderr
    assert len(logs) == 4, logs
    assert files(tmp_path / "out") == files(tmp_path / "stream"), logs


@pytest.mark.long
def test_ray_gives_the_bytes_of_one_stream(tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    inputs = corpus(tmp_path / "in")
    preprocess(inputs, tmp_path / "stream/p", TOKENIZER, KEYS)
    line = [sys.executable, "-m", "mega_data", *words(tmp_path / "in", tmp_path / "out/p")]
    line += ["--executor", "ray", "--workers", "2"]
    process = subprocess.run(line, capture_output=True, text=True, check=False, timeout=300)
    assert process.returncode == 0, process.stderr
    assert files(tmp_path / "out") == files(tmp_path / "stream")


def _workers(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = [child for task in tasks for child in task.read_text().split()]
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.long)])
def test_whoever_is_killed_the_bytes_are_the_same(kills: int, tmp_path: Path) -> None:
    rng = random.Random(kills)
    (tmp_path / "in").mkdir()
    for name in range(12):
        rows = "".join(json.dumps(row(rng)) + "\n" for _ in range(40))
        (tmp_path / f"in/{name:02d}.jsonl").write_text(rows)
    preprocess(expand_inputs([str(tmp_path / "in")]), tmp_path / "stream/p", TOKENIZER, KEYS)
    line = [sys.executable, "-m", "mega_data", *words(tmp_path / "in", tmp_path / "out/p")]
    line += ["--executor", "local", "--workers", "2"]
    for turn in range(kills):
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        with process.stderr:
            for _ in range(rng.randrange(1, 3)):  # tasks that end
                process.stderr.readline()
            workers = _workers(process.pid)
            victim = rng.choice(workers) if turn % 2 == 0 and workers else process.pid
            os.kill(victim, signal.SIGKILL)
            log = process.stderr.read()
        assert process.wait() in (0, 2, -signal.SIGKILL), log
        assert "Traceback" not in log
    subprocess.run(line, check=True, capture_output=True)
    assert files(tmp_path / "out") == files(tmp_path / "stream")


@pytest.mark.skipif(not (SHARED / "data/tokenizers/gpt2").exists(), reason="needs the shared data")
def test_a_byte_pair_tokenizer_is_opened_again_by_the_tasks(tmp_path: Path) -> None:
    folder = SHARED / "data/tokenizers/gpt2"
    tokenizer = open_tokenizer(
        "GPT2BPETokenizer", vocab_file=folder / "gpt2-vocab.json", merge_file=folder / "gpt2-merges.txt"
    )
    (tmp_path / "a.jsonl").write_text('{"text": "Some words, twice."}\n' * 100)
    inputs = expand_inputs([str(tmp_path / "a.jsonl")])
    stream = preprocess(inputs, tmp_path / "stream/p", tokenizer, Options(append_eod=True))
    placement = Placement("local", 1, None, 1000)
    tasks = preprocess_tasks(inputs, tmp_path / "out/p", tokenizer, Options(append_eod=True), placement)
    assert tasks is not None
    assert tasks.encoder == stream.encoder
    assert files(tmp_path / "out") == files(tmp_path / "stream")


def test_many_small_parts_are_joined_by_few_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 10,000 small shards had a task of its own, which flushed the .bin to the disk."""
    inputs = corpus(tmp_path / "in")
    preprocess(inputs, tmp_path / "stream/p", TOKENIZER, KEYS)
    stages = list[dict[str, int]]()
    make_stages = EncodingTasks.stages

    def record(job: EncodingTasks) -> list[TaskStage]:
        stages.append({stage.name: stage.tasks for stage in make_stages(job)})
        return make_stages(job)

    monkeypatch.setattr(EncodingTasks, "stages", record)
    for group_bytes, joins in (
        (1 << 26, 1),
        (1, len(split_inputs(inputs, 700)) - 1),
    ):  # an empty file has no own
        monkeypatch.setattr(encode_tasks, "_JOIN_BYTES", group_bytes)
        encode(inputs, tmp_path / f"out{joins}/p")
        assert stages[-1]["join"] == joins
        assert files(tmp_path / f"out{joins}") == files(tmp_path / "stream")


def test_after_a_kill_only_the_changed_inputs_are_encoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ended with the advice to remove all finished tasks."""
    inputs = corpus(tmp_path / "in")
    monkeypatch.setattr(ranges, "_GROUPS_PER_RANGE", 10**9)  # no file is small
    names = [part.item.path.name for part in split_inputs(inputs, 700)]
    encoded = list[str]()
    is_killed = True
    encode_task = EncodingTasks.encode

    def encode_or_die(job: EncodingTasks, task: int) -> dict[str, object]:
        if is_killed and names[task] == "f.txt":
            raise KeyboardInterrupt
        encoded.append(names[task])
        return encode_task(job, task)

    monkeypatch.setattr(EncodingTasks, "encode", encode_or_die)
    with pytest.raises(KeyboardInterrupt):
        encode(inputs, tmp_path / "out/p")
    assert encoded == names[:-1]
    (tmp_path / "in/d.csv").write_text("text,title\n5,6\n")
    is_killed = False
    encoded.clear()
    encode(inputs, tmp_path / "out/p")
    assert encoded == ["d.csv", "f.txt"]
    preprocess(inputs, tmp_path / "stream/p", TOKENIZER, KEYS)
    assert files(tmp_path / "out") == files(tmp_path / "stream")


def test_small_inputs_share_a_task_and_are_encoded_again_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """10,000 shards of 4 kB were 10,000 tasks, of which each flushed five files to the disk."""
    (tmp_path / "in").mkdir()
    paths = [tmp_path / f"in/{number:03d}.jsonl" for number in range(90)]
    for number, path in enumerate(paths):
        path.write_text(f'{{"text": "{number} 7"}}\n' * (1 + number % 5))
    for number in (31, 32):
        data = gzip.compress(paths[number].read_bytes(), mtime=0)
        paths[number] = paths[number].with_suffix(".jsonl.gz")
        paths[number].write_bytes(data[:-9])
    (tmp_path / "in/031.jsonl").unlink()
    (tmp_path / "in/032.jsonl").unlink()
    paths[60].write_text('{"text": "1"}\n7\n')
    inputs = expand_inputs([str(tmp_path / "in")])
    groups = ranges.plan_tasks(inputs, 64 * 500)
    assert [part.item for group in groups for part in group] == inputs
    assert 5 < len(groups) < 15
    assert all(sum(part.size for part in group) <= 500 for group in groups)

    options = Options(skip=True)
    stream = preprocess(inputs, tmp_path / "stream/p", TOKENIZER, options)
    capsys.readouterr()
    encoded = list[int]()
    encode_task = EncodingTasks.encode

    def encode_or_die(job: EncodingTasks, task: int) -> dict[str, object]:
        if is_killed and task == len(groups) - 1:
            raise KeyboardInterrupt
        encoded.append(task)
        return encode_task(job, task)

    is_killed = True
    monkeypatch.setattr(EncodingTasks, "encode", encode_or_die)
    with pytest.raises(KeyboardInterrupt):
        encode(inputs, tmp_path / "tasks/p", options, 1, 64 * 500)
    is_killed = False
    encoded.clear()
    paths[3].write_text(paths[3].read_text())  # another version, with equal content
    tasks = encode(inputs, tmp_path / "tasks/p", options, 1, 64 * 500)
    assert encoded == [0, len(groups) - 1]
    assert (tasks.documents, tasks.skipped) == (stream.documents, stream.skipped)
    assert files(tmp_path / "tasks") == files(tmp_path / "stream")
    notes = capsys.readouterr().err
    assert f"note: {paths[31]}: " in notes
    assert f"note: {paths[32]}: " in notes
