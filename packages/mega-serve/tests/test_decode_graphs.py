"""Captured decode steps, with a capture that runs the recorded function again: buckets, padding, results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mega_model.decoder import Decoder
from mega_model.init import initial_values
from mega_model.runtime import Runtime
from mega_schema.arch import table
from mega_schema.errors import ConfigError
from mega_schema.spec import gpt, llama
from mega_serve.engine.interfaces import Chunk
from mega_serve.execution.decode_graphs import DecodeGraphs, batch_sizes
from mega_serve.execution.device_inputs import DeviceInputs, InputBuffers
from mega_serve.execution.model_runner import RunnerOptions, TorchModelRunner
from mega_serve.execution.weight_loading import fill_model

SIZES = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 51, "max_seq_len": 40, "init_std": 0.2}
SPECS = {
    "gpt": gpt(**SIZES),
    "llama": llama(**SIZES, kv_heads=2, ffn=48, sliding_window=9),
    "bloom": replace(gpt(**SIZES), positions="alibi", embed_norm=True),
}
PAGE_SIZE = 4
TOLERANCE = 1e-5  # products of more rows add in another order
PAGES_PER_ROW = SIZES["max_seq_len"] // PAGE_SIZE


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device to compare with a CPU")


class RepeatedStep:
    """A step that is run again, with its output in one place, as a CUDA graph's is."""

    def __init__(self, run: Callable[[], Tensor]) -> None:
        self._run = run
        self._output = run().clone()

    def replay(self) -> Tensor:
        return self._output.copy_(self._run())


def build_model(name: str, seed: int = 3, device: str = "cpu") -> Decoder:
    spec = SPECS[name]
    return fill_model(
        Runtime.single_process(spec, device=device), initial_values(table(spec), seed), dtype="float32"
    )


def build_runner(name: str, *, graphs: int = 0) -> TorchModelRunner:
    options = RunnerOptions(page_size=PAGE_SIZE, kv_memory=1 << 21, attention="torch", spare_page=graphs > 0)
    runner = TorchModelRunner(build_model(name), options)
    if graphs:
        runner.capture_graphs(graphs, RepeatedStep)
    return runner


def decode(runner: TorchModelRunner, rows: int, steps: int, seed: int = 1) -> list[Tensor]:
    """Run prompts of several lengths, then tokens of all rows; return the logits of every step."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 51, (rows, 40), generator=generator).tolist()
    tables = [list(range(i, rows * PAGES_PER_ROW, rows)) for i in range(rows)]
    lengths = [3 + 5 * i % 17 for i in range(rows)]
    prompts = [Chunk(ids[i][: lengths[i]], 0, tables[i], lengths[i] - 1) for i in range(rows)]
    outputs = [runner.run(prompts).logits]
    for _ in range(steps):
        chunks = [Chunk([ids[i][lengths[i]]], lengths[i], tables[i], 0) for i in range(rows)]
        outputs.append(runner.run(chunks).logits)
        lengths = [length + 1 for length in lengths]
    return [output for output in outputs if isinstance(output, Tensor)]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_a_padded_captured_step_computes_what_an_eager_step_does(name: str, rows: int) -> None:
    eager, captured = (decode(build_runner(name, graphs=graphs), rows, 9) for graphs in (0, 6))
    assert len(eager) == len(captured) == 10
    for wanted, actual in zip(eager, captured, strict=True):
        assert wanted.shape == actual.shape == (rows, 51)
        torch.testing.assert_close(actual, wanted, rtol=0, atol=TOLERANCE)


def test_the_logits_of_a_captured_step_stay_when_the_next_one_runs() -> None:
    runner = build_runner("gpt", graphs=2)
    first, second = (runner.run([Chunk([token], 0, [0], 0)]).logits for token in (5, 6))
    third = runner.run([Chunk([5], 0, [0], 0)]).logits
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert isinstance(third, Tensor)
    assert torch.equal(first, third)
    assert not torch.equal(first, second)


def test_new_weights_are_captured_again() -> None:
    runner = build_runner("llama", graphs=2)
    runner.replace_model(build_model("llama", seed=8))
    fresh = build_runner("llama")
    fresh.replace_model(build_model("llama", seed=8))
    for wanted, actual in zip(decode(fresh, 2, 3), decode(runner, 2, 3), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=TOLERANCE)


def test_batch_sizes_cover_every_batch_with_little_padding() -> None:
    assert batch_sizes(1) == (1,)
    assert batch_sizes(3) == (1, 2, 4)
    assert batch_sizes(64) == (1, 2, 4, 8, 16, 32, 48, 64)
    assert len(batch_sizes(4096)) < 60
    for most in (100, 256, 300, 4096):
        sizes = batch_sizes(most)
        assert sizes[-1] >= most > sizes[-2]
        for smaller, larger in zip(sizes[4:], sizes[5:], strict=False):
            assert larger - smaller <= max(16, smaller / 8)


def test_a_batch_takes_the_next_size_and_pads_with_the_spare_page() -> None:
    buffers = InputBuffers(4, max_pages=3, page_size=4, spare_page=9, device=torch.device("cpu"))
    seen: list[list[list[int]]] = []

    def step(inputs: DeviceInputs) -> Tensor:
        seen.append([x.tolist() for x in (inputs.token_B, inputs.position_B, inputs.slot_B)])
        seen[-1].append(inputs.table_BW[:, 0].tolist())
        return torch.zeros(len(inputs.token_B), 2)

    graphs = DecodeGraphs(step, buffers, max_rows=4, capture=RepeatedStep)
    chunks = [Chunk([7], 6, [5, 2], 0), Chunk([8], 0, [3], 0), Chunk([6], 11, [0, 1, 4], 0)]
    assert graphs.run(chunks).shape == (3, 2)
    assert seen[0] == [[0] * 4, [0] * 4, [36] * 4, [9] * 4]  # the capture writes to the spare page only
    assert seen[1] == [[7, 8, 6, 0], [6, 0, 11, 0], [10, 12, 19, 36], [5, 3, 0, 9]]
    graphs.run(chunks[:2])
    assert [len(step[0]) for step in seen] == [4, 4, 2, 2]


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk([1, 2], 0, [0], 0),
        Chunk([1], 0, [0], 1),
        Chunk([1], 0, [0], 0, score=[2]),
    ],
    ids=["two tokens", "no logits", "a score"],
)
def test_other_steps_are_not_captured(chunk: Chunk) -> None:
    buffers = InputBuffers(1, max_pages=1, page_size=4, spare_page=1, device=torch.device("cpu"))
    graphs = DecodeGraphs(lambda inputs: torch.zeros(1), buffers, max_rows=1, capture=RepeatedStep)
    plain = Chunk([1], 0, [0], 0)
    assert graphs.accepts([plain])
    assert not graphs.accepts([chunk])
    assert not graphs.accepts([plain, plain])


def test_a_pool_without_room_for_the_spare_page_is_refused() -> None:
    model = build_model("gpt")
    page = 2 * 2 * 4 * 4 * 16 * 4  # keys and values, layers, heads, tokens, width rounded up, bytes
    TorchModelRunner(model, RunnerOptions(page_size=4, kv_memory=page, attention="torch"))
    options = RunnerOptions(page_size=4, kv_memory=page, attention="torch", spare_page=True)
    with pytest.raises(ConfigError, match="holds no page: .*; hint: --kv-cache-memory "):
        TorchModelRunner(model, options)


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_a_cuda_graph_computes_what_a_cpu_does(name: str, rows: int) -> None:
    options = RunnerOptions(page_size=PAGE_SIZE, kv_memory=1 << 21, attention="triton", spare_page=True)
    runner = TorchModelRunner(build_model(name, device="cuda"), options)
    runner.capture_graphs(6)
    for wanted, actual in zip(decode(build_runner(name), rows, 9), decode(runner, rows, 9), strict=True):
        torch.testing.assert_close(actual.cpu(), wanted, rtol=0, atol=1e-4)
