"""`torch_dist` folders: those that Megatron wrote, and those of mega-ckpt as torch reads them."""

from __future__ import annotations

import json
import pickle
import random
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from mega_ckpt.checkpoint.checkpoint_source import CheckpointSource
from mega_ckpt.checkpoint.writer import namespaces_to_write
from mega_ckpt.formats import user_overrides
from mega_ckpt.formats.interface import ReadOptions, WriteOptions
from mega_ckpt.formats.megatron.names import CORE, aliases
from mega_ckpt.formats.registry import format_of
from mega_ckpt.formats.torch_dist import dcp_writer
from mega_ckpt.formats.torch_dist.dcp_writer import DcpChunk
from mega_ckpt.formats.torch_dist.writer import chunks_to_write
from mega_ckpt.operations.convert import convert
from mega_ckpt.tensors import row_stream
from mega_schema.arch import table
from mega_schema.checkpoint.reader import MODEL, Checkpoint
from mega_schema.parallel_layout import Layout
from mega_schema.sharding import Slab
from mega_schema.spec import ModelSpec, gpt, llama

# what the sample was made with (shared/golden/README.md); its args say nothing
SAMPLE = gpt(
    layers=4,
    hidden=32,
    heads=4,
    kv_heads=2,
    ffn=64,
    vocab=128,
    max_seq_len=16,
    activation="swiglu",
    positions="rope",
    tied=False,
    bias=False,
    qkv_bias=False,
)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def through_torch(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor, whole, as torch's own loader gives it."""
    described = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in described.items()
        if not isinstance(entry, BytesStorageMetadata)
    }
    dcp_load(tensors, storage_reader=FileSystemReader(folder), no_dist=True)
    return tensors


def shapes(folder: Path) -> dict[str, Any]:
    described = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: type(entry).__name__ if isinstance(entry, BytesStorageMetadata) else list(entry.size)
        for name, entry in described.items()
    }


def read_tensor(checkpoint: Checkpoint, space: str, name: str) -> np.ndarray:
    shape = checkpoint.tensors[space][name].shape
    zero = (0,) * len(shape)
    return checkpoint.read_raw(space, name, Slab(zero, shape, zero))


def test_megatrons_sample_has_the_values_that_torch_reads(golden: Path, tmp_path: Path) -> None:
    reading = ReadOptions(model=SAMPLE)
    result = convert(golden / "torch_dist_sample", tmp_path / "run", "torch_dist", "mega", reading=reading)
    theirs, ours = through_torch(golden / "torch_dist_sample"), Checkpoint.open(tmp_path / "run")
    assert result.dropped == ()
    assert ours.iteration == 7
    assert np.array_equal(
        read_tensor(ours, MODEL, "embed.weight"), theirs["embedding.word_embeddings.weight"]
    )
    layer = theirs["decoder.layers.self_attention.linear_qkv.weight"][2]
    groups = layer.reshape(2, 4, 8, 32)  # two groups of two query heads, a key and a value
    qkv = torch.cat(
        [groups[:, :2].reshape(-1, 32), groups[:, 2].reshape(-1, 32), groups[:, 3].reshape(-1, 32)]
    )
    assert np.array_equal(read_tensor(ours, MODEL, "layers.2.qkv.weight"), qkv)
    fc1 = theirs["decoder.layers.mlp.linear_fc1.weight"]
    assert np.array_equal(read_tensor(ours, MODEL, "layers.3.gate_up.weight"), fc1[3])
    norm = theirs["decoder.layers.mlp.linear_fc1.layer_norm_bias"]
    assert np.array_equal(read_tensor(ours, MODEL, "layers.1.ffn_norm.bias"), norm[1])


def test_what_we_write_has_every_key_and_every_number_of_megatrons_sample(
    golden: Path, tmp_path: Path
) -> None:
    sample = golden / "torch_dist_sample"
    convert(sample, tmp_path / "run", "torch_dist", "mega", reading=ReadOptions(model=SAMPLE))
    written = convert(tmp_path / "run", tmp_path / "back", "mega", "torch_dist").written.folder
    layout = json.loads((golden / "ckpt_keys" / "torch_dist_layout.json").read_text("utf-8"))
    assert written == tmp_path / "back" / "iter_0000007"
    assert shapes(written) == layout["tensors"] == shapes(sample)
    assert json.loads((written / "metadata.json").read_bytes()) == layout["metadata_json"]
    theirs, ours = through_torch(sample), through_torch(written)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    common = torch.load(written / "common.pt", weights_only=False)
    assert common.keys() - {"content_metadata"} == set(
        layout["common_keys"]
    )  # which the sample is too old for
    args = common["args"]
    assert isinstance(args, Namespace)
    assert (args.num_query_groups, args.padded_vocab_size, args.params_dtype) == (2, 128, torch.float32)
    assert (tmp_path / "back" / "latest_checkpointed_iteration.txt").read_text() == "7"


def bits(values: torch.Tensor) -> torch.Tensor:
    """Numbers as bytes: those of the tests may be no numbers."""
    return values.contiguous().view(torch.uint8)


def random_spec(seed: int) -> ModelSpec:
    rng = random.Random(seed)
    heads, width = rng.choice([1, 2, 4]), rng.choice([2, 4])
    sizes: dict[str, Any] = {
        "layers": rng.randint(1, 3),
        "hidden": heads * width * rng.choice([1, 3]),
        "heads": heads,
        "head_dim": width,
        "kv_heads": rng.choice([n for n in (1, 2, 4) if heads % n == 0]),
        "ffn": 4 * rng.randint(1, 5),
        "vocab": rng.randint(2, 40),
        "max_seq_len": rng.randint(1, 9),
        "tied": rng.random() < 0.5,
        "qk_norm": rng.random() < 0.3,
        "vocab_multiple": rng.choice([1, 8]),
    }
    if rng.random() < 0.5:
        return llama(**sizes, qkv_bias=rng.random() < 0.5)
    bias, activation = rng.random() < 0.5, rng.choice(["gelu_erf", "squared_relu", "swiglu"])
    return gpt(
        **sizes,
        bias=bias,
        qkv_bias=bias or rng.random() < 0.5,
        norm="layernorm" if activation == "swiglu" else rng.choice(["layernorm", "rmsnorm"]),
        activation=activation,
        positions=rng.choice(["learned", "rope", "none"]),
    )


@pytest.mark.parametrize("seed", range(12))
def test_any_model_is_the_same_after_the_way_there_and_back(
    random_whole: Any, save_whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(
        row_stream, "CHUNK_BYTES", 1 << 22 if seed % 2 else 20
    )  # bytes: a few rows are a box, or all
    spec, dtype = random_spec(seed), ["F32", "BF16", "F16"][seed % 3]
    whole_tensors = random_whole(spec, dtype, optimizer=True, seed=seed)
    save_whole(tmp_path / "run", spec, whole_tensors, dtype=dtype, iteration=3)
    target = WriteOptions(layout=Layout(tp=spec.kv_heads))  # of the padding
    converted = convert(tmp_path / "run", tmp_path / "there", "mega", "torch_dist", target=target)
    convert(converted.written.folder.parent, tmp_path / "back", "torch_dist", "mega")
    back = Checkpoint.open(tmp_path / "back")
    assert back.spec == spec
    assert (back.iteration, back.trainer["consumed_samples"]) == (3, 24)
    assert back.tensors.keys() == whole_tensors.keys()
    for space, tensors in whole_tensors.items():
        assert {name: t.dtype for name, t in back.tensors[space].items()} == dict.fromkeys(
            tensors, dtype if space == MODEL else "F32"
        )
        for name, values in tensors.items():
            assert read_tensor(back, space, name).tobytes() == values.tobytes()
    padded = through_torch(converted.written.folder)["embedding.word_embeddings.weight"]
    multiple = spec.vocab_multiple * spec.kv_heads
    assert padded.shape[0] == -(-spec.vocab // multiple) * multiple
    assert all(torch.equal(bits(row), bits(padded[spec.vocab - 1])) for row in padded[spec.vocab :])


def test_what_torch_alone_wrote_is_read_under_the_names_of_the_local_modules(
    golden: Path, tmp_path: Path
) -> None:
    spec = gpt(layers=2, hidden=8, heads=2, vocab=9, max_seq_len=4, activation="gelu_erf")
    rows = {row.name: row for row in table(spec)}
    foreign = {alias.foreign: alias.unsharded_tensor(rows[alias.ours]) for alias in aliases(spec, CORE)}
    rng = np.random.default_rng(3)
    state = {name: torch.from_numpy(rng.normal(size=f.shape).astype("f4")) for name, f in foreign.items()}
    dcp_save({"model": state, "step": 4}, storage_writer=FileSystemWriter(tmp_path / "flat"), no_dist=True)
    (tmp_path / "spec.json").write_text(json.dumps(spec.to_dict()), "utf-8")
    reading = ReadOptions(model=user_overrides.parse_model(str(tmp_path / "spec.json")))
    result = convert(tmp_path / "flat", tmp_path / "run", "torch_dist", "mega", reading=reading)
    assert result.dropped == ("step",)
    ours = Checkpoint.open(tmp_path / "run")
    back = foreign["decoder.layers.1.self_attention.linear_qkv.bias"].assemble(
        np.dtype("f4"), lambda slab: ours.read_raw(MODEL, "layers.1.qkv.bias", slab)
    )
    assert np.array_equal(back, state["decoder.layers.1.self_attention.linear_qkv.bias"])
    assert np.array_equal(read_tensor(ours, MODEL, "embed.weight"), state["embedding.word_embeddings.weight"])


# the dimension that ranks of tp cut, the layer counted, by the end of a tensor's name
CUT = {
    "word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "linear_qkv.weight": 1,
    "linear_qkv.bias": 1,
    "linear_fc1.weight": 1,
    "linear_fc1.bias": 1,
    "linear_proj.weight": 2,
    "linear_fc2.weight": 2,
}


def as_ranks_wrote(source: CheckpointSource, folder: Path, tp: int, dp: int) -> None:
    """A folder as tp x dp ranks of Megatron write it: weights in boxes, the optimizer's state in runs."""
    cut: list[DcpChunk] = []
    truly = {}
    for chunk in chunks_to_write(source, namespaces_to_write(source.spaces), source.spec.vocab):
        dim = next((dim for end, dim in CUT.items() if chunk.key.endswith(end)), None)
        halves = 2 if source.spec.is_gated and ".linear_fc1." in chunk.key else 1
        boxes = np.split(chunk.values().reshape(chunk.shape), 1 if dim is None else tp * halves, dim or 0)
        for number, box in enumerate(boxes):
            chunk_start = np.array(chunk.start)
            chunk_start[dim or 0] += number * box.shape[dim or 0]
            if not chunk.key.startswith("optimizer."):
                whole, start = chunk.whole, tuple(chunk_start.tolist())
                cut.append(DcpChunk(chunk.key, chunk.dtype, whole, start, box.shape, partial(np.copy, box)))
                continue
            truly[chunk.key], begin = chunk.whole, 0
            whole = (*(np.array(chunk.whole) // box.shape).tolist(), box.size)
            for run in np.array_split(box.reshape((1,) * box.ndim + (-1,)), dp, -1):
                start = (*(chunk_start // box.shape).tolist(), begin)
                cut.append(DcpChunk(chunk.key, chunk.dtype, whole, start, run.shape, partial(np.copy, run)))
                begin += run.size
    random.Random(1).shuffle(cut)
    dcp_writer.write_dcp(folder, cut, ["rng_state/shard_0_1"], lambda _: None)
    described = pickle.loads((folder / ".metadata").read_bytes())
    for key, shape in truly.items():
        described.mcore_data[key] = {"nd_reformulated_orig_global_shape": shape}
    (folder / ".metadata").write_bytes(pickle.dumps(described))


@pytest.mark.parametrize(
    "spec",
    [
        gpt(layers=2, hidden=24, heads=4, vocab=24, max_seq_len=6, vocab_multiple=1),
        llama(layers=2, hidden=16, heads=4, kv_heads=2, ffn=12, vocab=10, max_seq_len=6, vocab_multiple=1),
    ],
    ids=["gpt", "llama"],
)
def test_what_many_ranks_wrote_is_put_together(
    spec: ModelSpec, random_whole: Any, save_whole: Any, tmp_path: Path
) -> None:
    whole_tensors = random_whole(spec, "BF16", optimizer=True)
    save_whole(tmp_path / "run", spec, whole_tensors, dtype="BF16", iteration=3)
    source = format_of("mega").read(tmp_path / "run", ReadOptions())
    as_ranks_wrote(source, tmp_path / "cut", tp=2, dp=3)
    result = convert(
        tmp_path / "cut", tmp_path / "back", "torch_dist", "mega", reading=ReadOptions(model=spec)
    )
    assert result.dropped == ("the random number generator states",)
    back = Checkpoint.open(tmp_path / "back")
    for space, tensors in whole_tensors.items():
        for name, values in tensors.items():
            assert read_tensor(back, space, name).tobytes() == values.tobytes()


def test_where_the_training_stood_goes_along(
    small_gpt: ModelSpec, random_whole: Any, save_whole: Any, tmp_path: Path
) -> None:
    save_whole(tmp_path / "run", small_gpt, random_whole(small_gpt, "F16", optimizer=True), dtype="F16")
    trainer = {
        "iteration": 9,
        "consumed_samples": 72,
        "skipped_samples": 16,
        "optimizer_steps": 7,
        "loss_scale": {"value": 1024.0, "growth_tracker": 5, "hysteresis_tracker": 2},
        "lr_schedule": {
            "peak": 3e-4,
            "least": 1e-5,
            "warmup": 8,
            "decay": 640,
            "style": "cosine",
            "initial": 0.0,
        },
        "wd_schedule": {"start": 0.1, "end": 0.1, "samples": 640, "style": "constant"},
    }
    source = replace(format_of("mega").read(tmp_path / "run", ReadOptions()), trainer=trainer)
    write = format_of("torch_dist").write
    assert write is not None
    folder = write(source, tmp_path / "there", WriteOptions()).folder
    assert format_of("torch_dist").read(folder, ReadOptions()).trainer == trainer
    common = torch.load(folder / "common.pt", weights_only=False)
    group, second_group = common["optimizer"]["optimizer"]["param_groups"]
    assert (group["wd_mult"], second_group["wd_mult"], group["step"]) == (1.0, 0.0, 7)
    assert "params" not in group  # Megatron puts those of a rank in, and would not replace ours
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert common["args"].no_save_rng
    assert not common["args"].no_save_optim
    released = write(replace(source, trainer={"iteration": 0}), tmp_path / "other", WriteOptions()).folder
    assert released == tmp_path / "other" / "release"
    assert format_of("torch_dist").read(tmp_path / "other", ReadOptions()).iteration == 0
