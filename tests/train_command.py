"""Run `mega-train` in the process of a test."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout

import pytest

from mega_train.cli import main


def run_mega_train(*argv: str, code: int = 0) -> tuple[str, str]:
    """Run a command that must exit with `code`; return its stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == code, err.getvalue()
    return out.getvalue(), err.getvalue()
