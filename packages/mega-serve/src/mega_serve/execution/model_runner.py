"""The model runner: one forward pass over chunks of sequences whose keys and values are in pages.

Legend: T tokens of all chunks; R rows whose logits are returned; P chunks whose hidden state is; D width;
V words without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mega_model.attention import RotaryTable
from mega_model.attention_backends import AttentionBackend
from mega_model.decoder import Decoder
from mega_model.kernels.numba import has_numba, load_kernels
from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError
from mega_serve.engine.interfaces import Chunk, RunnerOutput
from mega_serve.engine.requests import TokenLogprob
from mega_serve.execution.fused_decoder import FusedDecoder
from mega_serve.execution.paged_attention import KeyValuePages, NumbaPages, TorchPages, page_bytes
from mega_serve.execution.step_layout import StepLayout
from mega_serve.execution.token_scores import score_tokens

AttentionName = Literal["auto", "numba", "torch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """Settings of a model runner.

    Attributes:
        page_size: tokens of a page; with the numba kernels a multiple of 16.
        kv_memory: bytes of the pool of pages.
        attention: "auto" takes the numba kernels on a CPU if numba is installed.
        batch_invariant: a row of logits has the same bits in any batch, for any chunks, pages and reuse of
            prefixes.
    """

    page_size: int = 16
    kv_memory: int = 1 << 30
    attention: AttentionName = "auto"
    batch_invariant: bool = False


class TorchModelRunner:
    """A `ModelRunner` on one device, for a model that one process holds whole.

    Args:
        model: as `weight_loading.load_weights` returns it.
        vocab_size: ids that may be sampled; None: all of the model.

    Raises:
        ConfigError: the memory is too small for one page, or an option does not run here.
    """

    def __init__(self, model: Decoder, options: RunnerOptions, *, vocab_size: int | None = None) -> None:
        spec = model.spec
        weight = next(model.parameters())  # packed weights are none, norms and embeddings are
        self.model = model
        self.page_size = options.page_size
        self.vocab_size = spec.vocab if vocab_size is None else vocab_size
        self.max_seq_len = spec.max_seq_len
        self.device, self.dtype = weight.device, weight.dtype
        self.attention: Literal["numba", "torch"] = _choose_attention(options, self.device)
        if spec.rotary_dim:
            model.rotary = RotaryTable(spec, self.device)
        self._batch_invariant = options.batch_invariant
        self.num_pages, self._pages = self._new_pool(options, weight.dtype)
        self.fused = self._fuse()

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> RunnerOutput:
        """Run one forward pass over all chunks."""
        layout = StepLayout.from_chunks(chunks, page_size=self.page_size, num_pages=self.num_pages)
        ids = np.concatenate([np.asarray(chunk.token_ids, np.int64) for chunk in chunks])
        token_T, position_T = (torch.from_numpy(x).to(self.device) for x in (ids, layout.position_T))
        if self.fused is not None and self.fused.takes(layout):
            x_TD = self.fused.hidden_states(token_T, position_T, layout)
        else:
            x_TD = self._hidden_states(token_T, position_T, self._pages.begin_step(layout))
        first_C = layout.chunk_C4[:, 0].tolist()
        rows = [
            first + i
            for first, chunk in zip(first_C, chunks, strict=True)
            for i in range(chunk.logits_from, len(chunk.token_ids))
        ]
        row_R = torch.tensor(rows, dtype=torch.long, device=self.device)
        x_RD = x_TD if len(rows) == len(x_TD) else x_TD[row_R]
        scores = tuple(self._score(x_TD[first:], chunk) for first, chunk in zip(first_C, chunks, strict=True))
        logit_RV = self._logits(x_RD)
        return RunnerOutput(logit_RV, scores, self._pool_hidden(x_TD, first_C, chunks))

    @torch.inference_mode()
    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy keys and values of whole pages, (source, target), in all layers."""
        self._pages.copy_pages(pairs)

    def replace_model(self, model: Decoder) -> None:
        """Take other weights of the same shapes; keys and values in the pages are of the old ones."""
        if model.spec.rotary_dim:
            model.rotary = self.model.rotary
        self.model = model
        self.fused = self._fuse()

    def _fuse(self) -> FusedDecoder | None:
        """Return the fast form of a step of a few single tokens, if this model and its pages have one."""
        if self._batch_invariant or not isinstance(self._pages, NumbaPages):
            return None
        if not FusedDecoder.is_supported(self.model):
            return None
        return FusedDecoder(self.model, self._pages, load_kernels())

    def _hidden_states(self, token_T: Tensor, position_T: Tensor, attend: AttentionBackend) -> Tensor:
        """Compute everything but the head: (T, D)."""
        return self.model.hidden_states(token_T, position_T, attend)

    def _score(self, x_TD: Tensor, chunk: Chunk) -> tuple[TokenLogprob, ...]:
        if not chunk.score:
            return ()
        vocab = self.model.spec.vocab
        return score_tokens(self._logits, x_TD[: len(chunk.score)], chunk.score, chunk.score_top, vocab)

    def _pool_hidden(
        self, x_TD: Tensor, first_C: Sequence[int], chunks: Sequence[Chunk]
    ) -> list[list[float]]:
        """Return the hidden states that the chunks ask for, in their order."""
        rows = []
        for first, chunk in zip(first_C, chunks, strict=True):
            end = first + len(chunk.token_ids)
            if chunk.hidden is not None:
                rows.append(x_TD[first if chunk.hidden == "sum" else end - 1 : end].float().sum(0))
        pooled: list[list[float]] = self._share_hidden(torch.stack(rows)).tolist() if rows else []
        return pooled

    def _share_hidden(self, x_PD: Tensor) -> Tensor:
        """Return the pooled rows of the last stage, (P, D) float32."""
        return x_PD

    def _logits(self, x_RD: Tensor) -> Tensor:
        """Compute the logits, (R, V) float32."""
        if not len(x_RD):
            return x_RD.new_empty((0, self.model.spec.vocab), dtype=torch.float32)
        return self.model.logits(x_RD)[:, : self.model.spec.vocab].float()

    def _new_pool(self, options: RunnerOptions, dtype: torch.dtype) -> tuple[int, KeyValuePages]:
        """Return the number of pages that the memory holds, and the pool."""
        spec = self.model.spec
        layers = self.model.stage.layers
        kv_heads = spec.kv_heads // self.model.tp.size
        if self.attention == "torch" and self.device.type == "cpu":
            dtype = torch.float32
        size = page_bytes(spec, len(layers), kv_heads, options.page_size, dtype)
        num_pages = options.kv_memory // size
        if num_pages < 1:
            raise ConfigError(
                "--kv-cache-memory",
                "holds no page",
                found=f"{options.kv_memory} bytes",
                wanted=f"at least {size}",
            )
        if self.attention == "numba":
            return num_pages, NumbaPages(
                layers,
                num_pages=num_pages,
                page_size=options.page_size,
                kv_heads=kv_heads,
                head_dim=spec.head_dim,
                dtype=dtype,
                kernels=load_kernels().attention,
            )
        return num_pages, TorchPages(
            layers,
            num_pages=num_pages,
            page_size=options.page_size,
            kv_heads=kv_heads,
            head_dim=spec.head_dim,
            dtype=dtype,
            device=self.device,
        )


def _choose_attention(options: RunnerOptions, device: torch.device) -> Literal["numba", "torch"]:
    """Return the attention backend that the options ask for, or that is best here."""
    runs_numba = device.type == "cpu" and has_numba() and options.page_size % 16 == 0
    name: Literal["numba", "torch"] = "numba" if runs_numba else "torch"
    if options.attention == "numba" and device.type != "cpu":
        raise ConfigError(
            "--attention", "numba kernels run on a CPU", found=device.type, wanted="auto | torch"
        )
    if options.attention != "auto":
        name = options.attention
    if options.batch_invariant and name != "numba":
        raise ConfigError(
            "--batch-invariant", "needs the numba kernels, on a CPU", hint=install_hint("mega-serve", "cpu")
        )
    return name
