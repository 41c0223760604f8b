"""Error messages of common mistakes, compared word by word.

`messages.txt` holds the command lines and, below each, the one line that must appear on stderr. Review it as
prose.
"""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests import fork_server
from tests.repo_rules import faulty_inputs
from tests.repo_rules.repository import PROGRAMS

BLOCKS = Path(__file__).with_name("messages.txt").read_text("utf-8").strip().split("\n\n")
MESSAGES = dict(block.removeprefix("$ ").split("\n") for block in BLOCKS if not block.startswith("#"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mistakes")
    faulty_inputs.make(path)
    return path


def run(
    words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line, in this process, where torch is imported once."""
    module = words[0].replace("-", "_")
    if words[0] == "mega-serve":  # opens its port first and answers signals: a process of its own can
        process = fork_server.run(module, words[1:], imports=fork_server.SERVER, cwd=folder)
        return process.returncode, process.stdout, process.stderr
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as left:
        importlib.import_module(f"{module}.cli").main()
    captured = capfd.readouterr()
    assert isinstance(left.value.code, int)
    return left.value.code, captured.out, captured.err


@pytest.mark.parametrize("line", MESSAGES)
def test_a_mistake_is_answered_by_this_line_and_exit_code_2(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = all_files(folder)
    code, out, err = run(shlex.split(line), folder, monkeypatch, capfd)
    assert (code, out, err.count("\n"), err[-1:]) == (2, "", 1, "\n"), err
    if "…" in MESSAGES[line]:
        assert re.fullmatch(re.escape(MESSAGES[line]).replace("…", ".*"), err.rstrip("\n")), err
    else:
        assert err == MESSAGES[line] + "\n"
    assert all_files(folder) == before  # a mistake leaves nothing behind


def test_every_program_has_mistakes_in_the_list() -> None:
    assert {line.split()[0] for line in MESSAGES} == set(PROGRAMS)


def test_messages_stand_once_and_never_blame() -> None:
    assert len(MESSAGES) == sum(block.startswith("$ ") for block in BLOCKS)
    assert len(MESSAGES) > 50
    for message in MESSAGES.values():
        assert message.startswith("error: ")
        assert not {"invalid", "bad", "illegal", "please", "sorry", "oops"} & set(message.lower().split())


def all_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
