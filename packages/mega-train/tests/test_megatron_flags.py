"""Every flag of the training scripts we read: ours, put right, left out, or refused with what replaces it.

`their_flags.txt` has the names of Megatron-LM's (core 0.9 and before), its forks' and fairseq's that a
training script may hold.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from mega_schema.config import keys
from mega_train.cli import app
from mega_train.config import Run
from mega_train.familiar import explained, find, translated
from mega_train.megatron_flags import ABSENT, ALIKE, INSTEAD, MEANS, NEEDLESS, READ

OURS = {name for key in keys(Run) for name in key.declared.split("/")} | {"--config", "--set", "--help"}
TABLES = (NEEDLESS, ALIKE, READ, INSTEAD, ABSENT)
THEIRS = [flag for table in TABLES for flag in table]
NAMES = (Path(__file__).parent / "their_flags.txt").read_text("utf-8").split()


def test_a_flag_that_we_have_is_in_no_table_of_those_we_lack() -> None:
    assert not OURS & set(THEIRS)
    prefixes = tuple(flag for flag in THEIRS if flag.endswith("-"))
    assert not [flag for flag in OURS if flag.startswith(prefixes)]


def test_a_flag_stands_in_one_table() -> None:
    assert len(THEIRS) == len(set(THEIRS))
    assert all(flag.startswith("--") for flag in THEIRS)


def test_what_stands_for_a_flag_is_ours() -> None:
    words = [word for words in ALIKE.values() for word in words]
    words += [word for values in MEANS.values() for words in values.values() for word in words]
    assert {word for word in words if word.startswith("--")} <= OURS


def test_a_hint_names_only_flags_that_we_have() -> None:
    for hint in (*INSTEAD.values(), *ABSENT.values()):
        named = {word.rstrip(",;:") for word in hint.split() if word.startswith("--")}
        assert named <= OURS or hint.startswith(("mega-", "torchrun")), hint


def test_an_embedding_alone_on_its_stage_is_had_as_the_line_says() -> None:
    said = "plan --preset gpt2-124m --num-layers 3 --pipeline-model-parallel-size 4 --seq-length 64"
    hint = INSTEAD["--standalone-embedding-stage"].split()
    assert CliRunner().invoke(app, [*said.split(), *hint], standalone_mode=False).exception is None


def test_there_are_as_many_names_as_the_scripts_have() -> None:
    assert len(NAMES) == len(set(NAMES)) > 380


@pytest.mark.parametrize("flag", NAMES)
def test_a_flag_of_theirs_is_read_or_answered(flag: str) -> None:
    homes = [flag in OURS, flag in ALIKE, flag in MEANS and flag not in OURS, flag in READ]
    homes += [find(NEEDLESS, flag) is not None, find(INSTEAD, flag) is not None]
    refused = explained(flag)
    assert any(homes) or refused is not None, "nobody's flag"
    if refused is not None:
        assert str(refused).startswith(f"{flag}: ")


@pytest.mark.parametrize("flag", ["--num-layer", "--tensorboard", "--moe"])
def test_a_flag_that_is_not_megatrons_is_left_to_the_speller(flag: str) -> None:
    assert explained(flag) is None
    assert translated([flag, "3"]).words == [flag, "3"]
