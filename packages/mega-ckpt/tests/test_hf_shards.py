"""Hugging Face weight files: their splits, and the memory to write them."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_ckpt.formats.huggingface import config_json
from mega_ckpt.formats.huggingface.names import aliases
from mega_ckpt.formats.interface import WriteOptions, WriteResult
from mega_ckpt.operations.convert import convert
from mega_ckpt.tensors import safetensors_io
from mega_schema.arch import table
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import ConfigError
from mega_schema.spec import ModelSpec, gpt, llama


def from_hugging_face(load: Path, run: Path, **target: Any) -> WriteResult:
    return convert(load, run, "hf", "mega", target=WriteOptions(**target)).written


def to_hugging_face(run: Path, folder: Path, **target: Any) -> WriteResult:
    return convert(run, folder, "mega", "hf", target=WriteOptions(**target)).written


@pytest.mark.parametrize(("most", "files"), [(1, 28), (600, 14), (5_000_000_000, 1)])
def test_files_are_cut_between_tensors_at_most_so_large(
    run_folder: Any, small_gpt: ModelSpec, tmp_path: Path, most: int, files: int
) -> None:
    run = run_folder(small_gpt)
    to_hugging_face(run, tmp_path / "one")
    to_hugging_face(run, tmp_path / "cut", shard=most)
    names = [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)]
    paths = sorted((tmp_path / "cut").glob("*.safetensors"))
    assert [file.name for file in paths] == (names if files > 1 else ["model.safetensors"])
    whole = safetensors_io.read_header(tmp_path / "one" / "model.safetensors").entries
    parts = {name: e for file in paths for name, e in safetensors_io.read_header(file).entries.items()}
    assert list(parts) == list(whole)
    for name, entry in whole.items():
        assert np.array_equal(parts[name].values(), entry.values()), name
    for file in paths:
        entries = safetensors_io.read_header(file).entries
        assert sum(e.bytes for e in entries.values()) <= most or len(entries) == 1
    index = tmp_path / "cut" / "model.safetensors.index.json"
    assert index.exists() == (files > 1)
    if files > 1:
        content = json.loads(index.read_bytes())
        assert content["metadata"]["total_size"] == sum(e.bytes for e in whole.values())
        assert content["weight_map"] == {n: parts[n].file.name for n in whole}
    from_hugging_face(tmp_path / "cut", tmp_path / "back")
    assert Checkpoint.open(tmp_path / "back").spec == small_gpt


@pytest.mark.parametrize("text", ["5 GB", "GB", "5XB", "0MB", "-1KB", "5"])
def test_a_size_is_a_number_with_a_unit(mega: Any, tmp_path: Path, text: str) -> None:
    words = ("--from", "mega", "--to", "hf", "--load", tmp_path, "--save", tmp_path / "b")
    result = mega("convert", *words, "--max-shard-size", text)
    assert isinstance(result.exception, ConfigError)
    assert f"--max-shard-size: not a size: found {text}, wanted an integer and KB" in str(result.exception)


def test_the_command_cuts_files(mega: Any, run_folder: Any, small_gpt: ModelSpec, tmp_path: Path) -> None:
    words = ("--from", "mega", "--to", "hf", "--load", run_folder(small_gpt), "--save", tmp_path / "b")
    result = mega("convert", *words, "--max-shard-size", "1kb")
    assert result.exit_code == 0, result.output
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 1


WIDE: dict[str, ModelSpec] = {
    "llama": llama(layers=1, hidden=256, heads=4, ffn=256, vocab=64000, max_seq_len=4),
    "gpt2": gpt(layers=1, hidden=256, heads=4, ffn=64000, vocab=11, max_seq_len=4),
    "bloom": gpt(
        layers=1, hidden=256, heads=4, vocab=64000, max_seq_len=4, positions="alibi", embed_norm=True
    ),
}


@pytest.mark.parametrize("kind", WIDE)
def test_memory_does_not_grow_with_the_model(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part of the largest tensor (65 MB) is in memory; the whole tensor if it is transposed."""
    monkeypatch.setattr("mega_ckpt.tensors.parallel_map._MAX_THREADS", 1)  # each has chunks of its own
    spec = WIDE[kind]
    rows = {row.name: row for row in table(spec)}
    foreign = [alias.unsharded_tensor(rows[alias.ours]) for alias in aliases(spec)]
    announced = [safetensors_io.TensorHeader(tensor.name, "F32", tensor.shape) for tensor in foreign]
    (tmp_path / "hf").mkdir()
    with (tmp_path / "hf" / "model.safetensors").open("wb") as file:
        header, begins = safetensors_io.build_header(announced, {"format": "pt"})
        file.write(header)
        file.truncate(begins[-1] + announced[-1].bytes)  # zeros that take no room
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config_json.from_spec(spec, "x")), "utf-8")
    largest = max(tensor.bytes for tensor in announced)
    assert largest > 65_000_000
    peaks = []
    for work in (
        lambda: from_hugging_face(tmp_path / "hf", tmp_path / "run"),
        lambda: to_hugging_face(tmp_path / "run", tmp_path / "back", dtype="bf16"),
    ):
        tracemalloc.start()
        work()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    room = 40_000_000  # a chunk of 4 MB, and what a cast makes of it
    assert peaks[0] < room
    assert peaks[1] < room + (largest // 2 if kind == "gpt2" else 0)
