"""Short names that tell the folders of several runs apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

TEST = "test"  # the group of samples that is scored once, after training


def name_runs(folders: Sequence[Path]) -> list[str]:
    """The end of each path, as few parts of it as differ from all others; one given twice gets a number."""
    paths = [folder.resolve() for folder in folders]
    names = [_name(path, paths) for path in paths]
    return [
        f"{name} ({names[: at + 1].count(name)})" if names.count(name) > 1 else name
        for at, name in enumerate(names)
    ]


def is_test(group: str) -> bool:
    """Whether a group of scored samples, by its name in the record, is the test and no validation."""
    return group == TEST or group.startswith((f"{TEST} ", f"{TEST}-", f"{TEST}_"))


def _name(path: Path, paths: Sequence[Path]) -> str:
    others = {other for other in paths if other != path}
    for parts in range(1, len(path.parts)):
        end = path.parts[-parts:]
        if not any(other.parts[-parts:] == end for other in others):
            return "/".join(end)
    return str(path)
