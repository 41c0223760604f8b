"""The GPU benchmarks start on a CPU, so that errors are found without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.peers import is_installed

GPU = Path(__file__).parents[2] / "bench/gpu"
PEERS = {"hugging_face": "transformers", "megatron_core": "megatron.core"}


@pytest.mark.parametrize(
    ("script", "keys"),
    [
        ("kernels.py", {"kernel", "milliseconds", "ratio"}),
        pytest.param(
            "step.py",
            {"mfu", "of_products", "seconds_by_kind", "hugging_face", "megatron_core"},
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_benchmark_for_gpus_runs_tiny_on_a_cpu(script: str, keys: set[str], tmp_path: Path) -> None:
    words = [sys.executable, GPU / script, "--smoke", "--json", tmp_path / "found.json"]
    subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, check=True)
    results = json.loads((tmp_path / "found.json").read_text("utf-8"))["results"]
    assert results
    assert all(keys <= set(result) for result in results)
    for peer, module in PEERS.items():
        if is_installed(module):
            assert all("tokens_per_second" in result[peer] for result in results if peer in keys)


def test_the_serving_benchmark_for_gpus_runs_small_on_a_cpu(tmp_path: Path) -> None:
    if not is_installed("transformers"):
        pytest.skip("transformers is not installed: pip install -r requirements-test.txt")
    words = [sys.executable, GPU / "serve.py", "--small", "--json", tmp_path / "result.json"]
    subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, check=True)
    report = json.loads((tmp_path / "result.json").read_text("utf-8"))
    (result,) = report["results"]
    assert {"date", "hardware", "torch"} <= set(report)
    assert result["rows_equal"] == 1  # the same greedy tokens as transformers'
    assert result["ours"]["tokens_per_second"] > 0
    assert result["of_bound"] > 0


@pytest.mark.parametrize("script", ["kernels.py", pytest.param("step.py", marks=pytest.mark.long)])
def test_without_a_gpu_nothing_is_measured(script: str) -> None:
    process = subprocess.run(
        [sys.executable, GPU / script],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 1
    assert process.stderr.strip() == "no GPU here: --smoke shows on a CPU that this runs"
