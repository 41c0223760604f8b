"""Valid and invalid model specs."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from mega_schema.arch import table
from mega_schema.errors import ConfigError
from mega_schema.params import count_params
from mega_schema.presets import PRESETS, preset
from mega_schema.spec import FAMILY_DEFAULTS, ModelSpec, gpt, llama

SMALL = {"layers": 2, "hidden": 8, "heads": 2, "vocab": 5, "max_seq_len": 4}


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        # as published: the GPT-2 sizes are those of the released weights, which the paper's text misstates
        ("gpt2-124m", 0.124),
        ("gpt2-355m", 0.355),
        ("gpt2-774m", 0.774),
        ("gpt2-1.5b", 1.558),
        ("megatron-8.3b", 8.3),
        ("megatron-175b", 175),
        ("megatron-530b", 530),
        ("megatron-1t", 1008),
        ("megatron-11b", 11),
        ("llama2-7b", 6.74),
        ("llama2-13b", 13.02),
        ("llama2-70b", 68.98),
        ("llama3-8b", 8.03),
        ("llama3.1-8b", 8.03),
        ("llama3.1-405b", 405.85),
        ("llama3.1-70b", 70.55),
        ("llama3.2-1b", 1.236),
        ("mistral-7b", 7.24),
        ("qwen2.5-7b", 7.62),
        ("qwen3-8b", 8.19),
        ("bloom-7b1", 7.07),
    ],
)
def test_a_preset_has_as_many_parameters_as_its_name_says(name: str, billions: float) -> None:
    assert count_params(table(preset(name))) / 1e9 == pytest.approx(billions, rel=0.01)


def test_every_preset_survives_json() -> None:
    for spec in PRESETS.values():
        assert ModelSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_an_unknown_preset_is_answered_with_a_near_one() -> None:
    with pytest.raises(
        ConfigError, match=r"--preset: unknown model: found llama2-7B, .*did you mean llama2-7b\?"
    ):
        preset("llama2-7B")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "model.layers: not a count: found 0, wanted an integer above 0"),
        ({"layers": True}, "model.layers: not a count: found True"),
        ({"ffn": 2.5}, "model.ffn: not a count: found 2.5"),
        ({"vocab": "5"}, "model.vocab: not a count: found 5"),
        ({"norm": "batchnorm"}, "model.norm: unknown: found batchnorm, wanted layernorm | rmsnorm"),
        ({"norm_eps": "small"}, "model.norm_eps: not a number: found small"),
        ({"norm_eps": float("nan")}, "model.norm_eps: not a number: found nan"),
        ({"init_std": -0.1}, "model.init_std: not a number: found -0.1, wanted 0 or more"),
        ({"tied": 1}, "model.tied: not a boolean: found 1, wanted true | false"),
        ({"heads": 3}, "model.heads: do not divide model.hidden: found 3 heads, 8"),
        ({"heads": 0}, "model.heads: do not divide model.hidden: found 0 heads"),
        ({"heads": 4, "kv_heads": 3}, "model.kv_heads: query heads must share key heads evenly"),
        (
            {"positions": "rope", "rotary_fraction": 0.3},
            "model.rotary_fraction: rotary components come in pairs: found 1 of 4",
        ),
        (
            {"positions": "sinusoidal", "hidden": 7, "head_dim": 4},
            "model.hidden: sinusoidal positions are pairs",
        ),
        ({"positions": "rope", "rotary_fraction": 2.0}, "found 8 of 4, wanted an even number, at most 4"),
        ({"sliding_window": 0}, "model.sliding_window: not a count: found 0, wanted an integer above 0"),
        ({"sliding_window": 2.0}, "model.sliding_window: not a count: found 2.0"),
        (
            {"parallel_residual": True, "post_norm_residual": True},
            "model.parallel_residual: excludes model.post_norm_residual: found",
        ),
        ({"rope_scaling": 0.0}, "model.rope_scaling: not above 0: found 0, wanted 1 or more"),
        (
            {"rope_scaling_low": 4.0},
            "model.rope_scaling_low: is not below model.rope_scaling_high: found 4.0, wanted less than 4",
        ),
        ({"init": "orthogonal"}, "model.init: unknown: found orthogonal, wanted normal | xavier_uniform"),
        ({"hiden": 8}, "model.hiden: unknown key; hint: did you mean hidden?"),
    ],
)
def test_a_value_that_no_model_has_is_refused_by_its_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        gpt(**{**SMALL, **change})
    assert message in str(caught.value)


def test_a_missing_key_is_named() -> None:
    values = gpt(**SMALL).to_dict()
    del values["vocab"]
    with pytest.raises(ConfigError, match=r"run.toml: model.vocab: missing: wanted int"):
        ModelSpec.from_dict(values, "run.toml: model")


def test_the_families_are_two_sets_of_defaults() -> None:
    sizes = {**SMALL, "ffn": 6}
    assert llama(**sizes) == gpt(**sizes, family="llama", **FAMILY_DEFAULTS["llama"])
    fields = dataclasses.asdict(gpt(**sizes))
    assert gpt(**sizes) == llama(**fields)


def test_only_rotary_positions_turn_components() -> None:
    assert gpt(**SMALL).rotary_dim == 0
    assert gpt(**SMALL, positions="rope").rotary_dim == 4
    assert gpt(**SMALL, positions="rope", rotary_fraction=0.5).rotary_dim == 2
