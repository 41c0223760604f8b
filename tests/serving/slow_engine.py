"""`mega-serve` with an engine whose steps take 20 ms, so that a test can act while a request runs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from mega_schema.app.cli_runner import run_command
from mega_serve.commands import serve
from mega_serve.process.engine_process import LoadedEngine

STEP_SECONDS = 0.02


def build_slow_engine(options: Mapping[str, Any]) -> LoadedEngine:
    """Build the engine of mega-serve, and a wait before each step."""
    from mega_serve.execution.engine_factory import build_engine

    engine = build_engine(options)

    def wait() -> None:
        if engine.core.has_work:
            time.sleep(STEP_SECONDS)

    return LoadedEngine(core=engine.core, model=engine.model, between_steps=wait, close=engine.close)


def main() -> None:
    """Run the program."""
    run_command(
        serve.build_serve_command(
            "tests.serving.slow_engine:build_slow_engine", serve._build_apis, serve._build_pages
        )
    )
