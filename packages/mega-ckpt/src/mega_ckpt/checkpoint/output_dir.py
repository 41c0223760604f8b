"""Check an output folder before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from mega_schema.errors import ConfigError
from mega_schema.outputs import check_output


def contains_file(mark: str) -> Callable[[Path], bool]:
    """Return a predicate: whether a folder contains the file `mark`."""
    return lambda folder: (folder / mark).is_file()


def check_output_dir(folder: Path, *, mark: str, what: str, force: bool, inputs: Sequence[Path] = ()) -> None:
    """Refuse an output folder that is not empty; with `force`, accept one of the same kind.

    Args:
        mark: a file that every folder of the kind has.
        what: description of the content, for the message.
        inputs: folders or files that are read; they must not be in the folder that is replaced.

    Raises:
        ConfigError: the folder is refused.
    """
    check_output("--save", folder, "folder", inputs=inputs, is_ours=lambda _: True)
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not force:
        hint = "add --force to replace it"
        raise ConfigError("--save", "exists already", found=folder, hint=hint)
    if not contains_file(mark)(folder):
        message = f"contains something other than {what}: no {mark}"
        raise ConfigError("--save", message, found=folder, wanted="a new folder")


def other_checkpoints_error(checkpoint: Path) -> ConfigError:
    """Build the error for a run with other checkpoints: it would resume from the latest."""
    return ConfigError(
        "--save",
        "is a run with other checkpoints, and resumes from the latest",
        found=checkpoint,
        wanted="a new folder",
        hint="--force adds this checkpoint and makes it the latest",
    )
