"""One rank's trainer: optimizer step, validation, checkpoint."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mega_model.distributed.mesh import Mesh
from mega_model.init import initial_values
from mega_model.kernels.dispatch import choose_kernels
from mega_model.runtime import Runtime
from mega_schema.app.config import to_toml
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.checkpoint.writer import manifest_header, text_files
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.errors import FormatError, MegaError
from mega_train.checkpointing import state_dict
from mega_train.checkpointing.async_save import CheckpointSaver
from mega_train.checkpointing.save_dir import is_same_folder
from mega_train.config import RunConfig
from mega_train.data.dataloaders import SampleReader, build_data_splits, build_sampler
from mega_train.data.datasets import Datasets
from mega_train.data.identities import compute_identities
from mega_train.data.sft import TOKEN, PromptResponsePairs
from mega_train.distributed.grad_sync import GradientSync
from mega_train.distributed.sharding import build_sharding
from mega_train.engine.forward_step import ForwardStep
from mega_train.optim.factory import build_optimizer
from mega_train.optim.loss_scaler import DynamicLossScaler, param_dtype
from mega_train.pipeline.executor import execute
from mega_train.pipeline.schedules import SCHEDULES, PipelineShape, Table, forward_only
from mega_train.resolve import ResolvedConfig
from mega_train.resolve.run_mode import loads_optimizer
from mega_train.telemetry.timers import Timers, no_timer


class NonFiniteLossError(MegaError):
    """The loss or the gradient is not finite; all ranks raise it in the same step."""


class Trainer:
    """One rank of a run: its stages of the model, gradients, optimizer and data.

    Attributes:
        models: its pipeline stages, in the order of the forward pass; several with an interleaved pipeline.
        params: their parameters.
        iteration: optimizer steps done.
        consumed_samples: training samples consumed; determines the next sample numbers. Their tokens depend
            on the seed, --split, --seq-length and on the passes of the whole run (--train-iters) over the
            dataset, as in Megatron.
        consumed_tokens: tokens of those samples that were read; a curriculum reads fewer of each at first.
        skipped_samples: samples of skipped steps; the learning-rate schedule does not count them.
        loss_scaler: scales the loss.
        valid, test: samples to evaluate, by the name of their group; empty where nothing is evaluated.
        extra: further numbers of the last step for the log, by Megatron's names.
        timers: seconds of each phase.
        pipeline_schedules: this rank's actions in a step or a validation batch, by the number of
            micro-batches.
        heartbeat: number of actions done, in validations too: shows progress within a long step.
        loaded_from: the checkpoint it started from.
        saver: writes its checkpoints.
        kernel_choice: the kernels, and why they were chosen.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        mesh: Mesh,
        datasets: Datasets | IndexedDataset | PromptResponsePairs,
        *,
        checkpoint: Checkpoint | None = None,
        tokenizer: Path | None = None,
        superseded: Collection[int] = (),
    ) -> None:
        """
        Args:
            checkpoint: what to resume from; None starts from new weights.
            tokenizer: folder of the tokenizer that is copied into every checkpoint.
            superseded: iterations in --save whose checkpoints the first save supersedes.
        """
        self.config = config
        self.mesh = mesh
        self.tokenizer = tokenizer
        self.loaded_from = None if checkpoint is None else checkpoint.folder
        self.dtype = param_dtype(config.run.train)
        self.loss_scaler = DynamicLossScaler.from_config(config.run.train)
        self.kernel_choice = choose_kernels(config.run.train.kernels, mesh.device)
        self.rt = Runtime.from_mesh(
            mesh,
            config.spec,
            dtype=self.dtype,
            kernels=self.kernel_choice.kernels,
            recompute=config.recompute,
            fp8=config.fp8,
            fused_gradients=config.run.train.fused_weight_gradients,
        )
        self.sharding = build_sharding(self.rt, mesh, config.sharding_config)
        self.models, self.params = self.sharding.models, self.sharding.params
        table = self.rt.table.values()
        initial = initial_values(table, config.run.train.seed)
        state_dict.load_weights(
            self.sharding, initial if checkpoint is None else state_dict.weight_reader(checkpoint), self.rt
        )
        self.grad_sync = GradientSync(self.sharding, mesh, table)
        self.optimizer = build_optimizer(config.run, self.sharding, mesh)
        self.iteration = self.consumed_samples = self.consumed_tokens = self.skipped_samples = (
            self.heartbeat
        ) = 0
        self.timers = Timers(mesh.device)
        self.extra: dict[str, float] = {}
        saved_at: int | None = None
        if checkpoint is not None and not config.run.checkpoint.finetune:
            self.iteration = checkpoint.iteration
            self.consumed_samples = int(checkpoint.trainer["consumed_samples"])
            self.consumed_tokens = int(
                checkpoint.trainer.get("consumed_tokens", self.consumed_samples * config.seq_length)
            )
            self.skipped_samples = self.consumed_samples  # the schedules start here
            if loads_optimizer(config.run):
                state_dict.load_optimizer(checkpoint, self.optimizer, self.rt)
                self.skipped_samples = int(checkpoint.trainer.get("skipped_samples", 0))
                self.loss_scaler.load_state_dict(checkpoint.trainer.get("loss_scale", {}))
            if is_same_folder(checkpoint.folder.parent, config.run.checkpoint.save):
                saved_at = self.iteration
        self.saver = CheckpointSaver(config.run.checkpoint, mesh, saved_at, superseded)
        self.pipeline_schedules: dict[tuple[int, bool], Table] = {}
        self._datasets = datasets
        self._identities = dict[str, str]()
        data_splits = build_data_splits(
            config, datasets, mesh, iteration=self.iteration, consumed_samples=self.consumed_samples
        )
        self.train = data_splits.training
        self.valid = data_splits.validation
        self.test = data_splits.test
        self.samplers = {reader: build_sampler(config, mesh, reader) for reader in data_splits}

    def step(self, lr: float) -> tuple[float, float]:
        """Do one optimizer step. If loss or gradient are not finite on any rank, every rank skips the update.

        Returns:
            the loss in nats per token, and the gradient's norm before clipping; the same on every rank. The
            norm of a skipped step is not finite.

        Raises:
            NonFiniteLossError: loss or gradient are not finite, and no float16 loss scale explains it.
                Nothing was updated.
        """
        train, global_batch_size = self.config.run.train, self.global_batch_size
        self.sharding.zero_grad(self.config.num_micro_batches(global_batch_size))
        with self.timers("forward-backward"):
            mean = self._loss(
                self.train, self.consumed_samples, global_batch_size, train=True, seq_length=self.seq_length
            )
        with self.timers("all-grads-sync"):
            self.grad_sync.reduce(self.loss_scaler.value)
        # read late: reading a number from a GPU waits for all work launched before
        with self.timers("optimizer-unscale-and-check-inf"):
            norm = self.grad_sync.norm()
            loss = float(mean)
        finite = math.isfinite(loss) and math.isfinite(norm)
        overflow = train.fp16 and math.isfinite(loss)  # of a scaled gradient: a lower scale fixes it
        if not finite and not overflow and train.on_non_finite == "stop":
            raise self._non_finite_error(loss, norm)
        self.loss_scaler.update(overflow=not finite)
        self.extra = {}
        if finite and self.config.run.log.zeros:
            with self.timers("optimizer-count-zeros"):
                self.extra["num-zeros"] = self.grad_sync.num_zeros()
        if finite:
            with self.timers("optimizer"):
                self._update(norm, lr)
        else:
            self.skipped_samples += global_batch_size
        if self.config.run.log.params_norm:
            self.extra["params-norm"] = self.grad_sync.params_norm()
        self.consumed_tokens += global_batch_size * self.seq_length
        self.consumed_samples += global_batch_size
        self.iteration += 1
        return loss, norm if math.isfinite(loss) else math.nan

    def skip_to(self, last_iteration: int) -> None:
        """Skip the steps through `last_iteration`: they consume samples, and no schedule counts them."""
        consumed_before, self.consumed_samples = (
            self.consumed_samples,
            self.config.batch_size_schedule.samples_after(
                self.consumed_samples, last_iteration - self.iteration
            ),
        )
        self.skipped_samples += self.consumed_samples - consumed_before
        self.iteration = last_iteration

    def _update(self, norm: float, lr: float) -> None:
        timer = self.timers
        with timer("optimizer-clip-main-grad"):
            self.grad_sync.clip(norm, self.config.run.optimizer.clip)
        with timer("optimizer-inner-step"):
            schedules = self.config.schedules
            samples_done = self.consumed_samples - self.skipped_samples
            decoupled_lr = (
                None if schedules.decoupled_lr is None else schedules.decoupled_lr.lr_at(samples_done)
            )
            self.optimizer.step(
                self.grad_sync.shards, lr, schedules.weight_decay.value_at(samples_done), decoupled_lr
            )
        with timer("optimizer-copy-main-to-model-params"):
            self.sharding.copy_main_to_model_params()

    @property
    def seq_length(self) -> int:
        """Tokens of a sample in the next step."""
        return self.config.seq_length_schedule.length_at(self.iteration + 1)

    @property
    def global_batch_size(self) -> int:
        """Samples of the next step over all ranks."""
        return self.config.batch_size_schedule.size_at(self.consumed_samples)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.config.lr_schedule.lr_at(self.consumed_samples - self.skipped_samples)

    @property
    def resume_hint(self) -> str:
        """How to resume the run, for a message."""
        checkpoint = self.config.run.checkpoint
        if self.saver.saved_at is None and checkpoint.interval is not None:
            return f"nothing was saved yet: --save-interval is {checkpoint.interval}"
        if self.saver.saved_at is None:
            flags = "--save RUN --save-interval N" if checkpoint.save is None else "--save-interval N"
            return f"nothing was saved: {flags} saves every N iterations"
        return f"--load {checkpoint.save} goes on from iteration {self.saver.saved_at}"

    def _non_finite_error(self, loss: float, norm: float) -> NonFiniteLossError:
        return NonFiniteLossError(
            f"iteration {self.iteration + 1}",
            "loss or gradient is not finite",
            found=f"loss {loss:.4g}, gradient norm {norm:.4g}, first in {self.grad_sync.first_non_finite()}",
            wanted="numbers",
            hint="a lower --lr, a longer --lr-warmup-iters, --load the checkpoint before, "
            "or --on-non-finite skip",
        )

    @torch.no_grad()
    def evaluate(self, reader: SampleReader) -> float:
        """Compute the mean loss of --eval-iters batches of `valid` or `test`, in nats per token.

        Validations read successive samples every --eval-interval steps. A validation between two of those
        steps, at the end of a run, reads the samples of the previous one, so that both compare; Megatron
        reads further there.
        """
        evaluation = self.config.run.evaluation
        first_sample = max(0, self.iteration // evaluation.interval - 1) * evaluation.iterations
        if reader in self.test.values():
            first_sample = 0
        count = self.config.global_batch_size
        losses = [
            self._loss(
                reader, (first_sample + i) * count, count, train=False, seq_length=self.config.seq_length
            )
            for i in range(evaluation.iterations)
        ]
        return float(torch.stack(losses).double().mean())

    def save(self) -> None:
        """Start to save a checkpoint; `saver` reports when it is written."""
        checkpoint = self.config.run.checkpoint
        if (
            self.mesh.rank == 0 and not self._identities
        ):  # computed once, and not at the start: it reads the datasets
            self._identities.update(compute_identities(self.config.run.data, self._datasets))
        trainer = {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "consumed_tokens": self.consumed_tokens,
            "skipped_samples": self.skipped_samples,
            "loss_scale": self.loss_scaler.state_dict(),
            "optimizer_steps": self.optimizer.steps,
            "seed": self.config.run.train.seed,
            "learning_rate": self.lr,
            "courses": self.config.schedules.state_dict(),
            "datasets": self._identities,
        }
        commit = {
            "described": manifest_header(self.rt.spec, self.mesh.layout),
            "texts": text_files(trainer, to_toml(self._recorded_config())),
            "tokenizer": str(self.tokenizer) if self.tokenizer else None,
            "last": checkpoint.keep_last or int(checkpoint.keep_every is not None),
            "every": checkpoint.keep_every,
        }
        self.saver.begin(
            self.iteration,
            state_dict.shards_to_write(self.mesh, self.rt, self.sharding, self.optimizer),
            commit,
        )

    def _recorded_config(self) -> RunConfig:
        """Return the configuration for run.toml, without one-time permissions."""
        checkpoint = replace(self.config.run.checkpoint, overwrite=False, override_data=False)
        return replace(self.config.run, checkpoint=checkpoint)

    def _loss(
        self, reader: SampleReader, first_sample: int, count: int, *, train: bool, seq_length: int
    ) -> Tensor:
        config, mesh = self.config, self.mesh
        num_micro_batches = config.num_micro_batches(count)
        numbers = list(self.samplers[reader].micro_batches(first_sample, num_micro_batches))
        timer = self.timers if train else no_timer
        with timer("batch-generator"):
            batches = [
                self._fetch_batch(reader, micro_numbers)[..., : seq_length + 1] for micro_numbers in numbers
            ]
        work = ForwardStep(
            self.models, config, mesh, batches, self.loss_scaler.value, numbers if train else None
        )
        losses = execute(
            self._pipeline_schedule(num_micro_batches, train=train),
            work,
            mesh.channels,
            self.rt.weight_gradients,
            dtype=self.dtype,
            device=mesh.device,
            on_action=self._beat,
            timer=timer,
        )
        total = torch.stack(losses).sum() if losses else torch.zeros((), device=mesh.device)
        # replicas are dp x cp: the losses of cp ranks are scaled by cp (`ForwardStep`), so the mean over both
        # is the mean over the batch
        return mesh.replicas.reduce(mesh.pp.reduce(total)) / mesh.replicas.size

    def _pipeline_schedule(self, num_micro_batches: int, *, train: bool) -> Table:
        if (num_micro_batches, train) not in self.pipeline_schedules:
            shape = PipelineShape(self.mesh.pp.size, self.mesh.layout.vp, num_micro_batches)
            schedule = SCHEDULES[self.config.run.parallel.schedule] if train else forward_only
            self.pipeline_schedules[num_micro_batches, train] = schedule(shape, self.mesh.pp.rank)
        return self.pipeline_schedules[num_micro_batches, train]

    def _beat(self) -> None:
        self.heartbeat += 1

    def _fetch_batch(self, reader: SampleReader, numbers: list[int]) -> np.ndarray:
        batch = np.stack([reader[number] for number in numbers])
        token_BS1 = batch if batch.ndim == 2 else batch[:, TOKEN]
        smallest, largest = int(token_BS1.min()), int(token_BS1.max())
        if smallest < 0 or largest >= self.config.spec.vocab:
            outside = (token_BS1 < 0) | (token_BS1 >= self.config.spec.vocab)
            raise FormatError(
                reader.dataset_prefix(numbers[int(outside.any(axis=1).argmax())]),
                "holds a token outside the model's vocabulary",
                found=min(smallest, 0) or largest,
                wanted=f"0 to {self.config.spec.vocab - 1}",
                hint="a corpus made with the model's tokenizer, or a larger --vocab-size",
            )
        return batch
