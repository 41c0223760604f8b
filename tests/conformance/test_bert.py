"""BERT's logits, tensor names and shapes equal those of Megatron's own code (shared/golden)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mega_ckpt.formats.megatron.names import LEGACY, aliases, chunk_tensors
from mega_model.attention_backends import PackedAttention
from mega_model.build import build_model, fill_weights
from mega_model.encoder import Encoder
from mega_model.runtime import Runtime
from mega_schema.arch import table
from mega_schema.parallel_layout import Layout
from mega_schema.sharding import Slab
from mega_schema.spec import bert

# float32 over sums of at most 128 terms: a few units in the last place of the largest logit
RELATIVE = 1e-5


def test_logits_are_megatrons(golden: Path) -> None:
    spec = bert(layers=2, hidden=16, heads=4, vocab=128, max_seq_len=8, activation="gelu_erf")
    weights = dict(np.load(golden / "numerics" / "bert_weights.npz"))
    known = list(aliases(spec))
    assert {alias.foreign for alias in known} == weights.keys()
    rows = {row.name: row for row in table(spec)}
    foreign = {alias.ours: alias.unsharded_tensor(rows[alias.ours]) for alias in known}

    def read(name: str, slab: Slab) -> np.ndarray:
        return foreign[name].select(weights[foreign[name].name], slab.in_global)

    model = build_model(Runtime.single_process(spec))
    assert isinstance(model, Encoder)
    fill_weights(model, read)
    io = {name: torch.from_numpy(values) for name, values in np.load(golden / "numerics/bert_io.npz").items()}
    is_token_BS = io["padding_mask"].bool()
    with torch.no_grad():
        x_TD = model.hidden_states(
            io["tokens"].flatten(),
            torch.arange(8).repeat(2),
            PackedAttention(2, 8, io["padding_mask"], causal=False),
            token_type_T=io["tokentypes"].flatten(),
        )
        logits = model.logits(x_TD).unflatten(0, (2, 8))
        binary = model.binary_logits(x_TD, torch.tensor([0, 8]))
    for found, wanted in (
        (logits[is_token_BS], io["lm_logits"][is_token_BS]),
        (binary, io["binary_logits"]),
    ):
        assert (found - wanted).abs().max() <= RELATIVE * wanted.abs().max()


@pytest.mark.parametrize(("case", "tp", "pp"), [("tp1_pp1", 1, 1), ("tp2_pp2", 2, 2)])
def test_every_rank_has_megatrons_keys_shapes_and_order(golden: Path, case: str, tp: int, pp: int) -> None:
    spec = bert(layers=4, hidden=32, heads=4, vocab=128, max_seq_len=16, vocab_multiple=64)
    expected = json.loads((golden / "ckpt_keys" / f"legacy_bert_{case}.json").read_text("utf-8"))
    assert len(expected) == tp * pp
    for rank, wanted in expected.items():
        place = [*map(int, rank.split("_")[2:]), 0]
        found = chunk_tensors(spec, LEGACY, Layout(tp=tp, pp=pp), tp=place[0], pp=place[1])
        assert [(foreign.name, foreign.shape) for foreign in found] == [
            (name.replace(" > ", "."), tuple(shape)) for name, (shape, _) in wanted.items()
        ]
