"""BERT and T5 from raw text by the commands: split sentences, train, resume; BERT to transformers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mega_ckpt.cli import cli as mega_ckpt
from mega_data.cli import commands as mega_data
from mega_train.cli import app as mega_train
from mega_train.telemetry.event_log import read_events
from tests.selection import long

WORDS = ("the", "a", "sea", "ship", "wind", "river", "mountain", "walks", "sails", "sees", "finds")
WORDS += ("and", "under", "over", "old", "small")
MODEL = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "48"]
MODEL += ["--no-bias-gelu-fusion"]  # transformers has one GELU for layers and head
# Megatron's flags of pretrain_bert.sh
SCRIPT = "--micro-batch-size 4 --global-batch-size 8 --lr 2e-3 --lr-decay-style constant --min-lr 1e-4"
SCRIPT += " --weight-decay 1e-2 --clip-grad 1.0 --split 949,50,1 --data-impl mmap --log-interval 10"
SCRIPT += " --save-interval 10 --eval-interval 10 --eval-iters 1 --distributed-backend gloo"


def _run(program: click.Command, *argv: object) -> str:
    """Run a command in this process, check that it succeeds, and return its output."""
    result = CliRunner().invoke(program, [str(word) for word in argv])
    assert result.exit_code == 0, result.exception or result.output
    return result.output


def _train(ranks: int, family: str, *argv: object) -> str:
    words = [family, *map(str, argv), *SCRIPT.split()]
    if ranks == 1:
        return _run(mega_train, *words)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    process = subprocess.run(
        [*launch, "-m", "mega_train", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=200,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def _write_text(folder: Path) -> None:
    sentences = [
        f"{WORDS[i % 2].title()} {WORDS[2 + i % 5]} {WORDS[7 + i % 4]} {WORDS[11 + i % 3]} "
        f"{WORDS[i % 2]} {WORDS[14 + i % 2]} {WORDS[2 + i % 5]}."
        for i in range(400)
    ]
    documents = [" ".join(sentences[i : i + 8]) for i in range(0, 400, 4)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=long)])
def test_raw_text_becomes_a_bert_that_transformers_runs(tmp_path: Path, ranks: int) -> None:
    _write_text(tmp_path)
    vocab = tmp_path / "vocab.txt"
    words = ["--input", tmp_path / "text.jsonl", "--output-prefix", tmp_path / "c", "--workers", 1]
    words += ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", vocab, "--split-sentences"]
    _run(mega_data, "preprocess", *words)
    run = tmp_path / "run"
    data = ["--data-path", tmp_path / "c_text_sentence", "--vocab-file", vocab, "--save", run, "--load", run]
    tensor = ["--tensor-model-parallel-size", 2, "--sequence-parallel"] if ranks > 1 else []
    _train(ranks, "bert", *data, *MODEL, "--train-iters", 10, *tensor)
    out = _train(
        ranks, "bert", *data, *MODEL, "--train-iters", 40
    )  # on two ranks: data parallel from here on
    assert re.search(r"^validation at iteration 40 \| loss .* \| lm loss .* \| sop loss ", out, re.MULTILINE)
    starts = [event["iteration"] for event in read_events(run) if event["event"] == "train_start"]
    assert starts == [0, 10]
    logged = [event["loss_terms"] for event in read_events(run) if event["event"] == "train_log"]
    assert logged[-1]["lm loss"] < logged[0]["lm loss"]
    words = ["--from", "mega", "--to", "hf", "--load", run, "--save", tmp_path / "hf"]
    words += ["--no-check-logits"] if ranks == 1 else []  # transformers takes seconds to import
    _run(mega_ckpt, "convert", *words)
    config = json.loads((tmp_path / "hf/config.json").read_text("utf-8"))
    assert config["architectures"] == ["MegatronBertForPreTraining"]
    words = ["--from", "mega", "--to", "megatron", "--load", run, "--save", tmp_path / "megatron"]
    _run(mega_ckpt, "convert", *words)
    assert list((tmp_path / "megatron").rglob("model_optim_rng.pt"))


@long
def test_raw_text_trains_a_t5_on_two_ranks_that_resumes_on_another_layout(tmp_path: Path) -> None:
    _write_text(tmp_path)
    vocab = tmp_path / "vocab.txt"
    tokenizer = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", vocab, "--vocab-extra-ids", 20]
    words = ["--input", tmp_path / "text.jsonl", "--output-prefix", tmp_path / "c", "--workers", 1]
    _run(mega_data, "preprocess", *words, *tokenizer, "--split-sentences")
    run = tmp_path / "run"
    data = ["--data-path", tmp_path / "c_text_sentence", "--save", run, "--load", run]
    # Megatron's flags of pretrain_t5.sh
    model = ["--encoder-num-layers", 2, "--decoder-num-layers", 1, "--hidden-size", 32]
    model += ["--num-attention-heads", 4, "--kv-channels", 8, "--ffn-hidden-size", 64]
    model += ["--encoder-seq-length", 48, "--decoder-seq-length", 32, "--max-position-embeddings", 48]
    tensor = ["--tensor-model-parallel-size", 2, "--sequence-parallel", "--hidden-dropout", 0.1]
    _train(
        2, "t5", *data, *model, "--vocab-file", vocab, "--vocab-extra-ids", 20, "--train-iters", 10, *tensor
    )
    out = _train(2, "t5", *data, *model, "--use-distributed-optimizer", "--train-iters", 60)
    assert re.search(r"^validation at iteration 60 \| loss ", out, re.MULTILINE)
    starts = [event["iteration"] for event in read_events(run) if event["event"] == "train_start"]
    assert starts == [0, 10]
    losses = [event["loss"] for event in read_events(run) if event["event"] == "train_log"]
    assert losses[-1] < 0.7 * losses[0]
