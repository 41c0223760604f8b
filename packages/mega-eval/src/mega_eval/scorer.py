"""Compute the log-probabilities of the targets of windows, by forward passes without padding.

Legend: T tokens of a pass; R tokens that make a scored prediction; K scored predictions; D width;
V vocabulary; M targets of all windows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mega_eval.batch_size import Result, call_within_memory, choose_max_tokens, window_size_error
from mega_eval.forward_plan import ForwardPass, plan_passes
from mega_eval.models.interface import WindowScores
from mega_eval.windows import Window
from mega_model.attention_backends import AttentionBackend
from mega_model.decoder import Decoder
from mega_model.distributed.mesh import Axis
from mega_model.kernels.interface import OrderedLinear
from mega_model.kernels.log_probabilities import LogProbabilities
from mega_model.kernels.numba import has_numba, load_kernels
from mega_model.token_tree_attention import PagedTreeAttention, PrefixKeyValues, TokenTreeAttention

MAX_LOGITS = 1 << 23  # elements of logits in memory: 32 MiB of float32; larger chunks are slower on a CPU


class ModelScorer:
    """Scores windows by a decoder.

    A decoder with the kernels of `mega_model.kernels.batch_invariant` gives each target the bits of a
    training forward pass. With any other, the size and order of batches change the last bits.

    Args:
        decoder: the whole model on one device.
        batch_size: windows of one forward pass at most; None: as many as `max_tokens` allows.
        max_tokens: tokens of one forward pass; None: chosen by the free memory.
        share_prefixes: compute tokens with which several windows begin once.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        share_prefixes: bool = True,
    ) -> None:
        self.context_length = decoder.spec.max_seq_len
        self.vocab_size = decoder.spec.vocab
        self.device = next(decoder.parameters()).device
        self.is_batch_invariant = isinstance(decoder.kernels.linear, OrderedLinear)
        self._decoder = decoder.eval()
        self._batch_size = batch_size
        self._max_tokens = max_tokens
        self._share_prefixes = share_prefixes
        self._is_plain = decoder.spec.positions != "alibi" and decoder.spec.sliding_window is None
        uses_numba = self.device.type == "cpu" and has_numba()
        self._numba = load_kernels(package="mega-eval") if uses_numba else None

    @torch.inference_mode()
    def score_batches(
        self, windows: Sequence[Window], answered: Collection[int] = ()
    ) -> Iterator[list[tuple[int, WindowScores]]]:
        """Yield the scores of windows as they are complete, as `RequestModel.score_batches` does.

        A pass that does not fit in memory is cut into halves; the smaller size stays.

        Raises:
            ConfigError: one window alone does not fit.
        """
        for window in windows:
            length = window.input_length
            assert length <= self.context_length, f"{length} tokens for a context of {self.context_length}"
        max_tokens = self.choose_max_tokens()
        left = [number for number, window in enumerate(windows) if window.target_length]
        is_complete = False
        while not is_complete:
            table = _ScoreTable([windows[number] for number in left])
            prefix = PrefixKeyValues()
            plan = plan_passes(
                table.windows,
                max_tokens=max_tokens,
                max_windows=self._batch_size,
                share_prefixes=self._share_prefixes,
                answered=frozenset(index for index, number in enumerate(left) if number in answered),
            )
            is_complete = True
            for forward_pass in plan:
                scores = self.call_within_memory(
                    partial(self._score_pass, forward_pass, prefix), forward_pass.tree.tokens
                )
                if scores is None:
                    max_tokens = _halve(forward_pass)
                    is_complete = False
                    break
                if complete := table.enter(forward_pass, *scores):
                    yield [(left[number], table.scores(number)) for number in complete]
            left = [number for index, number in enumerate(left) if table.left_W[index]]

    def choose_max_tokens(self) -> int:
        """Return how many tokens a forward pass may have."""
        return self._max_tokens or choose_max_tokens(self._decoder)

    def call_within_memory(self, function: Callable[[], Result], tokens: int) -> Result | None:
        """Return what a function computes of a number of tokens; None: it does not fit in memory."""
        return call_within_memory(function, self.device)

    def _score_pass(self, forward_pass: ForwardPass, prefix: PrefixKeyValues) -> tuple[Tensor, Tensor]:
        attend = self.build_attention(forward_pass, prefix)
        return self._score_rows(forward_pass, self.run_pass(forward_pass, attend))

    def run_pass(self, forward_pass: ForwardPass, attend: AttentionBackend) -> Tensor:
        """Compute the last hidden states of the tokens that make a scored prediction, (R, D)."""
        token_T, position_T, row_R = (
            torch.from_numpy(x).to(self.device)
            for x in (forward_pass.token_T, forward_pass.tree.position_T, forward_pass.row_R)
        )
        return self.run_decoder(token_T, position_T, attend, row_R)

    def run_decoder(
        self, token_T: Tensor, position_T: Tensor, attend: AttentionBackend, row_R: Tensor | None = None
    ) -> Tensor:
        """Compute the last hidden states of tokens, (T, D), or of those of `row_R`, (R, D)."""
        return self._decoder.hidden_states(token_T, position_T, attend, row_R=row_R)

    def choose_tokens(self, x_BD: Tensor, rows: int, vocab_size: int) -> list[int]:
        """Return the most probable token below `vocab_size` of each of the rows of hidden states."""
        assert len(x_BD) == rows
        best = [self._decoder.logits(x_CD)[:, :vocab_size].argmax(1) for x_CD in self._chunks(x_BD)]
        tokens: list[int] = torch.cat(best).tolist()
        return tokens

    def _chunks(self, x_RD: Tensor) -> Sequence[Tensor]:
        """Cut rows into chunks whose logits are at most `MAX_LOGITS`."""
        chunks: Sequence[Tensor] = torch.split(x_RD, max(1, MAX_LOGITS // self.vocab_size))
        return chunks

    def build_attention(self, forward_pass: ForwardPass, prefix: PrefixKeyValues) -> AttentionBackend:
        """Return the attention backend of a pass."""
        tree, row_R, stores = forward_pass.tree, forward_pass.row_R, forward_pass.stores
        if self._numba is not None and (self.is_batch_invariant or not self._is_plain):
            return PagedTreeAttention(self._numba, tree, row_R, prefix, stores=stores)
        return TokenTreeAttention(tree, row_R, prefix, stores=stores)

    def _score_rows(self, forward_pass: ForwardPass, x_RD: Tensor) -> tuple[Tensor, Tensor]:
        """Return ln P of every target, float64, and the greedy choice, both (K,).

        The rows are cut into chunks, so that the logits of all never exist at once.
        """
        target_K, row_K = (
            torch.from_numpy(x).to(self.device) for x in (forward_pass.target_K, forward_pass.target_row_K)
        )
        logprob_K = torch.empty(len(target_K), dtype=torch.float64, device=self.device)
        greedy_K = torch.empty(len(target_K), dtype=torch.int64, device=self.device)
        order = np.argsort(forward_pass.target_row_K, kind="stable")
        chunks = self._chunks(x_RD)
        starts = np.cumsum([0, *(len(x_CD) for x_CD in chunks)])[:-1]
        bounds = np.searchsorted(forward_pass.target_row_K[order], [*starts, len(x_RD)])
        for x_CD, start, begin, end in zip(chunks, starts.tolist(), bounds[:-1], bounds[1:], strict=True):
            chosen_k = torch.from_numpy(order[begin:end]).to(self.device)
            logits_CV = self._decoder.logits(x_CD)[:, : self.vocab_size]
            row_k, target_k = row_K[chosen_k] - start, target_K[chosen_k]
            greedy_K[chosen_k] = logits_CV.argmax(1)[row_k]
            logprob_K[chosen_k] = self._log_probabilities(logits_CV, row_k, target_k)
        return logprob_K.cpu(), greedy_K.cpu()

    def _log_probabilities(self, logits_CV: Tensor, row_K: Tensor, target_K: Tensor) -> Tensor:
        """Return ln P of targets, (K,) float64, each from a row of logits without padding columns."""
        if self.is_batch_invariant:
            assert self._numba is not None
            losses_K = LogProbabilities(self._numba).losses(logits_CV[row_K], target_K, Axis("tp"))
            return -losses_K.double()
        target_logit_K = logits_CV[row_K, target_K].double()
        return target_logit_K - logits_CV.float().logsumexp(1).double()[row_K]


class _ScoreTable:
    """The scores of all targets, which passes fill in any order.

    Attributes:
        windows: what is scored.
        left_W: for each window, the targets that have no score yet.
    """

    def __init__(self, windows: Sequence[Window]) -> None:
        self.windows = windows
        self.left_W = np.array([window.target_length for window in windows], np.intp)
        self._ends = np.cumsum(self.left_W)
        self._starts = self._ends - self.left_W
        self._target_M = np.concatenate([np.zeros(0, np.int64), *(window.targets for window in windows)])
        self._logprob_M = np.zeros(len(self._target_M))
        self._greedy_M = np.zeros(len(self._target_M), np.int64)

    def enter(self, forward_pass: ForwardPass, logprob_K: Tensor, greedy_K: Tensor) -> list[int]:
        """Enter the scores of a pass; return the windows that are complete now."""
        window_K = forward_pass.window_K
        place_K = self._starts[window_K] + forward_pass.index_K
        self._logprob_M[place_K] = logprob_K.numpy()
        self._greedy_M[place_K] = greedy_K.numpy()
        entered, counts = np.unique(window_K, return_counts=True)
        self.left_W[entered] -= counts
        return [int(number) for number in entered if not self.left_W[number]]

    def scores(self, number: int) -> WindowScores:
        """Return the scores of a window."""
        place = slice(self._starts[number], self._ends[number])
        greedy = self._greedy_M[place].copy()
        return WindowScores(self._logprob_M[place].copy(), greedy == self._target_M[place], greedy)


def _halve(forward_pass: ForwardPass) -> int:
    """Return half the tokens of a pass that did not fit in memory."""
    tokens = forward_pass.tree.tokens
    if len(forward_pass.tree.count_C) == 1:
        raise window_size_error(forward_pass.tree.cached + tokens)
    return tokens // 2
