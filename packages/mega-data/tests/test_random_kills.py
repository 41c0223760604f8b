"""A command killed at random moments leaves no mix of datasets, and the next run completes it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("kind", ["merge", "preprocess"])
def test_whenever_it_is_killed_the_dataset_is_the_old_the_new_or_absent(kind, tmp_path):
    program = Path(__file__).with_name("random_kills.py")
    words = [sys.executable, program, tmp_path, kind, "3", "50"]
    process = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    seen = json.loads(process.stdout)
    assert seen["killed"] > 10, "most children were done before they were killed"
    assert seen.get("old", 0) + seen.get("new", 0) + seen.get("absent", 0) == 50
