"""Classic Megatron checkpoints against those that Megatron's own code wrote: keys and values."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from mega_ckpt.checkpoint.checkpoint_source import CheckpointSource, ReadBox
from mega_ckpt.cli import cli
from mega_ckpt.formats.interface import WriteOptions
from mega_ckpt.formats.registry import writer_of
from mega_ckpt.name_maps.alias import whole_slab
from mega_ckpt.torch_files.pickle_reader import open_file
from mega_model.attention_backends import PackedAttention
from mega_model.build import build_model, fill_weights
from mega_model.runtime import Runtime
from mega_schema.arch import table
from mega_schema.checkpoint.reader import MODEL, OPTIMIZER, Checkpoint
from mega_schema.parallel_layout import Layout
from mega_schema.spec import ModelSpec, gpt

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


def _convert(load: Path, save: Path, *words: str) -> Checkpoint:
    result = CliRunner().invoke(
        cli,
        ["convert", "--from", "megatron", "--to", "mega", "--load", str(load), "--save", str(save), *words],
    )
    assert result.exit_code == 0, result.exception or result.output
    return Checkpoint.open(save)


def _read_tensor(checkpoint: Checkpoint, name: str) -> np.ndarray:
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
    found = _convert(tmp_path / "run", tmp_path / "ours")
    ours = build_model(Runtime.single_process(found.spec))
    fill_weights(ours, lambda name, slab: found.read(MODEL, name, slab))
    token_BS = torch.from_numpy(io["tokens"])
    rows_B, length = token_BS.shape
    with torch.no_grad():
        logits = ours(
            token_BS.flatten(), torch.arange(length).repeat(rows_B), PackedAttention(rows_B, length)
        )
    wanted = torch.from_numpy(io["logits"]).flatten(0, 1)
    assert (logits - wanted).abs().max() <= RELATIVE * wanted.abs().max()


def test_a_checkpoint_of_megatrons_and_what_its_tool_made_of_it_are_one(golden: Path, tmp_path: Path) -> None:
    first, second = (
        _convert(golden / "legacy_ckpt" / name, tmp_path / name) for name in ("gpt-tp1pp1", "gpt-tp2pp2")
    )
    assert first.spec == second.spec
    assert (first.spec.vocab, first.spec.activation, first.iteration) == (100, "gelu_erf", 5)
    assert first.trainer["consumed_samples"] == 80
    for row in (row for row in table(first.spec) if row.tied_to is None):
        assert np.array_equal(_read_tensor(first, row.name), _read_tensor(second, row.name)), row.name


def test_heads_of_a_checkpoint_of_megatrons_are_taken_apart(golden: Path, tmp_path: Path) -> None:
    """Against views of the stored rows, [heads, 3, width]."""
    folder = golden / "legacy_ckpt" / "gptsw-tp1pp1"
    converted = _convert(folder, tmp_path / "ours")
    stored = open_file(folder / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt")
    for layer in range(4):
        theirs = stored.entry(
            f"model.language_model.encoder.layers.{layer}.self_attention.query_key_value.weight"
        )
        apart = theirs.values().reshape(4, 3, 6, 24).transpose(1, 0, 2, 3).reshape(72, 24)
        assert np.array_equal(_read_tensor(converted, f"layers.{layer}.qkv.weight"), apart)
    head = stored.entry("model.language_model.output_layer.weight").values()
    assert np.array_equal(_read_tensor(converted, "head.weight"), head[:100])


def test_the_true_vocabulary_is_what_a_person_says(golden: Path, tmp_path: Path) -> None:
    converted = _convert(golden / "legacy_ckpt" / "gpt-tp2pp2", tmp_path / "ours", "--true-vocab-size", "99")
    assert converted.spec.vocab == 99


KEYED = {"layers": 4, "hidden": 32, "heads": 4, "vocab": 128, "max_seq_len": 16, "vocab_multiple": 64}
KEYS: dict[str, ModelSpec] = {
    "legacy_gpt_tp1_pp1": gpt(**KEYED),
    "legacy_gpt_tp2_pp2": gpt(**KEYED),
    "legacy_gpt_swiglu_rope_untied_nobias_tp2_pp2": gpt(
        **{**KEYED, "ffn": 64, "activation": "swiglu", "positions": "rope"},
        tied=False,
        bias=False,
        qkv_bias=False,
    ),
}


@pytest.mark.parametrize("case", KEYS)
def test_torch_finds_every_key_of_megatrons_own_files_in_ours(
    golden: Path, tmp_path: Path, case: str
) -> None:
    expected = json.loads((golden / "ckpt_keys" / f"{case}.json").read_text("utf-8"))
    layout = Layout(tp=2, pp=2) if case.endswith("tp2_pp2") else Layout()
    source = CheckpointSource(tmp_path / "none", KEYS[case], *_zeros(KEYS[case]))
    free, write = writer_of("megatron")
    free(source, tmp_path / "theirs", WriteOptions(layout=layout))
    write(source, tmp_path / "theirs", WriteOptions(layout=layout))
    for rank, wanted in expected.items():
        tree = torch.load(tmp_path / "theirs" / "release" / rank / "model_optim_rng.pt", weights_only=False)
        assert list(_flat(tree["model"])) == list(wanted)
        for name, tensor in _flat(tree["model"]).items():
            assert [list(tensor.shape), str(tensor.dtype)] == wanted[name], name


def test_torch_finds_the_extra_states_that_the_core_class_asks_for(golden: Path, tmp_path: Path) -> None:
    expected = json.loads((golden / "ckpt_keys" / "mcore_state_dicts.json").read_text("utf-8"))[
        "mcore_gpt_local"
    ]
    source = CheckpointSource(
        tmp_path / "none", KEYS["legacy_gpt_tp1_pp1"], *_zeros(KEYS["legacy_gpt_tp1_pp1"])
    )
    writer_of("megatron-core")[1](source, tmp_path / "theirs", WriteOptions())
    file = tmp_path / "theirs" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    keys = torch.load(file, weights_only=False)["model"]
    renamed = {
        name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_").replace(
            "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"
        )
        for name in expected
    }
    assert keys.keys() == renamed
    assert {name for name, value in keys.items() if value is None} == {
        name for name in expected if name.endswith("_extra_state")
    }


def _zeros(spec: ModelSpec) -> tuple[dict[str, dict[str, str]], ReadBox]:
    names = [row.name for row in table(spec) if row.tied_to is None]
    return {MODEL: dict.fromkeys(names, "F32")}, lambda space, name, slab: np.zeros(slab.shape, np.float32)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    tensors = {}
    for key, value in tree.items():
        tensors |= _flat(value, f"{prefix}{key} > ") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return tensors


def test_tp_and_pp_reshapes_of_megatrons_checkpoint_are_one_model(golden: Path, tmp_path: Path) -> None:
    """Megatron's tool split a checkpoint as tp=2 pp=2; mega-ckpt gives the same tensors."""
    folder = golden / "legacy_ckpt"
    _convert(folder / "gpt-tp1pp1", tmp_path / "ours")
    words = [
        "--from",
        "mega",
        "--to",
        "megatron",
        "--load",
        str(tmp_path / "ours"),
        "--save",
        str(tmp_path / "t"),
    ]
    result = CliRunner().invoke(cli, ["convert", *words, "--tp", "2", "--pp", "2"])
    assert result.exit_code == 0, result.exception
    for rank in ("mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001", "mp_rank_01_001"):
        file = Path("iter_0000005") / rank / "model_optim_rng.pt"
        found, wanted = (
            open_file(run / file).entry("model") for run in (tmp_path / "t", folder / "gpt-tp2pp2")
        )
        found, wanted = _flat(found), _flat(wanted)
        assert list(found) == list(wanted)
        for name in wanted:
            # the tool's padding goes on from the padding that was there, ours from the last true row
            real = slice(0, 44 if "mp_rank_01" in rank and "word_embeddings" in name else None)
            assert np.array_equal(found[name].values()[real], wanted[name].values()[real]), name


def test_a_training_goes_on_through_files_of_megatrons_as_if_it_had_not_stopped(
    golden: Path, tmp_path: Path
) -> None:
    shape = (
        "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16"
    )
    steps = (
        "--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --save-interval 2 --eval-iters 0 --bf16"
    )
    rate = "--lr 1e-2 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 1"
    words = f"gpt --tokenizer-type NullTokenizer --vocab-size 65535 {shape} {steps} {rate}".split()
    data = ["--data-path", str(golden / "indexed" / "gptL_uint16_text_document")]

    def train(run: str, *more: str) -> None:
        line = [sys.executable, "-m", "mega_train", *words, *data, "--save", run, *more]
        subprocess.run(line, check=True, cwd=tmp_path, capture_output=True)

    train("whole")
    halfway = tmp_path / "whole" / "iter_0000002"
    words_of = [
        "convert",
        "--from",
        "mega",
        "--to",
        "megatron",
        "--load",
        str(halfway),
        "--tp",
        "2",
        "--pp",
        "2",
    ]
    result = CliRunner().invoke(cli, [*words_of, "--save", str(tmp_path / "theirs")])
    assert result.exit_code == 0, result.exception
    _convert(tmp_path / "theirs", tmp_path / "again")
    train("again", "--load", "again")
    first, second = (Checkpoint.open(tmp_path / run / "iter_0000004") for run in ("whole", "again"))
    assert first.tensors.keys() == second.tensors.keys() == {MODEL, *OPTIMIZER}
    for space, tensors in first.tensors.items():
        for name, tensor in tensors.items():
            whole = whole_slab(tensor.shape)
            assert np.array_equal(first.read_raw(space, name, whole), second.read_raw(space, name, whole)), (
                name
            )
