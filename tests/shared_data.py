"""Locate the shared data: outputs of Megatron's own code, real corpora, tokenizers and checkpoints.

The folder is the one that MEGA_SHARED names, by default `shared` beside the checkout. It is not part of the
repository. Tests that need it are skipped where the folder is absent; a file missing from it is a failure.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHARED = Path(os.environ.get("MEGA_SHARED") or ROOT.parent / "shared").absolute()
# every skip for this cause begins with these words: the summary of a run counts them
NO_SHARED_DATA = "no shared data"
REASON = f"{NO_SHARED_DATA}: {SHARED} is not a folder; set MEGA_SHARED"

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=REASON)


def require_shared() -> Path:
    """Return the folder of the shared data; skip the calling test where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(REASON)
    return SHARED
