"""One rank's trainer: optimizer steps and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import cached_property
from pathlib import Path

import torch

from mega_model.distributed.mesh import Mesh
from mega_model.init import initial_values
from mega_model.kernels.dispatch import KernelChoice, choose_batch_invariant_kernels, choose_kernels
from mega_model.runtime import Runtime
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_train.checkpointing import state_dict
from mega_train.checkpointing.async_save import CheckpointSaver
from mega_train.checkpointing.save_dir import is_same_folder
from mega_train.config import TrainConfig
from mega_train.data.dataloaders import RunDatasets, build_data_splits, build_sampler
from mega_train.data.identities import compute_identities
from mega_train.data.micro_batches import MicroBatchLoader
from mega_train.distributed.grad_sync import GradientSync
from mega_train.distributed.sharding import build_sharding
from mega_train.engine.forward_backward import ForwardBackward
from mega_train.engine.optimizer_step import OptimizerStep
from mega_train.engine.train_state import TrainState
from mega_train.optim.factory import build_optimizer
from mega_train.optim.loss_scaler import DynamicLossScaler, param_dtype
from mega_train.resolve import ResolvedConfig
from mega_train.resolve.run_mode import loads_optimizer
from mega_train.telemetry.timers import Timers


class Trainer:
    """One rank of a run: its stages of the model, gradients, optimizer and data.

    Attributes:
        models: its pipeline stages, in the order of the forward pass; several with an interleaved pipeline.
        params: their parameters.
        sharding: the parameters' weights, sharded over the replicas.
        state: the progress of the run.
        loader: loads this rank's micro-batches.
        forward_backward: runs micro-batches through the stages.
        optimizer_step: updates the weights by their gradients.
        valid, test: samples to evaluate, by the name of their group; empty if nothing is evaluated.
        timers: seconds of each phase.
        loaded_from: the checkpoint it started from.
        saver: writes its checkpoints.
        datasets: the datasets of the run.
        kernel_choice: the kernels, and the reason of each choice.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        mesh: Mesh,
        datasets: RunDatasets | IndexedDataset,
        *,
        checkpoint: Checkpoint | None = None,
        tokenizer: Path | None = None,
        superseded: Collection[int] = (),
    ) -> None:
        """Build the model, optimizer and data of a rank, and load the checkpoint.

        Args:
            checkpoint: what to resume from; None starts from new weights.
            tokenizer: folder of the tokenizer that is copied into every checkpoint.
            superseded: iterations in --save whose checkpoints the first save supersedes.
        """
        run = config.run
        self.config = config
        self.mesh = mesh
        self.tokenizer = tokenizer
        self.loaded_from = None if checkpoint is None else checkpoint.folder
        self.kernel_choice = choose_run_kernels(run.train, mesh.device)
        self.rt = _build_runtime(config, mesh, self.kernel_choice)
        self.sharding, gradients = build_sharding(self.rt, mesh, config.sharding_config)
        self.models, self.params = self.sharding.models, self.sharding.params
        table = self.rt.table.values()
        initial = initial_values(table, run.train.seed)
        state_dict.load_weights(
            self.sharding,
            initial if checkpoint is None else state_dict.weight_reader(checkpoint, config.spec, initial),
            self.rt,
        )
        self.grad_sync = GradientSync(self.sharding, gradients, mesh, table)
        self.optimizer = build_optimizer(run, self.sharding, mesh)
        self.loss_scaler = DynamicLossScaler.from_config(run.train)
        self.timers = Timers(mesh.device)
        self.state = TrainState(config)
        saved_at: int | None = None
        if checkpoint is not None and not run.checkpoint.finetune:
            self._load(checkpoint)
            if is_same_folder(checkpoint.folder.parent, run.checkpoint.save):
                saved_at = checkpoint.iteration
        self.saver = CheckpointSaver(run.checkpoint, mesh, saved_at, superseded)
        self.datasets = datasets
        splits = build_data_splits(
            config.data_splits_config(
                iteration=self.state.iteration, consumed_samples=self.state.consumed_samples
            ),
            datasets,
            mesh,
        )
        self.train = splits.training
        self.valid = splits.validation
        self.test = splits.test
        samplers = {
            reader: build_sampler(run.data, config.micro_batch_size, mesh.dp, reader) for reader in splits
        }
        self.loader = MicroBatchLoader(samplers, config.spec.vocab)
        self.forward_backward = ForwardBackward(
            config, mesh, self.rt, self.models, self.loader, self.loss_scaler
        )
        self.optimizer_step = OptimizerStep(
            config, self.grad_sync, self.optimizer, self.loss_scaler, self.timers
        )

    def _load(self, checkpoint: Checkpoint) -> None:
        """Load progress, optimizer state and loss scale of a checkpoint, as the run's options select."""
        with_optimizer = loads_optimizer(self.config.run)
        self.state.load(checkpoint, restarts_schedules=not with_optimizer)
        if with_optimizer:
            state_dict.load_optimizer(checkpoint, self.optimizer, self.rt)
            self.loss_scaler.load_state_dict(checkpoint.trainer.get("loss_scale", {}))

    def step(self, lr: float) -> tuple[float, float]:
        """Do one optimizer step. If loss or gradient is not finite on some rank, all ranks skip the update.

        Returns:
            the loss in nats per token, and the gradient's norm before clipping; the same on every rank. The
            norm of a skipped step is not finite.

        Raises:
            NonFiniteLossError: loss or gradient are not finite, and no float16 loss scale explains it.
                Nothing was updated.
        """
        state = self.state
        samples = state.global_batch_size
        self.grad_sync.gradients.zero_grad(self.config.num_micro_batches(samples))
        with self.timers("forward-backward"):
            losses = self.forward_backward.mean_losses(
                self.train, state.consumed_samples, samples, state.seq_length, train=True, timer=self.timers
            )
        loss, norm = self.optimizer_step.run(losses, lr, state)
        state.advance(is_updated=math.isfinite(norm))
        return loss, norm

    def save(self) -> None:
        """Start to save a checkpoint; `saver` reports when it is written."""
        trainer = state_dict.trainer_state(
            self.config,
            self.state.state_dict(),
            self.state.lr,
            self.optimizer,
            self.loss_scaler,
            self._identities if self.mesh.rank == 0 else {},
        )
        commit = state_dict.commit_contents(
            self.config.run, self.rt.spec, self.mesh.layout, trainer, self.tokenizer
        )
        shards = state_dict.shards_to_write(self.mesh, self.rt, self.sharding, self.optimizer)
        self.saver.begin(self.state.iteration, shards, commit)

    @cached_property
    def _identities(self) -> dict[str, str]:
        """A digest of each dataset, computed on first use, because it reads the datasets."""
        return dict(compute_identities(self.config.run.data, self.datasets))


def choose_run_kernels(train: TrainConfig, device: torch.device) -> KernelChoice:
    """Choose the kernels of a run.

    Raises:
        ConfigError: they are not available on this machine.
    """
    if train.batch_invariant:
        return choose_batch_invariant_kernels(device, package="mega-train")
    return choose_kernels(train.kernels, device, where="--kernels")


def _build_runtime(config: ResolvedConfig, mesh: Mesh, kernel_choice: KernelChoice) -> Runtime:
    return Runtime.from_mesh(
        mesh,
        config.spec,
        dtype=param_dtype(config.run.train),
        kernels=kernel_choice.kernels,
        recompute=config.recompute,
        fp8=config.fp8,
        fused_gradients=config.run.train.fused_weight_gradients,
    )
