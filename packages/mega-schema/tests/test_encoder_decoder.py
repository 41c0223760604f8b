"""Encoders with a decoder: their rows, equations, gradients, padding and recomputation, in one process."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mega_model.attention_backends import PackedAttention, PaddedCrossAttention
from mega_model.build import build_model, fill_weights
from mega_model.dropout import Dropout, token_keys
from mega_model.encoder_decoder import EncoderDecoder, EncoderInput
from mega_model.init import initial_values
from mega_model.loss import IGNORED
from mega_model.runtime import Runtime
from mega_schema.arch import table
from mega_schema.errors import ConfigError
from mega_schema.params import count_params
from mega_schema.recompute_policy import RecomputePolicy
from mega_schema.spec import ModelSpec, gpt, t5

SMALL: dict[str, Any] = {
    "encoder_layers": 2,
    "decoder_layers": 3,
    "hidden": 16,
    "heads": 4,
    "vocab": 19,
    "max_seq_len": 8,
    "vocab_multiple": 4,
}
SPECS: dict[str, ModelSpec] = {
    "megatron": t5(**SMALL),
    "residual after the norm": t5(**SMALL, post_norm_residual=True, activation="gelu_erf"),
    "without biases": t5(**SMALL, bias=False, qkv_bias=False, head_bias=False, activation="squared_relu"),
    "fewer key heads, untied": t5(**SMALL, kv_heads=2, tied=False),
}
GENERATOR = torch.Generator().manual_seed(3)
SOURCE = torch.randint(0, 19, (2, 8), generator=GENERATOR)
TOKENS = torch.randint(0, 19, (2, 5), generator=GENERATOR)
TARGETS = torch.randint(0, 19, (2, 5), generator=GENERATOR)
TARGETS[1, 3:] = IGNORED
LENGTHS = 8, 5  # of the source rows without padding
REAL = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])


def _model(spec: ModelSpec, rt: Runtime | None = None) -> EncoderDecoder:
    model = build_model(rt or Runtime.single_process(spec))
    assert isinstance(model, EncoderDecoder)
    fill_weights(model, initial_values(table(spec), 1))
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():  # norms of ones and biases of zeros would hide a mistake
        weight.data += 0.3 * torch.randn(weight.shape, generator=generator)
    return model


def _source(dropout: Dropout | None = None, cross_dropout: Dropout | None = None) -> EncoderInput:
    encoder_input = EncoderInput(
        SOURCE.flatten(),
        torch.arange(8).repeat(2),
        PackedAttention(2, 8, REAL, causal=False, dropout=dropout),
        PaddedCrossAttention(2, REAL == 1, cross_dropout),
    )
    return encoder_input if dropout is None else encoder_input._replace(drop=dropout)


def _loss(model: EncoderDecoder, token_BS: Tensor = TOKENS) -> Tensor:
    return model(
        token_BS.flatten(),
        torch.arange(5).repeat(2),
        PackedAttention(2, 5),
        target_T=TARGETS.flatten(),
        source=_source(),
    )


def _reference_logits(spec: ModelSpec, weights: dict[str, Tensor], row: int) -> Tensor:
    """The logits of one row without padding, from the equations, head by head."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[name + ".weight"], weights.get(name + ".bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(
            x, x.shape[-1:], weights[name + ".weight"], weights[name + ".bias"], spec.norm_eps
        )

    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
        size = spec.head_dim
        heads = []
        for n in range(spec.heads):
            columns = slice(n * size, (n + 1) * size)
            group = n * spec.kv_heads // spec.heads
            key_columns = slice(group * size, (group + 1) * size)
            score = q[:, columns] @ k[:, key_columns].T / size**0.5
            if causal:
                score = score.masked_fill(torch.ones_like(score).triu(1) == 1, -torch.inf)
            heads.append(score.softmax(-1) @ v[:, key_columns])
        return torch.cat(heads, -1)

    def feed_forward(name: str, y: Tensor) -> Tensor:
        inner = linear(name + "up", y)
        acts = {
            "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
            "gelu_erf": F.gelu,
            "squared_relu": lambda z: F.relu(z) ** 2,
        }
        return linear(name + "down", acts[spec.activation](inner))

    def add(x: Tensor, y: Tensor, branch: Tensor) -> Tensor:
        return (y if spec.post_norm_residual else x) + branch

    def embed(token_S: Tensor) -> Tensor:
        return weights["embed.weight"][token_S] + weights["position.weight"][: len(token_S)]

    widths = [spec.q_rows, spec.kv_rows, spec.kv_rows]
    x = embed(SOURCE[row, : LENGTHS[row]])
    memory = x
    for i in range(spec.layers):
        name = f"layers.{i}."
        if i == spec.encoder_layers:
            memory = norm("encoder_norm", x)
            x = embed(TOKENS[row])
        is_decoder = spec.has_cross_attention(i)
        y = norm(name + "attn_norm", x)
        x = add(
            x,
            y,
            linear(name + "out", attention(*linear(name + "qkv", y).split(widths, -1), causal=is_decoder)),
        )
        if is_decoder:
            y = norm(name + "cross.norm", x)
            k, v = linear(name + "cross.kv", memory).chunk(2, -1)
            x = add(x, y, linear(name + "cross.out", attention(linear(name + "cross.q", y), k, v)))
        y = norm(name + "ffn_norm", x)
        x = add(x, y, feed_forward(name, y))
    x = norm("final_norm", x)
    head = weights["embed.weight" if spec.tied else "head.weight"]
    return (x @ head.T + weights.get("head.bias", torch.zeros(len(head))))[:, : spec.vocab]


@pytest.mark.parametrize("name", SPECS)
def test_loss_and_gradients_are_those_of_the_equations(name: str) -> None:
    spec = SPECS[name]
    model = _model(spec)
    _loss(model).backward()
    found = {name: weight.grad for name, weight in model.named_parameters()}
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in model.named_parameters()}
    wanted = torch.stack(
        [
            F.cross_entropy(
                _reference_logits(spec, weights, row), TARGETS[row], reduction="sum", ignore_index=IGNORED
            )
            for row in range(2)
        ]
    ).sum()
    wanted.backward()
    torch.testing.assert_close(_loss(model).detach(), wanted.detach(), atol=1e-4, rtol=1e-5)
    for key, weight in weights.items():
        assert weight.grad is not None, key
        torch.testing.assert_close(found[key], weight.grad, atol=1e-4, rtol=1e-4, msg=key)


def test_the_loss_of_the_labelled_tokens_is_that_of_all() -> None:
    model = _model(SPECS["megatron"])
    _loss(model).backward()
    wanted = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    labelled_M = (TARGETS.flatten() != IGNORED).nonzero()[:, 0]
    assert len(labelled_M) < TARGETS.numel()
    loss = model(
        TOKENS.flatten(),
        torch.arange(5).repeat(2),
        PackedAttention(2, 5),
        target_T=TARGETS.flatten()[labelled_M],
        source=_source(),
        labelled_M=labelled_M,
    )
    loss.backward()
    torch.testing.assert_close(loss.detach(), _loss(model).detach(), rtol=1e-6, atol=0)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, wanted[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("method", ["full", "selective"])
def test_recomputation_with_dropout_changes_no_gradient(method: Any) -> None:
    spec = SPECS["megatron"]
    gradients = []
    for policy in (
        RecomputePolicy(),
        RecomputePolicy(method, modules=("core_attn", "layernorm", "mlp_act")),
    ):
        rt = replace(Runtime.single_process(spec), recompute=policy)
        model = _model(spec, rt)
        encoder, decoder, cross = (
            Dropout(0.2, 0.2, token_keys(1, [4, 5], positions), rt.tp)
            for positions in (torch.arange(8), 8 + torch.arange(5), 13 + torch.arange(5))
        )
        loss = model(
            TOKENS.flatten(),
            torch.arange(5).repeat(2),
            PackedAttention(2, 5, dropout=decoder),
            decoder,
            TARGETS.flatten(),
            source=_source(encoder, cross),
        )
        loss.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@torch.no_grad()
def test_a_token_of_the_decoder_sees_no_padding_and_no_later_token() -> None:
    model = _model(SPECS["megatron"])

    def states(source: Tensor, tokens: Tensor) -> Tensor:
        x: Tensor = model.hidden_states(
            tokens.flatten(),
            torch.arange(5).repeat(2),
            PackedAttention(2, 5),
            source=_source()._replace(token_E=source.flatten()),
        )
        return x.unflatten(0, (2, 5))

    before = states(SOURCE, TOKENS)
    changed = SOURCE.clone()
    changed[1, 6] += 1 if changed[1, 6] < 18 else -1
    torch.testing.assert_close(states(changed, TOKENS), before, rtol=0, atol=0)
    changed[1, 4] += 1 if changed[1, 4] < 18 else -1
    after = states(changed, TOKENS)
    assert torch.equal(after[0], before[0])
    assert (after[1] != before[1]).any(-1).all(), "each token sees the text of the encoder"
    tokens = TOKENS.clone()
    tokens[0, 3] += 1 if tokens[0, 3] < 18 else -1
    after = states(SOURCE, tokens)
    assert torch.equal(after[0, :3], before[0, :3])
    assert not torch.equal(after[0, 3:], before[0, 3:])


def test_the_table_has_the_parameters_of_the_paper() -> None:
    """With 12 and 12 layers of 768: 2 · 12 attentions of 4 h², 12 of cross-attention, 24 feed-forwards."""
    spec = t5(encoder_layers=12, decoder_layers=12, hidden=768, heads=12, vocab=30522, max_seq_len=512)
    h = 768
    matrices = 36 * 4 * h * h + 24 * 8 * h * h + (30522 + 512) * h
    vectors = 36 * 4 * h + 24 * 5 * h + (24 + 36 + 2) * 2 * h + 30522
    assert count_params(table(spec)) == matrices + vectors
    assert ModelSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_initial_values_of_output_projections_scale_with_the_depth_of_the_encoder() -> None:
    """As in Megatron, where --num-layers of T5 is that of the encoder."""
    rows = {row.name: row for row in table(SPECS["megatron"])}
    for name in ("layers.0.out", "layers.4.out", "layers.4.cross.out", "layers.4.down"):
        assert rows[f"{name}.weight"].init.std == pytest.approx(0.02 / 4**0.5), name
    assert rows["layers.4.cross.kv.weight"].init.std == 0.02


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encoder_layers": 5, "decoder_layers": 0}, "model.encoder_layers: leaves no layer for a decoder"),
        ({"causal": False}, "model.family: does not fit model.encoder_layers"),
        ({"qk_norm": True}, "model.qk_norm: is not supported in an encoder with a decoder"),
        ({"sliding_window": 4}, "model.sliding_window: is not supported in an encoder with a decoder"),
        ({"positions": "alibi"}, "model.positions: is not supported in an encoder"),
        ({"token_types": 2}, "model.token_types: is not supported in a decoder"),
        (
            {"positions": "relative", "relative_buckets": 6},
            "model.relative_buckets: cannot be halved by direction and by distance: found 6",
        ),
        (
            {"positions": "relative", "relative_max_distance": 16},
            "model.relative_max_distance: is within the distances that have a bucket of their own: found 16",
        ),
    ],
)
def test_a_model_that_cannot_be_is_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        t5(**{**SMALL, **fields})
    assert str(caught.value).startswith(message)


def test_a_family_without_an_encoder_refuses_its_fields() -> None:
    sizes = {"layers": 2, "hidden": 16, "heads": 2, "vocab": 19, "max_seq_len": 8}
    for fields, message in (
        ({"encoder_layers": 1}, "model.family: does not fit model.encoder_layers"),
        ({"head_bias": True}, "model.head_bias: is not supported in a decoder"),
        ({"scale_output": True}, "model.scale_output: is not supported in a decoder alone"),
        ({"positions": "relative"}, "model.positions: is supported only in an encoder with a decoder"),
    ):
        with pytest.raises(ConfigError) as caught:
            gpt(**sizes, **fields)  # type: ignore[arg-type]
        assert str(caught.value).startswith(message)
