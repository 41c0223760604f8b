"""Which checkpoint an engine loads that is started again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mega_schema.checkpoint.checkpoint_dir import MANIFEST, iteration_folder
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import FormatError
from mega_schema.spec import ModelSpec
from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_serve.execution.served_checkpoint import load_served
from tests.serving.random_checkpoint import save_random_checkpoint


@pytest.fixture
def run(tmp_path: Path, spec: ModelSpec, tokenizer: Tokenizer) -> Path:
    """A run with the iterations 7, 8 and 9."""
    tokenizer.save(tmp_path / "words")
    for iteration in (7, 8, 9):
        save_random_checkpoint(tmp_path, spec, tmp_path / "words", iteration=iteration)
    return tmp_path


def load_iteration(folder: Path) -> int:
    return Checkpoint.open(folder).iteration


def test_the_first_engine_loads_the_latest_checkpoint(run: Path) -> None:
    assert load_served(run, None, load_iteration, follow=False) == 9


@pytest.mark.parametrize("follow", [False, True])
def test_an_engine_that_is_started_again_keeps_its_checkpoint(run: Path, follow: bool) -> None:
    assert load_served(run, 7, load_iteration, follow=follow) == 7
    shutil.rmtree(iteration_folder(run, 9))  # the tracker names it still
    assert load_served(run, 7, load_iteration, follow=follow) == 7


def test_the_folder_of_one_checkpoint_is_loaded_itself(run: Path) -> None:
    assert load_served(iteration_folder(run, 8), 8, load_iteration, follow=False) == 8


def test_a_removed_checkpoint_is_replaced_by_the_newest_readable_one_of_a_followed_run(run: Path) -> None:
    shutil.rmtree(iteration_folder(run, 7))
    (iteration_folder(run, 9) / MANIFEST).write_text("{")
    assert load_served(run, 7, load_iteration, follow=True) == 8
    with pytest.raises(FormatError, match="iter_0000007"):
        load_served(run, 7, load_iteration, follow=False)


def test_without_a_readable_checkpoint_the_error_is_about_the_served_one(run: Path) -> None:
    for iteration in (7, 8, 9):
        (iteration_folder(run, iteration) / MANIFEST).write_text("{")
    with pytest.raises(FormatError, match="iter_0000007"):
        load_served(run, 7, load_iteration, follow=True)
