"""List the tracked files, the packages and their programs."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Package:
    """One distribution under packages/."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def project(self) -> dict[str, Any]:
        """The [project] table of its pyproject.toml."""
        table: dict[str, Any] = tomllib.loads((self.folder / "pyproject.toml").read_text("utf-8"))["project"]
        return table

    @property
    def roots(self) -> list[Path]:
        """Its import roots: one, or two in mega-schema."""
        return sorted(path.parent for path in self.folder.glob("src/*/__init__.py"))


PACKAGES = [Package(path.parent) for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
PROGRAMS = sorted(name for package in PACKAGES for name in package.project.get("scripts", {}))


@cache
def tracked_files() -> tuple[Path, ...]:
    """Every file of the repository, as git knows them."""
    # the setting lets git look at a clone that another user owns, as in a container
    git = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    listed = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True)
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    return tuple(file for file in files if file.is_file())  # one that is deleted but not yet committed is not


def relative_name(path: Path) -> str:
    """A file as people name it: relative to the root of the repository."""
    return path.relative_to(ROOT).as_posix()


def sources() -> dict[str, ast.Module]:
    """Every module under packages/*/src, parsed, by its name."""
    files = [file for package in PACKAGES for root in package.roots for file in sorted(root.rglob("*.py"))]
    return {relative_name(file): ast.parse(file.read_text("utf-8")) for file in files}
