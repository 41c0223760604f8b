"""Megatron core's `torch_dist` folders: those that Megatron wrote, and ours as torch reads them."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from mega_ckpt.convert import convert
from mega_ckpt.formats import Reading, Target
from mega_schema.checkpoint import MODEL, Checkpoint
from mega_schema.layout import Layout
from mega_schema.shard import Slab
from mega_schema.spec import ModelSpec, gpt, llama

# what the sample was made with (shared/golden/README.md); its args say nothing
SAMPLE = gpt(
    layers=4,
    hidden=32,
    heads=4,
    kv_heads=2,
    ffn=64,
    vocab=128,
    context=16,
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


def whole(checkpoint: Checkpoint, space: str, name: str) -> np.ndarray:
    shape = checkpoint.tensors[space][name].shape
    zero = (0,) * len(shape)
    return checkpoint.read_raw(space, name, Slab(zero, shape, zero))


def test_megatrons_sample_has_the_values_that_torch_reads(golden: Path, tmp_path: Path) -> None:
    reading = Reading(model=SAMPLE)
    done = convert(golden / "torch_dist_sample", tmp_path / "run", "torch_dist", "mega", reading=reading)
    theirs, ours = through_torch(golden / "torch_dist_sample"), Checkpoint.open(tmp_path / "run")
    assert done.left == ()
    assert ours.iteration == 7
    assert np.array_equal(whole(ours, MODEL, "embed.weight"), theirs["embedding.word_embeddings.weight"])
    layer = theirs["decoder.layers.self_attention.linear_qkv.weight"][2]
    groups = layer.reshape(2, 4, 8, 32)  # two groups of two query heads, a key and a value
    qkv = torch.cat(
        [groups[:, :2].reshape(-1, 32), groups[:, 2].reshape(-1, 32), groups[:, 3].reshape(-1, 32)]
    )
    assert np.array_equal(whole(ours, MODEL, "layers.2.qkv.weight"), qkv)
    fc1 = theirs["decoder.layers.mlp.linear_fc1.weight"]
    assert np.array_equal(whole(ours, MODEL, "layers.3.up.weight"), fc1[3])
    norm = theirs["decoder.layers.mlp.linear_fc1.layer_norm_bias"]
    assert np.array_equal(whole(ours, MODEL, "layers.1.ffn_norm.bias"), norm[1])


def test_what_we_write_has_every_key_and_every_number_of_megatrons_sample(
    golden: Path, tmp_path: Path
) -> None:
    sample = golden / "torch_dist_sample"
    convert(sample, tmp_path / "run", "torch_dist", "mega", reading=Reading(model=SAMPLE))
    written = convert(tmp_path / "run", tmp_path / "back", "mega", "torch_dist").written.folder
    layout = json.loads((golden / "ckpt_keys" / "torch_dist_layout.json").read_text("utf-8"))
    assert written == tmp_path / "back" / "iter_0000007"
    assert shapes(written) == layout["tensors"] == shapes(sample)
    assert json.loads((written / "metadata.json").read_bytes()) == layout["metadata_json"]
    theirs, ours = through_torch(sample), through_torch(written)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    args = torch.load(written / "common.pt", weights_only=False)["args"]
    assert isinstance(args, Namespace)
    assert (args.num_query_groups, args.padded_vocab_size, args.params_dtype) == (2, 128, torch.float32)
    assert (tmp_path / "back" / "latest_checkpointed_iteration.txt").read_text() == "7"


def random_spec(seed: int) -> ModelSpec:
    rng = random.Random(seed)
    heads, width = rng.choice([1, 2, 4]), rng.choice([2, 4])
    sizes: dict[str, Any] = {
        "layers": rng.randint(1, 3),
        "hidden": heads * width * rng.choice([1, 3]),
        "heads": heads,
        "head_width": width,
        "kv_heads": rng.choice([n for n in (1, 2, 4) if heads % n == 0]),
        "ffn": 4 * rng.randint(1, 5),
        "vocab": rng.randint(2, 40),
        "context": rng.randint(1, 9),
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
    random_whole: Any, save_whole: Any, tmp_path: Path, seed: int
) -> None:
    spec, dtype = random_spec(seed), ["F32", "BF16", "F16"][seed % 3]
    made = random_whole(spec, dtype, optimizer=True, seed=seed)
    save_whole(tmp_path / "run", spec, made, dtype=dtype, iteration=3)
    target = Target(layout=Layout(tp=spec.kv_heads))  # of the padding
    there = convert(tmp_path / "run", tmp_path / "there", "mega", "torch_dist", target=target)
    convert(there.written.folder.parent, tmp_path / "back", "torch_dist", "mega")
    back = Checkpoint.open(tmp_path / "back")
    assert back.spec == spec
    assert (back.iteration, back.trainer["consumed_samples"]) == (3, 24)
    assert back.tensors.keys() == made.keys()
    for space, tensors in made.items():
        assert {name: t.dtype for name, t in back.tensors[space].items()} == dict.fromkeys(
            tensors, dtype if space == MODEL else "F32"
        )
        for name, values in tensors.items():
            assert whole(back, space, name).tobytes() == values.tobytes()
    padded = through_torch(there.written.folder)["embedding.word_embeddings.weight"]
    multiple = spec.vocab_multiple * spec.kv_heads
    assert padded.shape[0] == -(-spec.vocab // multiple) * multiple
    assert not padded[spec.vocab :].any()
