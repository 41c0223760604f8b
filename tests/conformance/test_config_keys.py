"""All keys of config.json that transformers reads: none runs code, and none is misread."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from mega_ckpt.formats.interface import ReadOptions
from mega_ckpt.formats.registry import format_of
from mega_schema.errors import MegaError
from tests.conformance.hf_models import CASES, logits, save, spec_logits
from tests.selection import every_nth

TOKENS_BS = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(4))
KERNELS = """
import os

def get_kernel(*words, **options):
    with open(os.environ["KERNEL_CALLS"], "a") as calls:
        calls.write(f"{words} {options}\\n")
    raise ImportError("recorded")
"""
CONVERT_AND_LOAD = """
import os, sys
from mega_ckpt.cli import cli

load, save = sys.argv[1:]
words = ["convert", "--from", "hf", "--to", "hf", "--load", load, "--save", save, "--check-logits", "8"]
cli(words, standalone_mode=False)
if not os.path.exists(os.environ["KERNEL_CALLS"]):
    print("no call by mega-ckpt")
import transformers

transformers.AutoModelForCausalLM.from_pretrained(load)
"""


@pytest.fixture
def kernel_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a stand-in for the package `kernels` on the path; returns the file that lists its calls."""
    site = tmp_path / "site"
    (site / "kernels").mkdir(parents=True)
    (site / "kernels/__init__.py").write_text(KERNELS, "utf-8")
    (site / "kernels-0.15.2.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: kernels\nVersion: 0.15.2\n"
    (site / "kernels-0.15.2.dist-info/METADATA").write_text(metadata, "utf-8")
    (site / "kernels-0.15.2.dist-info/RECORD").write_text("kernels/__init__.py,,\n", "utf-8")
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("KERNEL_CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


def run_python(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run this interpreter offline, in a process of its own that sees the stand-in."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *map(str, words)], env=environment, capture_output=True, text=True, timeout=120
    )


def transformers_keys(config: Any) -> set[str]:
    """List the attributes of a config that transformers reads to make a model and to run it."""
    read: set[str] = set()
    original = PreTrainedConfig.__getattribute__

    def record(self: Any, name: str) -> Any:
        read.add(name)
        return original(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreTrainedConfig, "__getattribute__", record)
        logits(AutoModelForCausalLM.from_config(config).eval(), TOKENS_BS)
    names = {name for name in read if not callable(getattr(type(config), name, None))}
    return {name for name in names if not name.startswith("__")} | config.to_dict().keys()


def other_values(value: Any) -> list[Any]:
    """List values of a key that are not the one it has."""
    match value:
        case bool():
            return [not value, None]
        case int():
            return [0, value + 1, 2 * value, None]
        case float():
            return [2 * value, value / 2, None, "other"]
        case None:
            return [1, 3, False, True, "other", ["sliding_attention"] * 2, {"0": {"sliding_window": 3}}]
        case str():
            return ["other", "relu", "silu", "gelu", None]
        case list():
            return [[], ["sliding_attention"] * 2, ["chunked_attention"] * 2, None]
        case dict():
            return [{}, {**value, "rope_type": "yarn", "factor": 2.0}, None]
    raise AssertionError(value)


def test_a_config_that_names_a_kernel_never_reaches_the_kernel_loader(
    kernel_calls: Path, tmp_path: Path
) -> None:
    save(CASES["llama"](), tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text("utf-8"))
    for key in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"):
        config[key] = "evil-user/evil-kernel"
    (tmp_path / "hf/config.json").write_text(json.dumps(config), "utf-8")
    result = run_python("-c", CONVERT_AND_LOAD, tmp_path / "hf", tmp_path / "out")
    assert "both by transformers" in result.stdout, result.stderr
    assert "no call by mega-ckpt" in result.stdout
    # transformers itself goes to the loader: this config would have downloaded code
    assert result.returncode == 1
    calls = kernel_calls.read_text("utf-8") if kernel_calls.exists() else ""
    assert "evil-user/evil-kernel" in calls or "incompatible version" in result.stderr


def their_logits(folder: Path) -> torch.Tensor | None:
    """Run transformers on a folder as its users do; None where it does not load or run what we would."""
    try:
        return logits(AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval(), TOKENS_BS)
    except Exception:  # of any class: a config may name anything
        return None


@pytest.mark.parametrize(
    "case", every_nth(4, ["llama", "mistral", "qwen 2", "qwen 3", "gpt2", "pythia", "bloom"])
)
def test_every_key_that_transformers_reads_is_refused_or_changes_both_models_alike(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()
    # transformers logs the whole config of each that it cannot set
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    folder, config = tmp_path / "hf", CASES[case]()
    theirs = save(config, folder)
    base = {**config.to_dict(), **json.loads((folder / "config.json").read_text("utf-8"))}
    (folder / "config.json").write_text(json.dumps(base), "utf-8")
    ours = spec_logits(format_of("hf").read(folder, ReadOptions()), TOKENS_BS)
    torch.testing.assert_close(ours, logits(theirs, TOKENS_BS), atol=1e-5, rtol=1e-5)
    wrong = []
    for key in sorted(transformers_keys(config)):
        for value in other_values(base.get(key)):
            (folder / "config.json").write_text(json.dumps({**base, key: value}), "utf-8")
            try:
                source = format_of("hf").read(folder, ReadOptions())
            except MegaError:
                continue
            wanted = their_logits(folder)
            if wanted is None:
                continue
            found = spec_logits(source, TOKENS_BS)
            if found.shape != wanted.shape or not torch.allclose(found, wanted, atol=1e-4, rtol=1e-4):
                wrong.append(f"{key}: {value}")
    assert wrong == []
