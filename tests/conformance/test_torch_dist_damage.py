"""Damaged `torch_dist` folders, and errors while one is written."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mega_ckpt.checkpoint.writer import namespaces_to_write
from mega_ckpt.formats.interface import ReadOptions, WriteOptions
from mega_ckpt.formats.registry import format_of
from mega_ckpt.formats.torch_dist import dcp_writer
from mega_ckpt.formats.torch_dist.dcp_writer import DcpChunk
from mega_ckpt.formats.torch_dist.writer import chunks_to_write
from mega_ckpt.operations.convert import convert
from mega_schema.arch import table
from mega_schema.checkpoint.reader import MODEL, Checkpoint
from mega_schema.errors import ConfigError, FormatError
from mega_schema.spec import ModelSpec, gpt, llama

Damage = Callable[[Path], object]


def edit_metadata(change: Callable[[Any], object]) -> Damage:
    """Change what .metadata describes."""

    def change_file(folder: Path) -> None:
        described = pickle.loads((folder / ".metadata").read_bytes())
        change(described)
        (folder / ".metadata").write_bytes(pickle.dumps(described))

    return change_file


def reshape_norm(described: Any) -> None:
    norm = described.state_dict_metadata["decoder.final_layernorm.weight"]
    norm.size, norm.chunks[0].sizes = torch.Size([4]), torch.Size([4])  # type: ignore[misc]


DAMAGE: dict[str, tuple[Damage, str]] = {
    "no description": (lambda f: (f / ".metadata").unlink(), "contains no checkpoint of this format: wanted"),
    "no file": (lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp: missing file: wanted a file that"),
    "cut off": (lambda f: os.truncate(f / "__0_0.distcp", 2000), "__0_0.distcp: size in bytes: found 2000"),
    "cut description": (lambda f: os.truncate(f / ".metadata", 300), ".metadata"),
    "no arguments": (lambda f: (f / "common.pt").unlink(), "common.pt: no such file"),
    "a later version": (
        lambda f: (f / "metadata.json").write_text('{"sharded_backend_version": 2}'),
        "metadata.json: sharded_backend_version: is not known: found 2, wanted 1",
    ),
    "another backend": (
        lambda f: (f / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        "metadata.json: sharded_backend: is not known: found zarr, wanted torch_dist",
    ),
    "a list": (lambda f: (f / "metadata.json").write_text("[1]"), "metadata.json: is not a JSON object"),
    "a later torch": (
        edit_metadata(lambda d: setattr(d, "version", "2.0.0")),
        ".metadata: version: is not known: found 2.0.0",
    ),
    "no name of a GPT": (
        edit_metadata(lambda d: d.state_dict_metadata.pop("decoder.layers.self_attention.linear_qkv.weight")),
        "has no tensor names of a Megatron core GPT or BERT: found embedding.word_embeddings.weight",
    ),
    "another tensor": (
        edit_metadata(lambda d: d.state_dict_metadata.pop("decoder.final_layernorm.bias")),
        "has no tensor: wanted decoder.final_layernorm.bias",
    ),
    "another shape": (edit_metadata(reshape_norm), "shape: found (8,), wanted (4,)"),
    "a hole": (
        edit_metadata(lambda d: d.state_dict_metadata["decoder.final_layernorm.weight"].chunks.clear()),
        "decoder.final_layernorm.weight: numbers in its boxes: found 0, wanted 8",
    ),
    "a path": (
        edit_metadata(lambda d: [setattr(info, "relative_path", "../x") for info in d.storage_data.values()]),
        "file outside the folder: found ../x",
    ),
    "a shape of nothing": (
        edit_metadata(
            lambda d: setattr(d.state_dict_metadata["decoder.final_layernorm.weight"], "size", (0, 9**9))
        ),
        "description: found ValueError decoder.final_layernorm.weight: shape (0, 387420489)",
    ),
    "no description at all": (
        lambda f: (f / ".metadata").write_bytes(pickle.dumps([1])),
        ".metadata: is not a checkpoint's description",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_folder_is_one_line_and_nothing_is_written(
    random_whole: Any, save_whole: Any, tmp_path: Path, what: str
) -> None:
    spec = gpt(layers=2, hidden=8, heads=2, vocab=9, max_seq_len=4)
    save_whole(tmp_path / "run", spec, random_whole(spec))
    folder = convert(tmp_path / "run", tmp_path / "there", "mega", "torch_dist").written.folder
    damage, message = DAMAGE[what]
    damage(folder)
    with pytest.raises(FormatError) as caught:
        convert(folder, tmp_path / "back", "torch_dist", "mega")
    assert message in str(caught.value)
    assert not (tmp_path / "back").exists()


def test_without_torch_there_is_one_line_that_says_what_to_install(
    random_whole: Any, save_whole: Any, small_gpt: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_whole(tmp_path / "run", small_gpt, random_whole(small_gpt))
    convert(tmp_path / "run", tmp_path / "there", "mega", "torch_dist")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = r"torch, which is not installed; hint: pip install .*mega-ckpt\[torch\]"
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path / "run", tmp_path / "more", "mega", "torch_dist")
    assert not (tmp_path / "more").exists()
    monkeypatch.setitem(sys.modules, "torch", None)
    convert(tmp_path / "there", tmp_path / "back", "torch_dist", "mega")  # reading needs none


def test_a_write_that_fails_leaves_what_was_there(
    random_whole: Any, save_whole: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    tensors = {MODEL: {name: np.ones_like(values) for name, values in random_whole(small_gpt)[MODEL].items()}}
    tensors[MODEL]["layers.2.down.weight"] *= 1e9
    save_whole(tmp_path / "run", small_gpt, tensors)

    def to_torch_dist(**target: Any) -> None:
        convert(tmp_path / "run", tmp_path / "there", "mega", "torch_dist", target=WriteOptions(**target))

    too_large = r"layers.2.down.weight: too large for F16: found 1000000000.0"
    with pytest.raises(FormatError, match=too_large):
        to_torch_dist(dtype="fp16")
    assert not (tmp_path / "there").exists()
    to_torch_dist()
    before = all_bytes(tmp_path / "there")
    with pytest.raises(ConfigError, match="there is a checkpoint already.*iter_0000001; hint: add --force"):
        to_torch_dist()
    with pytest.raises(FormatError, match=too_large):
        to_torch_dist(dtype="fp16", force=True)
    assert all_bytes(tmp_path / "there") == before
    to_torch_dist(dtype="bf16", force=True)
    after = all_bytes(tmp_path / "there")
    assert after.keys() == before.keys()
    assert after != before


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_full_disk_is_one_line(
    random_whole: Any, save_whole: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    save_whole(tmp_path / "run", small_gpt, random_whole(small_gpt))
    code = (
        "import resource, signal, sys; from mega_ckpt.cli import main; import torch.distributed.checkpoint;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)); main()"
    )
    words = ["convert", "--from", "mega", "--to", "torch_dist", "--load", "run", "--save", "there"]
    process = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True
    )
    hint = "free disk space, or write to another disk"
    assert process.stderr == f"error: there: not written: found File too large; hint: {hint}\n"
    assert process.returncode == 2
    assert not (tmp_path / "there").exists()


def test_the_optimizer_that_is_not_adams_is_refused_or_left(
    random_whole: Any, save_whole: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    tensors = random_whole(small_gpt)
    save_whole(tmp_path / "run", small_gpt, tensors | {"optim.momentum": tensors[MODEL]})
    message = "optim.momentum: is not Adam's: .*; hint: --no-optim drops it"
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path / "run", tmp_path / "there", "mega", "torch_dist")
    result = convert(
        tmp_path / "run", tmp_path / "there", "mega", "torch_dist", target=WriteOptions(optimizer=False)
    )
    assert "the optimizer's state" in result.dropped


@pytest.mark.parametrize(
    ("key", "left"),
    [
        ("optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg", "whose sharding is unknown"),
        ("optimizer.state.exp_avg.embedding.word_embeddings.weight", "lacks exp_avg_sq"),
    ],
)
def test_an_optimizer_that_cannot_be_read_is_left_and_said(
    random_whole: Any, save_whole: Any, small_gpt: ModelSpec, tmp_path: Path, key: str, left: str
) -> None:
    save_whole(tmp_path / "run", small_gpt, random_whole(small_gpt))
    source = format_of("mega").read(tmp_path / "run", ReadOptions())
    every = list(chunks_to_write(source, namespaces_to_write(source.spaces), small_gpt.vocab))
    more = DcpChunk(key, "F32", (2, 3), (0, 0), (2, 3), partial(np.ones, (2, 3), np.float32))
    dcp_writer.write_dcp(tmp_path / "there", [*every, more], [], lambda _: None)
    reading = ReadOptions(model=small_gpt)
    result = convert(tmp_path / "there", tmp_path / "back", "torch_dist", "mega", reading=reading)
    assert left in result.dropped[0]
    assert set(Checkpoint.open(tmp_path / "back").tensors) == {MODEL}


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is on what Linux counts as data")
def test_memory_does_not_grow_with_the_model(save_whole: Any, tmp_path: Path) -> None:
    spec = llama(layers=1, hidden=384, heads=2, ffn=8, vocab=100_000, max_seq_len=2)  # two tensors of 154 MB
    whole = {row.name: np.zeros(row.shape, np.float32) for row in table(spec)}
    save_whole(tmp_path / "run", spec, {MODEL: whole})
    code = (
        "import re, resource, torch.distributed.checkpoint; from pathlib import Path;"
        "from mega_ckpt.operations.convert import convert; from mega_ckpt.formats.registry import format_of;"
        "format_of('mega'), format_of('torch_dist');"
        "used = 1024 * int(re.search(r'VmData:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]);"
        "resource.setrlimit(resource.RLIMIT_DATA, (used + 120_000_000,) * 2);"
        "convert(Path('run'), Path('there'), 'mega', 'torch_dist');"
        "convert(Path('there'), Path('back'), 'torch_dist', 'mega')"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_a_description_with_any_byte_changed_is_read_or_refused(
    random_whole: Any, save_whole: Any, tmp_path: Path
) -> None:
    spec = gpt(layers=1, hidden=4, heads=1, vocab=3, max_seq_len=2)
    save_whole(tmp_path / "run", spec, random_whole(spec))
    folder = convert(tmp_path / "run", tmp_path / "there", "mega", "torch_dist").written.folder
    sound, rng = (folder / ".metadata").read_bytes(), np.random.default_rng(2)
    refused = []
    for _ in range(60):
        damaged = bytearray(sound)
        damaged[rng.integers(len(sound))] = rng.integers(256)
        (folder / ".metadata").write_bytes(damaged)
        try:
            format_of("torch_dist").read(folder, ReadOptions())
        except FormatError as error:
            refused.append(str(error))
    assert len(refused) > 20
    assert not any("\n" in line for line in refused)
