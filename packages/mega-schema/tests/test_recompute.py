"""Recomputation gives bitwise equal gradients with less saved memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mega_model.attention_backends import PackedAttention
from mega_model.build import build_model, fill_weights
from mega_model.decoder import Decoder
from mega_model.distributed.mesh import Axis
from mega_model.dropout import Dropout, token_keys
from mega_model.init import initial_values
from mega_model.recompute import RecomputedAttention, recompute, recompute_sharded
from mega_model.runtime import Runtime
from mega_schema.arch import table
from mega_schema.recompute_policy import KEEP_ALL, MODULES, RecomputePolicy
from mega_schema.spec import ModelSpec, gpt, llama

SIZES = {"layers": 4, "hidden": 16, "heads": 4, "vocab": 19, "max_seq_len": 32, "vocab_multiple": 8}
SPECS: dict[str, ModelSpec] = {
    "gpt": gpt(**SIZES),
    "gpt, parallel residual": gpt(**SIZES, parallel_residual=True, activation="geglu"),
    "gpt, normed residual": gpt(**SIZES, post_norm_residual=True),
    "llama": llama(**SIZES, kv_heads=2, ffn=24),
}
ROWS, LENGTH = 2, 32
KINDS = {
    "selective": RecomputePolicy("selective"),
    "norms and activation": RecomputePolicy("selective", modules=("layernorm", "mlp_act")),
    "all modules": RecomputePolicy("selective", modules=MODULES),
    "full": RecomputePolicy("full"),
    "full by three": RecomputePolicy("full", layers=3),
    "block of two": RecomputePolicy("full", "block", 2),
}


@pytest.mark.parametrize(
    ("recompute", "groups"),
    [
        (KEEP_ALL, [([4, 5, 6, 7, 8], False)]),
        (RecomputePolicy("selective"), [([4, 5, 6, 7, 8], False)]),
        (RecomputePolicy("full"), [([i], True) for i in range(4, 9)]),
        (RecomputePolicy("full", layers=2), [([4, 5], True), ([6, 7], True), ([8], True)]),
        (RecomputePolicy("full", layers=9), [([4, 5, 6, 7, 8], True)]),
        (RecomputePolicy("full", "block", 2), [([4], True), ([5], True), ([6, 7, 8], False)]),
        (RecomputePolicy("full", "block", 5), [([i], True) for i in range(4, 9)]),
    ],
)
def test_the_layers_of_a_stage_are_grouped(
    recompute: RecomputePolicy, groups: list[tuple[list[int], bool]]
) -> None:
    assert recompute.groups(range(4, 9)) == groups


def _model(spec: ModelSpec, recompute: RecomputePolicy) -> Decoder:
    model = build_model(dataclasses.replace(Runtime.single_process(spec), recompute=recompute))
    fill_weights(model, initial_values(table(spec), 1))
    return model


def _forward(model: Decoder, recompute: RecomputePolicy, dropout: float, length: int = LENGTH) -> Tensor:
    token_T = torch.randint(0, 19, (ROWS * length,), generator=torch.Generator().manual_seed(3))
    drop = Dropout(dropout, dropout, token_keys(1, range(ROWS), torch.arange(length)), Axis("tp"))
    attend = PackedAttention(ROWS, length, dropout=drop)
    attended = RecomputedAttention(attend) if recompute.recomputes("core_attn") else attend
    scores: Tensor = model(token_T, torch.arange(length).repeat(ROWS), attended, drop)
    return scores.square().mean()


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_are_bit_for_bit_those_of_keeping_everything(name: str, kind: str, dropout: float) -> None:
    def gradients(recompute: RecomputePolicy) -> list[Tensor]:
        model = _model(SPECS[name], recompute)
        _forward(model, recompute, dropout).backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    unrecomputed, recomputed = gradients(KEEP_ALL), gradients(KINDS[kind])
    assert len(unrecomputed) == len(recomputed) == len(list(_model(SPECS[name], KEEP_ALL).parameters()))
    assert all(torch.equal(a, b) for a, b in zip(unrecomputed, recomputed, strict=True))


def _kept_bytes(forward: Callable[[], Tensor], weights: list[Tensor]) -> int:
    """Count the bytes that forward saves for backward, each storage once, without weights."""
    storages = {}
    known = {weight.untyped_storage().data_ptr() for weight in weights}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        forward()
    return sum(storage.nbytes() for storage in storages.values())


def _saved_bytes(kind: RecomputePolicy, layers: int, dropout: float = 0.0, length: int = LENGTH) -> int:
    model = _model(gpt(**(SIZES | {"layers": layers})), kind)
    return _kept_bytes(lambda: _forward(model, kind, dropout, length), list(model.parameters()))


def _kept_by_a_layer(kind: RecomputePolicy, length: int) -> int:
    return _saved_bytes(kind, 3, 0.3, length) - _saved_bytes(kind, 2, 0.3, length)


INPUT = ROWS * LENGTH * 16 * 4  # bytes of what enters a layer


def test_full_recomputation_keeps_what_enters_a_layer() -> None:
    assert _saved_bytes(KINDS["full"], 4) - _saved_bytes(KINDS["full"], 2) == 2 * INPUT
    assert _saved_bytes(KINDS["full by three"], 6) - _saved_bytes(KINDS["full by three"], 3) == INPUT
    one_layer = _saved_bytes(KEEP_ALL, 4) - _saved_bytes(KEEP_ALL, 3)
    assert _saved_bytes(KINDS["block of two"], 4) == _saved_bytes(KEEP_ALL, 4) - 2 * (one_layer - INPUT)


def test_selective_recomputation_keeps_nothing_that_grows_with_the_square_of_the_length() -> None:
    """5·a·s²·b in 16 bits with a mask (arXiv:2205.05198 §4.1): here two copies in 32 bits, and no mask."""
    selective = [_kept_by_a_layer(KINDS["selective"], length) for length in (16, 32)]
    saved_bytes = [_kept_by_a_layer(KEEP_ALL, length) for length in (16, 32)]
    assert selective[1] == 2 * selective[0]
    # the two copies of the probabilities, and a byte for every pair of places: which is seen
    square = 2 * 4 * ROWS * 4 + 1
    assert saved_bytes[1] - 2 * saved_bytes[0] == square * (32 * 32 - 2 * 16 * 16)


def test_norms_and_activation_that_are_recomputed_are_not_kept() -> None:
    """Of GPT the inputs of qkv and up, 2 h, and of down, 4 h (arXiv:2205.05198 §4.1, table 2)."""
    layer_bytes = _saved_bytes(KEEP_ALL, 3) - _saved_bytes(KEEP_ALL, 2)
    for modules, saved in ((("layernorm",), 2), (("mlp_act",), 4), (("layernorm", "mlp_act"), 6)):
        policy = RecomputePolicy("selective", modules=modules)
        assert _saved_bytes(policy, 3) - _saved_bytes(policy, 2) == layer_bytes - saved * INPUT, modules


def test_a_share_of_what_enters_is_enough() -> None:
    """One rank's share is the whole; the gather over several is tested in tests/parity."""
    x = torch.randn(8, 4, requires_grad=True)
    for run in (recompute, lambda f, x: recompute_sharded(f, x, Axis("tp"))):
        (gradient,) = torch.autograd.grad(run(lambda x: x.exp().square(), x).sum(), x)  # type: ignore[operator]
        torch.testing.assert_close(gradient, 2 * (2 * x).exp().detach())


def test_without_gradients_nothing_is_kept_and_nothing_is_computed_twice() -> None:
    calls = []
    with torch.no_grad():
        recompute(lambda x: calls.append(x) or x, torch.ones(1))
    assert len(calls) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("put_off", [False, True])
def test_weights_main_gradients_get_every_product_once(kind: str, put_off: bool) -> None:
    """Also where a zero-bubble pipeline makes the products after the backward pass."""

    def mains(recompute: RecomputePolicy, put_off: bool) -> dict[str, Tensor]:
        spec = SPECS["llama"]
        runtime = dataclasses.replace(Runtime.single_process(spec), recompute=recompute)
        model = build_model(runtime)
        fill_weights(model, initial_values(table(spec), 1))
        main = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
        for name, weight in model.named_parameters():
            runtime.weight_gradients.register_main_grad(weight, partial(main.__getitem__, name))
        for micro in range(2):
            loss = _forward(model, recompute, 0.3)
            if put_off:
                with runtime.weight_gradients.defer(micro):
                    loss.backward()
            else:
                loss.backward()
        for micro in range(2 if put_off else 0):
            runtime.weight_gradients.run_deferred(micro)
        return main

    unrecomputed, recomputed = mains(KEEP_ALL, False), mains(KINDS[kind], put_off)
    assert sum(bool(main.any()) for main in unrecomputed.values()) > 10
    assert all(torch.equal(recomputed[name], main) for name, main in unrecomputed.items())
