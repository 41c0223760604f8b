"""The model that flags describe, option by option."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import pytest

from mega_schema.errors import ConfigError
from mega_schema.presets import preset
from mega_schema.spec import FAMILY_DEFAULTS, Family, ModelSpec
from mega_train.resolve import ResolvedConfig

NO_MODEL: dict[str, Any] = dict.fromkeys(
    (
        "model__num_layers",
        "model__hidden_size",
        "model__num_attention_heads",
        "model__vocab_size",
        "model__make_vocab_size_divisible_by",
    )
)


class ResolveConfig(Protocol):
    def __call__(self, **values: Any) -> ResolvedConfig: ...


@pytest.mark.parametrize(
    ("flags", "model"),
    [
        ({"apply_layernorm_1p": True}, {"norm_1p": True}),
        ({"embed_layernorm": True}, {"embed_norm": True}),
        ({"qk_layernorm": True}, {"qk_norm": True}),
        ({"apply_residual_connection_post_layernorm": True}, {"post_norm_residual": True}),
        ({"parallel_residual": True}, {"parallel_residual": True}),
        ({"position_embedding_type": "alibi"}, {"positions": "alibi"}),
        (
            {"rotary_percent": 0.25, "position_embedding_type": "rope"},
            {"rotary_fraction": 0.25, "rotary_dim": 2},
        ),
        ({"rotary_interleaved": True}, {"rope_interleaved": True}),
        ({"rotary_seq_len_interpolation_factor": 4.0}, {"rope_interpolation": 4.0}),
        ({"use_rope_scaling": True}, {"rope_scaling": 8.0, "rope_scaling_context": 8192}),
        ({"use_rope_scaling": True, "rope_scaling_factor": 32.0}, {"rope_scaling": 32.0}),
        ({"init_method_xavier_uniform": True}, {"init": "xavier_uniform"}),
        ({"disable_bias_linear": True}, {"bias": False, "qkv_bias": False, "activation": "gelu_erf"}),
        (
            {"disable_bias_linear": True, "activation": "gelu_tanh"},
            {"bias": False, "activation": "gelu_tanh"},
        ),
        ({"disable_bias_linear": True, "add_qkv_bias": True}, {"bias": False, "qkv_bias": True}),
        ({"bias_gelu_fusion": False}, {"activation": "gelu_erf"}),
        ({"bias_gelu_fusion": False, "activation": "gelu_tanh"}, {"activation": "gelu_tanh"}),
        ({"bias_gelu_fusion": False, "swiglu": True}, {"activation": "swiglu"}),
        # BigScience's gates leave the width at 4 x hidden, NVIDIA's SwiGLU makes it 8/3
        ({"glu_activation": "geglu", "bias_gelu_fusion": False}, {"activation": "geglu", "ffn": 64 * 4}),
        ({"glu_activation": "liglu", "ffn_hidden_size": 24}, {"activation": "liglu", "ffn": 24}),
        (
            {"glu_activation": "swiglu", "swiglu": True, "hidden_size": 96},
            {"activation": "swiglu", "ffn": 256},
        ),
        ({"window_size": "4095,0"}, {"sliding_window": 4096}),
        ({"window_size": "(7, 0)"}, {"sliding_window": 8}),
        ({"window_size": "3"}, {"sliding_window": 4}),
    ],
    ids=str,
)
def test_an_option_of_the_model_is_in_its_spec(
    resolve_config: ResolveConfig, flags: dict[str, Any], model: dict[str, Any]
) -> None:
    values = {
        f"model__{key}": value
        for key, value in {"hidden_size": 64, "num_attention_heads": 8, **flags}.items()
    }
    if "window_size" in flags:
        values["model__window_size"] = f'"{flags["window_size"]}"'
    spec = resolve_config(**values).spec
    assert {key: getattr(spec, key) for key in model} == model


def test_a_preset_keeps_what_is_not_said(resolve_config: ResolveConfig) -> None:
    named = NO_MODEL | {"model__preset": "gpt2-124m"}
    assert resolve_config(**named, model__bias_gelu_fusion=False).spec.activation == "gelu_erf"
    named["model__preset"] = "llama3-8b"
    scaled = resolve_config(family="llama", **named, model__use_rope_scaling=True).spec
    wanted = preset("llama3-8b").to_dict() | {"rope_scaling": 8.0}
    assert scaled.to_dict() == wanted
    assert resolve_config(family="llama", **named, model__bias_gelu_fusion=False).spec == preset("llama3-8b")


@pytest.mark.parametrize(
    ("family", "name", "groups", "kv_heads"),
    [
        ("bert", "bert-base-uncased", None, 4),
        ("gpt", "gpt2-124m", None, 4),
        ("gpt", "gpt2-124m", 2, 2),
        ("llama", "llama3-8b", None, 8),  # grouped-query attention: the preset's groups stay
    ],
)
def test_key_heads_of_a_preset_follow_the_heads(
    resolve_config: ResolveConfig, family: Family, name: str, groups: int | None, kv_heads: int
) -> None:
    # the 12 key heads of the preset stayed, which 4 query heads cannot share
    heads = 16 if family == "llama" else 4
    flags = {**NO_MODEL, "model__preset": name, "model__num_attention_heads": heads}
    spec = resolve_config(family=family, **flags, model__num_query_groups=groups).spec
    assert (spec.heads, spec.kv_heads) == (heads, kv_heads)


@pytest.mark.parametrize(
    ("family", "name", "flags", "sizes"),
    [
        # heads of 64 and a feed-forward layer of 3072 stayed beside a hidden size of 256
        ("gpt", "gpt2-124m", {"hidden_size": 256, "num_attention_heads": 8}, (256, 8, 8, 32, 1024)),
        ("gpt", "gpt2-124m", {"num_attention_heads": 6}, (768, 6, 6, 128, 3072)),
        ("bert", "bert-base-uncased", {"hidden_size": 384}, (384, 12, 12, 32, 1536)),
        ("llama", "llama3-8b", {"hidden_size": 512, "num_attention_heads": 8}, (512, 8, 8, 64, 1792)),
        ("gpt", "gpt2-124m", {"hidden_size": 96, "kv_channels": 5, "ffn_hidden_size": 7}, (96, 12, 12, 5, 7)),
    ],
)
def test_sizes_of_heads_and_feed_forward_of_a_preset_follow_the_hidden_size(
    resolve_config: ResolveConfig, family: Family, name: str, flags: dict[str, int], sizes: tuple[int, ...]
) -> None:
    values = {f"model__{key}": value for key, value in flags.items()}
    spec = resolve_config(family=family, **(NO_MODEL | {"model__preset": name} | values)).spec
    assert (spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, spec.ffn) == sizes


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            {"hidden_size": 100, "num_attention_heads": 10},
            "--ffn-hidden-size: missing: found --hidden-size 100, and 11008 for 4096 in the preset; "
            "hint: --ffn-hidden-size 256",
        ),
        (
            {"hidden_size": 512, "num_attention_heads": 7},
            "--num-attention-heads: does not divide --hidden-size: found 7 heads, hidden 512, "
            "wanted a divisor of 512, or --kv-channels",
        ),
        (
            {"num_attention_heads": 0},
            "--num-attention-heads: not a count: found 0, wanted an integer above 0",
        ),
    ],
)
def test_sizes_that_do_not_follow_from_a_preset_are_asked_for(
    resolve_config: ResolveConfig, flags: dict[str, int], line: str
) -> None:
    values = {f"model__{key}": value for key, value in flags.items()}
    with pytest.raises(ConfigError) as caught:
        resolve_config(family="llama", **(NO_MODEL | {"model__preset": "llama2-7b"} | values))
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            {"glu_activation": "geglu", "swiglu": True},
            "--swiglu: disagrees with --glu-activation: found swiglu, wanted geglu",
        ),
        (
            {"glu_activation": "geglu", "activation": "reglu"},
            "--activation: disagrees with --glu-activation: found reglu, wanted geglu",
        ),
        (
            {"rope_scaling_factor": 8.0},
            "--rope-scaling-factor: needs --use-rope-scaling: found 8.0; hint: --use-rope-scaling, "
            "or leave it out",
        ),
        (
            {"window_size": "4,4"},
            "--window-size: not a window of tokens before: found 4,4, wanted LEFT,0; "
            "hint: --window-size 4095,0",
        ),
        ({"window_size": "wide"}, "--window-size: not a window of tokens before: found wide"),
    ],
    ids=str,
)
def test_options_that_disagree_are_told(
    resolve_config: ResolveConfig, flags: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(**{f"model__{key}": value for key, value in flags.items()})
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        ({}, {}),
        ({"embed_layernorm": True}, {"embed_norm": True}),
        ({"normalization": "LayerNorm"}, {"norm": "layernorm"}),
        ({"activation": "gelu_erf"}, {"activation": "gelu_erf", "ffn": 96 * 4}),
        ({"glu_activation": "geglu"}, {"activation": "geglu"}),
        ({"bias_gelu_fusion": False, "disable_bias_linear": True}, {}),
        ({"position_embedding_type": "learned_absolute"}, {"positions": "learned"}),
    ],
    ids=str,
)
def test_a_flag_replaces_one_default_of_the_llama_family(
    resolve_config: ResolveConfig, flags: dict[str, Any], changed: dict[str, Any]
) -> None:
    sizes = {"model__hidden_size": 96, "model__num_attention_heads": 8}
    spec = resolve_config(
        family="llama", **sizes, **{f"model__{key}": value for key, value in flags.items()}
    ).spec
    wanted = {"family": "llama", "ffn": 256, **FAMILY_DEFAULTS["llama"], **changed}
    assert {name: getattr(spec, name) for name in wanted} == wanted


def test_a_checkpoint_of_the_other_family_with_an_equal_model_is_accepted(
    resolve_config: ResolveConfig,
) -> None:
    switches = ("swiglu", "disable_bias_linear", "untie_embeddings_and_output_weights")
    options = {"normalization": "RMSNorm", "position_embedding_type": "rope"} | dict.fromkeys(switches, True)
    flags = {f"model__{key}": value for key, value in options.items()}
    spec = resolve_config(**flags).spec
    loaded = replace(spec, family="llama")
    assert resolve_config(loaded=loaded, **flags).spec == spec
    with pytest.raises(ConfigError, match="^--normalization: differs from the checkpoint's"):
        resolve_config(loaded=loaded)


def test_fields_of_a_model_are_flags_wherever_an_error_names_them(resolve_config: ResolveConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(model__parallel_residual=True, model__apply_residual_connection_post_layernorm=True)
    assert str(caught.value).startswith("--parallel-residual: ")
    assert "excludes --apply-residual-connection-post-layernorm: found both" in str(caught.value)
    loaded = resolve_config(model__window_size="3,0", model__untie_embeddings_and_output_weights=True).spec
    with pytest.raises(
        ConfigError, match=r"^--untie-embeddings-and-output-weights: .* not given, wanted given"
    ):
        resolve_config(loaded=loaded, model__window_size="3,0")
    with pytest.raises(ConfigError, match=r"^--window-size: differs .* found 7,0, wanted 3,0;"):
        resolve_config(
            loaded=loaded, model__window_size="7,0", model__untie_embeddings_and_output_weights=True
        )


def test_a_checkpoints_model_is_compared_without_what_it_began_with(resolve_config: ResolveConfig) -> None:
    loaded: ModelSpec = resolve_config().spec
    assert resolve_config(loaded=loaded, model__init_method_xavier_uniform=True).spec.init == "xavier_uniform"
    with pytest.raises(ConfigError, match="^--qk-layernorm: differs from the checkpoint's"):
        resolve_config(loaded=loaded, model__qk_layernorm=True)
