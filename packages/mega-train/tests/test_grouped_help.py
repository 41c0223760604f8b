"""Help of the training commands: everyday options fit a screen or two, and the rest is grouped by section."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from mega_schema.app.config import config_keys
from mega_train.cli import app
from mega_train.commands.grouped_help import EVERYDAY, TITLES
from mega_train.config import RunConfig

SCREEN = 34  # lines of a terminal window


def _help(command: str, flag: str = "--help") -> str:
    result = CliRunner().invoke(app, [command, flag])
    assert result.exit_code == 0, result.output
    return result.output


def _position(text: str, flag: str) -> int:
    """Where the option is described: at the start of a line."""
    return text.index(f"\n  {flag}")


@pytest.mark.parametrize("command", ["gpt", "llama", "prefix", "finetune", "plan", "validate"])
def test_help_fits_two_screens_of_80_columns(command: str) -> None:
    lines = _help(command).splitlines()
    assert len(lines) <= 2 * SCREEN
    assert max(map(len, lines)) <= 80


def test_help_begins_with_the_everyday_options_and_names_the_way_to_the_rest() -> None:
    text = _help("gpt")
    positions = [_position(text, flag) for flag in EVERYDAY]
    assert positions == sorted(positions)
    assert "--help-all" in text
    assert "--wandb-project" not in text
    sections = {key.section for key in config_keys(RunConfig)}
    assert all(f"\n  {section} " in text for section in sections), text


@pytest.mark.parametrize("command", ["gpt", "llama", "plan", "validate"])
def test_help_all_describes_every_option_once_below_its_section(command: str) -> None:
    text = _help(command, "--help-all")
    headings = {
        section: text.index(f"\n[{section}]") for section in {key.section for key in config_keys(RunConfig)}
    }
    order = sorted(headings.values())
    for key in config_keys(RunConfig):
        below = headings[key.section]
        after = next((heading for heading in order if heading > below), len(text))
        names = [line.split()[0].rstrip(",") for line in text[below:after].splitlines() if line[2:4] == "--"]
        assert names.count(key.flag) == 1, key.flag


def test_help_of_a_command_lists_its_own_options_too() -> None:
    for flag in ("--help", "--help-all"):
        text = _help("plan", flag)
        assert _position(text, "--hardware") < _position(text, "--num-layers")


@pytest.mark.parametrize(
    ("command", "flags", "absent"),
    [
        ("prefix", ["--data-path", "--loss-on-targets-only", "--noise-density"], ["--task"]),
        (
            "finetune",
            ["--task", "--train-data", "--valid-data", "--epochs"],
            ["--data-path", "--train-iters"],
        ),
    ],
)
def test_help_begins_with_the_options_of_the_command(
    command: str, flags: list[str], absent: list[str]
) -> None:
    text = _help(command)
    positions = [_position(text, flag) for flag in flags]
    assert positions == sorted(positions)
    assert not any(f"\n  {flag}" in text for flag in absent)


def test_every_everyday_option_is_one_of_the_program() -> None:
    known = {key.flag for key in config_keys(RunConfig)} | {"--config"}
    assert set(EVERYDAY) <= known


def test_every_section_has_a_title() -> None:
    assert list(TITLES) == list(dict.fromkeys(key.section for key in config_keys(RunConfig)))
