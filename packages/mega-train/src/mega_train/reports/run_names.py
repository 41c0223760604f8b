"""Short distinct names of run folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

TEST = "test"  # the group of samples that is scored once, after training


def name_runs(folders: Sequence[Path]) -> list[str]:
    """Name each folder by the shortest unique suffix of its path; duplicates get a number."""
    paths = [folder.resolve() for folder in folders]
    names = [_name(path, paths) for path in paths]
    return [
        f"{name} ({names[: index + 1].count(name)})" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]


def is_test(group: str) -> bool:
    """Whether a group of evaluated samples is the test and not a validation."""
    return group == TEST or group.startswith((f"{TEST} ", f"{TEST}-", f"{TEST}_"))


def _name(path: Path, paths: Sequence[Path]) -> str:
    other_paths = {other_path for other_path in paths if other_path != path}
    for parts in range(1, len(path.parts)):
        suffix = path.parts[-parts:]
        if not any(other_path.parts[-parts:] == suffix for other_path in other_paths):
            return "/".join(suffix)
    return str(path)
