"""Run the forward and backward passes of a batch through this rank's pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mega_model.decoder import Decoder
from mega_model.distributed.mesh import Mesh
from mega_model.runtime import Runtime
from mega_schema.task_heads import outputs_per_sample
from mega_train.data.dataloaders import SampleReader
from mega_train.data.micro_batches import MicroBatchLoader
from mega_train.engine.bert_forward_step import BertForwardStep
from mega_train.engine.forward_step import ForwardStep
from mega_train.engine.prefix_forward_step import PrefixForwardStep
from mega_train.engine.span_forward_step import SpanForwardStep
from mega_train.engine.t5_forward_step import T5ForwardStep
from mega_train.engine.tag_forward_step import TagForwardStep
from mega_train.engine.task_forward_step import TaskForwardStep
from mega_train.engine.text2text_forward_step import Text2TextForwardStep, put_decoder_input
from mega_train.engine.unpadded_t5_forward_step import UnpaddedT5ForwardStep
from mega_train.optim.loss_scaler import DynamicLossScaler
from mega_train.pipeline.executor import execute
from mega_train.pipeline.schedules import SCHEDULES, PipelineShape, Table, forward_only
from mega_train.resolve import ResolvedConfig
from mega_train.telemetry.timers import TimerFactory, no_timer


@dataclass(frozen=True, slots=True)
class MeanLosses:
    """The mean losses of a batch over all ranks, each a tensor of one number.

    Attributes:
        total: the loss of which the gradient is computed.
        terms: the terms of this sum, by Megatron's names; empty if there is only one.
    """

    total: Tensor
    terms: Mapping[str, Tensor]


class ForwardBackward:
    """Forward and backward passes of batches through this rank's pipeline stages.

    Attributes:
        heartbeat: number of completed actions, including validations; the watchdog reads it as progress.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        mesh: Mesh,
        rt: Runtime,
        models: Sequence[Decoder],
        loader: MicroBatchLoader,
        loss_scaler: DynamicLossScaler,
    ) -> None:
        self._config = config
        self._mesh = mesh
        self._rt = rt
        self._models = models
        self._loader = loader
        self._loss_scaler = loss_scaler
        self._tables: dict[tuple[int, bool], Table] = {}
        self.heartbeat = 0

    def mean_losses(
        self,
        reader: SampleReader,
        first_sample: int,
        count: int,
        seq_length: int,
        *,
        train: bool,
        timer: TimerFactory = no_timer,
    ) -> MeanLosses:
        """Compute the mean losses of `count` samples over all ranks; in training also the gradients.

        Args:
            first_sample: number of the first sample: the samples that all ranks have read before.
            seq_length: tokens of a sample.
        """
        mesh = self._mesh
        work, losses = self._run(reader, first_sample, count, seq_length, train=train, timer=timer)
        names = self._config.loss_terms
        sums = torch.zeros(1 + len(names), device=mesh.device)
        if losses:  # this rank has the last stage
            sums[0] = torch.stack(losses).sum()
        if work.terms:
            sums[1:] = torch.stack(work.terms).sum(0)
        # replicas are dp x cp: the losses of cp ranks are scaled by cp (`ForwardStep`), so the mean over both
        # is the mean over the batch
        total, *terms = mesh.replicas.reduce(mesh.pp.reduce(sums)) / mesh.replicas.size
        return MeanLosses(total, dict(zip(names, terms, strict=True)))

    def task_logits(self, reader: SampleReader, first_sample: int, count: int, seq_length: int) -> Tensor:
        """Compute the logits of the task's head for `count` samples, (count, K) float32 on every rank.

        K is the number of classes; of a head that reads every token, of classes times tokens.

        Args:
            first_sample: number of the first sample.
            seq_length: tokens of a sample.
        """
        work, _ = self._run(reader, first_sample, count, seq_length, train=False, timer=no_timer)
        assert isinstance(work, TaskForwardStep)
        outputs = outputs_per_sample(self._config.spec, seq_length)
        logits = torch.zeros(count, outputs, device=self._mesh.device)
        for numbers, output in work.outputs:  # of the rank of the last stage
            logits[torch.tensor(numbers, device=logits.device) - first_sample] = output
        return self._mesh.replicas.reduce(self._mesh.pp.reduce(logits))

    def next_tokens(
        self, reader: SampleReader, first_sample: int, input_BW: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Predict the most probable token after every prefix of the decoder's inputs, (B, W) on every rank.

        Args:
            first_sample: number of the first sample; B samples are read.
            input_BW: the inputs, which replace those of the samples.
        """
        count, width = input_BW.shape
        work, _ = self._run(
            reader, first_sample, count, self._config.seq_length, train=False, timer=no_timer, inputs=input_BW
        )
        assert isinstance(work, Text2TextForwardStep)
        token_BW = torch.zeros(count, width, dtype=torch.int64, device=self._mesh.device)
        for numbers, output in work.outputs:  # of the rank of the last stage
            token_BW[torch.tensor(numbers, device=token_BW.device) - first_sample] = output[:, :width]
        return self._mesh.replicas.reduce(self._mesh.pp.reduce(token_BW)).cpu().numpy()

    def _run(
        self,
        reader: SampleReader,
        first_sample: int,
        count: int,
        seq_length: int,
        *,
        train: bool,
        timer: TimerFactory,
        inputs: NDArray[np.int64] | None = None,
    ) -> tuple[ForwardStep, list[Tensor]]:
        """Execute the passes of `count` samples; return their work and its losses.

        Args:
            inputs: of the decoder, to predict tokens of instead of computing losses.
        """
        config = self._config
        mesh = self._mesh
        num_micro_batches = config.num_micro_batches(count)
        with timer("batch-generator"):
            # samples of an encoder are never shortened
            kept_length = seq_length if config.spec.is_decoder_only else None
            loaded = self._loader.load(reader, first_sample, num_micro_batches, kept_length)
        if inputs is not None:
            for numbers, batch in zip(loaded.sample_numbers, loaded.batches, strict=True):
                put_decoder_input(batch, inputs[np.array(numbers) - first_sample])
        dropout_seeds = loaded.sample_numbers if train else None
        step = forward_step_class(config)
        work = step(self._models, config, mesh, loaded.batches, self._loss_scaler.value, dropout_seeds)
        if isinstance(work, TaskForwardStep | Text2TextForwardStep):
            work.evaluated_numbers = loaded.sample_numbers
        if isinstance(work, Text2TextForwardStep):
            work.predicts = inputs is not None
        losses = execute(
            self._pipeline_schedule(num_micro_batches, train=train),
            work,
            mesh.channels,
            self._rt.weight_gradients,
            dtype=self._rt.dtype,
            device=mesh.device,
            on_action=self._beat,
            timer=timer,
        )
        return work, losses

    def _pipeline_schedule(self, num_micro_batches: int, *, train: bool) -> Table:
        """Return this rank's actions in a step, or in a validation batch."""
        if (num_micro_batches, train) not in self._tables:
            shape = PipelineShape(self._mesh.pp.size, self._mesh.layout.vp, num_micro_batches)
            schedule = SCHEDULES[self._config.run.parallel.schedule] if train else forward_only
            self._tables[num_micro_batches, train] = schedule(shape, self._mesh.pp.rank)
        return self._tables[num_micro_batches, train]

    def _beat(self) -> None:
        self.heartbeat += 1


def forward_step_class(config: ResolvedConfig) -> type[ForwardStep]:
    """Return the forward step of the kind of model and of its objective."""
    spec = config.spec
    if not config.run.objective.is_causal:
        return PrefixForwardStep
    if spec.task_head != "none":
        steps = {"span": SpanForwardStep, "token_classification": TagForwardStep}
        return steps.get(spec.task_head, TaskForwardStep)
    if spec.encoder_layers is not None:
        if config.run.task.name:
            return Text2TextForwardStep
        return UnpaddedT5ForwardStep if config.run.encoder_data.unpad else T5ForwardStep
    return ForwardStep if spec.causal else BertForwardStep
