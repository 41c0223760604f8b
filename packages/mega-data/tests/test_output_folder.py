"""Output folders of clean, dedup and extract contain all files of one run, or none."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from mega_data.cli import commands
from mega_data.executors.local import run as run_tasks
from mega_data.output_folder import check_folder
from mega_data.task_stages import PLAN, TaskStage
from mega_schema.errors import ConfigError, FormatError

STEP = ("--step", "whitespace")


def call(*words: object) -> None:
    commands.main([str(word) for word in words], standalone_mode=False)


def corpus(folder: Path, shards: int, broken: int | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    for shard in range(shards):
        text = "".join(json.dumps({"text": f"document  {n} of shard {shard}"}) + "\n" for n in range(5))
        (folder / f"{shard}.jsonl").write_text(text + ("wrong\n" if shard == broken else ""))
    return folder


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def run(*words: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mega_data", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("command", ["clean", "dedup"])
def test_a_wrong_line_leaves_no_file_that_looks_finished(command: str, tmp_path: Path) -> None:
    steps = STEP if command == "clean" else ()
    words = (command, "--input", corpus(tmp_path / "in", 4, broken=3), "--output", tmp_path / "out", *steps)
    with pytest.raises(FormatError, match=r"3\.jsonl:6: not JSON"):
        call(*words)
    assert visible(tmp_path / "out") == []
    assert len(list((tmp_path / "out/.work").glob("**/done/*/0000[012].json"))) == 3
    (tmp_path / "in/3.jsonl").unlink()
    call(*words)  # other inputs: nothing of the first run stays
    assert [name for name in visible(tmp_path / "out") if name.endswith(".jsonl")] == [
        "0.jsonl",
        "1.jsonl",
        "2.jsonl",
    ]


def test_a_wrong_line_in_the_first_shard_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        call("dedup", "--input", corpus(tmp_path / "in", 2, broken=0), "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shards_that_did_not_change_keep_their_results_after_a_wrong_line(tmp_path: Path) -> None:
    words = ("clean", "--input", corpus(tmp_path / "in", 4, broken=3), "--output", tmp_path / "out", *STEP)
    with pytest.raises(FormatError):
        call(*words)
    written = {path.name: path.stat().st_ino for path in (tmp_path / "out/.unfinished").glob("*.jsonl")}
    assert sorted(written) == ["0.jsonl", "1.jsonl", "2.jsonl"]
    mended = (tmp_path / "in/3.jsonl").read_text().removesuffix("wrong\n")
    (tmp_path / "in/3.jsonl").write_text(mended)
    call(*words)
    assert visible(tmp_path / "out") == [
        "0.jsonl",
        "1.jsonl",
        "2.jsonl",
        "3.jsonl",
        "report.html",
        "report.json",
    ]
    inodes = {name: (tmp_path / "out" / name).stat().st_ino for name in written}
    assert inodes == written  # renamed, not written again
    assert json.loads((tmp_path / "out/report.json").read_text())["steps"][0]["documents_in"] == 20


def test_wrong_lines_can_be_passed_over_after_a_run_that_ended_at_one(tmp_path: Path) -> None:
    words = ("dedup", "--input", corpus(tmp_path / "in", 3, broken=1), "--output", tmp_path / "out")
    with pytest.raises(FormatError):
        call(*words)
    call(*words, "--on-error", "skip")
    assert visible(tmp_path / "out") == ["0.jsonl", "1.jsonl", "2.jsonl", "quarantine"]
    assert [path.name for path in (tmp_path / "out/quarantine").iterdir()] == ["1.jsonl"]


def test_other_steps_after_a_wrong_line_start_anew(tmp_path: Path) -> None:
    words = ("clean", "--input", corpus(tmp_path / "in", 2, broken=1), "--output", tmp_path / "out")
    with pytest.raises(FormatError):
        call(*words, "--step", "length:minimum=10000")
    (tmp_path / "in/1.jsonl").write_text((tmp_path / "in/0.jsonl").read_text())
    call(*words, *STEP)
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert [(step["step"], step["documents_out"]) for step in report["steps"]] == [("whitespace", 10)]


def test_shards_of_an_earlier_run_do_not_stay_beside_those_of_another(tmp_path: Path) -> None:
    output = tmp_path / "out"
    call("clean", "--input", corpus(tmp_path / "in", 3), "--output", output, *STEP)
    with pytest.raises(ConfigError, match=r"--output: contains files of an earlier run.*0\.jsonl and 1 more"):
        call("dedup", "--input", tmp_path / "in/2.jsonl", "--output", output)
    assert len(visible(output)) == 5
    call(
        "clean",
        "--input",
        tmp_path / "in",
        "--output",
        output,
        "--step",
        "length:maximum=25",
        "--keep-dropped",
    )
    assert "dropped" in visible(output)
    call("clean", "--input", tmp_path / "in", "--output", output, *STEP)
    assert "dropped" not in visible(output)  # of the run before


@pytest.mark.parametrize(
    "line",
    ["clean --step whitespace", "dedup --preset exact", "mix", "stats", "train-tokenizer --vocab-size 260"],
)
def test_a_run_that_replaces_the_output_of_an_earlier_one_says_so(
    line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only `preprocess` and `merge` did; a run with other options replaced the files without a word."""
    words = (*line.split(), "--input", corpus(tmp_path / "in", 1), "--output", tmp_path / "out")
    kind = "tokenizer" if line.startswith("train") else "output"
    note = f"note: {tmp_path / 'out'}: this {kind} exists; it is replaced when this run ends\n"
    call(*words)
    assert note not in capfd.readouterr().err
    call(*words)
    assert capfd.readouterr().err.count(note) == 1


def test_a_work_folder_in_which_another_element_writes_its_plan_is_not_refused(tmp_path: Path) -> None:
    output, work = tmp_path / "out", tmp_path / "work"
    work.mkdir()
    (work / "..plan-ab81.d753.partial").touch()
    check_folder(output, work, [])
    (work / "notes").touch()
    with pytest.raises(ConfigError, match="^--work-dir: contains files that this command did not write"):
        check_folder(output, work, [])
    (work / PLAN).touch()
    check_folder(output, work, [])


def test_a_second_run_into_one_output_is_refused_in_one_line(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    number = os.open(output, os.O_RDONLY)
    fcntl.flock(number, fcntl.LOCK_EX)
    try:
        with pytest.raises(ConfigError, match="--output: another run writes there"):
            call("clean", "--input", corpus(tmp_path / "in", 1), "--output", output, *STEP)
    finally:
        os.close(number)
    call("clean", "--input", tmp_path / "in", "--output", output, *STEP)


@pytest.mark.parametrize("command", ["dedup", "clean"])
def test_a_run_killed_while_it_clears_its_work_folder_can_be_repeated(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (command, "--input", corpus(tmp_path / "in", 2), "--output", tmp_path / "out")
    words = (*words, *STEP) if command == "clean" else words
    removed = list[Path]()

    def die_after_plan(folder: Path, **_: object) -> None:
        if (folder / PLAN).exists():
            (folder / PLAN).unlink()
            removed.append(folder)
            raise KeyboardInterrupt

    monkeypatch.setattr("mega_data.task_stages.shutil.rmtree", die_after_plan)
    with pytest.raises((KeyboardInterrupt, Exception)):
        call(*words)
    assert removed
    before = visible(tmp_path / "out")
    monkeypatch.undo()
    call(*words)
    assert visible(tmp_path / "out") == before
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")] == [
        ".mega-data.json"
    ]


@pytest.mark.parametrize("command", ["clean", "dedup"])
def test_a_full_disk_is_one_line_and_the_run_goes_on_after_it(command: str, tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": f"{n} " * 400}) + "\n" for n in range(300))
    (tmp_path / "a.jsonl").write_text(rows)
    words = [command, "--input", tmp_path / "a.jsonl", "--output", tmp_path / "out"]
    words += STEP if command == "clean" else ()

    def limit() -> None:  # as a disk with no room left, for what this process writes
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    result = run(*words, preexec_fn=limit)
    assert result.returncode == 2, result.stderr
    line = result.stderr.splitlines()[-1]
    assert ": not written: found File too large; hint: free disk space" in line
    assert "Traceback" not in result.stderr
    assert run(*words).returncode == 0
    assert len((tmp_path / "out/a.jsonl").read_bytes().splitlines()) > 0


class FailingWork:
    """Work of which one task has a bug."""

    def __init__(self, inputs: int) -> None:
        self.inputs = [f"a path of some length to a shard, number {number}" for number in range(inputs)]

    def __call__(self, task: int) -> dict[str, int]:
        if task == 2:
            raise AttributeError("a bug of ours")
        return {"task": task}


def test_an_exception_in_a_task_is_passed_on_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="a bug of ours") as raised:
        run_tasks([TaskStage("bug", 4, FailingWork(4))], tmp_path, workers=2)
    assert "in __call__" in raised.value.__notes__[0]


def test_a_task_is_sent_to_a_worker_as_two_numbers_however_many_inputs_a_run_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = list[object]()
    send = Connection.send

    def record(self: Connection, value: object) -> None:
        sent.append(value)
        send(self, value)

    monkeypatch.setattr(Connection, "send", record)
    run_tasks([TaskStage("none", 2, FailingWork(2000))], tmp_path, workers=2)
    assert sorted(value for value in sent if isinstance(value, tuple)) == [(0, 0), (0, 1)]


def test_an_unknown_code_of_a_language_is_refused_and_a_run_that_keeps_nothing_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("clean", "--input", corpus(tmp_path / "in", 1), "--output", tmp_path / "out", "--step")
    with pytest.raises(ConfigError, match=r"step language: keep: no such code: found english.*keep=en"):
        call(*words, "language:keep=english")
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit) as exit_error:
        call(*words, "length:minimum=10000")
    assert exit_error.value.code == 1
    assert "note: none of 5 documents is left: exit code 1" in capsys.readouterr().err


def test_ctrl_c_and_sigterm_end_workers_in_the_middle_of_a_shard(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": f"words of document {n}. " * 300}) + "\n" for n in range(4000))
    (tmp_path / "in").mkdir()
    for shard in range(3):
        (tmp_path / f"in/{shard}.jsonl").write_text(rows)
    words = ["clean", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--workers", "2"]
    for sent, code, line in (
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "terminated: run the same"),
    ):
        process = subprocess.Popen(
            [sys.executable, "-m", "mega_data", *words, "--step", "gopher-repetition"],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # a shell gives what it starts in the background a SIGINT that is ignored
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        until = time.monotonic() + 60
        while not list(tmp_path.glob("out/.unfinished/.*.partial")) and time.monotonic() < until:
            time.sleep(0.05)
        if sent == signal.SIGINT:
            os.killpg(process.pid, sent)  # as a terminal sends it
        else:
            process.send_signal(sent)
        began = time.monotonic()
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - began < 10  # seconds; 2 on a machine with nothing else to do
        assert process.returncode == code, err
        assert err.splitlines()[-1].startswith(line), err
        assert "Traceback" not in err
        assert visible(tmp_path / "out") == []
        assert not list(tmp_path.glob("out/.unfinished/.*.partial"))


def test_temporary_files_of_a_killed_clean_are_not_published(tmp_path: Path) -> None:
    words = ("clean", "--input", corpus(tmp_path / "in", 4, broken=3), "--output", tmp_path / "out")
    words = (*words, "--step", "length:minimum=10000", "--keep-dropped")
    with pytest.raises(FormatError):
        call(*words)
    leftover = tmp_path / "out/.unfinished/dropped/00-pass/.0.jsonl.12ab34cd.partial"
    leftover.parent.mkdir(parents=True, exist_ok=True)
    leftover.touch()
    (tmp_path / "in/3.jsonl").write_text((tmp_path / "in/0.jsonl").read_text())
    with pytest.raises(SystemExit):  # no document was kept
        call(*words)
    assert visible(tmp_path / "out/dropped/00-pass") == ["0.jsonl", "1.jsonl", "2.jsonl", "3.jsonl"]
    assert not list((tmp_path / "out").rglob("*.partial"))
