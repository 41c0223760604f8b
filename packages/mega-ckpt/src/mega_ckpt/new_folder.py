"""A folder that is written: a new one, or in the place of one of its kind."""

from __future__ import annotations

from pathlib import Path

from mega_schema.errors import ConfigError


def check_free(folder: Path, *, mark: str, what: str, force: bool) -> None:
    """Refuse a place that is taken; with `force`, by anything but a folder of the kind.

    Args:
        mark: a file that every folder of the kind has.
        what: it holds, to say in the message.

    Raises:
        ConfigError: it is taken.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not force:
        hint = "add --force to replace it"
        raise ConfigError("--save", "there is something already", found=folder, hint=hint)
    if not (folder / mark).is_file():
        said = f"holds something else than {what}: no {mark}"
        raise ConfigError("--save", said, found=folder, wanted="a new folder")
