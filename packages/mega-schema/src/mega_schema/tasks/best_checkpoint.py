"""The record of a fine-tuning run's best epoch: `best_checkpoint.json` in the run's folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from mega_schema.atomic_io import write_text
from mega_schema.checkpoint.checkpoint_dir import iteration_folder
from mega_schema.errors import FormatError

BEST = "best_checkpoint.json"


@dataclass(frozen=True, slots=True)
class BestCheckpoint:
    """The epoch with the best value of a metric, and the iteration of its checkpoint."""

    iteration: int
    epoch: int
    metric: str
    value: float


def read_best(run: Path) -> BestCheckpoint | None:
    """Return the best epoch of a run; None if none is recorded.

    Raises:
        FormatError: the file is not such a record.
    """
    try:
        text = (run / BEST).read_text("utf-8")
    except OSError:
        return None
    try:
        best = BestCheckpoint(**json.loads(text))
        is_valid = type(best.iteration) is int and type(best.value) in (int, float)
    except (TypeError, ValueError):
        is_valid = False
    if not is_valid:
        hint = "remove the file; the next epoch is recorded again"
        raise FormatError(run / BEST, "is not the record of a best epoch", found=text[:80], hint=hint)
    return best


def find_best_folder(load: Path) -> Path:
    """Return the folder of a run's best checkpoint if it has one, else `load`.

    Raises:
        FormatError: the record of the best epoch is damaged.
    """
    best = read_best(load)
    folder = None if best is None else iteration_folder(load, best.iteration)
    return load if folder is None or not folder.is_dir() else folder


def write_best(run: Path, best: BestCheckpoint) -> None:
    """Write the record, whole or not at all."""
    write_text(run / BEST, json.dumps(asdict(best)) + "\n")
