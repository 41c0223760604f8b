"""BERT's logits, losses, tensor names and shapes equal those of Megatron's own code (shared/golden)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mega_ckpt.formats.megatron.names import LEGACY, aliases, chunk_tensors
from mega_model.attention_backends import PackedAttention
from mega_model.build import build_model, fill_weights
from mega_model.distributed.mesh import Mesh
from mega_model.encoder import Encoder
from mega_model.runtime import Runtime
from mega_schema.app.config import load_config
from mega_schema.arch import table
from mega_schema.parallel_layout import Layout
from mega_schema.sharding import Slab
from mega_schema.spec import bert
from mega_train.config import RunConfig
from mega_train.data.encoder.bert_reader import LABEL, ORDER, REAL, TOKEN, TYPE
from mega_train.engine.bert_forward_step import BertForwardStep
from mega_train.resolve import resolve

# float32 over sums of at most 128 terms: a few units in the last place of the largest logit
RELATIVE = 1e-5
SPEC = bert(layers=2, hidden=16, heads=4, vocab=128, max_seq_len=8, activation="gelu_erf")


def _megatrons_model(golden: Path) -> tuple[Encoder, dict[str, torch.Tensor]]:
    """The model of Megatron's weights, and the inputs and outputs of Megatron's own."""
    weights = dict(np.load(golden / "numerics" / "bert_weights.npz"))
    known = list(aliases(SPEC))
    assert {alias.foreign for alias in known} == weights.keys()
    rows = {row.name: row for row in table(SPEC)}
    foreign = {alias.ours: alias.unsharded_tensor(rows[alias.ours]) for alias in known}

    def read(name: str, slab: Slab) -> np.ndarray:
        return foreign[name].select(weights[foreign[name].name], slab.in_global)

    model = build_model(Runtime.single_process(SPEC))
    assert isinstance(model, Encoder)
    fill_weights(model, read)
    io = np.load(golden / "numerics/bert_io.npz").items()
    return model, {name: torch.from_numpy(values) for name, values in io}


def test_logits_are_megatrons(golden: Path) -> None:
    model, io = _megatrons_model(golden)
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


@pytest.mark.parametrize("train", [False, True])
def test_losses_are_those_of_megatrons_logits(golden: Path, train: bool) -> None:
    model, io = _megatrons_model(golden)
    mask_BS = torch.tensor([[0, 1, 0, 0, 1, 0, 1, 0], [0, 0, 1, 1, 0, 0, 0, 0]]) * io["padding_mask"]
    label_BS = io["tokens"].flip(0) * mask_BS
    order_B = torch.tensor([1, 0])
    batch = np.full((2, 5, 8), 1, np.int64)
    batch[:, TOKEN], batch[:, TYPE], batch[:, REAL] = io["tokens"], io["tokentypes"], io["padding_mask"]
    batch[:, LABEL] = torch.where(mask_BS == 1, label_BS, -100)
    batch[:, ORDER] = order_B[:, None]
    words = ["model.family=bert", "model.num_layers=2", "model.hidden_size=16", "model.num_attention_heads=4"]
    words += ["model.vocab_size=128", "model.activation=gelu_erf", "batch.seq_length=8"]
    words += ["batch.micro_batch_size=2", "train.train_iters=1", "optimizer.lr=1.0"]
    run = load_config(RunConfig, None, {}, words)
    config = resolve(run, "bert", 1, corpus=None, loaded_spec=None, cuda=False)
    work = BertForwardStep([model], config, Mesh(), [batch, batch], 1.0, [[0, 1]] * 2 if train else None)
    loss = work.forward(0, 0, None)
    # the formulas of pretrain_bert.py: a mean over the masked tokens, and one over the samples
    token_loss = F.cross_entropy(io["lm_logits"].flatten(0, 1), label_BS.flatten(), reduction="none")
    lm_loss = (token_loss * mask_BS.flatten()).sum() / mask_BS.sum()
    sop_loss = F.cross_entropy(io["binary_logits"], order_B)
    torch.testing.assert_close(2 * work.terms[0], torch.stack([lm_loss, sop_loss]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(2 * loss.detach(), lm_loss + sop_loss, atol=1e-5, rtol=1e-5)


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
