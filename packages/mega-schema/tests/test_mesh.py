"""World and mesh of one process; tests/parity tests the axes on several processes."""

from __future__ import annotations

import pytest

from mega_model.distributed.mesh import World
from mega_schema.errors import ConfigError


def test_without_torchrun_a_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert World.from_env() == World(1, 0, 0)


def test_torchrun_says_who_a_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD_SIZE", "16"), ("RANK", "9"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert World.from_env() == World(16, 9, 1)


@pytest.mark.parametrize("text", ["abc", "", "-1", "1.5"])
def test_a_rank_that_is_no_number_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", text)
    with pytest.raises(ConfigError, match="^RANK: not a number: found"):
        World.from_env()
