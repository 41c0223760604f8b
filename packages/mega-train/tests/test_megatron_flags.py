"""Flags of Megatron's launch scripts that we do not have."""

from __future__ import annotations

import pytest

from mega_schema.config import keys
from mega_train.config import Run
from mega_train.megatron_flags import ABSENT, INSTEAD, NEEDLESS, explained

OURS = {key.flag for key in keys(Run)} | {"--config", "--set", "--help"}
THEIRS = [*NEEDLESS, *INSTEAD, *ABSENT]


def test_a_flag_that_we_have_is_in_no_table_of_those_we_lack() -> None:
    assert not OURS & set(THEIRS)
    prefixes = tuple(flag for flag in THEIRS if flag.endswith("-"))
    assert not [flag for flag in OURS if flag.startswith(prefixes)]


def test_a_flag_stands_in_one_table() -> None:
    assert len(THEIRS) == len(set(THEIRS))
    assert all(flag.startswith("--") for flag in THEIRS)


def test_a_hint_names_only_flags_that_we_have() -> None:
    for hint in (*INSTEAD.values(), *ABSENT.values()):
        named = {word.rstrip(",;") for word in hint.split() if word.startswith("--")}
        assert named <= OURS, hint


def test_needless_flags_are_told_all_at_once_and_others_are_not() -> None:
    told = explained(
        "--use-flash-attn",
        ["gpt", "--one-logger-project", "x", "--use-flash-attn", "--fp16", "--one-logger-project"],
    )
    assert str(told).endswith("hint: leave it out, and also --one-logger-project")


@pytest.mark.parametrize("flag", ["--num-layer", "--tensorboard", "--moe"])
def test_a_flag_that_is_not_megatrons_is_left_to_the_speller(flag: str) -> None:
    assert explained(flag) is None
