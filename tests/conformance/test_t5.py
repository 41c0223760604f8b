"""T5's logits, loss and parameters equal those of Megatron's own code (shared/golden)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mega_model.attention_backends import PackedAttention, PaddedCrossAttention
from mega_model.attention_mask import PLAIN, AttentionMask
from mega_model.build import build_model, fill_weights
from mega_model.distributed.mesh import Mesh
from mega_model.encoder_decoder import EncoderDecoder, EncoderInput
from mega_model.runtime import Runtime
from mega_schema.app.config import load_config
from mega_schema.arch import table
from mega_schema.sharding import Slab
from mega_schema.spec import t5
from mega_train.config import RunConfig
from mega_train.data.encoder.t5_reader import LABEL, REAL, SOURCE, SOURCE_REAL, TOKEN
from mega_train.engine.t5_forward_step import T5ForwardStep
from mega_train.resolve import resolve

# float32 over sums of at most 128 terms: a few units in the last place of the largest logit
RELATIVE = 1e-5
SPEC = t5(
    encoder_layers=2,
    decoder_layers=2,
    hidden=16,
    heads=4,
    vocab=128,
    max_seq_len=8,
    ffn=32,
    activation="gelu_erf",
)
PARTS = {
    "attn_norm": "input_layernorm",
    "qkv": "self_attention.query_key_value",
    "out": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
DECODER_PARTS = PARTS | {
    "cross.norm": "post_attention_layernorm",
    "cross.q": "inter_attention.query",
    "cross.kv": "inter_attention.key_value",
    "cross.out": "inter_attention.dense",
    "ffn_norm": "post_inter_attention_layernorm",
}
OTHERS = {
    "embed": "language_model.embedding.word_embeddings",
    "position": "language_model.embedding.position_embeddings",
    "encoder_norm": "language_model.encoder.final_layernorm",
    "final_norm": "language_model.decoder.final_layernorm",
    "head": "lm_head",
}


@dataclass(frozen=True)
class MegatronAttention:
    """Megatron's attention: hidden scores are -10000, so that a token that sees nothing sees everything."""

    hidden_BsS: Tensor

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask = PLAIN) -> Tensor:
        rows = len(self.hidden_BsS)
        q, k, v = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (q, k, v))
        score = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).masked_fill(self.hidden_BsS[:, None], -10000.0)
        return (score.softmax(-1) @ v).transpose(1, 2).flatten(0, 1)


def _megatrons_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{OTHERS[module]}.{kind}"
    _, layer, part = module.split(".", 2)
    if int(layer) < 2:
        return f"language_model.encoder.layers.{layer}.{PARTS[part]}.{kind}"
    return f"language_model.decoder.layers.{int(layer) - 2}.{DECODER_PARTS[part]}.{kind}"


def _megatrons_model(golden: Path) -> tuple[EncoderDecoder, dict[str, Tensor]]:
    """The model of Megatron's weights, and the inputs and outputs of Megatron's own."""
    weights = dict(np.load(golden / "numerics" / "t5_weights.npz"))
    rows = [row for row in table(SPEC) if row.tied_to is None]
    assert {_megatrons_name(row.name) for row in rows} == weights.keys()

    def read(name: str, slab: Slab) -> np.ndarray:
        values = weights[_megatrons_name(name)]
        parts = {"qkv": 3, "kv": 2}.get(name.split(".")[-2], 1)
        # Megatron groups the rows by head: its queries, keys and values
        by_head = values.reshape(4, parts, -1, *values.shape[1:]) if parts > 1 else values
        ours = np.moveaxis(by_head, 1, 0).reshape(values.shape) if parts > 1 else values
        return ours[slab.in_global]

    model = build_model(Runtime.single_process(SPEC))
    assert isinstance(model, EncoderDecoder)
    fill_weights(model, read)
    io = np.load(golden / "numerics" / "t5_io.npz").items()
    return model, {name: torch.from_numpy(values) for name, values in io}


def _logits(model: EncoderDecoder, io: dict[str, Tensor], source: EncoderInput, rows: int) -> Tensor:
    x_TD = model.hidden_states(
        io["dec_tokens"][:rows].flatten(),
        torch.arange(6).repeat(rows),
        PackedAttention(rows, 6),
        source=source,
    )
    return model.logits(x_TD).unflatten(0, (rows, 6))


@torch.no_grad()
def test_logits_of_a_row_without_padding_are_megatrons(golden: Path) -> None:
    model, io = _megatrons_model(golden)
    source = EncoderInput(
        io["enc_tokens"][0],
        torch.arange(8),
        PackedAttention(1, 8, causal=False),
        PaddedCrossAttention(1),
    )
    found, wanted = _logits(model, io, source, 1), io["logits"][:1]
    assert (found - wanted).abs().max() <= RELATIVE * wanted.abs().max()


@torch.no_grad()
def test_logits_with_padding_are_those_of_megatrons_masks(golden: Path) -> None:
    """Releases 23.04 to 23.08 drop the mask of cross-attention: their decoder sees padding too."""
    model, io = _megatrons_model(golden)
    nothing_hidden = torch.zeros_like(io["enc_dec_mask_true_masked"])
    source = EncoderInput(
        io["enc_tokens"].flatten(),
        torch.arange(8).repeat(2),
        MegatronAttention(io["enc_mask_true_masked"]),
        MegatronAttention(nothing_hidden),
    )
    found, wanted = _logits(model, io, source, 2), io["logits"]
    assert (found - wanted).abs().max() <= RELATIVE * wanted.abs().max()


@pytest.mark.parametrize("row", [0, 1])
@torch.no_grad()
def test_our_masks_are_megatrons_as_its_code_means_them(golden: Path, row: int) -> None:
    """With the mask of cross-attention, which v2.5, v2.6 and BigScience's fork apply, and with padding."""
    model, io = _megatrons_model(golden)
    is_real_BS = torch.tensor([[True] * 8, [True] * 6 + [False] * 2])
    inputs = io["enc_tokens"].flatten(), torch.arange(8).repeat(2)
    ours = EncoderInput(
        *inputs, PackedAttention(2, 8, is_real_BS.long(), causal=False), PaddedCrossAttention(2, is_real_BS)
    )
    masks = (io["enc_mask_true_masked"], io["enc_dec_mask_true_masked"])
    theirs = EncoderInput(*inputs, *map(MegatronAttention, masks))
    found, wanted = (_logits(model, io, source, 2)[row] for source in (ours, theirs))
    assert (found - wanted).abs().max() <= RELATIVE * wanted.abs().max()


@pytest.mark.parametrize("train", [False, True])
def test_the_loss_of_a_step_is_the_formula_of_megatrons_script(golden: Path, train: bool) -> None:
    """A mean over the tokens of a micro-batch with a label, and over micro-batches (pretrain_t5.py)."""
    model, io = _megatrons_model(golden)
    label_S = torch.tensor([21, 42, 16, 50, -100, -100])
    batch = np.zeros((1, 5, 8), np.int64)
    batch[:, SOURCE], batch[:, SOURCE_REAL], batch[:, LABEL] = io["enc_tokens"][0], 1, -100
    batch[:, TOKEN, :6], batch[:, LABEL, :6], batch[:, REAL, :4] = io["dec_tokens"][0], label_S, 1
    words = ["model.family=t5", "model.num_layers=2", "model.hidden_size=16", "model.num_attention_heads=4"]
    words += ["model.vocab_size=128", "model.activation=gelu_erf", "model.ffn_hidden_size=32"]
    words += ["batch.seq_length=8", "encoder_data.decoder_seq_length=6", "train.train_iters=1"]
    run = load_config(RunConfig, None, {}, [*words, "optimizer.lr=1.0"])
    config = resolve(run, "t5", 1, corpus=None, loaded_spec=None, cuda=False)
    work = T5ForwardStep([model], config, Mesh(), [batch, batch], 1.0, [[0]] * 2 if train else None)
    loss = 2 * work.forward(0, 0, None).detach()
    token_loss = F.cross_entropy(io["logits"][0], label_S, reduction="none")
    mask_S = (label_S != -100).float()
    torch.testing.assert_close(loss, (token_loss * mask_S).sum() / mask_S.sum(), atol=1e-5, rtol=1e-5)


def test_the_loss_is_that_of_megatrons_logits(golden: Path) -> None:
    model, io = _megatrons_model(golden)
    target_T = io["dec_tokens"][0].roll(-1)
    loss = model(
        io["dec_tokens"][0],
        torch.arange(6),
        PackedAttention(1, 6),
        target_T=target_T,
        source=EncoderInput(
            io["enc_tokens"][0],
            torch.arange(8),
            PackedAttention(1, 8, causal=False),
            PaddedCrossAttention(1),
        ),
    )
    wanted = F.cross_entropy(io["logits"][0], target_T, reduction="sum")
    torch.testing.assert_close(loss.detach(), wanted, rtol=1e-5, atol=1e-5)
