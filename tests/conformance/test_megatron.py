"""Logits and masks equal those of Megatron's own code (shared/golden)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from mega_ckpt.formats.megatron.names import (
    CORE,
    CORE_FUSED,
    LEGACY,
    LEGACY_NORM,
    Names,
    aliases,
    chunk_tensors,
)
from mega_model.attention_backends import PackedAttention
from mega_model.build import build_model, fill_weights
from mega_model.loss import IGNORED
from mega_model.runtime import Runtime
from mega_schema.arch import table
from mega_schema.parallel_layout import Layout
from mega_schema.sharding import Slab
from mega_schema.spec import ModelSpec, gpt, llama
from mega_train.config import DataConfig
from mega_train.engine.forward_step import split_batch

SMALL = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 128, "max_seq_len": 8}
WIDE = {**SMALL, "hidden": 48, "ffn": 128, "activation": "swiglu", "positions": "rope"}
KEYED = {"layers": 4, "hidden": 32, "heads": 4, "vocab": 128, "max_seq_len": 16, "vocab_multiple": 64}
KEYED_WIDE = {**KEYED, "ffn": 64, "activation": "swiglu", "positions": "rope"}
CASES: dict[str, tuple[ModelSpec, Names]] = {
    "gpt_erf_gelu": (gpt(**SMALL, activation="gelu_erf"), LEGACY),
    "gpt_tanh_gelu_fused": (gpt(**SMALL, activation="gelu_tanh"), LEGACY),
    "gpt_postln": (gpt(**SMALL, activation="gelu_erf", post_norm_residual=True), LEGACY),
    "gpt_swiglu_rope_untied_nobias": (gpt(**WIDE, tied=False, bias=False, qkv_bias=False), LEGACY),
    "gpt_no_qk_scaling": (gpt(**SMALL, activation="gelu_erf"), LEGACY),
    "llama_legacy09": (llama(**SMALL, ffn=24, kv_heads=2), LEGACY_NORM),
}
# float32 over sums of at most 128 terms: a few units in the last place of the largest logit
RELATIVE = 1e-5


@pytest.mark.parametrize("case", CASES)
def test_logits_are_megatrons(golden: Path, case: str) -> None:
    spec, names = CASES[case]
    weights = dict(np.load(golden / "numerics" / f"{case}_weights.npz"))
    known = list(aliases(spec, names))
    assert {alias.foreign for alias in known} == weights.keys()
    rows = {row.name: row for row in table(spec)}
    foreign = {alias.ours: alias.unsharded_tensor(rows[alias.ours]) for alias in known}

    def read(name: str, slab: Slab) -> np.ndarray:
        return foreign[name].select(weights[foreign[name].name], slab.in_global)

    model = build_model(Runtime.single_process(spec))
    fill_weights(model, read)
    io = np.load(golden / "numerics" / f"{case}_io.npz")
    token_BS = torch.from_numpy(io["tokens"])
    rows_B, length = token_BS.shape
    with torch.no_grad():
        logits = model(
            token_BS.flatten(), torch.arange(length).repeat(rows_B), PackedAttention(rows_B, length)
        )
    wanted = torch.from_numpy(io["logits"]).flatten(0, 1)
    assert (logits - wanted).abs().max() <= RELATIVE * wanted.abs().max()
    for name, tensor in foreign.items():
        back = tensor.assemble(np.dtype("f4"), lambda slab, name=name: read(name, slab))
        assert np.array_equal(back, weights[tensor.name])


@pytest.mark.parametrize("reset_attention", [False, True])
@pytest.mark.parametrize("reset_positions", [False, True])
@pytest.mark.parametrize("mask_eod", [False, True])
def test_documents_end_where_megatrons_do(
    golden: Path, reset_positions: bool, reset_attention: bool, mask_eod: bool
) -> None:
    expected = json.loads((golden / "gpt_masks.json").read_text("utf-8"))
    key = f"reset_pos={reset_positions:d},reset_attn={reset_attention:d},eod_mask_loss={mask_eod:d}"
    wanted = expected["out"][key]
    data = DataConfig(
        reset_positions=reset_positions, reset_attention=reset_attention, eod_mask_loss=mask_eod
    )
    batch = torch.tensor([[*expected["tokens"], 11]])
    token_BS, target_BS, position_BS, apart_BS = split_batch(batch, data, expected["eod"])
    assert token_BS[0].tolist() == expected["tokens"]
    assert position_BS[0].tolist() == wanted["position_ids"]
    length = token_BS.shape[1]
    seen = _seen_by_each_token(PackedAttention(1, length, apart_BS), length)
    masked = torch.tensor(wanted["attention_mask_true_means_masked"])[0].bool()
    assert torch.equal(seen, ~masked)
    counts_S = target_BS[0] != IGNORED
    assert counts_S.float().tolist() == wanted["loss_mask"]
    assert target_BS[0][counts_S].tolist() == batch[0, 1:][counts_S].tolist()


def _seen_by_each_token(attend: PackedAttention, length: int) -> torch.Tensor:
    """Which keys reach which queries, by what comes out: values are one-hot, scores all alike."""
    even = torch.zeros(length, 1, length)
    value = torch.eye(length)[:, None]
    return attend(0, even, even, value)[:, 0] > 0


KEYS: dict[str, ModelSpec] = {
    "legacy_gpt_tp1_pp1": gpt(**KEYED),
    "legacy_gpt_tp2_pp2": gpt(**KEYED),
    "legacy_gpt_swiglu_rope_untied_nobias_tp2_pp2": gpt(**KEYED_WIDE, tied=False, bias=False, qkv_bias=False),
}


@pytest.mark.parametrize("case", KEYS)
def test_every_rank_has_megatrons_keys_shapes_and_order(golden: Path, case: str) -> None:
    expected = json.loads((golden / "ckpt_keys" / f"{case}.json").read_text("utf-8"))
    layout = Layout(tp=2, pp=2) if case.endswith("tp2_pp2") else Layout()
    for rank, wanted in expected.items():
        tp, pp = (int(place) for place in [*rank.split("_")[2:], 0][:2])
        found = chunk_tensors(KEYS[case], LEGACY, layout, tp=tp, pp=pp)
        assert [(foreign.name, foreign.shape) for foreign in found] == [
            (name.replace(" > ", "."), tuple(shape)) for name, (shape, _) in wanted.items()
        ]


@pytest.mark.parametrize(
    ("case", "spec"),
    [
        ("mcore_gpt_local", gpt(**KEYED)),
        (
            "mcore_gpt_local_swiglu_gqa_rope_untied",
            gpt(**KEYED_WIDE, kv_heads=2, tied=False, bias=False, qkv_bias=False),
        ),
    ],
)
def test_the_core_class_has_these_keys_shapes_and_order(golden: Path, case: str, spec: ModelSpec) -> None:
    expected = json.loads((golden / "ckpt_keys" / "mcore_state_dicts.json").read_text("utf-8"))[case]
    rows = {row.name: row for row in table(spec)}
    assert [
        (alias.foreign, alias.unsharded_tensor(rows[alias.ours]).shape) for alias in aliases(spec, CORE)
    ] == [(name, tuple(expected[name][0])) for name in expected if not name.endswith("_extra_state")]


def test_the_core_class_with_fused_norms_has_the_names_of_a_distributed_checkpoint(golden: Path) -> None:
    expected = json.loads((golden / "ckpt_keys" / "torch_dist_layout.json").read_text("utf-8"))["tensors"]
    spec = gpt(**KEYED_WIDE, kv_heads=2, tied=False, bias=False, qkv_bias=False)
    names = {re.sub(r"layers\.\d+", "layers", alias.foreign) for alias in aliases(spec, CORE_FUSED)}
    assert names == {name for name, shape in expected.items() if isinstance(shape, list)}
