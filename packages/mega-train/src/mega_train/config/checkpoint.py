"""Options of checkpoints: folders to save and load, intervals, and retention."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mega_schema.app.config import option


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Options of saving and loading checkpoints."""

    save: Path | None = option("--save", None, "folder of the run's checkpoints and event log")
    load: Path | None = option(
        "--load", None, "checkpoint to resume from: a run's folder, or one iteration's"
    )
    interval: int | None = option(
        "--save-interval", None, "optimizer steps between checkpoints; the last step is always saved"
    )
    async_save: bool = option(
        "--async-save/--no-async-save",
        True,
        "write checkpoints in the background from a copy of the rank's shard in memory (default)",
    )
    keep_last: int | None = option(
        "--keep-last", None, "number of newest checkpoints to keep; older ones are removed after each save"
    )
    keep_every: int | None = option(
        "--keep-every",
        None,
        "keep checkpoints at multiples of this many iterations; without --keep-last, the newest too",
    )
    exit_signal_handler: bool = option(
        "--exit-signal-handler/--no-exit-signal-handler",
        True,
        "on SIGTERM or SIGUSR1, save after the step and exit with code 143 (default); otherwise exit at once",
    )
    overwrite: bool = option(
        "--overwrite",
        False,
        "replace checkpoints in --save that this run neither wrote nor resumes from",
    )
    override_data: bool = option(
        "--override-data",
        False,
        "resume with another seed, split, blend or dataset than the checkpoint's run",
    )
    finetune: bool = option(
        "--finetune", False, "load only the weights: iteration, optimizer and data start from zero"
    )
    pretrained: Path | None = option(
        "--pretrained-checkpoint",
        None,
        "checkpoint to start from, as with --load --finetune, while --load contains no checkpoint yet",
    )
    exit_on_missing: bool = option(
        "--exit-on-missing-checkpoint",
        False,
        "fail if --load contains no checkpoint, even if --save is the same folder",
    )
    load_optim: bool = option(
        "--no-load-optim",
        True,
        "do not load the optimizer state or schedules; iteration and consumed samples are loaded",
    )
    load_rng: bool = option(
        "--no-load-rng",
        True,
        "accepted without effect: checkpoints contain no random state; dropout depends only on seed "
        "and sample",
    )
