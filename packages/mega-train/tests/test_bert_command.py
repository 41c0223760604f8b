"""The command for BERT: it learns, prints both losses, resumes, and refuses what does not fit."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from mega_model.distributed.mesh import Mesh
from mega_schema.app.config import load_config
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.dataset.indexed_dataset import IndexedWriter
from mega_schema.errors import FormatError
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer
from mega_train.config import RunConfig
from mega_train.data.datasets import Datasets
from mega_train.data.encoder.sentence_datasets import SentenceDatasets
from mega_train.engine.trainer import Trainer
from mega_train.resolve import resolve
from mega_train.telemetry.event_log import read_events
from tests.encoder_fixture import write_corpus, write_sentences
from tests.train_command import run_mega_train

MODEL = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32"]
TRAINING = ["--global-batch-size", "16", "--micro-batch-size", "16", "--lr", "3e-3", "--lr-decay-style"]
TRAINING += ["constant", "--eval-iters", "2", "--eval-interval", "50", "--log-interval", "50"]
TRAINING += ["--split", "80,20,0", "--train-iters", "100"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a dataset of sentences with its tokenizer beside it."""
    return write_corpus(tmp_path_factory.mktemp("sentences") / "toy")


def _bert(corpus: Path, *argv: str, code: int = 0) -> tuple[str, str]:
    return run_mega_train("bert", "--data-path", str(corpus), *MODEL, *TRAINING, *argv, code=code)


def test_a_run_learns_and_prints_both_losses(corpus: Path, tmp_path: Path) -> None:
    out, _ = _bert(corpus, "--save", str(tmp_path / "run"), "--save-interval", "50")
    lines = [line for line in out.splitlines() if " | lm loss " in line]
    assert [line.split(" | ")[0] for line in lines] == [
        *("iteration 50/100", "validation at iteration 50"),
        *("iteration 100/100", "validation at iteration 100"),
    ]
    assert all(" | sop loss " in line for line in lines)
    events = read_events(tmp_path / "run")
    validations = [event for event in events if event["event"] == "validation"]
    first, last = (validation["loss_terms"] for validation in validations)
    # a number follows the one before it: the words around a masked one tell which it is
    assert last["lm loss"] < first["lm loss"] < np.log(204)
    for event in (event for event in events if "loss_terms" in event):
        assert event["loss"] == pytest.approx(sum(event["loss_terms"].values()), rel=1e-5)
    assert validations[0]["perplexity"] == pytest.approx(np.exp(first["lm loss"]))
    checkpoint = Checkpoint.open(tmp_path / "run")
    assert (checkpoint.spec.family, checkpoint.spec.vocab) == ("bert", 204)
    shutil.rmtree(tmp_path / "run" / "iter_0000100")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("50")
    resumed = [*TRAINING, "--load", str(tmp_path / "run"), "--save", str(tmp_path / "run")]
    out, _ = run_mega_train("bert", "--data-path", str(corpus), *resumed, "--seq-length", "32")
    assert out.splitlines()[-1] == lines[-1]
    assert 'family = "bert"\nnum_layers = 2' in (tmp_path / "run/iter_0000100/run.toml").read_text("utf-8")


def test_one_segment_has_one_loss_and_no_token_types(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    out, _ = _bert(corpus, "--bert-no-binary-head", "--save", str(run), "--train-iters", "2")
    assert "lm loss" not in out
    spec = Checkpoint.open(run).spec
    assert (spec.token_types, spec.pooler, spec.binary_head) == (None, False, False)
    more = ["--load", str(run), "--data-path", str(corpus), *TRAINING, "--train-iters", "2"]
    _, err = run_mega_train("bert", *more, code=2)
    assert err.splitlines()[-1] == (
        "error: --bert-no-binary-head: is missing: the model has no binary head for the order of two "
        "segments: found not given; hint: --bert-no-binary-head"
    )


@pytest.mark.parametrize(
    ("words", "activation", "head"),
    [
        ([], "gelu_tanh", "gelu_erf"),
        (["model.bias_gelu_fusion=false"], "gelu_erf", "gelu_erf"),
        (["model.activation=gelu_tanh"], "gelu_tanh", "gelu_tanh"),
        (["model.activation=swiglu"], "swiglu", "gelu_erf"),
        (["model.preset=bert-base-uncased", "model.activation=gelu_tanh"], "gelu_tanh", "gelu_tanh"),
    ],
)
def test_the_gelu_of_the_head_is_by_erf_unless_an_activation_is_given(
    words: Sequence[str], activation: str, head: str
) -> None:
    sets = ["train.train_iters=1", "optimizer.lr=1.0", "model.vocab_size=99", *words]
    if "preset" not in str(words):
        sets += ["model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=4"]
        sets += ["batch.seq_length=8"]
    run = load_config(RunConfig, None, {}, sets)
    spec = resolve(run, "bert", 1, corpus=None, loaded_spec=None, cuda=False).spec
    assert (spec.activation, spec.head_transform) == (activation, head)
    # the keys in run.toml describe the same model
    recorded = resolve(
        RunConfig(train=run.train, optimizer=run.optimizer),
        "bert",
        1,
        corpus=None,
        loaded_spec=spec,
        cuda=False,
    ).run
    assert resolve(recorded, "bert", 1, corpus=None, loaded_spec=None, cuda=False).spec == spec


def test_megatrons_vocab_file_alone_is_a_lower_case_tokenizer(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "toy", described=False)
    _, err = _bert(corpus, code=2)
    assert err.splitlines()[-1].startswith("error: --vocab-size: missing")
    vocab = str(corpus.with_name("vocab.txt"))
    out, _ = _bert(corpus, "--vocab-file", vocab, "--train-iters", "2", "--eval-iters", "0")
    assert "bert, " in out


def _trainer(corpus: Path, *words: str, tokenizer: Tokenizer | None = None) -> Trainer:
    sets = [
        "model.num_layers=2",
        "model.hidden_size=16",
        "model.num_attention_heads=2",
        "batch.seq_length=32",
    ]
    sets += ["train.train_iters=9", "optimizer.lr=0.01", "optimizer.adam_eps=1e-3", "evaluation.eval_iters=0"]
    sets += ["batch.global_batch_size=4", "train.seed=5", *words]
    run = load_config(RunConfig, None, {"data_path": (str(corpus),)}, sets)
    datasets = Datasets.open(run.data)
    config = resolve(run, "bert", 1, corpus=datasets.identity, loaded_spec=None, cuda=False)
    sentences = SentenceDatasets.from_tokenizer(
        "bert", datasets, tokenizer or datasets.tokenizer, run.encoder_data
    )
    return Trainer(config, Mesh(), sentences)


def _steps(trainer: Trainer, count: int = 3) -> list[tuple[float, ...]]:
    return [
        (*trainer.step(trainer.state.lr), *trainer.optimizer_step.loss_terms.values()) for _ in range(count)
    ]


@pytest.mark.parametrize(
    "change",
    [
        ["recompute.recompute_granularity=full"],
        ["recompute.recompute_granularity=selective"],
        ["train.gradient_accumulation_fusion=false"],
    ],
    ids=["full", "selective", "unfused"],
)
def test_recomputation_and_fusion_change_no_step(corpus: Path, change: Sequence[str]) -> None:
    drops = ["train.hidden_dropout=0.1", "train.attention_dropout=0.1"]
    expected = _steps(_trainer(corpus, *drops))
    np.testing.assert_allclose(_steps(_trainer(corpus, *drops, *change)), expected, rtol=1e-5)


def test_the_loss_of_a_micro_batch_is_a_mean_over_its_masked_tokens(corpus: Path) -> None:
    """A step's loss is the mean over micro-batches, which have different numbers of masked tokens."""
    single = _trainer(corpus, "batch.micro_batch_size=1")
    losses = []
    for number in range(4):
        forward = single.forward_backward.mean_losses(single.train, number, 1, 32, train=False)
        losses.append([float(forward.total), *map(float, forward.terms.values())])
    batch = single.forward_backward.mean_losses(single.train, 0, 4, 32, train=False)
    values = [float(batch.total), *map(float, batch.terms.values())]
    np.testing.assert_allclose(values, np.mean(losses, axis=0), rtol=1e-5)


def test_a_micro_batch_without_a_masked_token_has_only_the_order(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "toy")
    trainer = _trainer(corpus, "encoder_data.mask_prob=1e-6")
    (loss, norm, lm_loss, sop_loss), *_ = _steps(trainer)
    assert lm_loss == 0
    assert loss == sop_loss > 0
    assert norm > 0


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="no bfloat16 products")
def test_bfloat16_is_close_to_float32(corpus: Path) -> None:
    exact, half = (_steps(_trainer(corpus, f"train.bf16={bf16}")) for bf16 in ("false", "true"))
    np.testing.assert_allclose(half, exact, rtol=0.05)


def test_a_token_outside_the_tokenizer_is_one_line(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "toy")
    with IndexedWriter(tmp_path / "wide", np.uint16) as out:
        for _ in range(20):
            for _ in range(4):
                out.add([7, 300, 9, 11])
            out.end_document()
    tokenizer = open_tokenizer("BertWordPieceCase", vocab_file=corpus.with_name("vocab.txt"))
    trainer = _trainer(tmp_path / "wide", "model.vocab_size=204", tokenizer=tokenizer)
    with pytest.raises(FormatError) as caught:
        _steps(trainer)
    assert str(caught.value) == (
        f"{tmp_path / 'wide'}: contains a token outside the tokenizer's vocabulary: found 300, "
        "wanted 0 to 203; hint: the tokenizer that the dataset was made with"
    )


REFUSED = {
    "--context-parallel-size 2": "--context-parallel-size: is not supported for BERT: ",
    "--decoder-seq-length 64": "--decoder-seq-length: applies to T5 only: found 64; hint: mega-train t5",
    "--decoder-num-layers 2": "--decoder-num-layers: applies to T5 only: found 2; hint: mega-train t5",
    "--preset modernbert-base --unpad-samples": "--bert-no-binary-head: is missing: the model has no binary",
    "--mask-prob 0": "--mask-prob: out of range: found 0.0, wanted between 0 and 1",
    "--short-seq-prob 2": "--short-seq-prob: out of range: found 2.0, wanted 0 to 1",
    "--reset-attention-mask": "--reset-attention-mask: does not apply to BERT: a sample of",
    "--calculate-per-token-loss": "--calculate-per-token-loss: does not apply to BERT: ",
    "--curriculum-start-length 8 --curriculum-steps 5": "--curriculum-start-length: does not apply to BERT: ",
    "--batch-invariant": "--batch-invariant: does not apply to BERT: its attention kernel is causal",
    "--preset gpt2-124m": "command: trains another family: found bert, wanted gpt; hint: mega-train gpt",
    "--window-size 8,0": "--window-size: not a window of as many tokens before as after: found 8,0",
    "--position-embedding-type alibi": "--position-embedding-type: is not supported in an encoder: ",
    "--seq-length 4": "--seq-length: too short for 3 special tokens and text: found 4, wanted 5 or more",
}


@pytest.mark.parametrize("words", REFUSED)
def test_options_that_bert_does_not_have_are_one_line(corpus: Path, tmp_path: Path, words: str) -> None:
    run = tmp_path / "run"
    out, err = _bert(corpus, "--save", str(run), *words.split(), code=2)
    assert err.splitlines()[-1].startswith(f"error: {REFUSED[words]}"), err
    assert (out, list(tmp_path.glob("run/iter_*"))) == ("", [])


@pytest.mark.parametrize("words", ["--mask-prob 0.2", "--unpad-samples", "--mask-type pieces"])
def test_a_gpt_refuses_the_options_of_bert(corpus: Path, words: str) -> None:
    _, err = run_mega_train("gpt", "--data-path", str(corpus), *MODEL, *TRAINING, *words.split(), code=2)
    flag, *value = words.split()
    value_text = value[0] if value else "given"
    families = "BERT" if flag == "--mask-type" else "BERT and T5"
    assert err.splitlines()[-1] == (
        f"error: {flag}: applies to {families} only: found {value_text}; "
        "hint: mega-train bert, or leave it out"
    )


def test_data_without_sentences_is_one_line(tmp_path: Path) -> None:
    write_corpus(tmp_path / "toy")
    write_sentences(tmp_path / "whole", [[30]] * 40)
    vocab = str(tmp_path / "vocab.txt")
    _, err = _bert(tmp_path / "whole", "--vocab-file", vocab, code=2)
    assert err.splitlines()[-1] == (
        f"error: {tmp_path / 'whole'}: is not split into sentences: found 40 documents with at most one "
        "sequence, wanted a sequence for each sentence; hint: mega-data preprocess --split-sentences"
    )


def test_a_checkpoint_of_the_other_kind_is_one_line(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    _bert(corpus, "--save", str(run), "--train-iters", "1", "--eval-iters", "0")
    _, err = run_mega_train(
        "gpt", "--data-path", str(corpus), "--load", str(run), "--finetune", *TRAINING, code=2
    )
    assert err.splitlines()[-1].endswith("found gpt, wanted bert; hint: mega-train bert")
