"""Fixtures of more than one folder of tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest


@pytest.fixture
def paths_need_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """An example of a document or a launcher names files of its reader's."""

    def convert(self: click.Path, value: Any, *_: object) -> Path:
        return Path(value)

    monkeypatch.setattr(click.Path, "convert", convert)
