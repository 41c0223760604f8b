"""The whole way on a small scale, from raw text to generated text over HTTP, with the installed programs."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

BIN = Path(sys.executable).parent  # where the console scripts are installed
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
MODEL = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "64"]
SCHEDULE = ["--global-batch-size", "8", "--lr", "3e-3", "--lr-decay-style", "constant"]
SCHEDULE += ["--eval-iters", "0", "--log-interval", "5"]


def run_program(program: str, *argv: object) -> str:
    """Run a program, check that it succeeds, and return its stdout."""
    command = [str(BIN / program), *map(str, argv)]
    process = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert process.returncode == 0, f"{' '.join(command)}\n{process.stdout}\n{process.stderr}"
    return process.stdout


def train(*argv: object) -> str:
    """Train on two processes, and return the output of the run."""
    launch = ["--standalone", "--nproc-per-node", 2, "-m", "mega_train", "gpt"]
    return run_program("torchrun", *launch, *argv, *SCHEDULE)


@contextmanager
def run_server(load: Path) -> Iterator[str]:
    """Serve the checkpoint; yields the URL once the model is loaded. The server ends well at SIGTERM."""
    command = [str(BIN / "mega-serve"), "--load", str(load), "--port", "0", "--device", "cpu"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as server:
        try:
            assert server.stdout is not None
            match = re.search(r"http://[\d.:]+", server.stdout.readline())
            assert match, server.communicate()[1]
            yield match[0]
            server.terminate()
            assert server.wait(60) == 0
        finally:
            server.kill()


@pytest.mark.skipif(not (BIN / "mega-train").exists(), reason=f"no console scripts in {BIN}")
def test_raw_text_becomes_generated_text_over_http(tmp_path: Path) -> None:
    text, held_out, vocabulary, corpus = (
        tmp_path / name for name in ("a.jsonl", "b.jsonl", "words", "corpus")
    )
    run_program(
        "mega-data",
        "sample",
        "--output",
        text,
        "--held-out",
        held_out,
        "--megabytes",
        0.3,
        "--held-out-fraction",
        0.1,
        "--workers",
        1,
    )
    run_program("mega-data", "train-tokenizer", "--input", text, "--vocab-size", 300, "--output", vocabulary)
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", vocabulary, "--append-eod"]
    run_program("mega-data", "preprocess", "--input", text, "--output-prefix", corpus, *tokenizer)
    data = ["--data-path", f"{corpus}_text_document"]

    tensor = tmp_path / "tensor"
    pipeline = tmp_path / "pipeline"
    output = train(*data, *MODEL, "--tensor-model-parallel-size", 2, "--train-iters", 20, "--save", tensor)
    losses = [float(loss) for loss in re.findall(r"\| loss ([\d.]+) \|", output)]
    assert len(losses) == 4
    assert losses[0] > losses[-1] + 0.3, "the loss falls"
    assert losses[0] < math.log(300) + 0.5

    run_program("mega-ckpt", "reshard", "--load", tensor, "--save", pipeline, "--tp", 1, "--pp", 2)
    resume = ["--load", pipeline, "--save", pipeline, "--pipeline-model-parallel-size", 2]
    output = train(*data, *resume, "--train-iters", 25)
    assert "tp 1 x pp 2 x dp 1" in output
    assert "from iteration 20" in output
    (resumed_loss,) = (float(loss) for loss in re.findall(r"\| loss ([\d.]+) \|", output))
    assert resumed_loss < losses[-2], "the run continues, it does not start again"
    run_program("mega-ckpt", "verify", pipeline)

    scores = tmp_path / "scores.json"
    run_program("mega-eval", "perplexity", "--load", pipeline, "--data", held_out, "--output", scores)
    result = json.loads(scores.read_text("utf-8"))
    assert result["model"]["iteration"] == 25
    assert result["metrics"]["loss"]["value"] == pytest.approx(resumed_loss, abs=0.5), (
        "held-out loss is close to training loss"
    )

    with run_server(pipeline) as url:
        body = {"prompts": ["The module"], "tokens_to_generate": 8, "top_k": 1}
        (generated,) = httpx.put(f"{url}/api", json=body, timeout=60).json()["text"]
        completion = {"prompt": "The module", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=completion, timeout=60).json()
    assert generated.startswith("The module")
    assert len(generated) > len("The module")
    assert answer["choices"][0]["text"] == generated.removeprefix("The module"), "both APIs, one model"
