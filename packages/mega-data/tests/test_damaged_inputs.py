"""Thousands of damaged inputs are refused with little memory, or are still valid; none crashes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("datasets", 1000),
        ("lines", 1000),
        pytest.param("datasets", 8000, marks=pytest.mark.long),
        pytest.param("lines", 2000, marks=pytest.mark.long),
    ],
)
def test_no_damaged_input_is_a_crash_or_costs_memory(kind, count, tmp_path):
    program = Path(__file__).with_name("damaged_inputs.py")
    words = [sys.executable, program, tmp_path, kind, "7", str(count)]
    process = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    refused, whole = json.loads(process.stdout)
    assert refused + whole == count
    assert refused > count // 2
    assert whole > count // 100  # a mutation may change an id to another, or a letter of a text
