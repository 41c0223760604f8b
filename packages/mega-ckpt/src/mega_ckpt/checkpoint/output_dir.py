"""A folder that is written: a new one, or in the place of one of its kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from mega_schema.errors import ConfigError
from mega_schema.outputs import check_output


def holds(mark: str) -> Callable[[Path], bool]:
    """A function: whether a folder has the file that every folder of a kind has."""
    return lambda folder: (folder / mark).is_file()


def check_free(folder: Path, *, mark: str, what: str, force: bool, inputs: Sequence[Path] = ()) -> None:
    """Refuse a place that is taken; with `force`, by anything but a folder of the kind.

    Args:
        mark: a file that every folder of the kind has.
        what: it holds, to say in the message.
        inputs: folders or files that are read, and must not be in the folder that is replaced.

    Raises:
        ConfigError: it is taken.
    """
    check_output("--save", folder, "folder", inputs=inputs, is_ours=lambda _: True)
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not force:
        hint = "add --force to replace it"
        raise ConfigError("--save", "there is something already", found=folder, hint=hint)
    if not holds(mark)(folder):
        said = f"holds something else than {what}: no {mark}"
        raise ConfigError("--save", said, found=folder, wanted="a new folder")


def other_checkpoints(found: Path) -> ConfigError:
    """The error of a run that has checkpoints: it would resume from a new one beside them."""
    return ConfigError(
        "--save",
        "is a run with other checkpoints, and resumes from the latest",
        found=found,
        wanted="a new folder",
        hint="--force adds this checkpoint and makes it the latest",
    )
