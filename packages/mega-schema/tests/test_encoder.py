"""Encoders: their rows, equations, padding, loss and pipeline stages, in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mega_model.attention_backends import PackedAttention
from mega_model.build import build_chunks, build_model, fill_weights, parameters
from mega_model.distributed.mesh import Axis, Mesh
from mega_model.encoder import Encoder
from mega_model.init import initial_values
from mega_model.loss import IGNORED
from mega_model.runtime import Runtime
from mega_schema.arch import table
from mega_schema.errors import ConfigError
from mega_schema.parallel_layout import Layout
from mega_schema.params import count_params
from mega_schema.presets import PRESETS, preset
from mega_schema.spec import ModelSpec, bert, gpt
from mega_schema.spec_checks import refuse_foreign_encoder, require_decoder
from mega_schema.spec_rules import ENCODER_FIELDS

SMALL: dict[str, Any] = {
    "layers": 3,
    "hidden": 16,
    "heads": 4,
    "vocab": 19,
    "max_seq_len": 8,
    "vocab_multiple": 4,
}
SPECS: dict[str, ModelSpec] = {
    "megatron": bert(**SMALL),
    "original": bert(**SMALL, post_norm_residual=True, activation="gelu_erf", norm_eps=1e-12),
    "without a binary head": bert(**SMALL, pooler=False, binary_head=False, head_transform="gelu_tanh"),
    "rotary without biases": bert(
        **SMALL, positions="rope", activation="geglu", bias=False, qkv_bias=False, token_types=None
    ),
    "modern": bert(
        **SMALL,
        positions="rope",
        activation="geglu",
        bias=False,
        qkv_bias=False,
        norm_bias=False,
        embed_norm=True,
        first_attention_norm=False,
        sliding_window=3,
        global_attention_every=2,
        token_types=None,
        pooler=False,
        binary_head=False,
    ),
    "three token types": bert(**SMALL, token_types=3, tied=False),
    "hidden states only": bert(**SMALL, binary_head=False, head_transform="none", head_bias=False),
}
GENERATOR = torch.Generator().manual_seed(3)
TOKENS = torch.randint(0, 19, (2, 8), generator=GENERATOR)
TYPES = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0, 0, 0]])
POSITIONS = torch.arange(8).repeat(2)
PADDING = torch.tensor([[0] * 8, [0] * 5 + [1] * 3])


def _model(spec: ModelSpec) -> Encoder:
    model = build_model(Runtime.single_process(spec))
    assert isinstance(model, Encoder)
    fill_weights(model, initial_values(table(spec), 1))
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():  # norms of ones and biases of zeros would hide a mistake
        weight.data += 0.3 * torch.randn(weight.shape, generator=generator)
    return model


def _encode_tokens(model: Encoder, token_BS: Tensor) -> Tensor:
    attend = PackedAttention(2, 8, PADDING, causal=False)
    x: Tensor = model.hidden_states(token_BS.flatten(), POSITIONS, attend, token_type_T=TYPES.flatten())
    return x


def _reference(spec: ModelSpec, weights: dict[str, Tensor], row: int) -> tuple[Tensor, Tensor | None]:
    """One row without padding: logits and binary logits, from the equations, head by head."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[name + ".weight"], weights.get(name + ".bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + spec.norm_eps).sqrt()
        return scaled * weights[name + ".weight"] + weights[name + ".bias"]

    approximate = {"gelu_tanh": "tanh"}
    length = 8 if row == 0 else 5
    x = weights["embed.weight"][TOKENS[row, :length]] + weights["position.weight"][:length]
    x = x + weights["token_type.weight"][TYPES[row, :length]]
    for i in range(spec.layers):
        p = f"layers.{i}."
        y = norm(p + "attn_norm", x)
        heads = []
        for q, k, v in zip(*(part.chunk(4, -1) for part in linear(p + "qkv", y).chunk(3, -1)), strict=True):
            heads.append((q @ k.T / spec.head_dim**0.5).softmax(-1) @ v)
        x = (y if spec.post_norm_residual else x) + linear(p + "out", torch.cat(heads, -1))
        y = norm(p + "ffn_norm", x)
        inner = F.gelu(linear(p + "up", y), approximate=approximate.get(spec.activation, "none"))
        x = (y if spec.post_norm_residual else x) + linear(p + "down", inner)
    x = norm("final_norm", x)
    binary = linear("binary_head", linear("pooler", x[0]).tanh()) if spec.binary_head else None
    if spec.head_transform != "none":
        gelu = F.gelu(linear("head.dense", x), approximate=approximate.get(spec.head_transform, "none"))
        x = norm("head.norm", gelu)
    head = weights["embed.weight" if spec.tied else "head.weight"]
    return (x @ head.T + weights.get("head.bias", torch.zeros(len(head))))[:, : spec.vocab], binary


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.positions == "learned"])
@torch.no_grad()
def test_logits_are_those_of_the_equations(name: str) -> None:
    spec = SPECS[name]
    model = _model(spec)
    x = _encode_tokens(model, TOKENS)
    logits = model.logits(x)[:, : spec.vocab].unflatten(0, (2, 8))
    for row, length in enumerate((8, 5)):
        wanted, binary = _reference(spec, dict(model.named_parameters()), row)
        torch.testing.assert_close(logits[row, :length], wanted, atol=2e-5, rtol=2e-5)
        if binary is not None:
            found = model.binary_logits(x, torch.tensor([0, 8]))[row]
            torch.testing.assert_close(found, binary, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_a_token_sees_all_tokens_of_its_row_and_no_padding(name: str) -> None:
    model = _model(SPECS[name])
    before = _encode_tokens(model, TOKENS).unflatten(0, (2, 8))
    last, padding = TOKENS.clone(), TOKENS.clone()
    last[:, 4] = (last[:, 4] + 1) % 19
    padding[1, 5:] = (padding[1, 5:] + 1) % 19
    changed = _encode_tokens(model, last).unflatten(0, (2, 8))
    assert ((changed - before).abs().amax(-1) > 1e-6)[:, :5].all()
    assert torch.equal(_encode_tokens(model, padding).unflatten(0, (2, 8))[1, :5], before[1, :5])


@torch.no_grad()
def test_tokens_without_a_type_are_of_the_first() -> None:
    model = _model(SPECS["megatron"])
    attend = PackedAttention(2, 8, causal=False)
    zeros = torch.zeros(16, dtype=torch.long)
    with_zeros = model(TOKENS.flatten(), POSITIONS, attend, token_type_T=zeros)
    assert torch.equal(model(TOKENS.flatten(), POSITIONS, attend), with_zeros)
    assert not torch.equal(
        model(TOKENS.flatten(), POSITIONS, attend, token_type_T=TYPES.flatten()), with_zeros
    )


@pytest.mark.parametrize("known_gradient", [None, 0.5])
@pytest.mark.parametrize("name", SPECS)
def test_the_loss_and_its_gradients_are_those_of_the_logits(name: str, known_gradient: float | None) -> None:
    spec = SPECS[name]
    target_T = torch.where(torch.arange(16) % 3 == 0, TOKENS.flatten(), IGNORED)
    gradients = []
    for fused in (True, False):
        model = _model(spec)
        main = torch.zeros_like(model.head.weight)
        model.head.gradients.register_main_grad(model.head.weight, lambda main=main: main)
        x = _encode_tokens(model, TOKENS)
        loss = (
            model.head(x, target_T, known_gradient)
            if fused
            else F.cross_entropy(model.head(x)[:, : spec.vocab], target_T, reduction="sum")
        )
        (loss * 0.5).backward()
        gradients.append({"loss": loss.detach(), "main": main} | _gradients(model))
    assert gradients[0].keys() == gradients[1].keys()
    for key, wanted in gradients[1].items():
        torch.testing.assert_close(gradients[0][key], wanted, atol=1e-5, rtol=1e-5, msg=key)
    wanted_T = F.cross_entropy(model.head(x)[:, : spec.vocab], target_T, reduction="none")
    torch.testing.assert_close(model.head.token_losses(x, target_T), wanted_T, atol=1e-5, rtol=1e-5)


def _gradients(model: Encoder) -> dict[str, Tensor]:
    return {name: w.grad for name, w in model.named_parameters() if w.grad is not None}


def test_every_parameter_has_a_gradient() -> None:
    for name, spec in SPECS.items():
        model = _model(spec)
        x = _encode_tokens(model, TOKENS)
        loss = model.head(x, TOKENS.flatten())
        if spec.binary_head:
            loss = loss + F.cross_entropy(model.binary_logits(x, torch.tensor([0, 8])), torch.tensor([0, 1]))
        loss.backward()
        unused = {"pooler.weight", "pooler.bias"} if not spec.binary_head else set()
        for key, weight in model.named_parameters():
            assert (weight.grad is not None and weight.grad.abs().max() > 0) != (key in unused), (name, key)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("pp", "vp"), [(1, 1), (2, 1), (3, 1), (1, 3)])
@torch.no_grad()
def test_stages_hold_the_rows_of_the_table_and_compute_the_model(name: str, pp: int, vp: int) -> None:
    spec, layout, x = SPECS[name], Layout(pp=pp, vp=vp), TOKENS.flatten()
    read = initial_values(table(spec), 7)
    names: set[str] = set()
    meshes = [Mesh(layout, rank, pp=Axis("pp", pp, rank)) for rank in range(pp)]
    runtimes = [Runtime.from_mesh(mesh, spec) for mesh in meshes]
    models = [build_chunks(rt, mesh) for rt, mesh in zip(runtimes, meshes, strict=True)]
    for index in range(pp * vp):
        rt, stage = runtimes[index % pp], models[index % pp][index // pp]
        assert isinstance(stage, Encoder)
        fill_weights(stage, read, rt)
        stage_names = {row.name for row, _ in parameters(stage, rt)}
        shared = {row.name for row in table(spec) if row.tied_to and pp * vp == 1}
        assert stage_names == {row.name for row in table(spec) if row.is_on(stage.stage)} - shared
        names |= stage_names | shared
        x = stage.hidden_states(
            x, POSITIONS, PackedAttention(2, 8, PADDING, causal=False), token_type_T=TYPES.flatten()
        )
    assert names == {row.name for row in table(spec)}
    whole = build_model(Runtime.single_process(spec))
    assert isinstance(whole, Encoder)
    fill_weights(whole, read)
    torch.testing.assert_close(x, _encode_tokens(whole, TOKENS))


@pytest.mark.parametrize("name", SPECS)
def test_names_are_unique_and_norms_and_biases_alone_do_not_decay(name: str) -> None:
    rows = table(SPECS[name])
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.decay == (not row.name.endswith(".bias") and "norm" not in row.name), row.name


@pytest.mark.parametrize(
    ("name", "millions"),
    [  # with pooler, heads and the two types; the published figures round them
        ("bert-base-uncased", 110.1),
        ("bert-large-uncased", 336.2),
        ("megatron-bert-345m", 336.2),
        ("megatron-bert-1.3b", 1279),
        ("megatron-bert-3.9b", 3863),
        ("modernbert-base", 149.6),
        ("modernbert-large", 395.8),
    ],
)
def test_a_preset_has_the_published_number_of_parameters(name: str, millions: float) -> None:
    assert count_params(table(preset(name))) / 1e6 == pytest.approx(millions, rel=0.01)


def test_a_manifest_from_before_encoders_is_a_decoder() -> None:
    values = json.loads(json.dumps(PRESETS["gpt2-124m"].to_dict()))
    for name in ("causal", *ENCODER_FIELDS):
        del values[name]
    assert ModelSpec.from_dict(values) == PRESETS["gpt2-124m"]


@pytest.mark.parametrize(
    ("spec", "change", "message"),
    [
        (
            gpt,
            {"token_types": 2},
            "model.token_types: is not supported in a decoder: found 2, wanted None, or",
        ),
        (
            gpt,
            {"head_bias": True},
            "model.head_bias: is not supported in a decoder: found True, wanted False",
        ),
        (
            gpt,
            {"head_transform": "relu"},
            "model.head_transform: unknown: found relu, wanted none | gelu_tanh",
        ),
        (gpt, {"causal": 0}, "model.causal: not a boolean: found 0"),
        (bert, {"causal": True}, "model.token_types: is not supported in a decoder"),
        (
            gpt,
            {"norm_bias": False},
            "model.norm_bias: is not supported in a decoder: found False, wanted True",
        ),
        (
            bert,
            {"global_attention_every": 3},
            "model.global_attention_every: needs model.sliding_window: found 3, wanted None, or a window",
        ),
        (bert, {"rope_theta_local": 0.0}, "model.rope_theta_local: not above 0: found 0, wanted 1 or more"),
        (bert, {"positions": "alibi"}, "model.positions: is not supported in an encoder: found alibi"),
        (bert, {"pooler": False}, "model.binary_head: needs model.pooler: found True, wanted False"),
        (bert, {"family": "gpt"}, "model.family: does not fit model.causal: found gpt, wanted bert"),
        (bert, {"token_types": 0}, "model.token_types: not a count: found 0"),
    ],
)
def test_parts_that_a_model_cannot_have_are_refused(spec: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec(**{**SMALL, **change})
    assert message in str(caught.value)


def test_an_encoder_is_refused_where_a_decoder_is_needed() -> None:
    require_decoder(gpt(**SMALL), Path("run"))
    with pytest.raises(ConfigError, match="run: model.causal: is of an encoder, .*found false, wanted true"):
        require_decoder(bert(**SMALL), Path("run"))


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("bert", "model_type: is of an encoder, which predicts no next token: found bert, wanted "),
        ("megatron-bert", "model_type: is of an encoder, which predicts no next token: found megatron-bert"),
        ("modernbert", "model_type: is of an encoder, which predicts no next token: found modernbert"),
        ("t5", "model_type: is of an encoder with a decoder, which cannot be run yet: found t5, wanted "),
    ],
)
def test_a_foreign_encoder_is_refused_without_a_conversion(
    tmp_path: Path, model_type: str, message: str
) -> None:
    """The converted model would be refused as well, with the conversion back as its hint."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    weights = tmp_path / "model.safetensors"
    weights.touch()
    for load in (tmp_path, weights):
        with pytest.raises(ConfigError) as caught:
            refuse_foreign_encoder(load)
        assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: {message}")
        assert str(caught.value).endswith("; hint: use the folder in transformers as it is")


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"[1]",
        b'{"model_type": ["bert"]}',
        b'{"model_type": "bert", "is_decoder": true}',
        b'{"model_type": "gpt2"}',
        b"\xff",
    ],
)
def test_other_foreign_folders_are_left_to_the_reader_of_their_format(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    refuse_foreign_encoder(tmp_path)
