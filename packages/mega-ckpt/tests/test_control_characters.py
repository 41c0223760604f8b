"""No command prints control characters of a file to the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mega_ckpt.operations import diff as differ
from mega_ckpt.operations.diff import DiffResult, TensorDifference
from mega_schema.checkpoint.checkpoint_dir import FORMAT
from mega_schema.checkpoint.side_files import rewrite_checksums
from mega_schema.checkpoint.tracker import latest_checkpoint
from mega_schema.spec import ModelSpec

Make = Callable[..., Path]
CLIPBOARD = "\x1b]52;c;ZXZpbA==\x07\x9b2J\u202e"
ESCAPED = r"\x1b]52;c;ZXZpbA==\x07\x9b2J\u202e"


def rewritten(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change a checkpoint's manifest as its author could have written it, checksums included."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    rewrite_checksums(folder, FORMAT)
    return folder


def with_tensor(manifest: dict[str, Any]) -> None:
    model = manifest["tensors"]["model"]
    model[CLIPBOARD] = model["final_norm.weight"]


def printed_lines(result: Any) -> list[str]:
    """The lines on the terminal, those of the error included."""
    assert type(result.exception) is not SystemExit or result.exit_code in (0, 1)
    message = str(result.exception) if result.exit_code == 1 and result.exception else ""
    return [*result.output.splitlines(), *message.splitlines()]


def check(lines: list[str]) -> None:
    assert any(ESCAPED in line for line in lines), lines
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("more", [(), ("--tensors",)], ids=str)
def test_inspect_escapes_what_a_manifest_says(
    run_folder: Make, small_gpt: ModelSpec, mega: Any, more: tuple[str, ...]
) -> None:
    def change(manifest: dict[str, Any]) -> None:
        with_tensor(manifest)
        manifest["layout"] = {CLIPBOARD: 1} if not more else manifest["layout"]

    check(printed_lines(mega("inspect", rewritten(latest_checkpoint(run_folder(small_gpt)), change), *more)))


def test_inspect_escapes_what_a_foreign_folder_says(hf_folder: Make, small_gpt: ModelSpec, mega: Any) -> None:
    folder = hf_folder(small_gpt, config={"eos_token_id": "\x9b2J\x1b"})
    lines = printed_lines(mega("inspect", folder))
    assert r'not supported by Mega: eos_token_id "\u009b2J\u001b"' in lines
    assert all(line.isprintable() for line in lines)


def test_convert_escapes_what_it_leaves_behind(
    hf_folder: Make, small_gpt: ModelSpec, mega: Any, tmp_path: Path
) -> None:
    folder = hf_folder(small_gpt, config={"eos_token_id": "\x9b2J\x1b"})
    lines = printed_lines(
        mega("convert", "--from", "hf", "--to", "mega", "--load", folder, "--save", tmp_path / "run")
    )
    assert r'dropped: eos_token_id "\u009b2J\u001b"' in lines
    assert all(line.isprintable() for line in lines)


def test_diff_escapes_names(
    run_folder: Make, small_gpt: ModelSpec, mega: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_folder(small_gpt)
    apart = TensorDifference("model", CLIPBOARD, "missing", "F32", None)
    result = DiffResult(1, (apart,), (CLIPBOARD,), ())
    monkeypatch.setattr(differ, "diff_checkpoints", lambda *_, **__: result)
    lines = printed_lines(mega("diff", run, run))
    check(lines)
    assert sum(ESCAPED in line for line in lines) == 2
    monkeypatch.undo()
    check(printed_lines(mega("diff", rewritten(latest_checkpoint(run), with_tensor), run)))


def test_verify_escapes_names(run_folder: Make, small_gpt: ModelSpec, mega: Any) -> None:
    run = run_folder(small_gpt)
    (latest_checkpoint(run) / "tokenizer" / CLIPBOARD.replace("/", "")).touch()
    check(printed_lines(mega("verify", run)))
    check(printed_lines(mega("verify", run, "--accept")))
    check(printed_lines(mega("verify", rewritten(latest_checkpoint(run), with_tensor))))
