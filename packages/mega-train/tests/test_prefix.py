"""Prefix language models: how samples get prefixes, the loss, and the command."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from mega_model.distributed.mesh import Mesh
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_train.commands.prefix import as_prefix_run
from mega_train.config import ModelConfig, ObjectiveConfig
from mega_train.data.datasets import Datasets
from mega_train.data.prefix_reader import PREFIX, PrefixRule, add_prompt_prefixes
from mega_train.data.sft import EXAMPLE, LEARNT, POSITION, TOKEN
from mega_train.engine.prefix_forward_step import PrefixForwardStep
from mega_train.engine.trainer import Trainer
from mega_train.telemetry.event_log import read_events
from tests.train_command import run_mega_train

EOD = 32
Ints = NDArray[np.int64]
# a sample of 12 tokens and its last target: a lone end, two documents, and the begin of a third
TOKENS = np.array([EOD, 5, 6, 7, EOD, 8, 9, EOD, 1, 2, 3, 4, 5])


def _reference_masks(row: Ints, rule: PrefixRule) -> tuple[Ints, Ints, Ints]:
    """Attention (S, S), loss mask (S,) and positions (S,) as pretrain_prefix_lm.py defines them, in loops.

    The prefixes are those that were drawn.
    """
    tokens = len(row[TOKEN]) - 1
    ends = [i for i in range(tokens) if row[TOKEN, i] == EOD]
    begins = [0, *(end + 1 for end in ends if end + 1 < tokens)]
    visible = np.tril(np.ones((tokens, tokens), np.int64))
    loss = np.ones(tokens, np.int64)
    position = np.arange(tokens)
    for begin, stop in zip(begins, [*begins[1:], tokens], strict=True):
        if rule.resets_positions:
            position[begin:stop] = np.arange(stop - begin)
        if rule.masks_eod and row[TOKEN, stop - 1] == EOD:
            loss[stop - 1] = 0
        if rule.per_document:
            visible[stop:, :stop] = 0
    for begin, stop in zip(begins, [*begins[1:], tokens], strict=True):
        if not rule.per_document:
            begin, stop = 0, tokens
        prefix = begin + int(row[PREFIX, begin:stop].sum())
        assert row[PREFIX, begin:prefix].all(), "a prefix is the first tokens"
        assert begin + 1 <= prefix <= stop
        if rule.per_document and row[TOKEN, stop - 1] == EOD and stop - begin > 1:
            assert prefix < stop, "the end of a document is not in its prefix"
        visible[begin:prefix, begin:prefix] = 1
        if rule.targets_only:
            loss[begin : prefix - 1] = 0
    return visible, loss, position


@pytest.mark.parametrize("per_document", [False, True])
@pytest.mark.parametrize("others", [False, True])
def test_masks_losses_and_positions_are_those_of_bigscience(per_document: bool, others: bool) -> None:
    rule = PrefixRule(
        9,
        EOD if per_document or others else None,
        per_document=per_document,
        resets_positions=others,
        masks_eod=others,
        targets_only=others,
    )
    for number in range(200):
        row = rule.add_prefixes(TOKENS, number)
        visible, loss, position = _reference_masks(row, rule)
        document, prefix = row[EXAMPLE, :-1], row[PREFIX, :-1]
        is_before = np.tril(np.ones_like(visible))
        mask = (document[:, None] == document) & ((is_before == 1) | (prefix == 1))
        np.testing.assert_array_equal(mask, visible)
        np.testing.assert_array_equal(row[LEARNT, 1:], loss)
        np.testing.assert_array_equal(row[POSITION, :-1], position)
        np.testing.assert_array_equal(row[TOKEN], TOKENS)


def test_every_length_of_a_prefix_is_drawn_equally_often() -> None:
    lengths = [int(PrefixRule(1).add_prefixes(TOKENS, i)[PREFIX].sum()) for i in range(2400)]
    counts = np.bincount(lengths)[1:]
    assert len(counts) == 12
    assert 140 < counts.min() <= counts.max() < 260
    repeated = [int(PrefixRule(1).add_prefixes(TOKENS, i)[PREFIX].sum()) for i in range(9, 20)]
    assert repeated == lengths[9:20]


def test_the_prefix_of_an_example_is_its_prompt() -> None:
    row = np.zeros((4, 9), np.int64)
    row[EXAMPLE] = [0, 0, 0, 0, 1, 1, 1, 1, 2]
    row[LEARNT] = [0, 0, 1, 1, 0, 1, 0, 1, 0]
    assert add_prompt_prefixes(row, 0)[PREFIX].tolist() == [1, 1, 0, 0, 1, 0, 0, 0, 1]


def _trainer(corpus: Path, resolve_config: Callable[..., Any], **values: Any) -> Trainer:
    dataset = IndexedDataset(corpus)
    assert dataset.info is not None
    config = resolve_config(
        corpus=dataset.info.tokenizer, data__data_path=str(corpus), objective__prefix_lm=True, **values
    )
    return Trainer(config, Mesh(), Datasets.from_dataset(dataset, config.run.data))


@pytest.mark.parametrize("targets_only", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("reweight", [False, True])
def test_the_loss_is_the_weighted_mean_of_the_targets(
    corpus: Path, resolve_config: Callable[..., Any], targets_only: bool, per_token: bool, reweight: bool
) -> None:
    trainer = _trainer(
        corpus,
        resolve_config,
        batch__micro_batch_size=2,
        objective__loss_on_targets_only=targets_only,
        objective__reweight_loss_based_on_position_frequency=reweight,
        train__calculate_per_token_loss=per_token,
    )
    loss = trainer.forward_backward.mean_losses(trainer.train, 0, 4, 8, train=False).total
    sums = []
    for samples in ((0, 1), (2, 3)):
        batch = np.stack([trainer.train[i] for i in samples])
        work = PrefixForwardStep(trainer.models, trainer.config, Mesh(), [batch], 1.0, None)
        model = trainer.models[0]
        x = torch.from_numpy(batch[:, TOKEN, :-1]).flatten()
        position = torch.arange(8).repeat(2)
        with torch.no_grad():
            logits = model(x, position, work._attention(model.kernels, 0, None, None))[:, :33]
        target = torch.from_numpy(batch[:, TOKEN, 1:]).flatten()
        weight = torch.from_numpy(batch[:, LEARNT, 1:]).flatten().double()
        if reweight:
            weight *= torch.tensor([2 * (8 - i) / 9 for i in range(8)] * 2)
        losses = F.cross_entropy(logits, target, reduction="none").double()
        sums.append(((losses * weight).sum(), weight.sum()))
        assert 0 < weight.sum() < 16 or not targets_only
    wanted = (
        sum(total for total, _ in sums) / sum(count for _, count in sums)
        if per_token
        else sum(total / count for total, count in sums) / 2
    )
    torch.testing.assert_close(loss, torch.as_tensor(wanted).float(), atol=1e-5, rtol=1e-5)


MODEL = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"]
TRAINING = ["--global-batch-size", "8", "--micro-batch-size", "8", "--lr", "1e-2", "--lr-decay-style"]
TRAINING += ["constant", "--eval-iters", "2", "--eval-interval", "20", "--log-interval", "20"]
TRAINING += ["--split", "80,20,0", "--train-iters", "40"]


def test_a_run_learns_validates_and_resumes(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["prefix", "--data-path", str(corpus), *TRAINING, "--loss-on-targets-only"]
    words += ["--reset-attention-mask", "--reweight-loss-based-on-position-frequency", "--save", str(run)]
    out, _ = run_mega_train(*words, *MODEL, "--save-interval", "20")
    validations = [event for event in read_events(run) if event["event"] == "validation"]
    assert validations[1]["loss"] < validations[0]["loss"] < np.log(33)
    assert validations[1]["perplexity"] == pytest.approx(np.exp(validations[1]["loss"]))
    assert Checkpoint.open(run).spec.family == "gpt"
    assert "prefix_lm = true" in (run / "iter_0000040/run.toml").read_text("utf-8")
    shutil.rmtree(run / "iter_0000040")
    (run / "latest_checkpointed_iteration.txt").write_text("20")
    resumed, _ = run_mega_train(*words, "--load", str(run), "--seq-length", "16")
    assert resumed.splitlines()[-1] == out.splitlines()[-1]
    assert " | loss " in out.splitlines()[-1]
    assert any(line.startswith("gpt (prefix language model), ") for line in out.splitlines())
    _, err = run_mega_train("gpt", *words[1:], "--load", str(run), "--seq-length", "16", code=2)
    assert err.splitlines()[-1].startswith("error: run: 2 values are refused")
    causal = [word for word in words[1:] if word not in ("--loss-on-targets-only", words[-3])]
    _, err = run_mega_train("gpt", *causal, "--load", str(run), "--seq-length", "16", code=2)
    assert err.splitlines()[-1].startswith(
        "error: --prefix-lm: the run would read different data from the run it resumes: "
        "found no --prefix-lm no --loss-on-targets-only, wanted --prefix-lm --loss-on-targets-only, as "
    )


def test_the_family_is_that_of_flags_preset_or_checkpoint(resolve_config: Callable[..., Any]) -> None:
    run = resolve_config().run
    plain = replace(run, model=replace(run.model, family=None))
    assert as_prefix_run(plain) == (replace(plain, objective=ObjectiveConfig(prefix=True)), None)
    assert as_prefix_run(run)[1] == "gpt"
    assert as_prefix_run(replace(run, model=ModelConfig(preset="llama2-7b")))[1] == "llama"


REFUSED = {
    "--context-parallel-size 2": "--context-parallel-size: is not supported for prefix language ",
    "--window-size 8,0": "--window-size: is not defined for tokens of a prefix, which see later tokens too: ",
    "--batch-invariant": "--batch-invariant: does not apply to prefix language models: its attention kernel ",
    "--curriculum-start-length 8 --curriculum-steps 5": "--curriculum-start-length: does not apply to ",
    "--preset bert-base-uncased": "--prefix-lm: applies to decoders only: found bert, wanted gpt | llama",
    "--preset nonsense": "--preset: unknown model: found nonsense",
    "gpt --loss-on-targets-only": "--loss-on-targets-only: applies to prefix language models only: "
    "found given; hint: mega-train prefix, or leave it out",
    "gpt --reweight-loss-based-on-position-frequency": "--reweight-loss-based-on-position-frequency: ",
}


@pytest.mark.parametrize("words", REFUSED)
def test_options_that_do_not_apply_are_one_line(corpus: Path, tmp_path: Path, words: str) -> None:
    run = tmp_path / "run"
    command, *options = words.split() if words.startswith("gpt") else ["prefix", *words.split()]
    model = ["--seq-length", "16"] if "--preset" in options else MODEL
    _, err = run_mega_train(
        command, "--data-path", str(corpus), *model, *TRAINING, "--save", str(run), *options, code=2
    )
    assert err.splitlines()[-1].startswith(f"error: {REFUSED[words]}"), err
    assert not run.exists()
