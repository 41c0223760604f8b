"""The command as a person meets it: one line for a mistake, and nothing heavy before it is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mega_schema.spec import ModelSpec


def _command(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mega_ckpt", *map(str, words)], capture_output=True, text=True
    )


def test_help_needs_no_numpy_and_nothing_here_needs_torch() -> None:
    code = "import sys, mega_ckpt.cli; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    code = (
        "import sys, mega_ckpt.reshard, mega_ckpt.convert, mega_ckpt.inspect, mega_ckpt.layouts.megatron;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("verify", "nowhere"),
            "error: nowhere: no such folder: wanted a checkpoint or the folder of a run; hint: ls .\n",
        ),
        (("inspect", "."), "error: .: holds no finished checkpoint: found no checkpoint"),
        (("reshard", "--load", "nowhere", "--save", "new"), "error: nowhere: no such folder"),
        (("reshard", "--load", "a", "--save", "b", "--tp", "0"), "error: --tp: 0 is not in the range"),
        (
            ("convert", "--from", "hf", "--to", "mega", "--load", "x", "--save", "y"),
            "error: x: has no config.json",
        ),
        (
            ("convert", "--from", "mega", "--to", "mega", "--load", "x", "--save", "y"),
            "hint: mega-ckpt reshard --load x --save y\n",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = _command(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_hint_of_a_layout_that_does_not_divide_can_be_pasted(
    run_folder: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    words = ("reshard", "--load", run_folder(small_gpt), "--save", tmp_path / "new")
    done = _command(*words, "--tp", 3)
    assert done.returncode == 2
    hint = done.stderr.split("hint: ")[1].split()
    assert _command(*words, *hint).returncode == 0


def test_version_and_module_are_the_command() -> None:
    assert _command("--version").stdout.startswith("mega-ckpt, version ")
