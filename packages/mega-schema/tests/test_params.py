"""The parameter table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mega_schema.arch import table
from mega_schema.parallel_layout import Layout
from mega_schema.params import Param, count_params
from mega_schema.presets import PRESETS
from mega_schema.spec import ModelSpec, gpt, llama

SMALL = {"layers": 3, "hidden": 8, "heads": 4, "vocab": 11, "max_seq_len": 6, "vocab_multiple": 4}
SPECS: dict[str, ModelSpec] = {
    "gpt": gpt(**SMALL),
    "gpt gated without bias": gpt(**SMALL, activation="swiglu", bias=False, qkv_bias=False, tied=False),
    "gpt computed positions": gpt(**SMALL, positions="sinusoidal", norm="rmsnorm"),
    "gpt with every norm": gpt(**SMALL, embed_norm=True, qk_norm=True, norm_1p=True, positions="alibi"),
    "llama": llama(**SMALL, ffn=12),
    "llama of qwen": llama(**SMALL, ffn=12, qkv_bias=True, qk_norm=True),
    "llama grouped tied": llama(**SMALL, ffn=12, kv_heads=2, tied=True),
}


@pytest.mark.parametrize("name", SPECS)
def test_names_are_unique_and_rows_are_consistent(name: str) -> None:
    rows = table(SPECS[name])
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    for row in rows:
        if row.split is not None and row.split.blocks:
            assert sum(row.split.blocks) == row.shape[row.split.dim]
        if row.tied_to is not None:
            (tied_row,) = (r for r in rows if r.name == row.tied_to)
            assert (tied_row.shape, tied_row.split, tied_row.tied_to) == (row.shape, row.split, None)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_every_parameter_is_on_one_stage(name: str, pp: int) -> None:
    stages = [Layout(pp=pp).stage(place, 3) for place in range(pp)]
    for row in table(SPECS[name]):
        assert sum(row.is_on(stage) for stage in stages) == 1, row.name


@pytest.mark.parametrize("name", SPECS)
def test_norms_and_biases_alone_do_not_decay(name: str) -> None:
    for row in table(SPECS[name]):
        assert row.decay == (not row.name.endswith(".bias") and "norm" not in row.name), row.name


@pytest.mark.parametrize("name", SPECS)
def test_the_family_changes_no_row(name: str) -> None:
    spec = SPECS[name]
    assert table(replace(spec, family="gpt")) == table(replace(spec, family="llama"))


@pytest.mark.parametrize("name", SPECS)
def test_the_first_matrix_of_a_gated_feed_forward_is_gate_up(name: str) -> None:
    spec = SPECS[name]
    rows = {row.name: row for row in table(spec)}
    have, absent = ("gate_up", "up") if spec.is_gated else ("up", "gate_up")
    row = rows[f"layers.0.{have}.weight"]
    assert row.shape == (spec.ffn * (2 if spec.is_gated else 1), spec.hidden)
    assert row.split is not None
    assert row.split.blocks == ((spec.ffn, spec.ffn) if spec.is_gated else ())
    assert not any(f".{absent}." in key for key in rows)


def test_a_tied_head_is_not_counted() -> None:
    tied, untied = (count_params(table(gpt(**SMALL, tied=tied))) for tied in (True, False))
    assert untied - tied == 11 * 8


def test_padding_is_local_and_never_global() -> None:
    (embed,) = (row for row in table(SPECS["gpt"]) if row.name == "embed.weight")
    assert embed.shape == (11, 8)
    assert embed.local_shape(1) == (12, 8)
    assert embed.local_shape(2) == (8, 8)


@pytest.mark.parametrize("name", ["megatron-530b", "megatron-1t", "llama2-70b", "llama3.1-405b"])
def test_large_presets_can_be_cut_over_a_machine_of_eight(name: str) -> None:
    for row in table(PRESETS[name]):
        assert row.local_shape(8)


def test_a_row_without_split_is_whole_on_every_rank() -> None:
    row: Param = next(r for r in table(SPECS["gpt"]) if r.split is None)
    assert row.slabs(0, 4) == row.slabs(3, 4)
    assert row.local_shape(4) == row.shape
