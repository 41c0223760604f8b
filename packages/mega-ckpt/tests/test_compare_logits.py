"""Comparison of logits if transformers fails; timing and flushing of a conversion."""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mega_ckpt.operations import convert as converting
from mega_ckpt.operations.compare_logits import LogitsDifference
from mega_ckpt.operations.convert import convert
from mega_schema.errors import FormatError
from mega_schema.spec import ModelSpec

LIKE = LogitsDifference(1, 0.0, 0.0, 1e-4, ("one", "other"))


class FailingModelClass:
    """A class of transformers whose models cannot be made, or have other tensors."""

    config_class = SimpleNamespace

    def __init__(self, error: Exception | None, unexpected: tuple[str, ...] = ()) -> None:
        self.error, self.unexpected = error, unexpected

    def from_pretrained(self, folder: None, **options: Any) -> tuple[Any, dict[str, Any]]:
        if self.error is not None:
            raise self.error

        def run(token_BS: Any, use_cache: bool) -> Any:
            import torch

            return SimpleNamespace(logits=torch.zeros(*token_BS.shape, 11))

        return run, {"unexpected_keys": self.unexpected, "missing_keys": ()}


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package of that name which has no class yet."""
    stub: Any = ModuleType("transformers")
    stub.__spec__ = importlib.machinery.ModuleSpec("transformers", None)
    stub.__version__ = "9.9"
    info = dict.fromkeys(
        ("set_verbosity", "set_verbosity_error", "disable_progress_bar", "enable_progress_bar"),
        lambda *_: None,
    )
    logging = SimpleNamespace(get_verbosity=lambda: 30, is_progress_bar_enabled=lambda: True, **info)
    stub.utils = SimpleNamespace(logging=logging)
    monkeypatch.setitem(sys.modules, "transformers", stub)
    return stub


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("You set `ignore_mismatched_sizes`\nto False"),
        ValueError("unknown rope type"),
        KeyError("factor"),
        AttributeError("no attribute"),
        ImportError("needs torch 9"),
        ZeroDivisionError("division by zero"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_model_that_transformers_cannot_make_is_one_line_and_the_result_stays(
    transformers: Any, run_folder: Any, small_gpt: ModelSpec, tmp_path: Path, error: Exception
) -> None:
    transformers.GPT2LMHeadModel = FailingModelClass(error)
    with pytest.raises(FormatError) as caught:
        convert(run_folder(small_gpt), tmp_path / "out", "mega", "hf", check=None)
    message = str(caught.value)
    assert message.startswith(
        f"{tmp_path / 'out'}: transformers 9.9 does not run the model: found {type(error).__name__} "
    )
    assert message.endswith("; hint: --no-check-logits, or another release of transformers")
    assert message.isprintable()
    assert (tmp_path / "out/model.safetensors").is_file()


def test_tensors_that_transformers_does_not_know_are_named(
    transformers: Any, run_folder: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    transformers.GPT2LMHeadModel = FailingModelClass(None, ("transformer.more",))
    with pytest.raises(FormatError, match="out: transformers reads other tensors: found transformer.more"):
        convert(run_folder(small_gpt), tmp_path / "out", "mega", "hf", check=8)


@pytest.mark.parametrize("broken", [False, True])
def test_a_release_without_the_class_leaves_both_sides_to_the_reference_forward(
    transformers: Any,
    run_folder: Any,
    small_gpt: ModelSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broken: bool,
) -> None:
    if broken:  # as a release does that lacks one of its own parts
        monkeypatch.setattr(transformers, "__getattr__", _raise, raising=False)
    logits = convert(run_folder(small_gpt), tmp_path / "out", "mega", "hf", check=8).logits
    assert logits is not None
    assert logits.by == ("the reference forward", "the reference forward")
    assert "mapping of their names is not checked" in str(logits)


def _raise(name: str) -> None:
    raise RuntimeError(f"Failed to import {name}")


def test_seconds_are_those_of_reading_and_writing_without_the_check(
    run_folder: Any, small_gpt: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def compare(*_: object) -> LogitsDifference:
        clock[0] += 1000
        return LIKE

    monkeypatch.setattr(converting, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(converting.compare_logits, "compare_logits", compare)
    result = convert(run_folder(small_gpt), tmp_path / "out", "mega", "hf", check=1)
    assert (result.logits, result.seconds, clock) == (LIKE, 0.0, [1000.0])


@pytest.mark.parametrize("want", ["hf", "meta", "megatron", "megatron-core", "torch_dist", "mega"])
def test_every_file_and_folder_is_flushed_before_it_has_its_name(
    hf_folder: Any, small_llama: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, want: str
) -> None:
    source = hf_folder(small_llama)
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    content = {"version": "1.0", "added_tokens": [], "model": model}
    (source / "tokenizer.json").write_text(json.dumps(content))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    flushed, unflushed = set[int](), list[str]()
    fsync, rename = os.fsync, Path.rename

    def record(descriptor: int) -> None:
        flushed.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def look(path: Path, target: Path) -> Path:
        entries = [path, *path.rglob("*")] if path.is_dir() else []
        unflushed.extend(str(entry) for entry in entries if entry.stat().st_ino not in flushed)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(Path, "rename", look)
    folder = convert(source, tmp_path / "out", "hf", want).written.folder
    assert unflushed == []
    assert folder.parent.stat().st_ino in flushed, "its name outlasts a power cut too"
