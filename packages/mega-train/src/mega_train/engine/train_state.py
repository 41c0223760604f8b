"""The progress of a run, and the values of the next step derived from it."""

from __future__ import annotations

from mega_schema.checkpoint.reader import Checkpoint
from mega_train.resolve import ResolvedConfig


class TrainState:
    """The progress of a run, and the values of the next step derived from it.

    Attributes:
        iteration: optimizer steps done.
        consumed_samples: training samples consumed; determines the next sample numbers. Their tokens depend
            on the seed, --split, --seq-length and on the passes of the whole run (--train-iters) over the
            dataset, as in Megatron.
        consumed_tokens: tokens of those samples that were read; a curriculum reads fewer of each at first.
        skipped_samples: samples of skipped steps; the learning-rate schedule does not count them.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        self._config = config
        self.iteration = 0
        self.consumed_samples = 0
        self.consumed_tokens = 0
        self.skipped_samples = 0

    @property
    def seq_length(self) -> int:
        """Tokens of a sample in the next step."""
        return self._config.seq_length_schedule.length_at(self.iteration + 1)

    @property
    def global_batch_size(self) -> int:
        """Samples of the next step over all ranks."""
        return self._config.batch_size_schedule.size_at(self.consumed_samples)

    @property
    def scheduled_samples(self) -> int:
        """Samples that the schedules count."""
        return self.consumed_samples - self.skipped_samples

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self._config.lr_schedule.lr_at(self.scheduled_samples)

    @property
    def decoupled_lr(self) -> float | None:
        """The learning rate of embedding and output, if it differs."""
        schedule = self._config.schedules.decoupled_lr
        return None if schedule is None else schedule.lr_at(self.scheduled_samples)

    @property
    def weight_decay(self) -> float:
        """The weight decay of the next step."""
        return self._config.schedules.weight_decay.value_at(self.scheduled_samples)

    def advance(self, *, is_updated: bool) -> None:
        """Count a step.

        Args:
            is_updated: whether it updated the weights; otherwise its samples are skipped.
        """
        samples = self.global_batch_size
        self.consumed_tokens += samples * self.seq_length
        self.consumed_samples += samples
        if not is_updated:
            self.skipped_samples += samples
        self.iteration += 1

    def skip_to(self, last_iteration: int) -> None:
        """Skip the steps through `last_iteration`: they consume samples, and no schedule counts them."""
        consumed_before = self.consumed_samples
        self.consumed_samples = self._config.batch_size_schedule.samples_after(
            consumed_before, last_iteration - self.iteration
        )
        self.skipped_samples += self.consumed_samples - consumed_before
        self.iteration = last_iteration

    def state_dict(self) -> dict[str, int]:
        """Return the progress for a checkpoint."""
        return {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "consumed_tokens": self.consumed_tokens,
            "skipped_samples": self.skipped_samples,
        }

    def load(self, checkpoint: Checkpoint, *, restarts_schedules: bool) -> None:
        """Load the progress from a checkpoint.

        Args:
            restarts_schedules: start the schedules at the current iteration.
        """
        saved = checkpoint.trainer
        self.iteration = checkpoint.iteration
        self.consumed_samples = int(saved["consumed_samples"])
        self.consumed_tokens = int(
            saved.get("consumed_tokens", self.consumed_samples * self._config.seq_length)
        )
        self.skipped_samples = (
            self.consumed_samples if restarts_schedules else int(saved.get("skipped_samples", 0))
        )
