"""Exit codes of processes in words."""

from __future__ import annotations


def describe_exit(code: int) -> str:
    """Return how a process ended, for the end of a sentence.

    Args:
        code: as `subprocess.Popen.returncode`: negative after a signal.
    """
    return f"got signal {-code}" if code < 0 else f"exited with code {code}"
