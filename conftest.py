"""Fixtures and the summary of every test run in this checkout."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

from tests.shared_data import NO_SHARED_DATA, ROOT, require_shared

# no test asserts a time: a busy machine needs more than hypothesis' 200 ms for an example
hypothesis.settings.register_profile("mega", deadline=None)
hypothesis.settings.load_profile("mega")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep modules and test items out of garbage collection: they stay, and are a million objects.

    The garbage collector would look through them while they are made, in tests that ask what is alive, and
    in every fork, which would copy their pages.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Undo the freeze of `pytest_collection`: libraries report what is alive at the end of the process."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of the shared data; a test that asks for it is skipped where the folder is absent."""
    return require_shared()


@pytest.fixture(scope="session")
def golden(shared: Path) -> Path:
    """Outputs of Megatron's own code, recorded; skipped like `shared`."""
    return shared / "golden"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests ran in each package, and how many were skipped because data is absent."""
    ran: Counter[str] = Counter()
    for outcome in ("passed", "failed", "xfailed"):
        for report in terminalreporter.getreports(outcome):
            if isinstance(report, pytest.TestReport) and report.when == "call":
                ran["/".join(report.nodeid.split("/")[:2])] += 1
    if not ran:
        return
    folders = [folder.relative_to(ROOT).as_posix() for folder in sorted(ROOT.glob("packages/*/"))]
    counts = ", ".join(f"{folder.removeprefix('packages/')} {ran.pop(folder, 0)}" for folder in folders)
    terminalreporter.write_line(f"tests run: {counts}, across packages {ran.total()}")
    skipped = [report.longrepr for report in terminalreporter.getreports("skipped")]
    reasons = [str(place[2]).removeprefix("Skipped: ") for place in skipped if isinstance(place, tuple)]
    absent = [reason for reason in reasons if reason.startswith(NO_SHARED_DATA)]
    if absent:
        terminalreporter.write_line(f"{len(absent)} tests skipped: {absent[0]}")
