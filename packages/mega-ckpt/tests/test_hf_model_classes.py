"""Round trips of models of all Hugging Face classes: equal config, bitwise equal weights."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_ckpt.formats.huggingface import config_json
from mega_ckpt.formats.huggingface.model_classes import CLASSES
from mega_ckpt.formats.interface import WriteOptions
from mega_ckpt.name_maps.alias import whole_slab
from mega_ckpt.operations.convert import convert
from mega_schema.arch import table
from mega_schema.checkpoint.reader import MODEL, Checkpoint
from mega_schema.errors import ConfigError, FormatError
from mega_schema.spec import ModelSpec, bert, gpt, llama, t5

SEEDS = range(6)
KINDS = list(dict.fromkeys(model_class.model_type for model_class in CLASSES))


def _random(kind: str, seed: int) -> ModelSpec:
    """A small model of this class, everything that its class leaves open drawn by lot."""
    draw = random.Random(f"{kind} {seed}")
    heads, width = draw.choice([1, 2, 4, 6]), draw.choice([2, 4, 8])
    common: dict[str, Any] = {
        "layers": draw.randint(1, 3),
        "hidden": heads * width,
        "heads": heads,
        "vocab": draw.randint(11, 40),
        "max_seq_len": draw.randint(1, 99),
        "tied": draw.random() < 0.5,
        "norm_eps": draw.choice([1e-5, 1e-6]),
        "init_std": draw.choice([0.02, 0.006]),
    }
    if kind == "gpt2":
        activation = draw.choice(["gelu_tanh", "gelu_erf", "squared_relu"])
        return gpt(**common, ffn=draw.randint(1, 50), activation=activation)
    if kind == "bloom":
        residual = draw.random() < 0.5
        return gpt(**common, positions="alibi", embed_norm=True, post_norm_residual=residual)
    if kind in ("bert", "megatron-bert"):
        activation = draw.choice(["gelu_tanh", "gelu_erf"])
        heads_of_class = draw.choice(
            [
                {"head_transform": activation},
                {"head_transform": activation, "pooler": False, "binary_head": False},
                {"head_transform": "none", "head_bias": False, "binary_head": False},
            ]
        )
        return bert(
            **{**common, "tied": True},
            **heads_of_class,
            ffn=draw.randint(1, 50),
            activation=activation,
            token_types=draw.choice([1, 2, 3]),
            post_norm_residual=kind == "bert",
        )
    if kind in ("t5", "umt5"):
        del common["layers"], common["init_std"]
        relative: dict[str, Any] = {"positions": "relative", "scale_attention": False, "norm": "rmsnorm"}
        return t5(
            **common,
            **relative,
            **dict.fromkeys(("bias", "qkv_bias", "head_bias"), False),
            encoder_layers=draw.randint(1, 3),
            decoder_layers=draw.randint(1, 3),
            head_dim=draw.choice([3, 8]),
            ffn=draw.randint(1, 50),
            activation=draw.choice(["relu", "geglu_tanh"]),
            relative_buckets=draw.choice([8, 32]),
            relative_per_layer=kind == "umt5",
            scale_output=common["tied"],
        )
    if kind == "modernbert":
        windows_of_layers = draw.choice(
            [{}, {"sliding_window": draw.randint(1, 9), "global_attention_every": draw.randint(2, 3)}]
        )
        heads_of_class = draw.choice(
            [{"head_transform": "gelu_tanh"}, {"head_transform": "none", "head_bias": False}]
        )
        return bert(
            **{**common, "tied": True, "layers": 4},
            **heads_of_class,
            **windows_of_layers,
            ffn=draw.randint(1, 50),
            activation="geglu",
            positions="rope",
            rope_theta=draw.choice([160000.0, 7.0]),
            rope_theta_local=draw.choice([10000.0, 5.0]),
            norm_bias=draw.random() < 0.5,
            embed_norm=True,
            first_attention_norm=False,
            **dict.fromkeys(("bias", "qkv_bias", "pooler", "binary_head"), False),
            token_types=None,
        )
    rope: dict[str, Any] = {"rope_theta": draw.choice([10000.0, 500000.0])}
    rope |= draw.choice(
        [
            {},
            {"rope_interpolation": 4.0},
            {"rope_scaling": 8.0, "rope_scaling_low": 1.0, "rope_scaling_context": 64},
        ]
    )
    if kind == "gpt_neox":
        return gpt(
            **common,
            **rope,
            ffn=draw.randint(1, 50),
            positions="rope",
            rotary_fraction=draw.choice([1.0, 2 / width]),
            activation=draw.choice(["gelu_tanh", "gelu_erf"]),
            parallel_residual=draw.random() < 0.5,
        )
    windows = {"llama": [None], "mistral": [1, 7]}.get(kind, [None, 5])
    return llama(
        **common,
        **rope,
        ffn=draw.randint(1, 50),
        kv_heads=draw.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        head_dim=draw.choice([width, 2, 10]),
        sliding_window=draw.choice(windows),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_says_the_whole_model_again(kind: str) -> None:
    for seed in range(60):
        spec = _random(kind, seed)
        config = json.loads(json.dumps(config_json.from_spec(spec, "x")))
        assert config["model_type"] == kind
        assert config_json.to_spec(config, "x") == spec, seed


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_model_of_a_class_comes_back_bit_for_bit(
    run_folder: Any, tmp_path: Path, kind: str, seed: int
) -> None:
    spec = _random(kind, seed)
    run = run_folder(spec)
    convert(run, tmp_path / "hf", "mega", "hf", target=WriteOptions(shard=1 << (4 * seed)))
    convert(tmp_path / "hf", tmp_path / "back", "hf", "mega")
    before, after = Checkpoint.open(run), Checkpoint.open(tmp_path / "back")
    assert after.spec == spec
    for row in table(spec):
        if row.tied_to is None:
            slab = whole_slab(row.shape)
            foreign_values, back = (
                model_class.read_raw(MODEL, row.name, slab) for model_class in (before, after)
            )
            assert np.array_equal(foreign_values, back), row.name


def _small_bert(**fields: Any) -> ModelSpec:
    return bert(layers=2, hidden=8, heads=2, vocab=11, max_seq_len=6, **fields)


@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_a_bert_without_token_types_is_written_with_one_of_zeros(
    run_folder: Any, tmp_path: Path, dtype: str
) -> None:
    # type_vocab_size was null, which no reader accepts; only the check of the logits noticed, after the write
    no_pair = {"token_types": None, "pooler": False, "binary_head": False}
    spec = _small_bert(activation="gelu_erf", **no_pair)
    run = run_folder(spec)
    target = WriteOptions(dtype=dtype, shard=1 << 8)
    convert(run, tmp_path / "hf", "mega", "hf", target=target)
    config = json.loads((tmp_path / "hf/config.json").read_bytes())
    assert (config["architectures"], config["type_vocab_size"]) == (["MegatronBertForMaskedLM"], 1)
    convert(tmp_path / "hf", tmp_path / "back", "hf", "mega")
    before, after = Checkpoint.open(run), Checkpoint.open(tmp_path / "back")
    assert after.spec == dataclasses.replace(spec, token_types=1)
    types = after.read_raw(MODEL, "token_type.weight", whole_slab((1, 8)))
    assert not types.any()
    assert after.tensors[MODEL].keys() - before.tensors[MODEL].keys() == {"token_type.weight"}
    if dtype == "keep":
        for name, tensor in before.tensors[MODEL].items():
            slab = whole_slab(tensor.shape)
            assert np.array_equal(before.read_raw(MODEL, name, slab), after.read_raw(MODEL, name, slab)), name


def test_megatrons_default_bert_is_refused_with_the_flags_that_train_another(
    run_folder: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(run_folder(_small_bert()), tmp_path / "hf", "mega", "hf")
    assert str(caught.value).endswith(
        "model.head_transform: is not supported by MegatronBertForPreTraining: found gelu_erf, wanted "
        "gelu_tanh; hint: train with --no-bias-gelu-fusion, or with --activation gelu_tanh"
    )
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("bloom", {"alibi": False}, "alibi: is not supported: found False, wanted True"),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx: is not support",
        ),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights: is not supported"),
        ("gpt2", {"activation_function": "tanh"}, "activation_function: is not supported: found tanh"),
        ("gpt_neox", {"attention_bias": False}, "attention_bias: is not supported: found False, wanted True"),
        ("gpt_neox", {"hidden_act": "relu"}, "hidden_act: is not supported: found relu, wanted gelu_fast | "),
        (
            "gpt_neox",
            {"rope_scaling": None, "rope_parameters": {"partial_rotary_factor": 3.0}},
            "model.rotary_fraction: rotary components come in pairs",
        ),
        ("gpt_neox", {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling: positions scaled in this way"),
        ("mistral", {"num_hidden_layers": None}, "num_hidden_layers: is null"),
        ("mistral", {"sliding_window": 0}, "model.sliding_window: not a count: found 0"),
        ("qwen2", {"rope_scaling": {"type": "mrope"}}, "positions scaled in this way are not supported"),
        ("qwen3", {"attention_bias": True}, "attention_bias: is not supported: found True, wanted False"),
        ("qwen3", {"model_type": "qwen3_moe"}, "model_type: unknown architecture: found qwen3_moe"),
        ("bloom", {"n_layer": None, "num_hidden_layers": 2}, "n_layer: is null"),
    ],
)
def test_what_ours_does_not_compute_is_refused_by_its_key(
    kind: str, change: dict[str, Any], message: str
) -> None:
    config = config_json.from_spec(_random(kind, 1), "x") | change
    with pytest.raises(FormatError) as caught:
        config_json.to_spec(config, "hf/config.json")
    assert str(caught.value).startswith("hf/config.json: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_older_names_of_keys_and_missing_ones_mean_what_the_class_takes() -> None:
    bloom = {
        "model_type": "bloom",
        "n_embed": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
        "vocab_size": 5,
    }
    spec = config_json.to_spec(bloom, "x")
    assert (spec.hidden, spec.heads, spec.layers, spec.ffn, spec.max_seq_len) == (8, 2, 3, 32, 2048)
    wide = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 1, "vocab_size": 5}
    wide["intermediate_size"] = 9
    neox = config_json.to_spec({"model_type": "gpt_neox", **wide}, "x")
    assert (neox.rotary_fraction, neox.parallel_residual, neox.activation) == (0.25, True, "gelu_erf")
    mistral = config_json.to_spec({"model_type": "mistral", **wide}, "x")
    assert (mistral.sliding_window, mistral.kv_heads, mistral.max_seq_len) == (4096, 8, 131072)
    assert (
        config_json.to_spec({"model_type": "mistral", **wide, "sliding_window": None}, "x").sliding_window
        is None
    )
    assert config_json.to_spec({"model_type": "qwen3", **wide, "num_key_value_heads": 2}, "x").head_dim == 128


CHOICES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 3},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
}


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("kind", CHOICES)
def test_a_model_is_written_as_the_class_that_has_what_it_has(kind: str, windowed: bool) -> None:
    window = {"sliding_window": 3} if windowed else {}
    spec = llama(layers=2, hidden=8, heads=4, ffn=6, vocab=11, max_seq_len=6, **{**window, **CHOICES[kind]})
    config = config_json.from_spec(spec, "x")
    assert config["model_type"] == ("mistral" if windowed and kind == "llama" else kind)
    assert config_json.to_spec(json.loads(json.dumps(config)), "x") == spec


def test_a_gated_gpt_is_written_as_a_llama_and_is_one_when_it_comes_back(
    run_folder: Any, tmp_path: Path
) -> None:
    gated = gpt(
        layers=2,
        hidden=8,
        heads=4,
        kv_heads=2,
        ffn=6,
        vocab=11,
        max_seq_len=6,
        norm="rmsnorm",
        activation="swiglu",
        positions="rope",
        bias=False,
        qkv_bias=False,
        tied=False,
    )
    convert(run_folder(gated), tmp_path / "hf", "mega", "hf")
    convert(tmp_path / "hf", tmp_path / "back", "hf", "mega")
    back, before = Checkpoint.open(tmp_path / "back"), Checkpoint.open(tmp_path / "run")
    assert back.spec == dataclasses.replace(gated, family="llama")
    for name, tensor in before.tensors[MODEL].items():
        slab = whole_slab(tensor.shape)
        theirs = back.read_raw(MODEL, name, slab)
        assert np.array_equal(before.read_raw(MODEL, name, slab), theirs)
