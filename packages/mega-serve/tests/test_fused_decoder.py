"""One kernel call for all layers of a step of single tokens, against the definition in torch's operations."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from mega_model.attention_backends import PackedAttention
from mega_model.build import load_model
from mega_model.decoder import Decoder
from mega_model.init import initial_values
from mega_model.kernels.numba import load_kernels
from mega_model.runtime import Runtime
from mega_schema.arch import table
from mega_schema.spec import ModelSpec, gpt, llama
from mega_serve.engine.interfaces import Chunk
from mega_serve.execution.fused_decoder import FusedDecoder
from mega_serve.execution.model_runner import RunnerOptions, TorchModelRunner
from mega_serve.execution.packed_weights import WeightDtype
from mega_serve.execution.weight_loading import compute_dtype, fill_model

SIZES = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 131, "max_seq_len": 96, "init_std": 0.15}
SPECS = {
    "gpt": gpt(**SIZES),
    "gpt-erf-1p": replace(gpt(**SIZES), activation="gelu_erf", norm_1p=True, bias=False),
    "llama": llama(**SIZES, kv_heads=2, ffn=128, sliding_window=21),
    "half-rotary": replace(llama(**SIZES, ffn=192), rotary_fraction=0.5, qkv_bias=True, norm_1p=True),
    "bloom": replace(gpt(**SIZES), positions="alibi", embed_norm=True, heads=16, kv_heads=1, head_dim=40),
}
UNUSUAL = {
    "qk_norm": replace(gpt(**SIZES), qk_norm=True),
    "parallel_residual": replace(gpt(**SIZES), parallel_residual=True),
    "post_norm_residual": replace(gpt(**SIZES), post_norm_residual=True),
    "rope_interleaved": replace(llama(**SIZES, ffn=128), rope_interleaved=True),
    "squared_relu": replace(gpt(**SIZES), activation="squared_relu"),
}
PAGE = 16
LENGTHS = (40, 17, 33, 9, 21, 12, 30, 8)


def _runner(spec: ModelSpec, dtype: WeightDtype = "float32", *, invariant: bool = False) -> TorchModelRunner:
    rt = Runtime.single_process(spec, dtype=compute_dtype(dtype))
    reader = initial_values(table(spec), seed=5)
    model = fill_model(rt, reader, dtype=dtype, kernels=load_kernels(), batch_invariant=invariant)
    return TorchModelRunner(model, RunnerOptions(kv_memory=4 << 20, batch_invariant=invariant))


def _sequences(spec: ModelSpec, rows: int) -> list[list[int]]:
    rng = random.Random(rows)
    return [[rng.randrange(spec.vocab) for _ in range(length)] for length in LENGTHS[:rows]]


def _decode(runner: TorchModelRunner, rows: int, prefix: int = 5) -> list[torch.Tensor]:
    """Return the logits of each row's tokens after `prefix` ones, each computed in a step of its own."""
    pages = random.Random(0).sample(range(runner.num_pages), 3 * rows)
    sequences = _sequences(runner.model.spec, rows)
    tables = [pages[3 * row : 3 * row + 3] for row in range(rows)]
    for ids, chunk_pages in zip(sequences, tables, strict=True):
        runner.run([Chunk(ids[:prefix], 0, chunk_pages, prefix)])
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    for position in range(prefix, max(map(len, sequences))):
        active = [row for row, ids in enumerate(sequences) if position < len(ids)]
        chunks = [Chunk([sequences[row][position]], position, tables[row], 0) for row in active]
        for row, values in zip(active, runner.run(chunks).logits, strict=True):  # type: ignore[call-overload]
            logits[row].append(values)
    return [torch.stack(values) for values in logits]


@cache
def _definition(spec: ModelSpec) -> Decoder:
    return load_model(spec, initial_values(table(spec), seed=5))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_single_tokens_have_the_logits_of_the_naive_loop(name: str, rows: int) -> None:
    runner = _runner(SPECS[name])
    assert runner.fused is not None
    for ids, logits in zip(_sequences(SPECS[name], rows), _decode(runner, rows), strict=True):
        with torch.inference_mode():
            expected = _definition(SPECS[name])(
                torch.tensor(ids), torch.arange(len(ids)), PackedAttention(1, len(ids))
            )
        torch.testing.assert_close(logits, expected[5:, : SPECS[name].vocab], rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("rows", [2, 7])
@pytest.mark.parametrize("name", SPECS)
def test_numbers_are_rounded_where_torch_rounds_them(name: str, dtype: WeightDtype, rows: int) -> None:
    runner = _runner(SPECS[name], dtype)
    assert runner.fused is not None
    fused = _decode(runner, rows)
    runner.fused = None
    for actual, expected in zip(fused, _decode(runner, rows), strict=True):
        # only the order of sums in the norms differs, which seldom changes a rounded number
        differences = (actual - expected).abs() / expected.abs().max()
        assert float(differences.mean()) < 1e-3
        assert float(differences.max()) < 3e-2


def test_threads_change_no_bits_of_a_fused_step() -> None:
    threads = torch.get_num_threads()
    runner = _runner(SPECS["llama"], "bfloat16")
    try:
        torch.set_num_threads(1)
        expected = _decode(runner, 3)
        torch.set_num_threads(2)
        assert all(map(torch.equal, _decode(runner, 3), expected))
    finally:
        torch.set_num_threads(threads)


def test_large_layers_of_more_rows_than_numba_multiplies_are_computed_by_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = _runner(SPECS["gpt"]).fused
    monkeypatch.setattr("mega_serve.execution.fused_decoder._SMALL_LAYER_BYTES", 1000)
    large = _runner(SPECS["gpt"]).fused
    assert small is not None
    assert large is not None
    assert (small.max_rows, large.max_rows) == (8, load_kernels().linear.MAX_ROWS)


@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_layer_is_computed_by_torch(name: str) -> None:
    assert not FusedDecoder.is_supported(_runner(UNUSUAL[name]).model)
    assert _runner(UNUSUAL[name]).fused is None


def test_a_batch_invariant_model_is_computed_by_its_own_kernels() -> None:
    assert _runner(SPECS["gpt"], invariant=True).fused is None


def test_a_replaced_model_is_the_one_that_decodes() -> None:
    runner = _runner(SPECS["gpt"])
    before = _decode(runner, 1)[0]
    spec = SPECS["gpt"]
    reader = initial_values(table(spec), seed=6)
    newer = fill_model(Runtime.single_process(spec), reader, dtype="float32", kernels=load_kernels())
    runner.replace_model(newer)
    after = _decode(runner, 1)[0]
    assert not torch.allclose(before, after, atol=0.1)
    runner.fused = None
    torch.testing.assert_close(after, _decode(runner, 1)[0], rtol=0.0, atol=1e-4)
