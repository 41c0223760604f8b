"""Skips what asks Megatron Core itself where it is not installed."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture(scope="session", autouse=True)
def megatron_core() -> None:
    for module in ("megatron.core", "psutil"):  # their writer of checkpoints wants psutil
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            pytest.skip(f"{module} is not installed: pip install -r requirements-test.txt")
