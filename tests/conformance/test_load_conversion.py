"""--load with a Hugging Face or a Megatron folder: conversion before the run, and reuse of the copy."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from mega_ckpt.cli import cli as mega_ckpt
from mega_ckpt.name_maps.alias import whole_slab
from mega_schema.checkpoint.reader import MODEL, Checkpoint
from mega_schema.dataset.indexed_dataset import DatasetInfo, IndexedWriter
from mega_schema.tokenizer.tokenizer import open_tokenizer
from mega_train.cli import main
from mega_train.telemetry.event_log import read_events
from tests.processes import on_ranks

Train = Callable[..., list[str]]
VOCABULARY = 33
MODEL_FLAGS = ["--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2"]
RUN = ["--seq-length", "16", "--global-batch-size", "4", "--lr", "0.01", "--eval-iters", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("foreign")


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Path:
    tokenizer = open_tokenizer("NullTokenizer", vocab_size=VOCABULARY - 1)
    info = DatasetInfo(tokenizer=tokenizer.identity)
    with IndexedWriter(folder / "toy_text_document", np.uint16, info=info) as out:
        for begin in range(60):
            out.add([*((begin + 7 * np.arange(20)) % (VOCABULARY - 1)), VOCABULARY - 1])
            out.end_document()
    return folder / "toy_text_document"


@pytest.fixture(scope="module")
def trained_run(folder: Path, corpus: Path) -> Path:
    """A run of three steps, and what Hugging Face and Megatron would have made of it beside it."""
    _run(corpus, *MODEL_FLAGS, "--train-iters", "3", "--save", str(folder / "ours"))
    for form in ("hf", "megatron"):
        words = [
            "convert",
            "--from",
            "mega",
            "--to",
            form,
            "--load",
            folder / "ours",
            "--save",
            folder / form,
        ]
        result = CliRunner().invoke(
            mega_ckpt, [*map(str, words), "--no-check-logits"], catch_exceptions=False
        )
        assert result.exit_code == 0, result.output
    return folder / "ours"


def _run(corpus: Path, *words: str, code: int = 0) -> str:
    """Train in this process; what was printed on stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
        main(["gpt", "--data-path", str(corpus), *RUN, *words])
    assert left.value.code == code, err.getvalue()
    return err.getvalue()


@pytest.fixture
def train(corpus: Path, caplog: pytest.LogCaptureFixture) -> Train:
    """Train in this process; the lines that a person reads on stderr."""

    def lines(*words: str, code: int = 0) -> list[str]:
        caplog.clear()
        printed = _run(corpus, *words, code=code)
        return [*caplog.messages, *printed.splitlines()]

    return lines


def _check_same_weights(left: Path, right: Path) -> None:
    first, second = Checkpoint.open(left), Checkpoint.open(right)
    assert first.tensors[MODEL].keys() == second.tensors[MODEL].keys()
    for name, tensor in first.tensors[MODEL].items():
        whole = whole_slab(tensor.shape)
        np.testing.assert_array_equal(first.model_slab(name, whole), second.model_slab(name, whole))


def test_a_hugging_face_folder_is_converted_in_a_line_and_its_weights_are_loaded(
    trained_run: Path, train: Train, tmp_path: Path
) -> None:
    hf, run = trained_run.parent / "hf", tmp_path / "run"
    output = train("--load", str(hf), "--save", str(run), "--train-iters", "2")
    copy = tmp_path / "run.converted"
    assert output == [
        f"{hf} is a Hugging Face folder: converting it to {copy}",
        f"{copy}: the run begins with only its weights",
    ]
    start = next(event for event in read_events(run) if event["event"] == "train_start")
    assert (start["iteration"], Path(start["loaded"]).parent) == (0, copy)
    _check_same_weights(trained_run, copy)
    (*_, repeated) = train("--load", str(hf), "--save", str(run), "--train-iters", "2", code=2)
    assert (
        "--save: contains checkpoints of a run that began with the same --load: found iteration 2" in repeated
    )
    assert f"hint: --load {run} --save {run} resumes from them" in repeated
    second_output = train("--load", str(hf), "--save", str(run), "--train-iters", "2", "--overwrite")
    assert f"reusing its converted copy {copy}" in second_output[0]
    assert not any("converting" in line for line in second_output)


def test_a_megatron_run_goes_on_with_its_optimizer_state(
    trained_run: Path, train: Train, tmp_path: Path
) -> None:
    run, more = tmp_path / "run", ("--train-iters", "5", "--lr-decay-iters", "3")
    output = train("--load", str(trained_run.parent / "megatron"), "--save", str(run), *more)
    assert "is a Megatron-LM checkpoint: converting it to" in output[0]
    assert output[1].endswith("the run begins with its weights and its optimizer's state")
    start = next(event for event in read_events(run) if event["event"] == "train_start")
    assert start["iteration"] == 3


def test_validate_accepts_a_foreign_load_and_converts_nothing(
    trained_run: Path, corpus: Path, tmp_path: Path
) -> None:
    hf, run = trained_run.parent / "hf", tmp_path / "run"
    argv = ["validate", "--data-path", str(corpus), "--train-iters", "2", "--lr", "0.01"]
    argv += ["--load", str(hf), "--save", str(run), "--json"]

    def run_validate() -> dict[str, object]:
        out = io.StringIO()
        with redirect_stdout(out), pytest.raises(SystemExit) as left:
            main(argv)
        assert left.value.code == 0
        return dict(json.loads(out.getvalue()))

    report = run_validate()
    copy = tmp_path / "run.converted"
    assert report["start"] == f"with {hf}, which mega-ckpt converts to {copy}"
    assert (report["model.num_layers"], report["model.hidden_size"], report["model.vocab_size"]) == (
        2,
        16,
        VOCABULARY,
    )
    assert list(tmp_path.iterdir()) == []
    _run(corpus, "--load", str(hf), "--save", str(run), "--train-iters", "1")
    shutil.rmtree(run)
    assert run_validate()["start"] == f"with the weights of {copy / 'iter_0000000'}"
    argv += ["--num-layers", "3", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "16"]
    err = io.StringIO()
    with redirect_stderr(err), pytest.raises(SystemExit):
        main(argv)
    assert "differs from the checkpoint's: found 3, wanted 2" in err.getvalue()


def test_a_changed_source_is_converted_anew_and_a_damaged_copy_too(
    trained_run: Path, train: Train, tmp_path: Path
) -> None:
    hf, run = tmp_path / "hf", tmp_path / "run"
    shutil.copytree(trained_run.parent / "hf", hf)
    words = ["--load", str(hf), "--save", str(run), "--train-iters", "1", "--overwrite"]
    assert "converting it to" in train(*words)[0]
    os.utime(hf / "config.json", ns=(1, 1))
    assert "converting it to" in train(*words)[0]
    weights = max((tmp_path / "run.converted").rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    weights.write_bytes(weights.read_bytes()[:-8])
    assert "converting it to" in train(*words)[0]


def test_a_source_that_cannot_be_converted_is_one_line_and_leaves_nothing(
    trained_run: Path, train: Train, tmp_path: Path
) -> None:
    hf = tmp_path / "hf"
    shutil.copytree(trained_run.parent / "hf", hf)
    (hf / "config.json").write_text('{"model_type": "mamba"}')
    output = train("--load", str(hf), "--save", str(tmp_path / "run"), "--train-iters", "1", code=2)
    assert output[-1].startswith(f"error: --load {hf}: cannot be converted: found ")
    assert "model_type" in output[-1]
    assert not [path.name for path in tmp_path.iterdir() if path.name != "hf"]


def test_two_ranks_load_a_hugging_face_folder_and_one_of_them_converts_it(
    trained_run: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    files = ["--load", str(trained_run.parent / "hf"), "--save", str(tmp_path / "run")]
    words = ["gpt", "--data-path", str(corpus), *RUN, *files, "--train-iters", "2"]
    on_ranks("mega_train", [*words, "--tensor-model-parallel-size", "2"], 2, tmp_path)
    printed = "".join((tmp_path / f"rank{rank}.txt").read_text("utf-8") for rank in range(2))
    assert printed.count("converting it to") == 1
    assert Checkpoint.open(tmp_path / "run").iteration == 2
