"""Models in one process: reference equations, variants, gradients, stages."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mega_model.attention import rotary_angles
from mega_model.attention_backends import PackedAttention
from mega_model.build import build_chunks, build_model, fill_weights, load_model, parameters
from mega_model.decoder import Decoder
from mega_model.distributed.mesh import Axis, Mesh
from mega_model.dropout import Dropout, token_keys
from mega_model.init import initial_values
from mega_model.layers import sinusoids
from mega_model.runtime import Runtime
from mega_schema.arch import table
from mega_schema.parallel_layout import Layout
from mega_schema.recompute_policy import RecomputePolicy
from mega_schema.spec import ModelSpec, gpt, llama

SMALL: dict[str, Any] = {
    "layers": 3,
    "hidden": 16,
    "heads": 4,
    "vocab": 19,
    "max_seq_len": 8,
    "vocab_multiple": 4,
}
SPECS: dict[str, ModelSpec] = {
    "gpt": gpt(**SMALL),
    "gpt with everything else": gpt(
        **SMALL,
        activation="swiglu",
        positions="rope",
        rotary_fraction=0.5,
        kv_heads=2,
        bias=False,
        qkv_bias=True,
        tied=False,
    ),
    "gpt of fairseq": gpt(**SMALL, activation="gelu_erf", positions="sinusoidal", scale_embedding=True),
    "gpt squared": gpt(**SMALL, activation="squared_relu", norm="rmsnorm", post_norm_residual=True),
    "gpt of two branches beside each other": gpt(
        **SMALL, positions="rope", rotary_fraction=0.5, parallel_residual=True, tied=False
    ),
    "gpt without positions": gpt(**SMALL, positions="none"),
    "gpt of bloom": gpt(**SMALL, positions="alibi", embed_norm=True, sliding_window=3),
    "gpt with head norms": gpt(
        **SMALL, qk_norm=True, norm_1p=True, activation="geglu", kv_heads=2, sliding_window=5
    ),
    "gpt with relu": gpt(
        **SMALL, activation="reglu", positions="rope", rope_interleaved=True, rotary_fraction=0.5
    ),
    "gpt bilinear": gpt(**SMALL, activation="liglu", positions="rope", rope_interpolation=3.0),
    "llama": llama(**SMALL, ffn=12),
    "llama 3.1": llama(
        **SMALL, ffn=12, rope_scaling=8.0, rope_scaling_context=20, rope_theta=5.0, sliding_window=4
    ),
    "llama with head norms": llama(**SMALL, ffn=12, kv_heads=2, qk_norm=True, qkv_bias=True),
    "llama grouped tied": llama(**SMALL, ffn=12, kv_heads=2, tied=True, rope_theta=100.0),
}
TOKENS = torch.randint(0, 19, (2, 8), generator=torch.Generator().manual_seed(3))


def _model(spec: ModelSpec, seed: int = 1) -> Decoder:
    model = build_model(Runtime.single_process(spec))
    fill_weights(model, initial_values(table(spec), seed))
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():  # norms of ones and biases of zeros would hide a mistake
        weight.data += 0.3 * torch.randn(weight.shape, generator=generator)
    return model


def _logits(model: Decoder, token_BS: Tensor) -> Tensor:
    rows, length = token_BS.shape
    with torch.no_grad():
        logits: Tensor = model(
            token_BS.flatten(), torch.arange(length).repeat(rows), PackedAttention(rows, length)
        )
    return logits[:, : model.spec.vocab].unflatten(0, (rows, length))


def _reference_logits(spec: ModelSpec, weights: dict[str, Tensor], token_BS: Tensor) -> Tensor:
    """The same model from the papers' equations, head by head and place by place."""
    rows = []
    for token_S in token_BS:
        x = weights["embed.weight"][token_S]
        place = torch.arange(len(token_S))
        if spec.embed_norm:
            x = _norm(spec, weights, "embed_norm", x)
        if spec.scale_embedding:
            x = x * spec.hidden**0.5
        if spec.positions == "learned":
            x = x + weights["position.weight"][place]
        if spec.positions == "sinusoidal":
            x = x + sinusoids(place, spec.hidden)
        for i in range(spec.layers):
            x = _block(spec, {n.removeprefix(f"layers.{i}."): w for n, w in weights.items()}, x)
        head = weights["embed.weight" if spec.tied else "head.weight"]
        rows.append(_norm(spec, weights, "final_norm", x) @ head[: spec.vocab].T)
    return torch.stack(rows)


def _norm(spec: ModelSpec, weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    scale = weights[name + ".weight"] + (1 if spec.norm_1p else 0)
    if spec.norm == "rmsnorm":
        return x / (x.pow(2).mean(-1, keepdim=True) + spec.norm_eps).sqrt() * scale
    centred = x - x.mean(-1, keepdim=True)
    deviation = (centred.pow(2).mean(-1, keepdim=True) + spec.norm_eps).sqrt()
    return centred / deviation * scale + weights[name + ".bias"]


def _linear(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ weights[name + ".weight"].T + weights.get(name + ".bias", torch.zeros(()))


def _block(spec: ModelSpec, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    y = _norm(spec, weights, "attn_norm", x)
    entered, x = x, (y if spec.post_norm_residual else x) + _attention(spec, weights, y)
    y = _norm(spec, weights, "ffn_norm", entered if spec.parallel_residual else x)
    inner = _linear(weights, "gate_up" if spec.is_gated else "up", y)
    if spec.is_gated:
        gate, up = inner[..., : spec.ffn], inner[..., spec.ffn :]
        inner = {
            "swiglu": gate * torch.sigmoid(gate),
            "geglu": gate * (1 + torch.erf(gate / 2**0.5)) / 2,
            "reglu": gate.clamp(min=0),
            "liglu": gate,
        }[spec.activation] * up
    elif spec.activation == "squared_relu":
        inner = inner.clamp(min=0) ** 2
    elif spec.activation == "gelu_erf":
        inner = inner * (1 + torch.erf(inner / 2**0.5)) / 2
    else:
        inner = inner * (1 + torch.tanh(0.7978845608028654 * (inner + 0.044715 * inner**3))) / 2
    return (y if spec.post_norm_residual else x) + _linear(weights, "down", inner)


def _attention(spec: ModelSpec, weights: dict[str, Tensor], y: Tensor) -> Tensor:
    width, out = spec.head_dim, []
    q, k, v = _linear(weights, "qkv", y).split([spec.q_rows, spec.kv_rows, spec.kv_rows], -1)
    place = torch.arange(len(y))
    distance = place[:, None] - place
    for head in range(spec.heads):
        group = head * spec.kv_heads // spec.heads
        query, key, value = (
            q[:, _head_columns(head, width)],
            k[:, _head_columns(group, width)],
            v[:, _head_columns(group, width)],
        )
        if spec.qk_norm:
            query, key = _norm(spec, weights, "q_norm", query), _norm(spec, weights, "k_norm", key)
        scores = _rotate(spec, query) @ _rotate(spec, key).T / width**0.5
        if spec.positions == "alibi":
            scores = scores + place * 2 ** (-8 * (head + 1) / spec.heads)  # by place, as BigScience writes it
        unseen = (distance < 0) | (distance >= (spec.sliding_window or spec.max_seq_len))
        out.append(scores.masked_fill(unseen, -torch.inf).softmax(-1) @ value)
    return _linear(weights, "out", torch.cat(out, -1))


def _head_columns(head: int, width: int) -> slice:
    return slice(head * width, (head + 1) * width)


def _rotate(spec: ModelSpec, x: Tensor) -> Tensor:
    """Pairs of components as complex numbers, multiplied by e^(i·place·rate)."""
    half = spec.rotary_dim // 2
    if not half:
        return x
    first = torch.arange(half) * 2 if spec.rope_interleaved else torch.arange(half)
    second = first + (1 if spec.rope_interleaved else half)
    rate = [_rate(spec, spec.rope_theta ** (-i / half) / spec.rope_interpolation) for i in range(half)]
    turn = torch.exp(1j * torch.arange(len(x))[:, None] * torch.tensor(rate))
    turned, out = torch.complex(x[:, first], x[:, second]) * turn, x.clone()
    out[:, first], out[:, second] = turned.real, turned.imag
    return out


def _rate(spec: ModelSpec, rate: float) -> float:
    """Llama 3.1's rule in its authors' words: by wavelength, in three cases."""
    wave, context = 2 * math.pi / rate, spec.rope_scaling_context
    if wave < context / spec.rope_scaling_high:
        return rate
    if wave > context / spec.rope_scaling_low:
        return rate / spec.rope_scaling
    smooth = (context / wave - spec.rope_scaling_low) / (spec.rope_scaling_high - spec.rope_scaling_low)
    return (1 - smooth) * rate / spec.rope_scaling + smooth * rate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_model_has_the_weights_that_were_read_and_is_in_evaluation_mode(dtype: torch.dtype) -> None:
    spec = SPECS["gpt"]
    model = load_model(spec, initial_values(table(spec), 1), dtype=dtype)
    reference = build_model(Runtime.single_process(spec, dtype=dtype))
    fill_weights(reference, initial_values(table(spec), 1))
    assert not model.training
    weights = model.state_dict()
    assert weights.keys() == reference.state_dict().keys()
    for name, weight in reference.state_dict().items():
        assert weights[name].dtype == dtype
        assert torch.equal(weights[name], weight)


@pytest.mark.parametrize("name", SPECS)
def test_logits_are_those_of_the_equations(name: str) -> None:
    model = _model(SPECS[name])
    wanted = _reference_logits(SPECS[name], dict(model.named_parameters()), TOKENS)
    torch.testing.assert_close(_logits(model, TOKENS), wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", SPECS)
def test_the_family_changes_no_bit_of_the_logits(name: str) -> None:
    spec = SPECS[name]
    of_gpt, of_llama = (
        _logits(_model(dataclasses.replace(spec, family=family)), TOKENS) for family in ("gpt", "llama")
    )
    assert torch.equal(of_gpt, of_llama)


@pytest.mark.parametrize("name", SPECS)
def test_a_token_does_not_see_what_comes_after_it(name: str) -> None:
    model, changed = _model(SPECS[name]), TOKENS.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 19
    before, after = _logits(model, TOKENS), _logits(model, changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize("name", SPECS)
def test_the_model_holds_the_rows_of_its_table_and_no_others(name: str) -> None:
    spec = SPECS[name]
    rt = Runtime.single_process(spec)
    model = build_model(rt)
    wanted = {row.name: row.local_shape(1) for row in table(spec) if row.tied_to is None}
    assert {row.name: tuple(weight.shape) for row, weight in parameters(model, rt)} == wanted


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("pp", "vp"), [(2, 1), (3, 1), (1, 2), (1, 3)])
def test_stages_one_after_another_are_the_model(name: str, pp: int, vp: int) -> None:
    spec, layout, x = SPECS[name], Layout(pp=pp, vp=vp), TOKENS.flatten()
    read, place = initial_values(table(spec), 7), torch.arange(8).repeat(2)
    param_names: set[str] = set()
    meshes = [Mesh(layout, rank, pp=Axis("pp", pp, rank)) for rank in range(pp)]
    runtimes = [Runtime.from_mesh(mesh, spec) for mesh in meshes]
    models = [build_chunks(rt, mesh) for rt, mesh in zip(runtimes, meshes, strict=True)]
    for index in range(pp * vp):
        rt, stage = runtimes[index % pp], models[index % pp][index // pp]
        fill_weights(stage, read, rt)
        names = {row.name for row, _ in parameters(stage, rt)}
        assert names == {row.name for row in table(spec) if row.is_on(stage.stage)}
        assert not names & param_names
        param_names |= names
        with torch.no_grad():
            x = stage(x, place, PackedAttention(2, 8))
    assert param_names == {row.name for row in table(spec)}
    whole = build_model(Runtime.single_process(spec))
    fill_weights(whole, read)
    torch.testing.assert_close(x[:, : spec.vocab].unflatten(0, (2, 8)), _logits(whole, TOKENS))


@pytest.mark.parametrize(
    "policy", [RecomputePolicy(), RecomputePolicy("full"), RecomputePolicy("full", "block", 1)], ids=str
)
@pytest.mark.parametrize("name", SPECS)
def test_what_a_stage_passes_on_is_not_kept_for_its_own_backward(name: str, policy: RecomputePolicy) -> None:
    """A pipeline frees it as soon as the next stage has it."""
    spec, place = SPECS[name], torch.arange(8)
    rt = Runtime.from_mesh(Mesh(Layout(pp=2), 0, pp=Axis("pp", 2, 0)), spec, recompute=policy)
    stage = build_model(rt)
    fill_weights(stage, initial_values(table(spec), 7), rt)
    drop = Dropout(0.2, 0.2, token_keys(1, [0, 1], place), rt.tp)
    saved_pointers: set[int] = set()

    def keep(x: Tensor) -> Tensor:
        saved_pointers.add(x.untyped_storage().data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = stage(TOKENS.flatten(), place.repeat(2), PackedAttention(2, 8, dropout=drop), drop)
    assert saved_pointers
    assert out.untyped_storage().data_ptr() not in saved_pointers


def test_filled_padding_is_zero_and_a_tied_head_is_the_embedding() -> None:
    spec = SPECS["gpt"]
    model = build_model(Runtime.single_process(spec))
    with torch.no_grad():
        model.embed.weight.fill_(torch.nan)
    fill_weights(model, initial_values(table(spec), 1))
    assert model.embed.weight.shape == (20, 16)
    assert torch.count_nonzero(model.embed.weight[19:]) == 0
    assert model.head.weight is model.embed.weight


def test_every_parameter_has_a_gradient() -> None:
    for spec in SPECS.values():
        model = _model(spec)
        model(TOKENS.flatten(), torch.arange(8).repeat(2), PackedAttention(2, 8))[
            :, : spec.vocab
        ].square().mean().backward()
        for name, weight in model.named_parameters():
            assert weight.grad is not None, name
            assert torch.isfinite(weight.grad).all(), name
            assert weight.grad.abs().max() > 0, name


def test_bfloat16_weights_are_the_rounded_ones() -> None:
    spec = SPECS["llama"]
    rt = Runtime.single_process(spec, dtype=torch.bfloat16)
    low, full = build_model(rt), build_model(Runtime.single_process(spec))
    for model in (low, full):
        fill_weights(model, initial_values(table(spec), 1), rt)
    for a, b in zip(low.parameters(), full.parameters(), strict=True):
        assert torch.equal(a, b.bfloat16())


def test_turning_keeps_lengths_and_depends_on_distance_alone() -> None:
    spec = llama(layers=1, hidden=8, heads=1, ffn=8, vocab=5, max_seq_len=100, rope_theta=50.0)
    rotate = Runtime.single_process(spec).kernels.apply_rotary
    q, k = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(0))

    def rotate_to(x: Tensor, place: int) -> Tensor:
        return rotate(x, *rotary_angles(torch.tensor([place]), spec))

    torch.testing.assert_close(rotate_to(q, 5).norm(), q.norm())
    score = [(rotate_to(q, near + 3) * rotate_to(k, near)).sum() for near in (0, 4, 90)]
    torch.testing.assert_close(score[0], score[1])
    torch.testing.assert_close(score[0], score[2], atol=1e-4, rtol=1e-4)
    assert torch.equal(rotate_to(q, 0), q)


def test_the_reference_norms_are_torchs_own() -> None:
    kernels = Runtime.single_process(SPECS["gpt"]).kernels
    x, scale, shift = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0)).unbind()
    torch.testing.assert_close(kernels.rms_norm(x, scale[0], 1e-5), F.rms_norm(x, (16,), scale[0], 1e-5))
    torch.testing.assert_close(
        kernels.layer_norm(x, scale[0], shift[0], 1e-5), F.layer_norm(x, (16,), scale[0], shift[0], 1e-5)
    )
