"""Classic checkpoints of Megatron's, read: those that its own code wrote, and its numerics as such files."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from mega_ckpt.cli import cli
from mega_ckpt.layouts import whole_slab
from mega_ckpt.pickles import open_file
from mega_model.attend import Packed
from mega_model.build import build, fill
from mega_model.runtime import Runtime
from mega_schema.arch import table
from mega_schema.checkpoint import MODEL, Checkpoint

# float32 over sums of at most 128 terms: a few units in the last place of the largest logit
RELATIVE = 1e-5
SMALL = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "max_position_embeddings": 8,
    "padded_vocab_size": 128,
    "bias_gelu_fusion": False,
}
CASES: dict[str, dict[str, Any]] = {
    "gpt_erf_gelu": {},
    "gpt_tanh_gelu_fused": {"bias_gelu_fusion": True},
    "gpt_postln": {"apply_residual_connection_post_layernorm": True},
    "gpt_swiglu_rope_untied_nobias": {
        "hidden_size": 48,
        "ffn_hidden_size": 128,
        "swiglu": True,
        "use_rotary_position_embeddings": True,
        "add_position_embedding": False,
        "untie_embeddings_and_output_weights": True,
        "add_bias_linear": False,
    },
    "gpt_no_qk_scaling": {"apply_query_key_layer_scaling": False},
    "llama_legacy09": {
        "ffn_hidden_size": 24,
        "group_query_attention": True,
        "num_query_groups": 2,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-5,
        "swiglu": True,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
        "add_bias_linear": False,
    },
}


def _converted(load: Path, save: Path, *words: str) -> Checkpoint:
    result = CliRunner().invoke(
        cli,
        ["convert", "--from", "megatron", "--to", "mega", "--load", str(load), "--save", str(save), *words],
    )
    assert result.exit_code == 0, result.exception or result.output
    return Checkpoint.open(save)


def _whole(checkpoint: Checkpoint, name: str) -> np.ndarray:
    return checkpoint.read(MODEL, name, whole_slab(checkpoint.tensors[MODEL][name].shape))


@pytest.mark.parametrize("case", CASES)
def test_numerics_in_a_file_of_megatrons_have_its_logits(golden: Path, tmp_path: Path, case: str) -> None:
    with np.load(golden / "numerics" / f"{case}_weights.npz") as file:
        weights = dict(file)
    with np.load(golden / "numerics" / f"{case}_io.npz") as file:
        io = dict(file)
    model = {"language_model": {"encoder": {}}}
    for name in weights:
        _, part, rest = name.split(".", 2)
        place = model["language_model"].setdefault(part, {})
        if part == "embedding":
            part, rest = rest.split(".")
            place = place.setdefault(part, {})
        place[rest] = torch.from_numpy(weights[name])
    rank = tmp_path / "run" / "release" / "mp_rank_00"
    rank.mkdir(parents=True)
    tree = {
        "args": Namespace(**SMALL | CASES[case]),
        "checkpoint_version": 3.0,
        "iteration": 1,
        "model": model,
    }
    torch.save(tree, rank / "model_optim_rng.pt")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("release", "utf-8")
    found = _converted(tmp_path / "run", tmp_path / "ours")
    ours = build(found.spec, Runtime.alone(found.spec))
    fill(ours, lambda name, slab: found.read(MODEL, name, slab))
    token_BS = torch.from_numpy(io["tokens"])
    rows_B, length = token_BS.shape
    with torch.no_grad():
        logits = ours(token_BS.flatten(), torch.arange(length).repeat(rows_B), Packed(rows_B, length))
    wanted = torch.from_numpy(io["logits"]).flatten(0, 1)
    assert (logits - wanted).abs().max() <= RELATIVE * wanted.abs().max()


def test_a_checkpoint_of_megatrons_and_what_its_tool_made_of_it_are_one(golden: Path, tmp_path: Path) -> None:
    one, other = (
        _converted(golden / "legacy_ckpt" / name, tmp_path / name) for name in ("gpt-tp1pp1", "gpt-tp2pp2")
    )
    assert one.spec == other.spec
    assert (one.spec.vocab, one.spec.activation, one.iteration) == (100, "gelu_erf", 5)
    assert one.trainer["consumed_samples"] == 80
    for row in (row for row in table(one.spec) if row.tied_to is None):
        assert np.array_equal(_whole(one, row.name), _whole(other, row.name)), row.name


def test_heads_of_a_checkpoint_of_megatrons_are_taken_apart(golden: Path, tmp_path: Path) -> None:
    """Against views of the stored rows, [heads, 3, width]."""
    folder = golden / "legacy_ckpt" / "gptsw-tp1pp1"
    found = _converted(folder, tmp_path / "ours")
    stored = open_file(folder / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt")
    for layer in range(4):
        theirs = stored.at(
            f"model.language_model.encoder.layers.{layer}.self_attention.query_key_value.weight"
        )
        apart = theirs.values().reshape(4, 3, 6, 24).transpose(1, 0, 2, 3).reshape(72, 24)
        assert np.array_equal(_whole(found, f"layers.{layer}.qkv.weight"), apart)
    head = stored.at("model.language_model.output_layer.weight").values()
    assert np.array_equal(_whole(found, "head.weight"), head[:100])


def test_the_true_vocabulary_is_what_a_person_says(golden: Path, tmp_path: Path) -> None:
    found = _converted(golden / "legacy_ckpt" / "gpt-tp2pp2", tmp_path / "ours", "--true-vocab-size", "99")
    assert found.spec.vocab == 99


@pytest.mark.parametrize("name", ["bert-tp1pp1", "bert-tp2pp2"])
def test_bert_is_refused_by_name(golden: Path, tmp_path: Path, name: str) -> None:
    load = golden / "legacy_ckpt" / name
    words = [
        "convert",
        "--from",
        "megatron",
        "--to",
        "mega",
        "--load",
        str(load),
        "--save",
        str(tmp_path / "x"),
    ]
    result = CliRunner().invoke(cli, words)
    assert "is of a BERT or T5 model, which ours are not: wanted a GPT" in str(result.exception)
    assert not (tmp_path / "x").exists()
