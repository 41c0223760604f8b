"""The model that flags describe, option by option."""

from __future__ import annotations

from typing import Any, Protocol

import pytest

from mega_schema.errors import ConfigError
from mega_schema.spec import ModelSpec, preset
from mega_train.resolve import ResolvedConfig

NO_MODEL: dict[str, Any] = dict.fromkeys(
    ("model__layers", "model__hidden", "model__heads", "model__vocab", "model__vocab_multiple")
)


class ResolveConfig(Protocol):
    def __call__(self, **values: Any) -> ResolvedConfig: ...


@pytest.mark.parametrize(
    ("flags", "model"),
    [
        ({"norm_1p": True}, {"norm_1p": True}),
        ({"embed_norm": True}, {"embed_norm": True}),
        ({"qk_norm": True}, {"qk_norm": True}),
        ({"post_norm_residual": True}, {"post_norm_residual": True}),
        ({"parallel_residual": True}, {"parallel_residual": True}),
        ({"positions": "alibi"}, {"positions": "alibi"}),
        ({"rope_share": 0.25, "positions": "rope"}, {"rope_share": 0.25, "rotary_dim": 2}),
        ({"rope_interleaved": True}, {"rope_interleaved": True}),
        ({"rope_interpolation": 4.0}, {"rope_interpolation": 4.0}),
        ({"rope_scaled": True}, {"rope_scaling": 8.0, "rope_scaling_context": 8192}),
        ({"rope_scaled": True, "rope_scaling": 32.0}, {"rope_scaling": 32.0}),
        ({"xavier": True}, {"init": "xavier_uniform"}),
        ({"no_bias": True}, {"bias": False, "qkv_bias": False, "activation": "gelu_erf"}),
        ({"no_bias": True, "activation": "gelu_tanh"}, {"bias": False, "activation": "gelu_tanh"}),
        ({"no_bias": True, "qkv_bias": True}, {"bias": False, "qkv_bias": True}),
        ({"unfused_gelu": True}, {"activation": "gelu_erf"}),
        ({"unfused_gelu": True, "activation": "gelu_tanh"}, {"activation": "gelu_tanh"}),
        ({"unfused_gelu": True, "swiglu": True}, {"activation": "swiglu"}),
        # BigScience's gates leave the width at 4 x hidden, NVIDIA's SwiGLU makes it 8/3
        ({"glu": "geglu", "unfused_gelu": True}, {"activation": "geglu", "ffn": 64 * 4}),
        ({"glu": "liglu", "ffn": 24}, {"activation": "liglu", "ffn": 24}),
        ({"glu": "swiglu", "swiglu": True, "hidden": 96}, {"activation": "swiglu", "ffn": 256}),
        ({"window": "4095,0"}, {"window": 4096}),
        ({"window": "(7, 0)"}, {"window": 8}),
        ({"window": "3"}, {"window": 4}),
    ],
    ids=str,
)
def test_an_option_of_the_model_is_in_its_spec(
    resolve_config: ResolveConfig, flags: dict[str, Any], model: dict[str, Any]
) -> None:
    values = {f"model__{key}": value for key, value in {"hidden": 64, "heads": 8, **flags}.items()}
    if "window" in flags:
        values["model__window"] = f'"{flags["window"]}"'
    spec = resolve_config(**values).spec
    assert {key: getattr(spec, key) for key in model} == model


def test_a_preset_keeps_what_is_not_said(resolve_config: ResolveConfig) -> None:
    named = NO_MODEL | {"model__preset": "gpt2-124m"}
    assert resolve_config(**named, model__unfused_gelu=True).spec.activation == "gelu_erf"
    named["model__preset"] = "llama3-8b"
    scaled = resolve_config(family="llama", **named, model__rope_scaled=True).spec
    wanted = preset("llama3-8b").to_dict() | {"rope_scaling": 8.0}
    assert scaled.to_dict() == wanted
    assert resolve_config(family="llama", **named, model__unfused_gelu=True).spec == preset("llama3-8b")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            {"glu": "geglu", "swiglu": True},
            "--swiglu: disagrees with --glu-activation: found swiglu, wanted geglu",
        ),
        (
            {"glu": "geglu", "activation": "reglu"},
            "--activation: disagrees with --glu-activation: found reglu, wanted geglu",
        ),
        (
            {"rope_scaling": 8.0},
            "--rope-scaling-factor: nothing is scaled: found 8.0; hint: --use-rope-scaling, or leave it out",
        ),
        (
            {"window": "4,4"},
            "--window-size: not a window of tokens before: found 4,4, wanted LEFT,0; "
            "hint: --window-size 4095,0",
        ),
        ({"window": "wide"}, "--window-size: not a window of tokens before: found wide"),
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
    ("flags", "line"),
    [
        ({"embed_norm": True}, "--embed-layernorm: {one}: found given, wanted not given"),
        ({"norm": "LayerNorm"}, "--normalization: {one}: found LayerNorm, wanted RMSNorm"),
        ({"activation": "gelu_erf"}, "--activation: {one}: found gelu_erf, wanted swiglu"),
        ({"glu": "geglu"}, "--glu-activation: {one}: found geglu, wanted swiglu"),
        (
            {"positions": "learned_absolute"},
            "--position-embedding-type: {one}: found learned_absolute, wanted rope",
        ),
    ],
)
def test_a_llama_is_told_what_it_has_one_of_by_the_flag(
    resolve_config: ResolveConfig, flags: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(family="llama", **{f"model__{key}": value for key, value in flags.items()})
    says = line.format(one="the llama family has one choice")
    assert str(caught.value) == f"{says}; hint: mega-train gpt has the others"


def test_fields_of_a_model_are_flags_wherever_an_error_names_them(resolve_config: ResolveConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(model__parallel_residual=True, model__post_norm_residual=True)
    assert str(caught.value).startswith("--parallel-residual: ")
    assert "found --apply-residual-connection-post-layernorm too" in str(caught.value)
    loaded = resolve_config(model__window="3,0", model__untied=True).spec
    with pytest.raises(
        ConfigError, match=r"^--untie-embeddings-and-output-weights: .* not given, wanted given"
    ):
        resolve_config(loaded=loaded, model__window="3,0")
    with pytest.raises(ConfigError, match=r"^--window-size: differs .* found 7,0, wanted 3,0;"):
        resolve_config(loaded=loaded, model__window="7,0", model__untied=True)


def test_a_checkpoints_model_is_compared_without_what_it_began_with(resolve_config: ResolveConfig) -> None:
    loaded: ModelSpec = resolve_config().spec
    assert resolve_config(loaded=loaded, model__xavier=True).spec.init == "xavier_uniform"
    with pytest.raises(ConfigError, match="^--qk-layernorm: differs from the checkpoint's"):
        resolve_config(loaded=loaded, model__qk_norm=True)
