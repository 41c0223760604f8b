"""Skip the tests that need Megatron Core if it is not installed."""

from __future__ import annotations

import pytest

from bench.gpu.peers import is_installed


@pytest.fixture(scope="session", autouse=True)
def megatron_core() -> None:
    for module in ("megatron.core", "psutil"):  # their writer of checkpoints wants psutil
        if not is_installed(module):
            pytest.skip(f"{module} is not installed: pip install -r requirements-test.txt")
