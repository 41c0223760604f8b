"""`convert --check-logits` accepts equal models and detects different ones."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from click.testing import CliRunner, Result

from mega_ckpt.cli import cli
from mega_ckpt.formats.huggingface import format as hf_format
from mega_ckpt.formats.huggingface.names import aliases
from mega_ckpt.formats.interface import ReadOptions
from mega_ckpt.formats.registry import format_of
from mega_ckpt.operations import compare_logits
from mega_schema.arch import table
from mega_schema.checkpoint.reader import MODEL
from mega_schema.errors import ConfigError, FormatError
from mega_schema.spec import ModelSpec, gpt, llama

Trained = Callable[..., Path]


@pytest.fixture
def save_trained(save_whole: Any, tmp_path: Path) -> Trained:
    """A run whose weights are of the size that training leaves them at."""

    def make(spec: ModelSpec, name: str = "run", seed: int = 5) -> Path:
        rng = np.random.default_rng(seed)
        whole = {
            row.name: ("norm" in row.name) + rng.normal(size=row.shape, scale=0.3).astype("f4")
            for row in table(spec)
            if row.tied_to is None
        }
        save_whole(tmp_path / name, spec, {MODEL: whole})
        return tmp_path / name

    return make


def convert(load: Path, want: str, save: Path, *more: str) -> Result:
    words = ["convert", "--from", "mega", "--to", want, "--load", load, "--save", save, *more]
    return CliRunner().invoke(cli, [str(word) for word in words])


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("family", ["gpt", "llama", "deep"])
def test_transformers_computes_what_the_reference_forward_does(
    save_trained: Trained, tmp_path: Path, family: str, dtype: str
) -> None:
    spec = {
        "gpt": gpt(layers=3, hidden=16, heads=4, vocab=37, max_seq_len=9),
        "llama": llama(layers=3, hidden=16, heads=4, kv_heads=2, ffn=12, vocab=37, max_seq_len=9),
        "deep": llama(layers=24, hidden=32, heads=4, ffn=48, vocab=50, max_seq_len=32),
    }[family]
    result = convert(save_trained(spec), "hf", tmp_path / "hf", "--dtype", dtype, "--json")
    assert result.exit_code == 0, result.output
    logits_report = json.loads(result.stdout)["logits"]
    assert logits_report["by"] == ["the reference forward", "transformers"]
    assert logits_report["tokens"] == 64
    assert logits_report["alike"] is True
    assert 0 < 2 * logits_report["relative"] <= logits_report["tolerance"] == 1e-4


def test_a_wrong_conversion_is_one_line_and_exit_code_1(
    save_trained: Trained, small_llama: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped_aliases(spec: ModelSpec) -> Any:
        partner = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        for alias in aliases(spec):
            part = alias.foreign.split(".")[-2]
            yield type(alias)(alias.foreign.replace(part, partner.get(part, part)), alias.ours, alias.block)

    monkeypatch.setattr(hf_format, "aliases", swapped_aliases)
    result = convert(save_trained(small_llama), "hf", tmp_path / "hf", "--check-logits", "5")
    assert result.exit_code == 1
    *_, message = result.stderr.splitlines()
    assert message.startswith(f"error: {tmp_path / 'hf'}: logits differ from the source's: found ")
    assert "over 5 tokens" in result.stdout


def test_small_models_are_checked_on_their_way_to_hugging_face_and_others_when_asked(
    save_trained: Trained, small_gpt: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = save_trained(small_gpt)
    assert "over 64 tokens" in convert(run, "hf", tmp_path / "1").stdout
    assert "logits" not in convert(run, "hf", tmp_path / "2", "--no-check-logits").stdout
    assert "logits" not in convert(run, "torch_dist", tmp_path / "3").stdout
    asked = convert(run, "torch_dist", tmp_path / "4", "--check-logits", "11")
    assert (
        "logits: max difference 0.0e+00, 0.0e+00 of the largest, over 11 tokens, both by the ref"
        in asked.stdout
    )
    monkeypatch.setattr(compare_logits, "_SMALL_MODEL", 1000)
    assert "logits" not in convert(run, "hf", tmp_path / "5").stdout


def test_without_torch_nothing_is_run_and_asking_is_a_mistake_before_anything_is_written(
    save_trained: Trained, small_gpt: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    run = save_trained(small_gpt)
    assert "logits" not in convert(run, "hf", tmp_path / "1").stdout
    result = convert(run, "hf", tmp_path / "2", "--check-logits", "5")
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == (
        "--check-logits: runs the model, and torch is not installed; "
        'hint: pip install -e "packages/mega-ckpt[torch]", or --no-check-logits'
    )
    assert not (tmp_path / "2").exists()


def test_other_weights_another_vocabulary_and_nan_are_not_alike(
    save_trained: Trained, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    def side(spec: ModelSpec, name: str, seed: int) -> compare_logits.LoadedSide:
        path = save_trained(spec, name, seed)
        return compare_logits.LoadedSide("mega", path, format_of("mega").read(path, ReadOptions()))

    first, second = side(small_gpt, "a", 1), side(small_gpt, "b", 2)
    assert compare_logits.compare_logits(first, first, 7).absolute == 0
    assert not compare_logits.compare_logits(first, second, 7).is_close
    larger = side(gpt(layers=3, hidden=16, heads=4, vocab=38, max_seq_len=8), "c", 1)
    with pytest.raises(FormatError, match="c: vocabulary: is another: found 38, wanted 37"):
        compare_logits.compare_logits(first, larger, 7)
    assert not compare_logits.LogitsDifference(1, float("nan"), float("nan"), 1e-4, ("a", "b")).is_close


def test_weights_are_rounded_from_the_ones_that_the_optimizer_keeps(
    small_gpt: ModelSpec, random_whole: Any, save_whole: Any, tmp_path: Path
) -> None:
    whole = random_whole(small_gpt, "BF16", optimizer=True)
    save_whole(tmp_path / "run", small_gpt, whole, dtype="BF16")
    result = convert(tmp_path / "run", "hf", tmp_path / "hf", "--dtype", "fp32", "--no-check-logits")
    assert result.exit_code == 0, result.output
    stored = safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors")
    assert stored["transformer.wte.weight"].tobytes() == whole["optim.main"]["embed.weight"].tobytes()
