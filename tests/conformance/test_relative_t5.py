"""T5 with relative positions: logits and gradients are those of transformers, with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

from mega_model.attention_backends import PackedAttention, PaddedCrossAttention
from mega_model.build import build_model, fill_weights
from mega_model.encoder_decoder import EncoderDecoder, EncoderInput
from mega_model.kernels.relative_bias import relative_buckets
from mega_model.loss import IGNORED
from mega_model.runtime import Runtime
from mega_schema.arch import table
from mega_schema.spec import ModelSpec, t5

SIZES: Mapping[str, Any] = {
    "vocab_size": 40,
    "d_model": 24,
    "d_kv": 16,
    "d_ff": 40,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
    "dropout_rate": 0.0,
    "attn_implementation": "eager",
}
OURS: Mapping[str, Any] = {
    "encoder_layers": 2,
    "decoder_layers": 3,
    "hidden": 24,
    "heads": 2,
    "head_dim": 16,
    "ffn": 40,
    "vocab": 40,
    "max_seq_len": 32,
    "norm": "rmsnorm",
    "norm_eps": 1e-6,
    "positions": "relative",
    "relative_buckets": 8,
    "relative_max_distance": 10,
    "bias": False,
    "qkv_bias": False,
    "head_bias": False,
    "scale_attention": False,
}
NEWER: Mapping[str, Any] = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
MODELS: Mapping[str, tuple[ModelSpec, type[PreTrainedModel], Any]] = {
    "1.0": (t5(**OURS, activation="relu", scale_output=True), T5ForConditionalGeneration, T5Config(**SIZES)),
    "1.1": (
        t5(**OURS, activation="geglu_tanh", tied=False),
        T5ForConditionalGeneration,
        T5Config(**SIZES, **NEWER),
    ),
    "umt5": (
        t5(**OURS, activation="geglu_tanh", tied=False, relative_per_layer=True),
        UMT5ForConditionalGeneration,
        UMT5Config(**SIZES, **NEWER),
    ),
}
SOURCE_LENGTHS = 17, 11
LENGTHS = 14, 9


def _judge(name: str) -> PreTrainedModel:
    """The model of transformers with random weights; an output matrix of its own if ours has one."""
    spec, kind, config = MODELS[name]
    torch.manual_seed(5)
    judge = kind(config).eval()
    if not spec.tied:
        judge.lm_head.weight = torch.nn.Parameter(torch.empty(40, 24))
    for weight in judge.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return judge


def _their_names(spec: ModelSpec, name: str) -> list[str]:
    """The matrices of transformers of which one of ours is the concatenation."""
    whole = {"embed.weight": "shared.weight", "head.weight": "lm_head.weight"}
    whole |= {
        f"{norm}.weight": f"{side}.final_layer_norm.weight"
        for norm, side in (("encoder_norm", "encoder"), ("final_norm", "decoder"))
    }
    if name in whole:
        return [whole[name]]
    is_bias = name.startswith("relative_bias.")
    layer, part = (name.split(".")[1], "bias") if is_bias else name.removesuffix(".weight").split(".", 2)[1:]
    side, number = ("encoder", int(layer)) if int(layer) < 2 else ("decoder", int(layer) - 2)
    block = f"{side}.block.{number}.layer."
    feed_forward = block + ("1" if side == "encoder" else "2")
    names = {
        "attn_norm": [block + "0.layer_norm"],
        "qkv": [block + f"0.SelfAttention.{part}" for part in "qkv"],
        "out": [block + "0.SelfAttention.o"],
        "bias": [block + "0.SelfAttention.relative_attention_bias"],
        "cross.norm": [block + "1.layer_norm"],
        "cross.q": [block + "1.EncDecAttention.q"],
        "cross.kv": [block + f"1.EncDecAttention.{part}" for part in "kv"],
        "cross.out": [block + "1.EncDecAttention.o"],
        "ffn_norm": [feed_forward + ".layer_norm"],
        "gate_up": [feed_forward + f".DenseReluDense.wi_{part}" for part in "01"],
        "up": [feed_forward + ".DenseReluDense.wi"],
        "down": [feed_forward + ".DenseReluDense.wo"],
    }
    return [f"{module}.weight" for module in names[part]]


def _inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Source, its mask, tokens and targets of two rows, the second padded."""
    generator = torch.Generator().manual_seed(7)
    source, token, target = (
        torch.randint(0, 40, (2, length), generator=generator)
        for length in (SOURCE_LENGTHS[0], LENGTHS[0], LENGTHS[0])
    )
    is_real = torch.arange(SOURCE_LENGTHS[0]) < torch.tensor(SOURCE_LENGTHS)[:, None]
    target[torch.arange(LENGTHS[0]) >= torch.tensor(LENGTHS)[:, None]] = IGNORED
    return source, is_real, token, target


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_transformers(name: str) -> None:
    spec = MODELS[name][0]
    judge = _judge(name)
    state = dict(judge.named_parameters()) | {"lm_head.weight": judge.lm_head.weight}
    model = build_model(Runtime.single_process(spec))
    assert isinstance(model, EncoderDecoder)
    fill_weights(
        model, lambda row, box: torch.cat([state[part] for part in _their_names(spec, row)])[box.in_global]
    )
    source, is_real, token, target = _inputs()
    wanted = judge(input_ids=source, attention_mask=is_real.long(), decoder_input_ids=token).logits
    encoder_input = EncoderInput(
        source.flatten(),
        torch.arange(SOURCE_LENGTHS[0]).repeat(2),
        PackedAttention(2, SOURCE_LENGTHS[0], is_real.long(), causal=False),
        PaddedCrossAttention(2, is_real),
    )
    inputs = token.flatten(), torch.arange(LENGTHS[0]).repeat(2), PackedAttention(2, LENGTHS[0])
    logits = model(*inputs, source=encoder_input).unflatten(0, (2, -1))[..., :40]
    is_text = target != IGNORED
    torch.testing.assert_close(logits[is_text], wanted[is_text], atol=1e-5, rtol=1e-5)
    loss = model(*inputs, target_T=target.flatten(), source=encoder_input)
    loss.backward()
    torch.nn.functional.cross_entropy(wanted.transpose(1, 2), target, reduction="sum").backward()
    for row, weight in model.named_parameters():
        theirs = torch.cat([state[part].grad for part in _their_names(spec, row)])
        ours = weight.grad[: len(theirs)]
        torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=1e-5, msg=row)


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_of_transformers_is_a_row_of_the_table(name: str) -> None:
    spec = MODELS[name][0]
    rows = [row for row in table(spec) if row.tied_to is None]
    theirs = [part for row in rows for part in _their_names(spec, row.name)]
    assert sorted(theirs) == sorted(dict(_judge(name).named_parameters()))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 10), (20, 71)])
def test_buckets_are_those_of_transformers(causal: bool, buckets: int, farthest: int) -> None:
    sizes = {"relative_attention_num_buckets": buckets, "relative_attention_max_distance": farthest}
    config = UMT5Config(**{**SIZES, **sizes}, is_decoder=causal)
    from transformers.models.umt5.modeling_umt5 import UMT5Attention

    attention = UMT5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    distances = torch.arange(-farthest, farthest + 1)
    wanted = attention._relative_position_bucket(distances)
    assert torch.equal(relative_buckets(buckets, farthest, causal=causal), wanted)
    far = attention._relative_position_bucket(torch.tensor([-1000, 1000]))
    assert torch.equal(far, wanted[[0, -1]]), "the last bucket is that of all distances beyond"
