"""CUDA graphs of decode steps: one launch replays all kernels of a step.

A graph has fixed shapes and reads fixed memory. So there is one for each of a few batch sizes; a batch is
padded to the next size, and its inputs are copied to `device_inputs.InputBuffers` first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mega_serve.engine.interfaces import Chunk
from mega_serve.execution.device_inputs import DeviceInputs, InputBuffers

_WARM_UPS = 2  # compile kernels and allocate workspaces, which a capture must not do

Step = Callable[[DeviceInputs], Tensor]


class CapturedStep(Protocol):
    """A recorded step."""

    def replay(self) -> Tensor:
        """Run the step again on what its inputs hold by now; return its output, the same tensor each time."""


class CudaGraph:
    """A step captured as a CUDA graph.

    Args:
        run: the step; it must not read the device from the host.
        pool: handle of memory that graphs share, which never run at the same time.
    """

    def __init__(self, run: Callable[[], Tensor], pool: Any) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._output = run()

    def replay(self) -> Tensor:
        """Run the graph."""
        self._graph.replay()
        return self._output


Capture = Callable[[Callable[[], Tensor]], CapturedStep]


def cuda_capture() -> Capture:
    """Return a function that captures steps, which share their memory."""
    pool = torch.cuda.graph_pool_handle()
    return lambda run: CudaGraph(run, pool)


class DecodeGraphs:
    """Captured decode steps for all batch sizes up to a limit.

    Args:
        step: computes the logits of the rows of inputs, (B, V) float32.
        buffers: the inputs, of `batch_sizes(max_rows)[-1]` rows.
        max_rows: the largest batch.
        capture: records a step; tests pass one that needs no GPU.
    """

    def __init__(self, step: Step, buffers: InputBuffers, *, max_rows: int, capture: Capture) -> None:
        self._step = step
        self._buffers = buffers
        self._sizes = batch_sizes(max_rows)
        self._capture = capture
        self._captured: dict[int, CapturedStep] = {}

    def capture_all(self) -> None:
        """Capture all batch sizes, the largest first, so that the others fit into its memory.

        Another call captures them again, as for new weights.
        """
        self._captured.clear()
        for size in reversed(self._sizes):
            self._captured_step(size)

    def accepts(self, chunks: Sequence[Chunk]) -> bool:
        """Whether a step is one that is captured: one new token and one row of logits of every sequence."""
        return len(chunks) <= self._sizes[-1] and all(
            len(chunk.token_ids) == 1 and chunk.logits_from == 0 and not chunk.score for chunk in chunks
        )

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Return the logits of the chunks, in memory of their own."""
        rows = next(size for size in self._sizes if size >= len(chunks))
        captured = self._captured_step(rows)  # a capture runs on the inputs of the last step
        self._buffers.fill(chunks, rows)
        return captured.replay()[: len(chunks)].clone()

    def _captured_step(self, rows: int) -> CapturedStep:
        if rows not in self._captured:
            inputs = self._buffers.view(rows)
            self._buffers.fill((), rows)  # padding only: the spare page is all that a capture writes
            self._captured[rows] = self._capture(lambda: self._step(inputs))
        return self._captured[rows]


def batch_sizes(max_rows: int) -> tuple[int, ...]:
    """Return the batch sizes to capture: powers of two to 16, then steps of at least 16 and about an eighth.

    The last one is the first that holds `max_rows`.
    """
    sizes = [1]
    while sizes[-1] < max_rows:
        size = sizes[-1]
        sizes.append(2 * size if size < 16 else size + 16 * max(1, size // 128))
    return tuple(sizes)
