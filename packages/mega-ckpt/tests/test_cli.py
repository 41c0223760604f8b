"""The command line: one-line errors, and no slow imports before they are needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mega_ckpt.formats.registry import NAMES, WRITTEN, format_of
from mega_schema.spec import ModelSpec


def _command(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mega_ckpt", *map(str, words)], capture_output=True, text=True
    )


def test_help_needs_no_numpy_and_nothing_here_needs_torch() -> None:
    code = "import sys, mega_ckpt.cli; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    code = (
        "import sys, mega_ckpt.operations.reshard, mega_ckpt.operations.convert;"
        "import mega_ckpt.operations.inspect, mega_ckpt.formats.megatron.names;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("verify", "nowhere"),
            "error: nowhere: no such folder: wanted a checkpoint or the folder of a run; hint: ls .\n",
        ),
        (("inspect", "."), "error: .: contains no finished checkpoint: found no checkpoint"),
        (("reshard", "--load", "nowhere", "--save", "new"), "error: nowhere: no such folder"),
        (
            ("reshard", "--load", "a", "--save", "b", "--tp", "0"),
            "error: --tp: out of range: found 0, wanted at least 1",
        ),
        (
            ("convert", "--from", "hf", "--to", "mega", "--load", "x", "--save", "y"),
            "error: x: no such file or folder; hint: ls .\n",
        ),
        (
            ("convert", "--from", "hf", "--to", "mega", "--load", "meta-llama/Llama", "--save", "y"),
            "hint: of Hugging Face's hub? hf download meta-llama/Llama --local-dir Llama-hf\n",
        ),
        (
            ("convert", "--from", "hf", "--to", "fairseq", "--load", "x", "--save", "y"),
            "--to: is a read-only format: found fairseq, wanted mega | hf | meta | megatron",
        ),
        (
            ("convert", "--from", "torch_dist", "--to", "mega", "--load", "/no/x", "--save", "y"),
            "error: /no/x: no such file or folder; hint: ls /\n",
        ),
        (
            ("convert", "--from", "mega", "--to", "mega", "--load", "x", "--save", "y"),
            "hint: mega-ckpt reshard --load x --save y\n",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = _command(*words)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [
        ("reshard", "--load", "run"),
        ("average", "run"),
        *(("convert", "--from", "mega", "--load", "run", "--to", name) for name in WRITTEN if name != "mega"),
        ("convert", "--from", "hf", "--load", "hf", "--to", "mega"),
        ("export-tokenizer", "run"),
    ],
    ids=" ".join,
)
def test_a_file_where_a_folder_is_to_be_written_is_named_with_its_flag(
    run_folder: Any,
    hf_folder: Any,
    small_llama: ModelSpec,
    mega: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    run_folder(small_llama)
    hf_folder(small_llama)
    Path("c.jsonl").write_text("{}")
    message = str(mega(*command, "--save", "c.jsonl").exception)
    assert message == "--save: is a file: found c.jsonl, wanted a folder"
    message = str(mega(*command, "--save", "c.jsonl/new/run").exception)
    assert message == "--save: is below a file: found c.jsonl, wanted a folder"
    assert Path("c.jsonl").read_text() == "{}"


def test_the_formats_that_are_only_read_are_not_offered_to_write() -> None:
    assert [name for name in NAMES if format_of(name).write is not None] == [*WRITTEN]
    offered = _command("convert", "--help").stdout.partition("--to [")[2].partition("]")[0]
    assert offered == "|".join(WRITTEN)


def test_the_hint_of_a_layout_that_does_not_divide_can_be_pasted(
    run_folder: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    words = ("reshard", "--load", run_folder(small_gpt), "--save", tmp_path / "new")
    result = _command(*words, "--tp", 3)
    assert result.returncode == 2
    hint = result.stderr.split("hint: ")[1].split()
    assert _command(*words, *hint).returncode == 0


def test_version_and_module_are_the_command() -> None:
    assert _command("--version").stdout.startswith("mega-ckpt, version ")
