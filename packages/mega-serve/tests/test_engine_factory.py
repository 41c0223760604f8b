"""The engine that the factory builds from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from mega_schema.errors import ConfigError
from mega_serve.engine.interfaces import Chunk, RunnerOutput
from mega_serve.engine.requests import EngineRequest, SamplingParams
from mega_serve.execution.engine_factory import build_engine
from mega_serve.execution.model_runner import TorchModelRunner


def test_attention_that_does_not_run_here_and_a_pool_without_pages_are_refused_before_the_model_is_loaded(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("loads the model")

    monkeypatch.setattr("mega_serve.execution.engine_factory.load_weights", load)
    with pytest.raises(ConfigError, match="--attention flash: needs a GPU: found cpu"):
        build_engine({"load": str(checkpoint), "device": "cpu", "attention": "flash"})
    with pytest.raises(ConfigError, match="--kv-cache-memory: holds no page: found 1000 bytes, wanted "):
        build_engine({"load": str(checkpoint), "device": "cpu", "kv_cache_memory": 1000})


def test_kernels_run_before_the_engine_is_ready(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    run = TorchModelRunner.run

    def record(runner: TorchModelRunner, chunks: Sequence[Chunk]) -> RunnerOutput:
        lengths.extend(len(chunk.token_ids) for chunk in chunks)
        return run(runner, chunks)

    monkeypatch.setattr(TorchModelRunner, "run", record)
    core = build_engine({"load": str(checkpoint), "device": "cpu", "kv_cache_memory": 1 << 20}).core
    assert lengths == [20, 1]
    assert core.stats().kv_usage == 0
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    core.add(EngineRequest(request_id="a", prompt_token_ids=(5, 6, 7), params=params))
    outputs = [output for _ in range(4) for output in core.step()]
    assert sum(len(output.token_ids) for output in outputs) == 4
    assert outputs[0].cached_tokens == 0
