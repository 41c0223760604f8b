"""Every flag of the training scripts we read: ours, replaced, left out, or refused with what replaces it.

`script_flags.txt` has the names of Megatron-LM's (core 0.9 and before), its forks' and fairseq's that a
training script may hold. `script_flags_2026.txt` has those of core 0.10 to 0.16 and of the tree of 2026: the
fields of megatron-core 0.16.1's dataclasses that become flags, and those that are declared by hand.
`data/megatron_flags.txt` has every flag of four versions of Megatron-LM, and what DeepSpeed's fork adds.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mega_schema.app.config import config_keys
from mega_train.cli import app
from mega_train.commands.explain import explain_word
from mega_train.compat.flag_translation import MEGATRON_DEFAULTS, refusal_of, suggest_flag, translate_flags
from mega_train.compat.megatron_flags import find_flag, flag_table
from mega_train.config import RunConfig

OURS = {name for key in config_keys(RunConfig) for name in key.declared.split("/")}
OURS |= {"--config", "--set", "--help", MEGATRON_DEFAULTS}
TABLE = flag_table()
HERE = Path(__file__).parent
NAMES = (HERE / "script_flags.txt").read_text("utf-8").split()
NEWER = (HERE / "script_flags_2026.txt").read_text("utf-8").split()
VERSIONS_OF = {
    flag: versions
    for flag, *versions in map(str.split, (HERE / "data/megatron_flags.txt").read_text("utf-8").splitlines())
    if flag != "#"
}
VERSIONS = {"23.06": 223, "0.9": 397, "0.16": 697, "2026": 930, "deepspeed": 81}
THEIRS = [*TABLE.left_out, *TABLE.refused, *TABLE.read_as, *TABLE.in_context]


def test_a_flag_that_we_have_is_in_no_table_of_those_we_lack() -> None:
    assert not OURS & set(THEIRS)
    prefixes = tuple(flag for flag in THEIRS if flag.endswith("-"))
    assert not [flag for flag in OURS if flag.startswith(prefixes)]


def test_a_flag_stands_in_one_table() -> None:
    every = [*THEIRS, *TABLE.values]
    assert len(every) == len(set(every))
    assert all(flag.startswith("--") for flag in every)


def test_replacements_of_flags_are_flags_of_mega_train() -> None:
    words = [word for words in TABLE.read_as.values() for word in words]
    words += [word for values in TABLE.values.values() for words in values.values() for word in words]
    assert {word for word in words if word.startswith("--")} <= OURS


def test_what_is_to_be_given_instead_are_flags_that_we_have() -> None:
    for refusal in TABLE.refused.values():
        named = {word.rstrip(",;:") for word in refusal.instead.split() if word.startswith("--")}
        assert named <= OURS or refusal.instead.startswith("mega-"), refusal


def test_an_embedding_alone_on_its_stage_is_had_as_the_line_says() -> None:
    command = "plan --preset gpt2-124m --num-layers 3 --pipeline-model-parallel-size 4 --seq-length 64"
    hint = TABLE.refused["--standalone-embedding-stage"].instead.split()
    assert CliRunner().invoke(app, [*command.split(), *hint], standalone_mode=False).exception is None


def test_there_are_as_many_names_as_the_scripts_have() -> None:
    assert len(NAMES) == len(set(NAMES)) > 380
    assert len(NEWER) == len(set(NEWER)) > 250
    assert not set(NAMES) & set(NEWER)


@pytest.mark.parametrize("flag", [*NAMES, *NEWER])
def test_a_flag_of_another_program_is_translated_or_refused(flag: str) -> None:
    homes = [flag in table for table in (OURS, TABLE.read_as, TABLE.values, TABLE.in_context)]
    homes.append(find_flag(TABLE.left_out, flag) is not None)
    refused = refusal_of(flag, TABLE)
    assert any(homes) or refused is not None, "nobody's flag"
    if refused is not None:
        assert str(refused).startswith(f"{flag}: ")
    assert list(explain_word(flag))


def test_the_list_has_every_flag_of_a_version() -> None:
    every = [version for versions in VERSIONS_OF.values() for version in versions]
    assert {version: every.count(version) for version in VERSIONS} == VERSIONS
    assert set(every) == set(VERSIONS)
    assert list(VERSIONS_OF) == sorted(VERSIONS_OF)


@pytest.mark.parametrize("version", VERSIONS)
def test_training_does_with_a_flag_what_explain_says(version: str) -> None:
    for flag, versions in VERSIONS_OF.items():
        if version not in versions:
            continue
        first, *_ = explain_word(flag)
        result = translate_flags([flag, "1"], OURS)
        says, acts = first.removeprefix(flag).strip(), "\n".join(map(str, result.refused))
        if says.startswith("is left out: "):
            assert result.left_out == {flag: says.removeprefix("is left out: ")}, flag
            assert not result.words, flag
        elif says.startswith("is refused: "):
            assert acts == f"{flag}: {says.removeprefix('is refused: ')}"
        else:
            assert flag in {*OURS, *TABLE.read_as, *TABLE.values, *TABLE.in_context}, flag
            assert result.words or flag in {*TABLE.values, *TABLE.in_context}, flag
            assert not acts or flag in {*TABLE.values, *TABLE.in_context}, flag


def test_refused_flags_of_a_version_end_a_start_with_code_2_in_one_table() -> None:
    explanations = {
        flag: next(explain_word(flag)) for flag, versions in VERSIONS_OF.items() if "2026" in versions
    }
    flags = [flag for flag, line in explanations.items() if "   is refused: " in line]
    command = [sys.executable, "-m", "mega_train", "gpt", *flags]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert process.returncode == 2
    heading, *rows, line = process.stderr.splitlines()
    assert heading.split() == ["flag", "why", "instead"]
    assert [row.split()[0] for row in rows if row.startswith("--")] == flags
    assert line.startswith(f"error: command line: {len(flags)} arguments are refused, listed above")


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--num-layer", "did you mean --num-layers?"),
        ("--vocab-sise", "did you mean --vocab-size?"),
        ("--recompute-g", "did you mean --recompute-granularity?"),  # argparse takes a unique beginning
        ("--wandb", ""),
        ("--mixture", ""),
        ("--moe", ""),
        ("--attention", "did you mean --attention-dropout?"),
    ],
)
def test_an_unknown_flag_is_refused_with_a_suggestion(flag: str, hint: str) -> None:
    assert refusal_of(flag, TABLE) is None
    (error,) = translate_flags([flag, "3"], OURS).refused
    assert str(error) == f"{flag}: no such option" + (f"; hint: {hint}" if hint else "")
    assert suggest_flag(flag, OURS, TABLE) == hint
