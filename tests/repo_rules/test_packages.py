"""Required content of every package, and start-up of its program."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.repo_rules.repository import PACKAGES, PROGRAMS, ROOT, Package

HEAVY = {"torch", "numpy", "tokenizers", "matplotlib", "fastapi", "transformers", "safetensors", "rich"}
each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
each_program = pytest.mark.parametrize("program", PROGRAMS)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_there_are_six_packages_and_five_programs() -> None:
    assert [package.name for package in PACKAGES] == [
        *("mega-ckpt", "mega-data", "mega-eval", "mega-schema", "mega-serve", "mega-train")
    ]
    assert PROGRAMS == ["mega-ckpt", "mega-data", "mega-eval", "mega-serve", "mega-train"]


@each_package
def test_a_package_is_typed_and_documented(package: Package) -> None:
    assert all((root / "py.typed").is_file() for root in package.roots)
    readme = (package.folder / "README.md").read_text("utf-8")
    assert readme.startswith(f"# {package.name}\n")
    assert "Limitation" in readme


@each_package
def test_a_package_has_one_version_everywhere(package: Package) -> None:
    stated = package.project["version"]
    root = importlib.import_module(package.name.replace("-", "_"))
    changelog = (package.folder / "CHANGELOG.md").read_text("utf-8")
    newest = re.search(r"^## (\S+)(?: \(unreleased\)| - \d{4}-\d{2}-\d{2})$", changelog, re.MULTILINE)
    assert newest is not None
    assert (root.__version__, newest[1], version(package.name)) == (stated, stated, stated)


@each_package
def test_a_changelog_says_something_of_every_version(package: Package) -> None:
    changelog = (package.folder / "CHANGELOG.md").read_text("utf-8")
    for entry in re.split(r"^## .*$", changelog, flags=re.MULTILINE)[1:]:
        assert re.search(r"^- \S", entry, re.MULTILINE)


@each_program
def test_the_installed_program_tells_its_version(program: str) -> None:
    stated = next(package for package in PACKAGES if package.name == program).project["version"]
    result = run(str(Path(sys.executable).parent / program), "--version")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split()[-1] == stated


@each_program
def test_help_answers_without_importing_anything_heavy(program: str) -> None:
    result = run(sys.executable, "-X", "importtime", "-m", program.replace("-", "_"), "--help")
    assert result.returncode == 0
    assert result.stdout.startswith("Usage: ")
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert "click" in imported  # the list is one of modules
    assert imported & HEAVY == set()


@each_package
def test_metadata_name_authors_license_and_purpose(package: Package) -> None:
    project = package.project
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert (package.folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert project["authors"] == [{"name": "Mega contributors"}]
    assert project["keywords"]
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.11"} <= set(project["classifiers"])


@each_package
def test_a_package_takes_no_other_minor_version_of_the_schema(package: Package) -> None:
    """Siblings import the schema's internals, which change with its minor version."""
    schema = next(package for package in PACKAGES if package.name == "mega-schema").project["version"]
    wanted = f"~={schema.rpartition('.')[0]}.0"
    pins = [pin for pin in package.project["dependencies"] if pin.startswith("mega-schema")]
    assert [re.sub(r"mega-schema(\[\w+\])?", "", pin) for pin in pins] == [wanted] * (
        package.name != "mega-schema"
    )


@each_package
def test_click_is_new_enough_for_one_line_errors(package: Package) -> None:
    """mega_schema.app.cli_runner names click.exceptions.NoArgsIsHelpError, which click 8.2 added."""
    floors = [pin for pin in package.project["dependencies"] if pin.startswith("click")]
    assert floors == ["click>=8.2"] * len(floors)
    assert floors or "mega-schema" in " ".join(package.project["dependencies"])
