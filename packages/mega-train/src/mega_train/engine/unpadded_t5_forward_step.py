"""Forward step of a micro-batch of T5 that computes no padding, of --unpad-samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from mega_model.dropout import Dropout, no_dropout
from mega_model.encoder_decoder import EncoderInput
from mega_model.kernels import Kernels
from mega_model.loss import IGNORED
from mega_model.unpadded_attention import UnpaddedCrossAttention
from mega_train.data.encoder.t5_reader import LABEL, REAL, SOURCE, SOURCE_REAL, TOKEN
from mega_train.engine.encoder_attention import recomputed_core_attention, unpadded_attention
from mega_train.engine.t5_forward_step import T5ForwardStep
from mega_train.engine.unpadded_rows import UnpaddedRows


@dataclass(frozen=True, slots=True)
class _BothSides:
    """The rows of a micro-batch without padding."""

    encoder: UnpaddedRows
    decoder: UnpaddedRows

    @property
    def tokens(self) -> int:
        return len(self.encoder.index_T) + len(self.decoder.index_T)


class UnpaddedT5ForwardStep(T5ForwardStep):
    """The micro-batches of one optimizer step of T5, with the tokens of each side end to end.

    A padding id within the text is visible.
    """

    @cached_property
    def _rows(self) -> list[_BothSides]:
        tp = self.mesh.tp
        multiple = tp.size if tp.sequence or self.config.recompute.distribute_saved else 1
        rows = []
        for batch in self.batches:
            decoder = batch[:, :, : self.seq_length]
            is_real = (decoder[:, REAL] == 1) | (decoder[:, LABEL] != IGNORED)
            encoder = UnpaddedRows.from_real(batch[:, SOURCE_REAL, : self.encoder_length], multiple)
            rows.append(_BothSides(encoder, UnpaddedRows.from_real(is_real.astype(np.int64), multiple)))
        return rows

    def boundary(self, micro: int) -> tuple[int, int]:
        tp = self.mesh.tp
        tokens = self._rows[micro].tokens
        return tokens // tp.size if tp.sequence else tokens, self.config.spec.hidden

    def _run_model(
        self,
        chunk: int,
        micro: int,
        received: Tensor | None,
        target_M: Tensor | None = None,
        gradient: float | None = None,
        labelled_M: Tensor | None = None,
    ) -> Tensor:
        model = self.models[chunk]
        device = self.mesh.device
        rows = self._rows[micro].decoder
        index_T = torch.from_numpy(rows.index_T).to(device)
        real_T = index_T[: sum(rows.lengths[: len(rows.begin_B)])]  # without repeats of the first token
        if target_M is not None and labelled_M is None:  # the head computes all tokens
            target_M = target_M[index_T]
            target_M[len(real_T) :] = IGNORED
        elif labelled_M is not None:
            labelled_M = torch.searchsorted(real_T, labelled_M)
        token_BS = torch.from_numpy(self.batches[micro][:, TOKEN, : self.seq_length]).to(device)
        dropout = _select(self._dropout(micro, self._decoder_numbers), index_T)
        output: Tensor = model(
            token_BS.flatten()[index_T] if received is None else received,
            self.position_s.repeat(len(token_BS))[index_T],
            unpadded_attention(
                model.kernels, self.config.recompute, rows.lengths, dropout, device, causal=True
            ),
            dropout or no_dropout,
            target_M,
            gradient,
            source=self._unpadded_encoder_input(model.kernels, micro),
            labelled_M=labelled_M,
        )
        return output

    def _unpadded_encoder_input(self, kernels: Kernels, micro: int) -> EncoderInput:
        device, recompute = self.mesh.device, self.config.recompute
        rows, decoder_rows = self._rows[micro].encoder, self._rows[micro].decoder
        index_E = torch.from_numpy(rows.index_T).to(device)
        source_BS = torch.from_numpy(self.batches[micro][:, SOURCE, : self.encoder_length]).to(device)
        position_S = torch.arange(self.encoder_length, device=device)
        dropout = _select(self._dropout(micro, position_S), index_E)
        numbers = self._decoder_numbers + self.config.run.encoder_data.decoder_length
        cross_attend = UnpaddedCrossAttention.from_lengths(
            decoder_rows.lengths,
            rows.lengths,
            samples=len(rows.begin_B),
            dropout=_select(self._dropout(micro, numbers), torch.from_numpy(decoder_rows.index_T).to(device)),
            attention=kernels.attention,
            softmax=kernels.masked_softmax,
        )
        return EncoderInput(
            source_BS.flatten()[index_E],
            position_S.repeat(len(source_BS))[index_E],
            unpadded_attention(kernels, recompute, rows.lengths, dropout, device),
            recomputed_core_attention(cross_attend, recompute),
            dropout or no_dropout,
        )


def _select(dropout: Dropout | None, index_T: Tensor) -> Dropout | None:
    """Return the dropout of some tokens."""
    return dropout and replace(dropout, token_T=dropout.token_T[index_T])
