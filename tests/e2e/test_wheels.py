"""Wheels and source archives are complete, and each program runs from its wheel outside the checkout."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.repo_rules.repository import PACKAGES, ROOT, Package

SITES = [place for place in sys.path if place.endswith("site-packages")]
# a command that does something, or a mistake that is answered in one line, and its exit code
COMMANDS = {
    "mega-data": (["sample", "--output", "corpus.jsonl", "--megabytes", "0.2", "--workers", "1"], 0),
    "mega-train": (["explain", "--swiglu"], 0),
    "mega-ckpt": (["inspect", "nothing-here"], 2),
    "mega-serve": (["--load", "nothing-here"], 2),
    "mega-eval": (["perplexity", "--load", "nothing-here", "--data", "nothing-here.jsonl"], 2),
}


def _run(*words: object, folder: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == code, f"{words}\n{process.stdout}\n{process.stderr}"
    return process


def _build(package: Package, folder: Path) -> tuple[Path, Path]:
    """Build a wheel and a source archive from the files of the package."""
    source = folder / "source" / package.name
    shutil.copytree(package.folder, source, ignore=shutil.ignore_patterns("__pycache__"))
    _run(sys.executable, "-m", "hatchling", "build", "-d", folder / "dist", folder=source)
    stem = f"{package.name.replace('-', '_')}-{package.project['version']}"
    return folder / "dist" / f"{stem}-py3-none-any.whl", folder / "dist" / f"{stem}.tar.gz"


def _check(package: Package, folder: Path) -> Path:
    """Check what the two archives of a package hold; return the wheel."""
    wheel, archive = _build(package, folder)
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        info = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(file.read(info))
        license_text = file.read(info.replace("METADATA", "licenses/LICENSE"))
    assert license_text == (ROOT / "LICENSE").read_bytes()
    files = {path for root in package.roots for path in root.rglob("*") if path.is_file()}
    sources = {path.relative_to(package.folder / "src").as_posix() for path in files if path.suffix != ".pyc"}
    assert not sources - names, "files of the sources that the wheel lacks"
    assert {f"{root.name}/py.typed" for root in package.roots} <= names
    assert (metadata["License-Expression"], metadata["Author"]) == ("Apache-2.0", "Mega contributors")
    assert metadata["Keywords"]
    assert metadata.get_all("Classifier")
    with tarfile.open(archive) as file:
        members = {name.partition("/")[2] for name in file.getnames()}
    assert {"LICENSE", "CHANGELOG.md", "README.md", "pyproject.toml"} <= members
    return wheel


def _environment(folder: Path, *wheels: Path) -> None:
    """Make an environment with these wheels that sees the libraries of the running one."""
    _run(sys.executable, "-m", "venv", "--without-pip", folder, folder=folder.parent)
    (site,) = folder.glob("lib/python3.*/site-packages")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    _run(*pip, "--no-deps", "--no-index", "--target", site, *wheels, folder=folder)
    (site / "libraries.pth").write_text("\n".join(SITES) + "\n", "utf-8")  # its .pth files are not read again


def test_the_archives_of_the_schema_hold_license_changelog_and_metadata(tmp_path: Path) -> None:
    schema = next(package for package in PACKAGES if package.name == "mega-schema")
    assert _check(schema, tmp_path).is_file()


@pytest.mark.long
def test_each_program_runs_from_its_wheel_alone_outside_the_checkout(tmp_path: Path) -> None:
    wheels = {package.name: _check(package, tmp_path) for package in PACKAGES}
    for package in PACKAGES:
        folder = tmp_path / package.name
        _environment(folder, *{wheels["mega-schema"], wheels[package.name]})
        python = folder / "bin" / "python"
        code_of_package = "import sys, {0}; print({0}.__file__)".format(package.roots[-1].name)
        assert str(folder) in _run(python, "-c", code_of_package, folder=tmp_path).stdout
        for sibling in PACKAGES:
            if sibling.name not in ("mega-schema", package.name):
                absent = _run(python, "-c", f"import {sibling.roots[0].name}", folder=tmp_path, code=1)
                assert "ModuleNotFoundError" in absent.stderr
        if package.name not in COMMANDS:
            continue
        program = [python, "-m", package.roots[0].name]
        assert _run(*program, "--version", folder=tmp_path).stdout.split()[-1] == package.project["version"]
        assert _run(*program, "--help", folder=tmp_path).stdout.startswith("Usage: ")
        words, code = COMMANDS[package.name]
        result = _run(*program, *words, folder=tmp_path, code=code)
        assert "Traceback" not in result.stderr
        assert not code or result.stderr.splitlines()[-1].startswith("error: ")
