"""Errors of a run's tracker; each has a hint with a command that repairs it."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from mega_schema.checkpoint.checkpoint_dir import LATEST, MANIFEST, iteration_folder
from mega_schema.checkpoint.tracker import latest_checkpoint, latest_iteration
from mega_schema.errors import CorruptFileError, FormatError


def run_of(folder: Path, *iterations: int, tracker: str | None = None) -> Path:
    """Make a run's folder with the names of its checkpoints alone."""
    folder.mkdir(parents=True, exist_ok=True)
    for iteration in iterations:
        iteration_folder(folder, iteration).mkdir()
        (iteration_folder(folder, iteration) / MANIFEST).touch()
    if tracker is not None:
        (folder / LATEST).write_text(tracker)
    return folder


def refusal(run: Path) -> FormatError:
    with pytest.raises(FormatError) as caught:
        latest_checkpoint(run)
    return caught.value


@pytest.mark.parametrize("tracker", [None, "", "\n", "banana", "30", "9" * 5000])
def test_the_hint_of_a_tracker_that_names_no_checkpoint_mends_it(tmp_path: Path, tracker: str | None) -> None:
    run = run_of(tmp_path / "run", 10, 20, tracker=tracker)
    mend, _, check = refusal(run).hint.partition(", once ")
    assert check == f"mega-ckpt verify {run}/iter_0000020 reports it as sound"
    subprocess.run(["/bin/sh", "-c", mend], check=True)
    assert latest_iteration(run) == 20


def test_a_tracker_that_names_no_folder_is_a_damage_and_others_are_not(tmp_path: Path) -> None:
    assert isinstance(refusal(run_of(tmp_path / "gone", 10, tracker="30")), CorruptFileError)
    assert not isinstance(refusal(run_of(tmp_path / "empty", 10, tracker="")), CorruptFileError)


def test_a_tracker_without_any_checkpoint_is_not_mended(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", tracker="")
    assert refusal(run).hint == f"name another folder: {run} has no checkpoint"


def test_a_folder_that_does_not_exist_is_told_with_what_is_there(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 10, tracker="10")
    for missing, listed in ((tmp_path / "a/b", str(tmp_path)), (run / "iter_0000011", f"-d {run}/iter_*")):
        message = refusal(missing)
        assert (message.where, message.what) == (missing, "no such folder")
        assert message.hint == f"ls {listed}"


def test_a_file_in_the_place_of_a_folder_is_told(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 10, tracker="10")
    message = refusal(run / "iter_0000010" / MANIFEST)
    assert (message.what, message.hint) == ("is a file", f"name {run / 'iter_0000010'}")
    assert refusal(run / LATEST).hint == f"ls {run}"


@pytest.mark.parametrize(
    ("mark", "form"),
    [
        ("config.json", "hf"),
        ("params.json", "meta"),
        ("iter_0000010/mp_rank_00/model_optim_rng.pt", "megatron"),
    ],
)
@pytest.mark.parametrize("tracker", [None, "10", "release"])
def test_a_checkpoint_of_another_program_is_told_with_the_command_that_converts_it(
    tmp_path: Path, mark: str, form: str, tracker: str | None
) -> None:
    folder = run_of(tmp_path / "theirs", tracker=tracker)
    (folder / mark).parent.mkdir(parents=True, exist_ok=True)
    (folder / mark).touch()
    words = shlex.split(refusal(folder).hint)
    assert words[:6] == ["mega-ckpt", "convert", "--from", form, "--to", "mega"]
    assert words[words.index("--load") + 1] == str(folder)


def test_the_run_in_a_folder_of_runs_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path).hint == "name a folder that a run has saved to"
    run = run_of(tmp_path / "small", 10, tracker="10")
    assert refusal(tmp_path).hint == f"name a run's folder, such as {run}"


def test_a_run_that_has_begun_its_first_checkpoint_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / ".iter_0000010.partial").mkdir()
    assert refusal(tmp_path).hint == "wait for the run's first save, or restart it"
