"""What a run keeps, and what it shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mega_schema.config import option


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Where checkpoints go and come from."""

    save: Path | None = option("--save", None, "folder of the run's checkpoints and of its record")
    load: Path | None = option("--load", None, "checkpoint to go on from: a run's folder, or one iteration's")
    interval: int | None = option(
        "--save-interval", None, "optimizer steps between checkpoints; the last step is always saved"
    )
    finetune: bool = option(
        "--finetune", False, "take the weights alone: iteration, optimizer and data begin anew"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What is shown."""

    interval: int = option("--log-interval", 100, "optimizer steps between lines of the log")
