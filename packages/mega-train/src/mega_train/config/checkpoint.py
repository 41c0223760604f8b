"""Options of checkpoints: where they are saved and loaded, how often, and which are kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mega_schema.app.config import option


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Where checkpoints go and come from."""

    save: Path | None = option("--save", None, "folder of the run's checkpoints and of its record")
    load: Path | None = option("--load", None, "checkpoint to go on from: a run's folder, or one iteration's")
    interval: int | None = option(
        "--save-interval", None, "optimizer steps between checkpoints; the last step is always saved"
    )
    background: bool = option(
        "--async-save/--no-async-save",
        True,
        "write checkpoints while the run goes on (default), from a copy of the rank's share in memory",
    )
    keep_last: int | None = option(
        "--keep-last", None, "remove all but so many of the newest checkpoints once there is another"
    )
    keep_every: int | None = option(
        "--keep-every", None, "keep those whose iteration this divides; without --keep-last also the newest"
    )
    signals: bool = option(
        "--exit-signal-handler/--no-exit-signal-handler",
        True,
        "on SIGTERM or SIGUSR1 save after the step and leave with code 143 (default); else they end at once",
    )
    overwrite: bool = option(
        "--overwrite",
        False,
        "let this run take the place of checkpoints in --save that it did not write or does not resume from",
    )
    override_data: bool = option(
        "--override-data",
        False,
        "resume with another seed, split, blend or dataset than the checkpoint's run",
    )
    finetune: bool = option(
        "--finetune", False, "take the weights alone: iteration, optimizer and data begin anew"
    )
    pretrained: Path | None = option(
        "--pretrained-checkpoint",
        None,
        "where --load holds nothing yet, begin with the weights of this one, as --load and --finetune do",
    )
    exit_on_missing: bool = option(
        "--exit-on-missing-checkpoint",
        False,
        "end with an error where --load holds no checkpoint, also where --save is the same folder",
    )
    no_load_optim: bool = option(
        "--no-load-optim",
        False,
        "optimizer and courses begin anew; iteration and samples go on, as the checkpoint says",
    )
    no_load_rng: bool = option(
        "--no-load-rng", False, "accepted: nothing random is kept, dropout depends on seed and sample alone"
    )
