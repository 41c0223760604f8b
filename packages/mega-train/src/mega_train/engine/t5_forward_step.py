"""Forward step of a micro-batch of T5: the decoder predicts the spans that the encoder's text lacks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mega_model.attention_backends import AttentionBackend, PaddedCrossAttention
from mega_model.decoder import Decoder
from mega_model.dropout import no_dropout
from mega_model.encoder_decoder import EncoderInput
from mega_model.kernels import Kernels
from mega_model.loss import IGNORED
from mega_train.data.encoder.t5_reader import LABEL, REAL, SOURCE, SOURCE_REAL, TOKEN
from mega_train.engine.encoder_attention import encoder_attention, recomputed_core_attention
from mega_train.engine.forward_step import ForwardStep
from mega_train.optim.loss_scaler import scale_loss


class T5ForwardStep(ForwardStep):
    """The micro-batches of one optimizer step of T5; batches are (samples, 5, length) of `t5_reader`.

    A micro-batch's loss is the mean over the tokens of its decoder, without padding. The step's loss is the
    mean over its micro-batches, as in Megatron.
    """

    @property
    def encoder_length(self) -> int:
        """Tokens of a sample of the encoder."""
        return self.config.seq_length

    def length_of(self, batch: np.ndarray) -> int:
        return self.config.run.encoder_data.decoder_length

    def boundary(self, micro: int) -> tuple[int, int]:
        """Return the tokens of both sides, see `EncoderDecoder`."""
        tp = self.mesh.tp
        tokens = self.config.micro_batch_size * (self.encoder_length + self.seq_length)
        return tokens // tp.size if tp.sequence else tokens, self.config.spec.hidden

    def forward(self, chunk: int, micro: int, received: Tensor | None) -> Tensor:
        labelled_M, count = self._find_labelled(self.batches[micro])
        scale = self._token_weight(count)
        target_T = torch.from_numpy(self.batches[micro][:, LABEL, : self.seq_length]).flatten()
        target_T = target_T.to(self.mesh.device, non_blocking=True)
        output = self._run_model(
            chunk,
            micro,
            received,
            target_T if labelled_M is None else target_T[labelled_M],
            self.loss_scale * float(scale) if self.knows_loss_grad else None,
            labelled_M,
        )
        is_last = self.models[chunk].stage.is_last
        return scale_loss(output * scale, self.loss_scale) if is_last else output

    @property
    def _decoder_numbers(self) -> Tensor:
        """Numbers of the decoder's tokens, which follow those of the encoder's."""
        return self.config.seq_length + self.position_s

    def _token_weight(self, count: int) -> float | Tensor:
        """Return the weight of a token's loss in that of the step.

        Args:
            count: tokens with a loss of the micro-batch, at least 1.
        """
        return 1 / (count * len(self.batches))

    def _run_model(
        self,
        chunk: int,
        micro: int,
        received: Tensor | None,
        target_M: Tensor | None = None,
        gradient: float | None = None,
        labelled_M: Tensor | None = None,
    ) -> Tensor:
        """Run a stage; see `EncoderDecoder.forward`."""
        model = self.models[chunk]
        batch = self.batches[micro]
        values = torch.from_numpy(batch).to(self.mesh.device, non_blocking=True)
        # every token of a sample has a number of its own, by which its dropout differs
        dropout = self._dropout(micro, self._decoder_numbers)
        output: Tensor = model(
            values[:, TOKEN, : self.seq_length].flatten() if received is None else received,
            self.position_s.repeat(len(batch)),
            self._decoder_attention(model.kernels, batch, micro),
            dropout or no_dropout,
            target_M,
            gradient,
            source=self._encoder_input(model, batch, values, micro),
            labelled_M=labelled_M,
        )
        return output

    def _find_labelled(self, batch: np.ndarray) -> tuple[Tensor | None, int]:
        """Find the decoder's tokens of a micro-batch that are no padding, at least one, and their number.

        With sequence parallelism there is no index: ranks hold different numbers of them, and the head
        computes all.
        """
        (labelled,) = np.nonzero(batch[:, LABEL, : self.seq_length].reshape(-1) != IGNORED)
        count = max(1, len(labelled))
        if self.mesh.tp.sequence:
            return None, count
        index = labelled if len(labelled) else np.zeros(1, np.int64)
        return torch.from_numpy(index).to(self.mesh.device), count

    def _decoder_attention(self, kernels: Kernels, batch: np.ndarray, micro: int) -> AttentionBackend:
        """Return causal attention; it hides padding ids within the text, as Megatron's mask does.

        No token of the text sees the padding after it, so that is not masked.
        """
        visible_BS = (batch[:, REAL] == 1) | (batch[:, LABEL] == IGNORED)
        dropout = self._dropout(micro, self._decoder_numbers)
        return encoder_attention(
            kernels,
            self.config.recompute,
            visible_BS[:, : self.seq_length],
            dropout,
            self.mesh.device,
            causal=True,
        )

    def _encoder_input(self, model: Decoder, batch: np.ndarray, values: Tensor, micro: int) -> EncoderInput:
        kernels, recompute, device = model.kernels, self.config.recompute, self.mesh.device
        length = self.encoder_length
        position_S = torch.arange(length, device=device)
        dropout = self._dropout(micro, position_S)
        real_BS = batch[:, SOURCE_REAL, :length]
        cross_attend = PaddedCrossAttention(
            len(batch),
            values[:, SOURCE_REAL, :length] == 1 if (real_BS == 0).any() else None,
            self._dropout(micro, self._decoder_numbers + self.config.run.encoder_data.decoder_length),
            attention=kernels.attention,
            softmax=kernels.masked_softmax,
        )
        return EncoderInput(
            values[:, SOURCE, :length].flatten(),
            position_S.repeat(len(batch)),
            encoder_attention(kernels, recompute, real_BS, dropout, device),
            recomputed_core_attention(cross_attend, recompute),
            dropout or no_dropout,
        )
