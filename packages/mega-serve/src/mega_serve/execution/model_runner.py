"""The model runner: one forward pass over chunks of sequences whose keys and values are in pages.

Legend: T tokens of all chunks; R rows whose logits are returned; P chunks whose hidden state is; D width;
V words without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mega_model.attention import RotaryTable
from mega_model.attention_backends import AttentionBackend
from mega_model.decoder import Decoder
from mega_model.kernels.log_probabilities import LogProbabilities
from mega_model.kernels.numba import load_kernels
from mega_serve.engine.interfaces import Chunk, RunnerOutput
from mega_serve.engine.requests import TokenLogprob
from mega_serve.execution.attention_choice import AttentionName, build_pages, choose_attention
from mega_serve.execution.decode_graphs import Capture, DecodeGraphs, batch_sizes, cuda_capture
from mega_serve.execution.device_inputs import DeviceInputs, InputBuffers
from mega_serve.execution.fused_decoder import FusedDecoder
from mega_serve.execution.paged_attention import KeyValuePages, NumbaPages, TorchPages, page_bytes
from mega_serve.execution.pool_memory import cache_dtype, count_pages
from mega_serve.execution.step_layout import StepLayout
from mega_serve.execution.token_scores import LogSoftmax, score_tokens, torch_log_softmax


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """Settings of a model runner.

    Attributes:
        page_size: tokens of a page; with the numba kernels a multiple of 16.
        kv_memory: bytes of the pool of pages.
        attention: see `attention_choice.choose_attention`.
        spare_page: keep a page for the padding of captured steps (`TorchModelRunner.capture_graphs`).
        batch_invariant: a row of logits has the bits of a training forward pass, in any batch, for any
            chunks, pages and reuse of prefixes.
    """

    page_size: int = 16
    kv_memory: int = 1 << 30
    attention: AttentionName = "auto"
    spare_page: bool = False
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
        self.attention = choose_attention(
            options.attention,
            self.device,
            page_size=options.page_size,
            head_dim=spec.head_dim,
            dtype=weight.dtype,
            batch_invariant=options.batch_invariant,
        )
        if spec.rotary_dim:
            model.rotary = RotaryTable(spec, self.device, model.kernels.angles)
        self._batch_invariant = options.batch_invariant
        self.log_softmax: LogSoftmax = torch_log_softmax
        if options.batch_invariant:
            self.log_softmax = LogProbabilities(load_kernels()).log_softmax
        self.num_pages, self._pages = self._new_pool(options, weight.dtype)
        self._spare_page: int | None = None  # of captured steps
        if options.spare_page:
            self.num_pages -= 1
            self._spare_page = self.num_pages
        self._graphs: DecodeGraphs | None = None
        self.fused = self._fuse()

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> RunnerOutput:
        """Run one forward pass over all chunks."""
        if self._graphs is not None and self._graphs.accepts(chunks):
            return RunnerOutput(self._graphs.run(chunks), ((),) * len(chunks))
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
    def capture_graphs(self, max_rows: int, capture: Capture | None = None) -> None:
        """Capture the steps that decode up to `max_rows` sequences; from then on they are replayed.

        Args:
            capture: records a step; None: as a CUDA graph.
        """
        assert self._spare_page is not None, f"--attention {self.attention} cannot be captured"
        rows = batch_sizes(max_rows)[-1]
        buffers = InputBuffers(
            rows,
            max_pages=-(-self.max_seq_len // self.page_size),
            page_size=self.page_size,
            spare_page=self._spare_page,
            device=self.device,
        )
        self._graphs = DecodeGraphs(
            self._decode, buffers, max_rows=max_rows, capture=capture or cuda_capture()
        )
        self._graphs.capture_all()

    @torch.inference_mode()
    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy keys and values of whole pages, (source, target), in all layers."""
        self._pages.copy_pages(pairs)

    @torch.inference_mode()
    def replace_model(self, model: Decoder) -> None:
        """Take other weights of the same shapes; keys and values in the pages are of the old ones."""
        if model.spec.rotary_dim:
            model.rotary = self.model.rotary
        self.model = model
        self.fused = self._fuse()
        if self._graphs is not None:
            self._graphs.capture_all()

    def _fuse(self) -> FusedDecoder | None:
        """Return the fast form of a step of a few single tokens, if this model and its pages have one."""
        if self._batch_invariant or not isinstance(self._pages, NumbaPages):
            return None
        if not FusedDecoder.is_supported(self.model):
            return None
        return FusedDecoder(self.model, self._pages, load_kernels())

    def _decode(self, inputs: DeviceInputs) -> Tensor:
        """Compute the logits, (B, V) float32, of one new token of each sequence."""
        assert isinstance(self._pages, TorchPages)
        attend = self._pages.begin_decode(inputs)
        return self._logits(self._hidden_states(inputs.token_B, inputs.position_B, attend))

    def _hidden_states(self, token_T: Tensor, position_T: Tensor, attend: AttentionBackend) -> Tensor:
        """Compute everything but the head: (T, D)."""
        return self.model.hidden_states(token_T, position_T, attend)

    def _score(self, x_TD: Tensor, chunk: Chunk) -> tuple[TokenLogprob, ...]:
        if not chunk.score:
            return ()
        vocab = self.model.spec.vocab
        x_RD = x_TD[: len(chunk.score)]
        return score_tokens(self._logits, x_RD, chunk.score, chunk.score_top, vocab, self.log_softmax)

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
        dtype = cache_dtype(self.attention, self.device, dtype)
        size = page_bytes(spec, len(layers), kv_heads, options.page_size, dtype)
        num_pages = count_pages(options.kv_memory, size, least=2 if options.spare_page else 1)
        return num_pages, build_pages(
            self.attention,
            layers,
            num_pages=num_pages,
            page_size=options.page_size,
            kv_heads=kv_heads,
            head_dim=spec.head_dim,
            dtype=dtype,
            device=self.device,
        )
