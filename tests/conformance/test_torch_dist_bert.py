"""`torch_dist` folders of a BERT: what we write comes back, and other models are refused by one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as dcp_save

from mega_ckpt.cli import cli
from mega_ckpt.formats.megatron.names import CORE_BERT, CORE_BERT_FUSED, aliases
from mega_ckpt.name_maps.alias import whole_slab
from mega_schema.arch import table
from mega_schema.checkpoint.reader import MODEL, OPTIMIZER, Checkpoint
from mega_schema.spec import ModelSpec, bert, gpt

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SIZES: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 2, "vocab": 13, "max_seq_len": 8}
SPEC = bert(**SIZES, vocab_multiple=8)
NO_HEADS: dict[str, Any] = {"binary_head": False, "head_transform": "none", "head_bias": False}


def _convert(source: str, target: str, load: Path, save: Path, *more: str) -> str:
    """Return the one line of an error; empty if there was none."""
    words = ["convert", "--from", source, "--to", target, "--load", load, "--save", save, *more]
    result = CliRunner().invoke(cli, [str(word) for word in words])
    return str(result.exception or "")


def _save(run: Path, spec: ModelSpec, save_whole: Any, spaces: tuple[str, ...] = (MODEL,)) -> Checkpoint:
    rng = np.random.default_rng(5)
    rows = [row for row in table(spec) if row.tied_to is None]
    tensors = {
        space: {row.name: rng.uniform(0.1, 0.3, row.shape).astype("f4") for row in rows} for space in spaces
    }
    save_whole(run, spec, tensors, iteration=4)
    return Checkpoint.open(run)


def _tensors_equal(first: Checkpoint, second: Checkpoint) -> bool:
    return first.tensors.keys() == second.tensors.keys() and all(
        np.array_equal(*(c.read(space, name, whole_slab(tensor.shape)) for c in (first, second)))
        for space, tensors in first.tensors.items()
        for name, tensor in tensors.items()
    )


@pytest.mark.parametrize("has_pairs", [True, False], ids=["with a binary head", "without"])
def test_a_bert_and_its_optimizer_come_back(tmp_path: Path, save_whole: Any, has_pairs: bool) -> None:
    parts: dict[str, Any] = {} if has_pairs else {"token_types": None, "pooler": False, "binary_head": False}
    ours = _save(
        tmp_path / "run",
        bert(**SIZES, **parts, activation="gelu_erf"),
        save_whole,
        (MODEL, *OPTIMIZER[1:]),
    )
    assert not _convert("mega", "torch_dist", tmp_path / "run", tmp_path / "dist", "--tp", "2")
    assert not _convert("torch_dist", "mega", tmp_path / "dist", tmp_path / "back")
    back = Checkpoint.open(tmp_path / "back")
    assert back.spec == ours.spec
    assert _tensors_equal(ours, back)
    assert not _convert("torch_dist", "megatron", tmp_path / "dist", tmp_path / "classic", "--tp", "2")
    assert not _convert("megatron", "mega", tmp_path / "classic", tmp_path / "again")
    assert _tensors_equal(ours, Checkpoint.open(tmp_path / "again"))


@pytest.mark.parametrize("names", [CORE_BERT, CORE_BERT_FUSED], ids=["local", "te"])
def test_what_torch_alone_wrote_of_a_bert_is_read_with_its_model(tmp_path: Path, names: Any) -> None:
    rows = {row.name: row for row in table(SPEC)}
    foreign = {alias.foreign: alias.unsharded_tensor(rows[alias.ours]) for alias in aliases(SPEC, names)}
    rng = np.random.default_rng(3)
    state = {name: torch.from_numpy(rng.normal(size=f.shape).astype("f4")) for name, f in foreign.items()}
    dcp_save(state, storage_writer=FileSystemWriter(tmp_path / "flat"), no_dist=True)
    for name, spec in (("bert", SPEC), ("gpt", gpt(**SIZES))):
        (tmp_path / f"{name}.json").write_text(json.dumps(spec.to_dict()), "utf-8")
    run, model = tmp_path / "run", str(tmp_path / "bert.json")
    assert not _convert("torch_dist", "mega", tmp_path / "flat", run, "--model", model)
    ours = Checkpoint.open(run)
    pairs = {"head.bias": "output_layer.bias", "pooler.weight": "pooler.dense.weight"}
    for name, theirs in pairs.items():
        values = ours.read(MODEL, name, whole_slab(ours.tensors[MODEL][name].shape))
        assert np.array_equal(values, state[theirs])
    refused = _convert(
        "torch_dist", "mega", tmp_path / "flat", tmp_path / "x", "--model", str(tmp_path / "gpt.json")
    )
    assert refused.startswith(f"{tmp_path / 'flat'}: is of a BERT: found model.causal = true")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"activation": "gelu_tanh", "head_transform": "gelu_tanh"},
            "model.head_transform: is not supported by Megatron: found gelu_tanh, wanted gelu_erf; "
            "hint: --to megatron may have it",
        ),
        (
            {"positions": "rope"},
            "model.positions: is not supported by Megatron: found rope, wanted learned",
        ),
        (
            {"post_norm_residual": True},
            "model.post_norm_residual: is not supported by Megatron: found True, wanted False; "
            "hint: --to megatron may have it",
        ),
        (
            {"task_head": "classification", "labels": ("a", "b"), **NO_HEADS},
            "model.task_head: is not supported by Megatron: found classification, wanted none",
        ),
    ],
)
def test_a_bert_that_megatron_core_would_compute_otherwise_is_not_written(
    tmp_path: Path, save_whole: Any, fields: dict[str, Any], message: str
) -> None:
    _save(tmp_path / "run", bert(**SIZES, **fields), save_whole)
    refused = _convert("mega", "torch_dist", tmp_path / "run", tmp_path / "x")
    assert message in refused
    assert not (tmp_path / "x").exists()


def _untie(args: Any) -> None:
    args.untie_embeddings_and_output_weights = True


def _turn(args: Any) -> None:
    args.position_embedding_type = "rope"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_untie, "model.tied: is not supported for a BERT of the core class: found False, wanted True"),
        (_turn, "model.positions: is not supported for a BERT of the core class: found rope, wanted learned"),
    ],
)
def test_a_bert_of_unsupported_arguments_is_not_read(
    tmp_path: Path, save_whole: Any, change: Callable[[Any], None], message: str
) -> None:
    _save(tmp_path / "run", SPEC, save_whole)
    assert not _convert("mega", "torch_dist", tmp_path / "run", tmp_path / "dist")
    common = tmp_path / "dist" / "iter_0000004" / "common.pt"
    tree = torch.load(common, weights_only=False)
    change(tree["args"])
    torch.save(tree, common)
    assert message in _convert("torch_dist", "mega", tmp_path / "dist", tmp_path / "x")
    assert not (tmp_path / "x").exists()
