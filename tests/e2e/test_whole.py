"""From text to an answer over HTTP, small: every command of the house as a person types it."""

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
COURSE = ["--global-batch-size", "8", "--lr", "3e-3", "--lr-decay-style", "constant"]
COURSE += ["--eval-iters", "0", "--log-interval", "5"]


def typed(program: str, *argv: object) -> str:
    """What a command says on stdout, having ended well."""
    command = [str(BIN / program), *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def trained(*argv: object) -> str:
    """What a training run on two processes says."""
    return typed("torchrun", "--standalone", "--nproc-per-node", 2, "-m", "mega_train", "gpt", *argv, *COURSE)


@contextmanager
def serving(load: Path) -> Iterator[str]:
    """The URL of a server of the checkpoint."""
    command = [str(BIN / "mega-serve"), "--load", str(load), "--port", "0", "--device", "cpu"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as server:
        try:
            assert server.stdout is not None
            ready = re.search(r"http://[\d.:]+", server.stdout.readline())
            assert ready, server.communicate()[1]
            yield ready[0]
        finally:
            server.kill()


@pytest.mark.skipif(not (BIN / "mega-train").exists(), reason=f"no console scripts in {BIN}")
def test_text_becomes_an_answer_over_http(tmp_path: Path) -> None:
    text, held_out, words, corpus = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "words", "corpus"))
    typed(
        "mega-data",
        "sample",
        "--output",
        text,
        "--held-out",
        held_out,
        "--megabytes",
        0.3,
        "--held-out-share",
        0.1,
        "--workers",
        1,
    )
    typed("mega-data", "train-tokenizer", "--input", text, "--vocab-size", 300, "--output", words)
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", words, "--append-eod"]
    typed("mega-data", "preprocess", "--input", text, "--output-prefix", corpus, *tokenizer)
    data = ["--data-path", f"{corpus}_text_document"]

    tensor, pipeline = tmp_path / "tensor", tmp_path / "pipeline"
    said = trained(*data, *MODEL, "--tensor-model-parallel-size", 2, "--train-iters", 20, "--save", tensor)
    losses = [float(loss) for loss in re.findall(r"\| loss ([\d.]+) \|", said)]
    assert len(losses) == 4
    assert losses[0] > losses[-1] + 0.3, "it learns"
    assert losses[0] < math.log(300) + 0.5

    typed("mega-ckpt", "reshard", "--load", tensor, "--save", pipeline, "--tp", 1, "--pp", 2)
    resume = ["--load", pipeline, "--save", pipeline, "--pipeline-model-parallel-size", 2]
    said = trained(*data, *resume, "--train-iters", 25)
    assert "tp 1 x pp 2 x dp 1" in said
    assert "from iteration 20" in said
    (on,) = (float(loss) for loss in re.findall(r"\| loss ([\d.]+) \|", said))
    assert on < losses[-2], "it goes on where it was, not from the beginning"
    typed("mega-ckpt", "verify", pipeline)

    scores = tmp_path / "scores.json"
    typed("mega-eval", "perplexity", "--load", pipeline, "--data", held_out, "--output", scores)
    result = json.loads(scores.read_text("utf-8"))
    assert result["checkpoint"]["iteration"] == 25
    assert result["scores"]["loss"] == pytest.approx(on, abs=0.5), "text it has not seen, like text it has"

    with serving(pipeline) as url:
        body = {"prompts": ["The module"], "tokens_to_generate": 8, "top_k": 1}
        (answer,) = httpx.put(f"{url}/api", json=body, timeout=60).json()["text"]
    assert answer.startswith("The module")
    assert len(answer) > len("The module")
