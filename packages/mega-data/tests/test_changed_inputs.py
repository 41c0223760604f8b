"""Commands fail if an input changes between or during the tasks of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mega_data.cli import commands
from mega_data.commands.task_progress import TaskProgress
from mega_data.extract.mediawiki import read_dump
from mega_schema.errors import FormatError

SUFFIXES = (".jsonl", ".bin", ".idx")
FLAGS = {
    "clean": ("--step", "duplicates", "--step", "spans"),
    "dedup": ("--jaccard", "0.5"),
    "extract": ("--split-mb", "1"),
    "preprocess": (
        *("--executor", "local", "--split-mb", "1"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", "9999"),
    ),
}


def document(number: int) -> str:
    return " ".join(str(number * word) for word in range(1, 60))


def make_inputs(folder: Path, command: str) -> list[Path]:
    folder.mkdir()
    if command != "extract":
        count = 100 if command == "preprocess" else 20  # small inputs share a task of preprocess
        for shard in range(3):
            rows = (json.dumps({"text": document(shard % 2 + n)}) + "\n" for n in range(count))
            (folder / f"{shard}.jsonl").write_text("".join(rows))
        return sorted(folder.iterdir())
    for shard, numbers in enumerate((range(2600), range(50))):  # the first is two tasks
        (folder / f"{shard}.xml").write_text(dump(numbers))
    return sorted(folder.iterdir())


def dump(numbers: range) -> str:
    pages = (
        f"<page><title>{n}</title><ns>0</ns><id>{n}</id><text>{document(n)}</text></page>\n" for n in numbers
    )
    return f"<mediawiki>{''.join(pages)}</mediawiki>"


def change(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "longer":
        path.write_bytes(data + data)
    elif how == "shorter":
        lines = data.splitlines(keepends=True)
        path.write_bytes(b"".join([*lines[: len(lines) // 2], *lines[-1:]]))
    elif how == "replaced":
        replacement = path.with_name("new")
        replacement.write_bytes(data.replace(b"1", b"2"))
        replacement.replace(path)
    else:
        path.unlink()


def call(command: str, inputs: Path, output: Path) -> None:
    to = ("--output-prefix", str(output / "p")) if command == "preprocess" else ("--output", str(output))
    words = [command, "--input", str(inputs), *to, *FLAGS[command]]
    commands.main(words, standalone_mode=False)


def read_outputs(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.*")) if path.suffix in SUFFIXES}


COMMANDS = [("clean", 2), ("dedup", 4), ("dedup", 20), ("extract", 1), ("preprocess", 2)]


@pytest.mark.parametrize("how", ["longer", "shorter", "replaced", "deleted"])
@pytest.mark.parametrize(("command", "after"), COMMANDS)
def test_an_input_that_changes_between_tasks_ends_the_run_and_the_next_is_of_the_new_file(
    command: str, after: int, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(tmp_path / "in", command)
    tell, calls = TaskProgress.__call__, 0

    def change_after_some(self: TaskProgress, result: dict[str, object]) -> None:
        nonlocal calls
        tell(self, result)
        calls += 1
        if calls == after:
            change(inputs[0], how)

    with monkeypatch.context() as patch:
        patch.setattr(TaskProgress, "__call__", change_after_some)
        with pytest.raises(
            FormatError, match=rf"{inputs[0].name}: changed while it was read: found .* bytes"
        ):
            call(command, tmp_path / "in", tmp_path / "out")
    assert read_outputs(tmp_path / "out") == {}
    call(command, tmp_path / "in", tmp_path / "out")
    call(command, tmp_path / "in", tmp_path / "whole")
    assert read_outputs(tmp_path / "out") == read_outputs(tmp_path / "whole")


@pytest.mark.parametrize("how", ["longer", "shorter", "replaced", "deleted"])
def test_an_input_that_changes_while_a_task_of_extract_reads_it_ends_the_run_there(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, read = make_inputs(tmp_path / "in", "extract"), list[Path]()

    def change_while_it_is_read(path: Path, *places: int | None):
        read.append(path)
        for number, page in enumerate(read_dump(path, *places)):
            if number == 5:
                change(inputs[0], how)
            yield page

    monkeypatch.setattr("mega_data.extract.mediawiki.read_dump", change_while_it_is_read)
    with pytest.raises(FormatError, match=r"0\.xml: changed while it was read"):
        call("extract", tmp_path / "in", tmp_path / "out")
    assert read == inputs[:1]
    assert read_outputs(tmp_path / "out") == {}


@pytest.mark.parametrize("command", ["clean", "dedup", "preprocess"])
def test_after_a_change_only_the_tasks_of_the_changed_input_are_repeated(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(tmp_path / "in", command)
    tell, labels = TaskProgress.__call__, list[str]()

    def record(self: TaskProgress, result: dict[str, object]) -> None:
        tell(self, result)
        labels.append(self.label)
        if len(labels) == 3:  # all tasks of the first stage
            change(inputs[1], "longer")

    monkeypatch.setattr(TaskProgress, "__call__", record)
    with pytest.raises(FormatError, match=r"1\.jsonl: changed while it was read"):
        call(command, tmp_path / "in", tmp_path / "out")
    monkeypatch.setattr(TaskProgress, "__call__", lambda self, result: labels.append(self.label))
    first_stage = labels[0]
    labels.clear()
    call(command, tmp_path / "in", tmp_path / "out")
    assert labels.count(first_stage) == 1
