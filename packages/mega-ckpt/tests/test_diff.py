"""`diff` and `inspect --stats`: differences between checkpoints, and statistics of tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_ckpt.checkpoint.checkpoint_source import CheckpointSource
from mega_ckpt.formats.interface import ReadOptions
from mega_ckpt.formats.registry import format_of
from mega_ckpt.operations import diff
from mega_ckpt.operations.diff import diff_checkpoints
from mega_ckpt.operations.reshard import reshard
from mega_ckpt.operations.stats import Stats, checkpoint_stats
from mega_ckpt.tensors import row_stream
from mega_schema.checkpoint.reader import MODEL, OPTIMIZER, Checkpoint
from mega_schema.errors import ConfigError, FormatError
from mega_schema.parallel_layout import Layout
from mega_schema.sharding import Slab
from mega_schema.spec import ModelSpec, gpt


def _source(run: Path) -> CheckpointSource:
    return format_of("mega").read(run, ReadOptions())


def _change_tensor(
    source: CheckpointSource, name: str, change: Callable[[np.ndarray, Slab], object]
) -> CheckpointSource:
    """The same checkpoint, but for numbers of one weight."""

    def box(space: str, tensor: str, slab: Slab) -> np.ndarray:
        values = source.read_box(space, tensor, slab)
        if (space, tensor) == (MODEL, name):
            change(values, slab)
        return values

    return replace(source, read_box=box)


def test_what_was_resharded_and_converted_is_the_same(
    mega: Any, run_folder: Any, small_llama: ModelSpec, tmp_path: Path
) -> None:
    run = run_folder(small_llama)
    mega("reshard", "--load", run, "--save", tmp_path / "cut", "--tp", 2)
    result = mega("diff", run, tmp_path / "cut")
    assert (result.exit_code, result.output) == (0, "60 tensors compared: the same\n")
    mega("convert", "--from", "mega", "--to", "hf", "--load", run, "--save", tmp_path / "hf")
    result = mega("diff", run, tmp_path / "hf")
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        *(f"only A has optim.{space}, which is not compared" for space in ("exp_avg", "exp_avg_sq", "main")),
        "15 tensors compared: the same",
    ]


def test_two_runs_differ_in_every_tensor_and_the_exit_code_says_so(
    mega: Any, run_folder: Any, small_gpt: ModelSpec
) -> None:
    a, b = run_folder(small_gpt), run_folder(small_gpt, "other", scale=2.0)
    result = mega("diff", a, b, "--no-optim", "--json")
    report = json.loads(result.output)
    assert (result.exit_code, report["same"], report["tensors"]) == (1, False, 28)
    assert {difference["what"] for difference in report["differences"]} == {"values"}
    assert {difference["relative"] for difference in report["differences"]} == {0.5}
    first = report["differences"][0]
    assert (first["name"], first["differing"], first["elements"]) == ("embed.weight", 88, 88)
    text = mega("diff", a, b, "--no-optim").output
    assert "model  embed.weight  values: F32, F32; 88 of 88 elements differ, max " in text
    assert text.endswith("28 tensors compared: 28 differences\n")


@pytest.mark.parametrize("chunk_bytes", [64, 1 << 22])
def test_one_number_is_found_with_how_far_it_is_off(
    run_folder: Any, small_gpt: ModelSpec, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(diff, "CHUNK_BYTES", chunk_bytes)
    source = _source(run_folder(small_gpt))

    def change_element(values: np.ndarray, slab: Slab) -> None:
        if slab.start[0] <= 7 < slab.start[0] + slab.shape[0]:
            values[7 - slab.start[0], 3] += 0.5

    (difference,) = diff_checkpoints(
        source, _change_tensor(source, "embed.weight", change_element)
    ).differences
    assert (difference.space, difference.name, difference.what, difference.differing) == (
        MODEL,
        "embed.weight",
        "values",
        1,
    )
    assert difference.absolute == pytest.approx(0.5)


def test_no_number_equals_itself_and_a_zero_has_no_sign(run_folder: Any, small_gpt: ModelSpec) -> None:
    source = _source(run_folder(small_gpt))

    def set_to(value: float) -> CheckpointSource:
        return _change_tensor(source, "final_norm.bias", lambda values, _: values.fill(value))

    def differing_counts(a: float, b: float) -> list[int]:
        return [difference.differing for difference in diff_checkpoints(set_to(a), set_to(b)).differences]

    assert (
        differing_counts(np.nan, np.nan)
        == differing_counts(0.0, -0.0)
        == differing_counts(np.inf, np.inf)
        == []
    )
    assert (
        differing_counts(np.nan, 1.0)
        == differing_counts(np.inf, -np.inf)
        == differing_counts(np.inf, 1.0)
        == [8]
    )
    (difference,) = diff_checkpoints(set_to(np.inf), set_to(1.0)).differences
    assert (difference.absolute, difference.relative) == (0.0, 0.0)  # of the numbers that are finite in both


def test_dtypes_shapes_and_missing_tensors_are_told_apart(
    run_folder: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    run = run_folder(small_gpt)
    plain = reshard(Checkpoint.open(run), tmp_path / "plain", Layout(), optimizer=False)
    narrow = reshard(Checkpoint(plain), tmp_path / "bf16", Layout(), dtype="bf16")
    result = diff_checkpoints(_source(run), _source(narrow))
    assert {(difference.what, difference.a, difference.b) for difference in result.differences} == {
        ("dtype", "F32", "BF16")
    }
    assert 0 < max(difference.relative for difference in result.differences) < 2**-8
    assert result.only_a == ("optim.exp_avg", "optim.exp_avg_sq", "optim.main")
    deeper = _source(run_folder(gpt(layers=3, hidden=8, heads=4, vocab=12, max_seq_len=6), "deeper"))
    result = diff_checkpoints(_source(run), deeper, optimizer=False)
    differences = {
        difference.name: (difference.what, difference.a, difference.b) for difference in result.differences
    }
    assert differences["embed.weight"] == ("shape", "11 x 8", "12 x 8")
    assert differences["layers.2.up.weight"] == ("missing", None, "F32")


def test_a_format_that_files_do_not_tell_has_to_be_said(
    mega: Any, run_folder: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    run = run_folder(small_gpt)
    (tmp_path / "papers").mkdir()
    result = mega("diff", run, tmp_path / "papers")
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(
        f"--to: missing, and the format of {tmp_path / 'papers'} cannot be detected"
    )
    assert isinstance(mega("diff", tmp_path / "nowhere", run).exception, FormatError)


def test_stats_are_numpys(mega: Any, run_folder: Any, small_gpt: ModelSpec, monkeypatch: Any) -> None:
    monkeypatch.setattr(row_stream, "CHUNK_BYTES", 100)
    checkpoint = Checkpoint.open(run_folder(small_gpt))
    stats = json.loads(mega("inspect", checkpoint.folder, "--stats", "--json").output)["stats"]
    assert stats == json.loads(json.dumps(checkpoint_stats(checkpoint)))
    for space, entries in checkpoint.tensors.items():
        for name, tensor in entries.items():
            zero = (0,) * len(tensor.shape)
            values = checkpoint.read(space, name, Slab(zero, tensor.shape, zero)).astype(np.float64)
            has = stats[space][name]
            assert (has["min"], has["max"]) == (values.min(), values.max())
            assert has["norm"] == pytest.approx(np.linalg.norm(values))
            assert has["mean"] == pytest.approx(values.mean())
            counts = {int(e): n for e, n in has["magnitudes"].items()}
            assert sum(counts.values()) == values.size
            for exponent, count in counts.items():
                inside = (abs(values) >= 2.0**exponent) & (abs(values) < 2.0 ** (exponent + 1))
                assert count == np.count_nonzero(inside)
    line = mega("inspect", checkpoint.folder, "--stats").output.splitlines()[-1]
    assert line.startswith("optim.main  final_norm.bias  norm ")


def test_what_is_no_number_is_counted_and_not_averaged() -> None:
    stats = Stats()
    stats.update(np.array([np.nan, np.inf, -np.inf, 0.0, 3.0]))
    summary = stats.to_dict()
    assert (summary["nan"], summary["inf"], summary["zeros"]) == (1, 2, 1)
    assert (summary["norm"], summary["mean"], summary["min"], summary["max"]) == (3.0, 1.5, 0.0, 3.0)
    assert summary["magnitudes"] == {"1": 1}
    empty = Stats()
    empty.update(np.array([np.nan]))
    assert empty.to_dict()["mean"] is empty.to_dict()["min"] is None


def test_a_tensor_of_no_numbers_says_so(mega: Any, run_folder: Any, small_gpt: ModelSpec) -> None:
    lines = mega("inspect", run_folder(small_gpt, scale=np.nan), "--stats").output
    assert "model  final_norm.bias  no finite number  8 NaN\n" in lines
    assert "  all 0\n" in mega("inspect", run_folder(small_gpt, "zero", scale=0.0), "--stats").output


def test_another_format_is_inspected_in_our_names_with_the_numbers_of_ours(
    mega: Any, run_folder: Any, small_llama: ModelSpec, tmp_path: Path
) -> None:
    run, theirs = run_folder(small_llama), tmp_path / "theirs"
    mega("convert", "--from", "mega", "--to", "megatron", "--load", run, "--save", theirs, "--tp", 2)
    wanted, actual = (json.loads(mega("inspect", path, "--json", "--stats").output) for path in (run, theirs))
    assert (actual["format"], actual["iteration"]) == ("megatron", wanted["iteration"])
    assert (actual["parameters"], actual["model"]) == (wanted["parameters"], wanted["model"])
    spaces = [MODEL, *OPTIMIZER[1:]]  # the weights are in float32 and are the optimizer's own
    assert actual["stats"] == {space: wanted["stats"][space] for space in spaces}
    for space in spaces:
        has = wanted["namespaces"][space]
        assert actual["namespaces"][space] == {key: has[key] for key in ("tensors", "dtypes", "bytes")}
    lines = mega("inspect", theirs, "--tensors").output.splitlines()
    assert lines[1] == "format      megatron: a classic checkpoint of Megatron-LM, or a run's folder"
    assert "model  embed.weight  F32  11 x 8" in lines


def test_what_a_foreign_checkpoint_has_and_ours_has_not_is_told_and_damage_is_refused(
    mega: Any, run_folder: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    padded = replace(small_gpt, vocab_multiple=8)
    mega("convert", "--from", "mega", "--to", "torch_dist", "--load", run_folder(padded), "--save", theirs)
    lines = mega("inspect", theirs).output.splitlines()
    assert lines[-1] == "not supported by Mega: 5 rows of padding"
    (data,) = theirs.glob("iter_*/*.distcp")
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    data.write_bytes(damaged)
    assert isinstance(mega("inspect", theirs, "--stats").exception, FormatError)


def test_what_files_do_not_say_is_said_beside_them(
    mega: Any, run_folder: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    run, theirs, model = run_folder(small_gpt), tmp_path / "theirs", tmp_path / "model.json"
    mega("convert", "--from", "mega", "--to", "torch_dist", "--load", run, "--save", theirs)
    (flat,) = theirs.glob("iter_*")
    for name in ("common.pt", "metadata.json"):  # as torch alone leaves it
        (flat / name).unlink()
    model.write_text(json.dumps(small_gpt.to_dict()), "utf-8")
    for words in (["inspect", flat], ["diff", run, flat]):
        assert "hint: --model" in str(mega(*words).exception)
        assert mega(*words, "--model", model).exit_code == 0
    file = tmp_path / "weights.bin"
    file.write_bytes(b"")
    assert str(mega("inspect", file).exception).startswith(
        f"--from: missing, and the format of {file} cannot be detected"
    )


def test_a_gated_gpt_is_the_llama_that_it_becomes(mega: Any, run_folder: Any, tmp_path: Path) -> None:
    """Foreign files do not store the family, and both families have the same parameters."""
    spec = gpt(
        layers=2, hidden=8, heads=4, ffn=6, vocab=11, max_seq_len=6, norm="rmsnorm", activation="swiglu",
        positions="rope", bias=False,
    )  # fmt: skip
    run = run_folder(spec)
    for form in ("hf", "torch_dist"):
        save, words = tmp_path / form, ["--from", "mega", "--to", form, "--check-logits", 8]
        result = mega("convert", *words, "--load", run, "--save", save)
        assert result.exit_code == 0, result.exception
        assert "logits:" in result.output
        assert format_of(form).read(save, ReadOptions()).spec.family == "llama"
        for pair in ((run, save), (save, run)):
            assert mega("diff", *pair).output.splitlines()[-1].endswith("tensors compared: the same")
