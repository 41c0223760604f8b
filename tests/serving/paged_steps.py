"""Random steps over pages, and the attention of `TorchPages.begin_step` over them as the expected result."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mega_model.attention_backends import AttentionBackend
from mega_model.attention_mask import PLAIN, AttentionMask, alibi_slopes
from mega_serve.engine.interfaces import Chunk
from mega_serve.execution.device_inputs import DeviceInputs, InputBuffers
from mega_serve.execution.paged_attention import DecodePages, KeyValuePages, TorchPages
from mega_serve.execution.step_layout import StepLayout

NUM_PAGES = 40
MAX_PAGES = 6
LAYERS = (3, 4)  # a stage's layers keep their global numbers


@dataclass(frozen=True)
class Shape:
    """Sizes of an attention layer, and its mask."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int = 16
    mask: AttentionMask = PLAIN


SHAPES = {
    "plain": Shape(2, 2, 32),
    "grouped": Shape(6, 2, 24),
    "window": Shape(4, 1, 16, 16, AttentionMask(window=21)),
    "alibi": Shape(3, 3, 40, 8, AttentionMask(slopes=alibi_slopes(3))),
    "alibi in a window": Shape(4, 1, 64, 32, AttentionMask(window=9, slopes=alibi_slopes(4))),
}
NewPages = Callable[..., TorchPages]


def new_pages(
    kind: NewPages, shape: Shape, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> TorchPages:
    return kind(
        LAYERS,
        num_pages=NUM_PAGES,
        page_size=shape.page_size,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        device=torch.device(device),
    )


class TwoPools:
    """Random sequences whose keys and values go to two pools of pages; attention over both is compared."""

    def __init__(
        self,
        actual: KeyValuePages,
        shape: Shape,
        seed: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.actual = actual
        self.expected = new_pages(TorchPages, shape)
        self.shape = shape
        self.device, self.dtype = device, dtype
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        pages = list(range(NUM_PAGES - 1))  # the last one is the spare page
        self.rng.shuffle(pages)
        self.tables = [pages[i * MAX_PAGES : (i + 1) * MAX_PAGES] for i in range(4)]
        self.lengths = [0] * 4

    def prefill(self) -> float:
        """Run a chunk of some sequences; return the largest difference of the results."""
        chunks = []
        for i in self.rng.sample(range(4), self.rng.randint(1, 4)):
            left = MAX_PAGES * self.shape.page_size - 8 - self.lengths[i]
            if left > 0:
                count = self.rng.randint(1, max(1, left // 2))
                chunks.append(Chunk([0] * count, self.lengths[i], self.tables[i], count))
                self.lengths[i] += count
        if not chunks:
            return 0.0
        return self._compare(chunks, lambda layout: self.actual.begin_step(layout))

    def decode(self, padding: int = 0) -> float:
        """Run one token of every sequence; return the largest difference of the results.

        Args:
            padding: rows beyond the sequences, as a captured batch has.
        """
        chunks = [Chunk([0], self.lengths[i], self.tables[i], 0) for i in range(4)]
        for i in range(4):
            self.lengths[i] += 1
        pages = self.actual
        assert isinstance(pages, TorchPages)
        return self._compare(chunks, lambda layout: self._decode_backend(pages, chunks, padding), padding)

    def _decode_backend(self, pages: DecodePages, chunks: list[Chunk], padding: int) -> AttentionBackend:
        buffers = InputBuffers(
            len(chunks) + padding,
            max_pages=MAX_PAGES,
            page_size=self.shape.page_size,
            spare_page=NUM_PAGES - 1,
            device=torch.device(self.device),
        )
        inputs: DeviceInputs = buffers.view(len(chunks) + padding)
        buffers.fill(chunks, len(chunks) + padding)
        return pages.begin_decode(inputs)

    def _compare(
        self, chunks: list[Chunk], backend_of: Callable[[StepLayout], AttentionBackend], padding: int = 0
    ) -> float:
        layout = StepLayout.from_chunks(chunks, page_size=self.shape.page_size, num_pages=NUM_PAGES - 1)
        expected, actual = self.expected.begin_step(layout), backend_of(layout)
        worst = 0.0
        for layer in LAYERS:
            q, k, v = self._draw_qkv(len(layout.slot_T) + padding)
            count = len(layout.slot_T)
            with torch.inference_mode():
                wanted = expected(
                    layer, q[:count].float(), k[:count].float(), v[:count].float(), self.shape.mask
                )
                result = actual(layer, *(x.to(self.device) for x in (q, k, v)), self.shape.mask)
            assert result.dtype == self.dtype
            worst = max(worst, float((result.cpu().float()[:count] - wanted).abs().max()))
        return worst

    def _draw_qkv(self, tokens: int) -> list[Tensor]:
        """Return queries, keys and values as views of one tensor, as a fused projection gives them."""
        s = self.shape
        widths = [heads * s.head_dim for heads in (s.heads, s.kv_heads, s.kv_heads)]
        qkv = torch.randn(tokens, sum(widths), generator=self.generator).to(self.dtype)
        return [x.unflatten(-1, (-1, s.head_dim)) for x in qkv.split(widths, -1)]


def largest_difference(two: TwoPools, steps: int) -> float:
    """Run random steps of prompts and of generation."""
    worst = 0.0
    for step in range(steps):
        worst = max(worst, two.prefill(), two.decode(padding=step % 3))
    return worst
