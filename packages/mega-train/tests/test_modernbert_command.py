"""The command for ModernBERT: it learns, computes no padding, and run.toml describes the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mega_model.distributed.mesh import Mesh
from mega_schema.app.config import load_config
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.presets import preset
from mega_train.config import RunConfig
from mega_train.data.datasets import Datasets
from mega_train.data.encoder.bert_reader import REAL
from mega_train.data.encoder.sentence_datasets import SentenceDatasets
from mega_train.engine.trainer import Trainer
from mega_train.engine.unpadded_rows import UnpaddedRows
from mega_train.resolve import resolve
from mega_train.telemetry.event_log import read_events
from tests.encoder_fixture import write_corpus
from tests.train_command import run_mega_train

MODERN = ["--preset", "modernbert-base", "--num-layers", "4", "--hidden-size", "32", "--num-attention-heads"]
MODERN += ["4", "--vocab-size", "204", "--seq-length", "32", "--window-size", "4,4", "--mask-prob", "0.3"]
MODERN += ["--bert-no-binary-head", "--unpad-samples", "--global-batch-size", "16", "--lr", "3e-3"]
MODERN += ["--micro-batch-size", "16", "--lr-decay-style", "constant", "--split", "80,20,0"]
DROPOUT = ["train.hidden_dropout=0.1", "train.attention_dropout=0.1"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a dataset of sentences with its tokenizer beside it."""
    return write_corpus(tmp_path_factory.mktemp("sentences") / "toy")


def test_a_run_learns_and_its_checkpoint_is_the_preset_in_small(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = ["--train-iters", "50", "--eval-iters", "2", "--eval-interval", "25", "--log-interval", "25"]
    run_mega_train("bert", "--data-path", str(corpus), *MODERN, *more, "--save", str(run))
    validations = [event for event in read_events(run) if event["event"] == "validation"]
    # a number follows the one before it: the words around a masked one tell which it is
    assert validations[-1]["loss"] < validations[0]["loss"] < np.log(204)
    spec = Checkpoint.open(run).spec
    sizes = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 4, "head_dim": 8, "ffn": 48, "vocab": 204}
    assert spec == replace(preset("modernbert-base"), **sizes, sliding_window=5)


def _trainer(corpus: Path, *words: str) -> Trainer:
    sets = ["model.preset=modernbert-base", "model.num_layers=4", "model.hidden_size=16"]
    sets += ["model.num_attention_heads=2", "model.vocab_size=204", "model.window_size=4,4"]
    sets += ["batch.seq_length=32", "batch.global_batch_size=8", "batch.micro_batch_size=4"]
    sets += ["train.train_iters=9", "optimizer.lr=0.01", "optimizer.adam_eps=1e-3", "evaluation.eval_iters=0"]
    sets += ["encoder_data.bert_no_binary_head=true", "encoder_data.mask_prob=0.3", *words]
    run = load_config(RunConfig, None, {"data_path": (str(corpus),)}, sets)
    datasets = Datasets.open(run.data)
    config = resolve(run, "bert", 1, corpus=datasets.identity, loaded_spec=None, cuda=False)
    tokenizer = datasets.tokenizer
    return Trainer(
        config, Mesh(), SentenceDatasets.from_tokenizer("bert", datasets, tokenizer, run.encoder_data)
    )


def _steps(trainer: Trainer) -> list[tuple[float, ...]]:
    steps = [trainer.step(trainer.state.lr) for _ in range(3)]
    return [*steps, tuple(trainer.optimizer_step.loss_terms.values())]


@pytest.mark.parametrize(
    "change",
    [
        [],
        ["recompute.recompute_granularity=selective"],
        ["train.attention_dropout=0"],
        # Megatron's BERT, whose binary head reads the first token of each row
        [
            *("model.preset=megatron-bert-345m", "model.window_size=none"),
            "encoder_data.bert_no_binary_head=false",
        ],
    ],
    ids=["modern", "recomputed", "grouped", "megatron"],
)
def test_without_padding_losses_and_gradient_norms_are_the_same(corpus: Path, change: Sequence[str]) -> None:
    padded = _trainer(corpus, *DROPOUT, *change, "encoder_data.sample_rule=legacy")
    assert any((padded.train[i][REAL] == 0).any() for i in range(8))
    unpadded = _trainer(
        corpus, *DROPOUT, *change, "encoder_data.sample_rule=legacy", "encoder_data.unpad_samples=true"
    )
    for expected, actual in zip(_steps(padded), _steps(unpadded), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_unpadded_rows_are_those_of_the_real_tokens_and_repeats_of_the_first() -> None:
    real_BS = np.array([[1, 1, 1, 0], [1, 0, 1, 1], [1, 1, 0, 0]])
    rows = UnpaddedRows.from_real(real_BS, 1)
    assert rows.index_T.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert (rows.lengths, rows.begin_B.tolist()) == ((3, 4, 2), [0, 3, 7])
    rows = UnpaddedRows.from_real(real_BS, 4)
    assert rows.index_T.tolist()[-3:] == [0, 0, 0]
    assert (rows.lengths, rows.begin_B.tolist()) == ((3, 4, 2, 3), [0, 3, 7])


def test_run_toml_describes_a_loaded_modernbert(corpus: Path) -> None:
    spec = _trainer(corpus).config.spec
    sets = ["train.train_iters=1", "optimizer.lr=1.0", "encoder_data.bert_no_binary_head=true"]
    run = load_config(RunConfig, None, {"data_path": (str(corpus),)}, sets)
    recorded = resolve(run, "bert", 1, corpus=None, loaded_spec=spec, cuda=False).run
    assert recorded.model.preset is not None
    assert resolve(recorded, "bert", 1, corpus=None, loaded_spec=None, cuda=False).spec == spec


@pytest.mark.parametrize("has_preset", [True, False])
def test_flags_place_the_layers_without_a_window_and_their_base(corpus: Path, has_preset: bool) -> None:
    words = ["model.global_attention_every_n_layers=2", "model.local_rotary_base=5000"]
    if not has_preset:
        words += ["model.preset=none", "model.position_embedding_type=rope"]
    config = _trainer(corpus, *words).config
    assert [config.spec.is_local(layer) for layer in range(4)] == [False, True, False, True]
    assert config.spec.rope_theta_local == 5000
    spec = resolve(config.run, "bert", 1, corpus=None, loaded_spec=None, cuda=False).spec
    assert spec == config.spec


BERT = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 32 --lr 1 --global-batch-size 1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--global-attention-every-n-layers 2",
            "--global-attention-every-n-layers: needs --window-size: found 2, wanted ",
        ),
        (
            "--global-attention-every-n-layers 0 --window-size 4,4",
            "--global-attention-every-n-layers: not a count: found 0, wanted an integer above 0",
        ),
        (
            "--local-rotary-base 5000 --window-size 4,4",
            "--local-rotary-base: applies to models with windows in some of their layers only: found 5000.0",
        ),
    ],
)
def test_windows_that_no_layer_can_have_are_one_line(corpus: Path, words: str, message: str) -> None:
    _, err = run_mega_train(
        "bert", "--data-path", str(corpus), *BERT.split(), "--train-iters", "1", *words.split(), code=2
    )
    assert err.splitlines()[-1].startswith(f"error: {message}"), err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--context-parallel-size 2",
            "--context-parallel-size: is not supported for BERT: padding would give",
        ),
        ("--window-size 4,0", "--window-size: not a window of as many tokens before as after: found 4,0"),
    ],
)
def test_what_a_modernbert_does_not_have_is_one_line(corpus: Path, words: str, message: str) -> None:
    _, err = run_mega_train(
        "bert", "--data-path", str(corpus), *MODERN, "--train-iters", "1", *words.split(), code=2
    )
    assert err.splitlines()[-1].startswith(f"error: {message}"), err
