"""The model runner against the naive loop: same logits for any chunks, batch, pages and reused prefix."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from mega_model.attention_backends import PackedAttention
from mega_model.build import load_model
from mega_model.decoder import Decoder
from mega_model.init import initial_values
from mega_model.kernels.numba import load_kernels
from mega_model.runtime import Runtime
from mega_schema.arch import table
from mega_schema.sharding import Slab
from mega_schema.spec import ModelSpec, gpt, llama
from mega_serve.engine.interfaces import Chunk
from mega_serve.engine.requests import TokenLogprob
from mega_serve.execution.model_runner import AttentionName, RunnerOptions, TorchModelRunner
from mega_serve.execution.packed_weights import WeightDtype
from mega_serve.execution.weight_loading import compute_dtype, fill_model

SIZES = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 131, "max_seq_len": 96, "init_std": 0.15}
SPECS = {
    "gpt": gpt(**SIZES),
    "llama": llama(**SIZES, kv_heads=2, ffn=96, sliding_window=21),
    "bloom": replace(gpt(**SIZES), positions="alibi", embed_norm=True, kv_heads=1, head_dim=24, bias=True),
}
PAGE_SIZE = 16
MEMORY = 4 << 20


def build_runner(
    name: str, attention: AttentionName, *, dtype: WeightDtype = "float32", invariant: bool = False
) -> TorchModelRunner:
    options = RunnerOptions(
        page_size=PAGE_SIZE, kv_memory=MEMORY, attention=attention, batch_invariant=invariant
    )
    return TorchModelRunner(_model(name, dtype, attention, invariant), options)


def _model(name: str, dtype: WeightDtype, attention: AttentionName, invariant: bool) -> Decoder:
    spec = SPECS[name]
    rt = Runtime.single_process(spec, dtype=compute_dtype(dtype))
    kernels = load_kernels() if attention == "numba" else None
    return fill_model(rt, _reader(spec), dtype=dtype, kernels=kernels, batch_invariant=invariant)


def _reader(spec: ModelSpec) -> Callable[[str, Slab], Tensor]:
    return initial_values(table(spec), seed=5)


@cache
def _definition(name: str, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_model(SPECS[name], _reader(SPECS[name]), dtype=dtype)


@cache
def expected_logits(name: str, ids: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Compute the logits of one whole sequence, without pages or packed weights."""
    with torch.inference_mode():
        model = _definition(name, dtype)
        logits = model(torch.tensor(ids), torch.arange(len(ids)), PackedAttention(1, len(ids)))
    return logits[:, : SPECS[name].vocab].float()


@dataclass
class Row:
    """A sequence with all its ids, of which the first `computed` are in pages."""

    ids: list[int]
    pages: list[int] = field(default_factory=list)
    shared: int = 0  # leading pages of another row
    computed: int = 0


@dataclass
class History:
    """Random steps over rows that come, go, and share prefixes; keeps the logits of every (row, position)."""

    runner: TorchModelRunner
    name: str
    rng: random.Random
    shuffle: bool = True
    rows: list[Row] = field(default_factory=list)
    logits: list[tuple[Row, int, Tensor]] = field(default_factory=list)
    scores: list[tuple[Row, int, TokenLogprob]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = list(range(self.runner.num_pages))
        if self.shuffle:
            self.rng.shuffle(self.free)

    def add_row(self) -> None:
        spec = SPECS[self.name]
        length = self.rng.randint(2, spec.max_seq_len)
        self.rows.append(Row([self.rng.randrange(spec.vocab) for _ in range(length)]))

    def fork_row(self) -> None:
        """Start a row with the prefix of another: its whole pages are shared, the last is a copy."""
        source = self.rng.choice(self.rows)
        prefix_tokens = self.rng.randint(0, source.computed)
        ids = source.ids[:prefix_tokens] + [self.rng.randrange(SPECS[self.name].vocab) for _ in range(8)]
        whole, rest = divmod(prefix_tokens, PAGE_SIZE)
        row = Row(ids[: SPECS[self.name].max_seq_len], source.pages[:whole], whole, prefix_tokens)
        if rest:
            page = self.free.pop()
            self.runner.copy_pages([(source.pages[whole], page)])
            row.pages.append(page)
        self.rows.append(row)

    def step(self) -> None:
        ready = [row for row in self.rows if row.computed < len(row.ids)]
        chosen = self.rng.sample(ready, self.rng.randint(1, len(ready))) if ready else []
        chunks, spans = [], []
        for row in chosen:
            left = len(row.ids) - row.computed
            count = 1 if self.rng.random() < 0.3 else self.rng.randint(1, left)
            while len(row.pages) * PAGE_SIZE < row.computed + count:
                row.pages.append(self.free.pop(0))
            ids = row.ids[row.computed : row.computed + count]
            follow = row.ids[row.computed + 1 : row.computed + count + 1] if self.rng.random() < 0.4 else []
            spans.append((row, row.computed, self.rng.randint(0, count), follow))
            top = self.rng.randint(0, 3)
            chunks.append(Chunk(ids, row.computed, list(row.pages), spans[-1][2], follow, top))
            row.computed += count
        if not chunks:
            return
        output = self.runner.run(chunks)
        logits = iter(output.logits)  # type: ignore[call-overload]
        for chunk, (row, start, first, follow), scores in zip(chunks, spans, output.scores, strict=True):
            for i in range(first, len(chunk.token_ids)):
                self.logits.append((row, start + i, next(logits)))
            assert len(scores) == len(follow)
            self.scores += [(row, start + i, score) for i, score in enumerate(scores)]
        assert next(logits, None) is None

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.rng.random() < 0.5 and len(self.free) > 16:
                self.add_row()
            elif self.rows and self.rng.random() < 0.4 and len(self.free) > 16:
                self.fork_row()
            self.step()


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 12), marks=pytest.mark.long)], ids=len)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("attention", ["numba", "torch"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_logits_equal_the_naive_loop(
    name: str, attention: AttentionName, shuffle: bool, seeds: range
) -> None:
    runner = build_runner(name, attention)
    worst = 0.0
    for seed in seeds:
        history = History(runner, name, random.Random(seed), shuffle)
        history.run(14)
        for row, position, logits in history.logits:
            expected = expected_logits(name, tuple(row.ids))[position]
            worst = max(worst, float((logits - expected).abs().max()))
        for row, position, score in history.scores:
            expected = expected_logits(name, tuple(row.ids))[position].log_softmax(-1)
            assert score.token_id == row.ids[position + 1]
            assert abs(score.logprob - float(expected[score.token_id])) < 1e-4
            assert [value for _, value in score.top] == pytest.approx(
                expected.topk(len(score.top)).values.tolist(), abs=1e-4
            )
    assert worst < 1e-4


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 12), marks=pytest.mark.long)], ids=len)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SPECS)
def test_logits_are_bitwise_independent_of_batch_chunks_and_pages(
    name: str, dtype: WeightDtype, seeds: range
) -> None:
    runner = build_runner(name, "numba", dtype=dtype, invariant=True)
    bits: dict[tuple[int, ...], Tensor] = {}
    repeats = 0
    for seed in seeds:
        history = History(runner, name, random.Random(seed))
        for _ in range(3):  # three rows of equal ids, in pages of their own
            history.rows.append(Row(list(range(5, 60))))
        history.run(10)
        for row, position, logits in history.logits:
            prefix = tuple(row.ids[: position + 1])
            if prefix in bits:
                repeats += 1
                assert torch.equal(bits[prefix], logits)
            bits[prefix] = logits
    assert repeats > 25 * len(seeds)
