"""Errors for --load of another program's checkpoint; no conversion runs here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mega_model.distributed.mesh import World
from mega_schema.errors import FormatError, MegaError
from mega_train.checkpointing import foreign_checkpoint
from mega_train.checkpointing.foreign_checkpoint import convert_foreign_load
from mega_train.commands.config_diff import resolve_for_display
from mega_train.config import CheckpointConfig, ParallelConfig, RunConfig

ALONE = World(1)


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    """A folder that looks like Hugging Face's."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    return tmp_path / "hf"


def _run(load: Path | None, save: Path | None = None, pretrained: Path | None = None) -> RunConfig:
    return RunConfig(checkpoint=CheckpointConfig(load=load, save=save, pretrained=pretrained))


def _refusal(run: RunConfig, world: World = ALONE) -> str:
    with pytest.raises(MegaError) as caught:
        convert_foreign_load(run, world)
    return str(caught.value)


def test_a_checkpoint_of_ours_and_a_run_that_begins_anew_are_left_as_they_are(tmp_path: Path) -> None:
    run = _run(tmp_path / "r", tmp_path / "r")
    assert convert_foreign_load(run, ALONE) is run
    assert convert_foreign_load(_run(None), ALONE) == _run(None)
    (tmp_path / "r" / "iter_0000001").mkdir(parents=True)
    (tmp_path / "r" / "iter_0000001" / "manifest.json").write_text("{}")
    (tmp_path / "r" / "config.json").write_text("{}")
    assert convert_foreign_load(run, ALONE) is run


def test_without_save_there_is_no_place_for_the_copy(hf: Path) -> None:
    command = f"mega-ckpt convert --from hf --to mega --load {hf} --save CONVERTED"
    assert _refusal(_run(hf)) == (
        "--load: is a Hugging Face folder, and its converted copy needs a folder: "
        f"found {hf}, wanted --save; the copy is written next to it; hint: --save RUN, or {command}"
    )


def test_without_mega_ckpt_the_line_says_what_to_install_and_nothing_is_written(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_checkpoint, "_CONVERTER", "no_such_package_of_ours")
    refusal = _refusal(_run(hf, tmp_path / "run"))
    assert refusal.startswith(
        "--load: is a Hugging Face folder, and mega-ckpt, which converts it, is not installed"
    )
    assert 'pip install -e "packages/mega-ckpt", or elsewhere mega-ckpt convert --from hf' in refusal
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_converter_that_fails_is_one_line_and_leaves_nothing(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_checkpoint, "_CONVERTER", "json")  # a module that cannot be run so
    with pytest.raises(
        FormatError, match="^--load .*hf: cannot be converted: found .*; hint: mega-ckpt convert"
    ):
        convert_foreign_load(_run(hf, tmp_path / "run"), ALONE)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_folder_that_is_no_copy_is_not_written_over(hf: Path, tmp_path: Path) -> None:
    user_file = tmp_path / "run.converted" / "thesis.txt"
    user_file.parent.mkdir()
    user_file.write_text("mine")
    refusal = _refusal(_run(hf, tmp_path / "run"))
    assert refusal.startswith(
        f"--load: the folder for its converted copy is taken: found {user_file.parent}, "
    )
    assert user_file.read_text() == "mine"


def test_a_run_does_not_save_into_the_checkpoint_of_another_program(hf: Path) -> None:
    assert _refusal(_run(hf, hf)).startswith(
        "--save: contains a checkpoint of another program: found a Hugging "
    )


def test_a_pretrained_checkpoint_counts_only_where_load_holds_nothing(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_checkpoint, "_CONVERTER", "no_such_package_of_ours")
    new = tmp_path / "new"
    assert _refusal(_run(new, new, hf)).startswith("--pretrained-checkpoint: is a Hugging Face folder")
    begun = tmp_path / "begun" / "iter_0000001"
    begun.mkdir(parents=True)
    (begun / "manifest.json").write_text("{}")
    run = _run(begun.parent, begun.parent, hf)
    assert convert_foreign_load(run, ALONE) is run


def test_files_of_weights_are_told_the_folder_or_the_command(hf: Path, tmp_path: Path) -> None:
    weights = hf / "model.safetensors"
    weights.touch()
    assert _refusal(_run(weights)).endswith(f"hint: --load {hf}")
    (tmp_path / "loose").mkdir()
    (tmp_path / "loose" / "model.bin").touch()
    refusal = _refusal(_run(tmp_path / "loose"))
    assert refusal.startswith("--load: contains weights of an unknown format: found ")
    assert "hint: mega-ckpt convert --from FORMAT --to mega --load" in refusal


def test_validate_refuses_what_cannot_be_converted_and_converts_nothing(hf: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"^--load .*hf: cannot be converted: found .*config.json"):
        resolve_for_display(_run(hf, tmp_path / "run"), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_rank_that_waits_gives_up_where_the_first_shows_no_sign_of_life(hf: Path, tmp_path: Path) -> None:
    run = replace(_run(hf, tmp_path / "run"), parallel=ParallelConfig(timeout_minutes=0.01))
    refusal = _refusal(run, World(2, rank=1))
    assert refusal.startswith(f"{tmp_path / 'run.converted'}: rank 0 has not converted the checkpoint")
