"""One rank's share of a run: an optimizer step, a validation, a checkpoint."""

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
from mega_train.checkpointing.async_save import Saves
from mega_train.checkpointing.save_dir import same_folder
from mega_train.config import Run
from mega_train.data.dataloaders import Reading, cursor, feed
from mega_train.data.datasets import Corpora
from mega_train.data.identities import compute_identities
from mega_train.data.sft import TOKEN, Pairs
from mega_train.distributed.grad_sync import Gradients
from mega_train.distributed.sharding import build_sharding
from mega_train.engine.forward_step import MicroBatches
from mega_train.optim.factory import optimizer
from mega_train.optim.loss_scaler import LossScale, weights_dtype
from mega_train.pipeline.executor import run
from mega_train.pipeline.schedules import SCHEDULES, Pipe, Table, forward_only
from mega_train.resolve import Plan
from mega_train.resolve.run_mode import takes_optimizer
from mega_train.telemetry.timers import Timers, untimed


class NotFinite(MegaError):
    """Loss or gradient are no numbers; all ranks find it in the same step."""


class Trainer:
    """One rank of a run: its share of the model, its gradients, its optimizer, its data.

    Attributes:
        models: the pipeline stages it holds, in the order a micro-batch passes them; one, or with an
            interleaved pipeline several.
        held: their parameters, all together.
        iteration: optimizer steps done.
        consumed: training samples consumed; it decides which sample numbers come next. Which tokens they are
            depends on the seed, --split, --seq-length and on how often the whole run (--train-iters) goes
            through the corpus, as in Megatron.
        tokens: of those samples, all that were read; a curriculum reads fewer of each at first.
        skipped: those samples whose step was skipped; the learning rate's course does not count them.
        scale: what the loss is multiplied by.
        valid, test: samples to score, by the name of their group; none where there is nothing to score.
        extra: of the last step, what the log asks for beside loss and norm, by Megatron's names.
        timers: the seconds of its phases.
        tables: what this rank does in a step, or in a batch of a validation, of so many micro-batches.
        actions: of the schedule done, those of validations too: a sign of life also within a long step.
        loaded: the checkpoint it began with.
        saves: the checkpoints it writes.
        choice: whose kernels it computes with, and why.
    """

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        corpora: Corpora | IndexedDataset | Pairs,
        *,
        checkpoint: Checkpoint | None = None,
        tokenizer: Path | None = None,
        superseded: Collection[int] = (),
    ) -> None:
        """
        Args:
            checkpoint: what to go on from; None begins anew.
            tokenizer: folder of the tokenizer that goes with every checkpoint.
            superseded: iterations in --save whose checkpoints the first save supersedes.
        """
        self.plan, self.mesh, self.tokenizer = plan, mesh, tokenizer
        self.loaded = None if checkpoint is None else checkpoint.folder
        self.dtype, self.scale = weights_dtype(plan.run.train), LossScale.of(plan.run.train)
        self.choice = choose_kernels(plan.run.train.kernels, mesh.device)
        self.rt = Runtime.from_mesh(
            mesh,
            plan.spec,
            dtype=self.dtype,
            kernels=self.choice.kernels,
            recompute=plan.recompute,
            fp8=plan.fp8,
            fused_gradients=not plan.run.train.rounded_weight_gradients,
        )
        self.shards = build_sharding(self.rt, mesh, plan.sharing)
        self.models, self.held = self.shards.models, self.shards.held
        rows = self.rt.table.values()
        initial = initial_values(rows, plan.run.train.seed)
        state_dict.fill(
            self.shards, initial if checkpoint is None else state_dict.weights(checkpoint), self.rt
        )
        self.gradients = Gradients(self.shards, mesh, rows)
        self.optimizer = optimizer(plan.run, self.shards, mesh)
        self.iteration = self.consumed = self.tokens = self.skipped = self.actions = 0
        self.timers = Timers(mesh.device)
        self.extra: dict[str, float] = {}
        saved_at: int | None = None
        if checkpoint is not None and not plan.run.checkpoint.finetune:
            self.iteration = checkpoint.iteration
            self.consumed = int(checkpoint.trainer["consumed_samples"])
            self.tokens = int(checkpoint.trainer.get("consumed_tokens", self.consumed * plan.length))
            self.skipped = self.consumed  # the courses begin here
            if takes_optimizer(plan.run):
                state_dict.load_optimizer(checkpoint, self.optimizer, self.rt)
                self.skipped = int(checkpoint.trainer.get("skipped_samples", 0))
                self.scale.load(checkpoint.trainer.get("loss_scale", {}))
            if same_folder(checkpoint.folder.parent, plan.run.checkpoint.save):
                saved_at = self.iteration
        self.saves = Saves(plan.run.checkpoint, mesh, saved_at, superseded)
        self.tables: dict[tuple[int, bool], Table] = {}
        self._corpora, self._identities = corpora, dict[str, str]()
        fed = feed(plan, corpora, mesh, iteration=self.iteration, consumed=self.consumed)
        self.train, self.valid, self.test = fed.training, fed.validation, fed.test
        self.cursors = {samples: cursor(plan, mesh, samples) for samples in fed}

    def step(self, rate: float) -> tuple[float, float]:
        """One optimizer step. Where loss or gradient are not finite on any rank, every rank skips the update.

        Returns:
            the loss in nats per token, and the gradient's norm before clipping; the same on every rank. The
            norm of a skipped step is not finite.

        Raises:
            NotFinite: loss or gradient are not finite, and it is not for float16's scale to mend. Nothing was
                updated.
        """
        train, samples = self.plan.run.train, self.samples
        self.shards.begin(self.plan.micros(samples))
        with self.timers("forward-backward"):
            mean = self._loss(self.train, self.consumed, samples, train=True, length=self.length)
        with self.timers("all-grads-sync"):
            self.gradients.reduce(self.scale.value)
        # read only now: a number read from a GPU waits for all that was asked of it before
        with self.timers("optimizer-unscale-and-check-inf"):
            norm, loss = self.gradients.norm(), float(mean)
        finite = math.isfinite(loss) and math.isfinite(norm)
        overflow = train.fp16 and math.isfinite(loss)  # of a scaled gradient: the scale mends it
        if not finite and not overflow and train.on_non_finite == "stop":
            raise self._not_finite(loss, norm)
        self.scale.update(overflow=not finite)
        self.extra = {}
        if finite and self.plan.run.log.zeros:
            with self.timers("optimizer-count-zeros"):
                self.extra["num-zeros"] = self.gradients.zeros()
        if finite:
            with self.timers("optimizer"):
                self._update(norm, rate)
        else:
            self.skipped += samples
        if self.plan.run.log.params_norm:
            self.extra["params-norm"] = self.gradients.params_norm()
        self.tokens += samples * self.length
        self.consumed += samples
        self.iteration += 1
        return loss, norm if math.isfinite(loss) else math.nan

    def pass_over(self, last: int) -> None:
        """Leave out the steps through iteration `last`: their samples are consumed, no course counts them."""
        before, self.consumed = self.consumed, self.plan.batches.after(self.consumed, last - self.iteration)
        self.skipped += self.consumed - before
        self.iteration = last

    def _update(self, norm: float, rate: float) -> None:
        timed = self.timers
        with timed("optimizer-clip-main-grad"):
            self.gradients.clip(norm, self.plan.run.optimizer.clip)
        with timed("optimizer-inner-step"):
            courses, at = self.plan.courses, self.consumed - self.skipped
            ends = None if courses.ends is None else courses.ends.at(at)
            self.optimizer.step(self.gradients.of, rate, courses.decay.at(at), ends)
        with timed("optimizer-copy-main-to-model-params"):
            self.shards.publish()

    @property
    def length(self) -> int:
        """Tokens of a sample that the next step reads."""
        return self.plan.lengths.at(self.iteration + 1)

    @property
    def samples(self) -> int:
        """Samples of the next step, all ranks together."""
        return self.plan.batches.at(self.consumed)

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return self.plan.rate.at(self.consumed - self.skipped)

    @property
    def goes_on(self) -> str:
        """How the run can be gone on with, for a person."""
        save = self.plan.run.checkpoint
        if self.saves.saved_at is None and save.interval is not None:
            return f"nothing was saved yet: --save-interval is {save.interval}"
        if self.saves.saved_at is None:
            flags = "--save RUN --save-interval N" if save.save is None else "--save-interval N"
            return f"nothing was saved: {flags} saves every N iterations"
        return f"--load {save.save} goes on from iteration {self.saves.saved_at}"

    def _not_finite(self, loss: float, norm: float) -> NotFinite:
        return NotFinite(
            f"iteration {self.iteration + 1}",
            "loss or gradient is not finite",
            found=f"loss {loss:.4g}, gradient norm {norm:.4g}, first in {self.gradients.first_non_finite()}",
            wanted="numbers",
            hint="a lower --lr, a longer --lr-warmup-iters, --load the checkpoint before, "
            "or --on-non-finite skip",
        )

    @torch.no_grad()
    def score(self, samples: Reading) -> float:
        """Mean loss of --eval-iters batches of `valid` or `test`, in nats per token.

        Validation reads on every --eval-interval steps. Between two of those steps (at a run's end) it reads
        what the one before did, so that the two compare; Megatron reads on there too.
        """
        evaluation = self.plan.run.evaluation
        before = max(0, self.iteration // evaluation.interval - 1) * evaluation.iterations
        if samples in self.test.values():
            before = 0
        count = self.plan.global_samples
        losses = [
            self._loss(samples, (before + i) * count, count, train=False, length=self.plan.length)
            for i in range(evaluation.iterations)
        ]
        return float(torch.stack(losses).double().mean())

    def save(self) -> None:
        """Begin a checkpoint of where the run stands; `saves` tells when it is written."""
        kept = self.plan.run.checkpoint
        if self.mesh.rank == 0 and not self._identities:  # they take reading, so once and not at the start
            self._identities.update(compute_identities(self.plan.run.data, self._corpora))
        trainer = {
            "iteration": self.iteration,
            "consumed_samples": self.consumed,
            "consumed_tokens": self.tokens,
            "skipped_samples": self.skipped,
            "loss_scale": self.scale.state(),
            "optimizer_steps": self.optimizer.steps,
            "seed": self.plan.run.train.seed,
            "learning_rate": self.rate,
            "courses": self.plan.courses.state(),
            "datasets": self._identities,
        }
        commit = {
            "described": manifest_header(self.rt.spec, self.mesh.layout),
            "texts": text_files(trainer, to_toml(self._recorded())),
            "tokenizer": str(self.tokenizer) if self.tokenizer else None,
            "last": kept.keep_last or int(kept.keep_every is not None),
            "every": kept.keep_every,
        }
        self.saves.begin(
            self.iteration, state_dict.parts(self.mesh, self.rt, self.shards, self.optimizer), commit
        )

    def _recorded(self) -> Run:
        """The configuration as run.toml has it: what a person allowed once is not allowed again."""
        checkpoint = replace(self.plan.run.checkpoint, overwrite=False, override_data=False)
        return replace(self.plan.run, checkpoint=checkpoint)

    def _loss(self, samples: Reading, consumed: int, count: int, *, train: bool, length: int) -> Tensor:
        plan, mesh = self.plan, self.mesh
        micros = plan.micros(count)
        numbers = list(self.cursors[samples].micro_batches(consumed, micros))
        timed = self.timers if train else untimed
        with timed("batch-generator"):
            batches = [self._read(samples, some)[..., : length + 1] for some in numbers]
        work = MicroBatches(self.models, plan, mesh, batches, self.scale.value, numbers if train else None)
        losses = run(
            self._table(micros, train=train),
            work,
            mesh.channels,
            self.rt.weight_gradients,
            dtype=self.dtype,
            device=mesh.device,
            done=self._gets_on,
            timed=timed,
        )
        total = torch.stack(losses).sum() if losses else torch.zeros((), device=mesh.device)
        return mesh.replicas.reduce(mesh.pp.reduce(total)) / mesh.replicas.size

    def _table(self, micros: int, *, train: bool) -> Table:
        if (micros, train) not in self.tables:
            pipe = Pipe(self.mesh.pp.size, self.mesh.layout.vp, micros)
            schedule = SCHEDULES[self.plan.run.parallel.schedule] if train else forward_only
            self.tables[micros, train] = schedule(pipe, self.mesh.pp.rank)
        return self.tables[micros, train]

    def _gets_on(self) -> None:
        self.actions += 1

    def _read(self, samples: Reading, numbers: list[int]) -> np.ndarray:
        batch = np.stack([samples[number] for number in numbers])
        token_BS1 = batch if batch.ndim == 2 else batch[:, TOKEN]
        least, largest = int(token_BS1.min()), int(token_BS1.max())
        if least < 0 or largest >= self.plan.spec.vocab:
            outside = (token_BS1 < 0) | (token_BS1 >= self.plan.spec.vocab)
            raise FormatError(
                samples.corpus(numbers[int(outside.any(axis=1).argmax())]),
                "holds a token outside the model's vocabulary",
                found=min(least, 0) or largest,
                wanted=f"0 to {self.plan.spec.vocab - 1}",
                hint="a corpus made with the model's tokenizer, or a larger --vocab-size",
            )
        return batch
