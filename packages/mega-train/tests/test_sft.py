"""Supervised fine-tuning: reading, packing and loss of prompts and answers."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_model.attention_backends import PackedAttention
from mega_model.distributed.mesh import Mesh
from mega_model.dropout import no_dropout
from mega_model.loss import IGNORED
from mega_schema.dataset.indexed_dataset import DatasetInfo, IndexedWriter, sibling
from mega_schema.errors import ConfigError, FormatError
from mega_schema.tokenizer.tokenizer import open_tokenizer
from mega_train.cli import main
from mega_train.config import DataConfig
from mega_train.data.dataloaders import build_data_splits
from mega_train.data.sft import (
    EXAMPLE,
    LEARNT,
    POSITION,
    TOKEN,
    PackedSftDataset,
    PromptResponsePairs,
    open_examples,
)
from mega_train.engine.trainer import Trainer
from mega_train.resolve import ResolvedConfig

EOD = 32
KEYS = ("prompt", "answer")
Example = tuple[list[int], list[int]]
EXAMPLES: list[Example] = [
    ([1, 2, 3], [4, 5]),
    ([], [6, 7]),
    ([8], []),
    ([9, 10], [11]),
    ([12] * 6, [13, 14]),
]


class ResolveConfig(Protocol):
    def __call__(self, **values: Any) -> ResolvedConfig: ...


def write(prefix: Path, examples: Sequence[Example], *, eod: bool = False, bos: int | None = None) -> Path:
    """The two datasets, as `mega-data preprocess` writes them: a document of no tokens has no sequence."""
    tokenizer = open_tokenizer("NullTokenizer", vocab_size=EOD)
    info = DatasetInfo(tokenizer=replace(tokenizer.identity, bos=bos))
    for place, key in enumerate(KEYS):
        path = sibling(prefix, f"_{key}_document")
        with IndexedWriter(path, np.dtype(np.uint16), info=info) as out:
            for example in examples:
                if ids := example[place]:
                    out.add([*([] if bos is None else [bos]), *ids, *([EOD] if eod else [])])
                out.end_document()
        tokenizer.save(sibling(path, ".tokenizer"))
    return prefix


@pytest.mark.parametrize("eod", [False, True])
@pytest.mark.parametrize("bos", [None, 31, EOD])
def test_an_example_is_prompt_answer_and_end_however_they_were_written(
    tmp_path: Path, eod: bool, bos: int | None
) -> None:
    pairs = PromptResponsePairs(write(tmp_path / "sft", EXAMPLES, eod=eod, bos=bos), KEYS)
    begins = [] if bos is None else [bos]
    assert len(pairs) == len(EXAMPLES)
    for i, (prompt, answer) in enumerate(EXAMPLES):
        # a text begins once: with the prompt, or with an answer that has none
        first = [*begins, *prompt] if prompt else []
        second = answer if prompt or not answer else [*begins, *answer]
        ids, count = pairs.read(i)
        assert ids.tolist() == [*first, *second, EOD]
        assert count == len(first) == pairs.lengths[0][i]
        assert len(ids) == pairs.lengths[0][i] + pairs.lengths[1][i]


def _packs(pairs: PromptResponsePairs, **values: Any) -> PackedSftDataset:
    options: dict[str, Any] = {"length": 11, "rows": 4, "seed": 1, "name": "the training split"}
    return PackedSftDataset(pairs, values.pop("part", (0, len(pairs))), **options | values)


def test_a_row_has_tokens_examples_positions_and_a_loss_mask(tmp_path: Path) -> None:
    packs = _packs(PromptResponsePairs(write(tmp_path / "sft", [([1, 2], [3]), ([], [4, 5])]), KEYS))
    row = packs[0]
    assert row.shape == (4, 12)
    first_row, second_row = [1, 2, 3, EOD], [4, 5, EOD]
    swapped = row[TOKEN, 0] == 4
    ids = second_row + first_row if swapped else first_row + second_row
    learnt = [0, 1, 1, 0, 0, 1, 1] if swapped else [0, 0, 1, 1, 0, 1, 1]
    first = len(second_row if swapped else first_row)
    assert row[TOKEN].tolist() == [*ids, *[EOD] * 5]
    assert row[LEARNT].tolist() == [*learnt, *[0] * 5]
    assert row[EXAMPLE].tolist() == [0] * first + [1] * (7 - first) + [2] * 5
    assert row[POSITION].tolist() == [*range(first), *range(7 - first), *range(5)]


@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 7)), min_size=1, max_size=12),
    seed=st.integers(0, 99),
)
def test_an_epoch_reads_every_example_that_fits_once_and_whole(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[tuple[int, int]], seed: int
) -> None:
    examples = [([1 + i % 20] * a, [21 + i % 9] * b) for i, (a, b) in enumerate(lengths)]
    pairs = PromptResponsePairs(write(tmp_path_factory.mktemp("sft") / "x", examples), KEYS)
    packs = _packs(pairs, rows=1, seed=seed, length=13)
    read = [
        row[TOKEN, row[EXAMPLE] == number].tolist()
        for row in (packs[i] for i in range(len(packs)))
        for number in range(row[EXAMPLE].max() + 1)
        if row[LEARNT, row[EXAMPLE] == number].any()
        or row[TOKEN, row[EXAMPLE] == number].tolist() != [EOD] * (row[EXAMPLE] == number).sum()
    ]
    wanted = [[*prompt, *answer, EOD] for prompt, answer in examples if prompt or answer]
    assert sorted(read) == sorted(wanted)
    longer = _packs(pairs, rows=3 * len(packs), seed=seed, length=13)
    assert all(np.array_equal(longer[i], packs[i]) for i in range(len(packs))), "a longer run begins alike"


def test_examples_that_are_too_long_are_left_out_and_counted(
    resolve_config: ResolveConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = PromptResponsePairs(write(tmp_path / "sft", EXAMPLES), KEYS)
    packs = _packs(pairs, length=6)
    assert packs.too_long == 1
    assert 4 not in packs.order
    assert pairs.info is not None
    plan = resolve_config(
        corpus=pairs.info.tokenizer, data__sft=True, data__split="1,0,0", batch__seq_length=6
    )
    splits = plan.data_splits_config(iteration=0, consumed_samples=0)
    for rank in (0, 1):
        build_data_splits(splits, pairs, Mesh(rank=rank))
    assert caplog.messages == ["the training split: 1 of 5 examples are longer than a sample and left out"]
    with pytest.raises(ConfigError) as refused:
        _packs(pairs, length=6, part=(4, 5))
    assert str(refused.value) == (
        "--data-path: no example of the training split fits a sample: found 1 examples of 9 tokens or more, "
        "wanted at most --seq-length + 1 = 7; hint: a longer --seq-length, or another --split"
    )


def test_a_pair_is_one_prefix() -> None:
    for data, wording in ((DataConfig(), "none"), (DataConfig(path=("0.5", "a", "0.5", "b")), "0.5 a 0.5 b")):
        with pytest.raises(ConfigError) as refused:
            open_examples(data)
        assert str(refused.value) == (
            f"--sft: reads one pair of datasets: found {wording}, wanted one prefix; hint: --data-path P"
        )


def test_two_datasets_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"sft_prompt_document\.idx: no such file"):
        PromptResponsePairs(tmp_path / "sft", KEYS)
    write(tmp_path / "sft", EXAMPLES)
    write(tmp_path / "other", EXAMPLES[:3])
    for suffix in (".bin", ".idx", ".json"):
        (tmp_path / f"other_answer_document{suffix}").rename(tmp_path / f"sft_answer_document{suffix}")
    with pytest.raises(FormatError) as refused:
        PromptResponsePairs(tmp_path / "sft", KEYS)
    assert str(refused.value) == (
        f"{tmp_path / 'sft_answer_document'}: lacks an answer for some prompts: found 3 documents, "
        "wanted 5, as sft_prompt_document has; hint: mega-data preprocess --json-keys prompt answer, both "
        "at once"
    )
    tokenizer = open_tokenizer("NullTokenizer", vocab_size=20)
    with IndexedWriter(
        tmp_path / "sft_answer_document", np.dtype(np.uint16), info=DatasetInfo(tokenizer=tokenizer.identity)
    ) as out:
        for _ in EXAMPLES:
            out.add([1])
            out.end_document()
    with pytest.raises(
        FormatError, match="sft_answer_document: is tokenized differently from the prompts: found"
    ):
        PromptResponsePairs(tmp_path / "sft", KEYS)


@pytest.fixture
def start_tuning(resolve_config: ResolveConfig, tmp_path: Path) -> Callable[..., Trainer]:
    """A trainer that fine-tunes on 40 examples."""
    rng = np.random.default_rng(5)
    examples = []
    for _ in range(40):
        a, b = rng.integers(1, 5, 2)
        examples.append((rng.integers(0, 32, a).tolist(), rng.integers(0, 32, b).tolist()))
    pairs = PromptResponsePairs(write(tmp_path / "sft", examples), KEYS)
    assert pairs.info is not None

    def start(**values: Any) -> Trainer:
        settings = {"data__sft": True, "data__split": "100,0,0", "batch__seq_length": 16} | values
        return Trainer(resolve_config(corpus=pairs.info.tokenizer, **settings), Mesh(), pairs)

    return start


def _reference_loss(run: Trainer, rows: Sequence[int]) -> tuple[float, float]:
    """Loss and gradient's norm of what is learnt in these rows, each example by itself through the model."""
    (model,), examples = run.models, list[tuple[torch.Tensor, torch.Tensor]]()
    assert isinstance(run.train, PackedSftDataset)
    for row in rows:
        begin = int(run.train.ends[row - 1]) if row else 0
        for example in run.train.order[begin : run.train.ends[row]]:
            ids, prompt = run.train.pairs.read(int(example))
            target = torch.from_numpy(ids[1:]).clone()
            target[: max(prompt, 1) - 1] = IGNORED
            examples.append((torch.from_numpy(ids[:-1]), target))
    count = sum(int((target != IGNORED).sum()) for _, target in examples)
    run.grad_sync.gradients.zero_grad(len(examples))
    total = 0.0
    for token, target in examples:
        place, alone = torch.arange(len(token)), PackedAttention(1, len(token))
        loss = model(token, place, alone, no_dropout, target) / count
        loss.backward()
        total += float(loss.detach())
    run.grad_sync.reduce()
    return total, run.grad_sync.norm()


def test_the_loss_and_its_gradient_are_those_of_the_examples_one_by_one(
    start_tuning: Callable[..., Trainer],
) -> None:
    packed = start_tuning(batch__micro_batch_size=2).step(0.0)
    assert packed == pytest.approx(_reference_loss(start_tuning(), range(4)), rel=1e-5)


def test_a_batch_is_one_mean_over_its_answers_however_it_is_cut(start_tuning: Callable[..., Trainer]) -> None:
    losses = [start_tuning(batch__micro_batch_size=micro).step(0.0) for micro in (1, 2, 4)]
    np.testing.assert_allclose(losses, [losses[0]] * 3, rtol=1e-5)


def test_a_mean_over_tokens_is_another_than_one_over_micro_batches(
    resolve_config: ResolveConfig, open_corpus: Any
) -> None:
    def loss(micro: int, **values: Any) -> float:
        plan = resolve_config(
            corpus=open_corpus.info.tokenizer,
            batch__micro_batch_size=micro,
            data__eod_mask_loss=True,
            **values,
        )
        return Trainer(plan, Mesh(), open_corpus).step(0.0)[0]

    assert loss(1) != pytest.approx(loss(4), rel=1e-6)
    assert loss(1, train__calculate_per_token_loss=True) == pytest.approx(loss(4), rel=1e-6), (
        "of one they are the same"
    )


def test_the_end_of_a_document_must_be_known(resolve_config: ResolveConfig) -> None:
    with pytest.raises(
        ConfigError, match=r"--data-path: the end-of-document token is not known: .*and --sft"
    ):
        resolve_config(data__sft=True)


def test_a_curriculum_would_cut_answers_off(start_tuning: Callable[..., Trainer]) -> None:
    with pytest.raises(ConfigError, match=r"^--curriculum-start-length: would cut answers off: found --sft"):
        start_tuning(curriculum__curriculum_start_length=2, curriculum__curriculum_steps=2)


def test_the_command_learns_answers_from_two_keys(tmp_path: Path) -> None:
    examples = [([i, (i + 3) % 30], [(i + 7) % 30, (i + 9) % 30]) for i in range(30)]
    data = write(tmp_path / "qa", examples)
    words = ["gpt", "--sft", "--data-path", str(data), "--split", "100,0,0", "--eval-iters", "0"]
    words += ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "20"]
    words += ["--global-batch-size", "4", "--micro-batch-size", "4", "--lr", "0.02", "--train-iters", "60"]
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
        main([*words, "--log-interval", "20", "--sft-keys", "prompt", "answer"])
    assert left.value.code == 0, err.getvalue()
    losses = [
        float(line.split("loss ")[1].split()[0]) for line in out.getvalue().splitlines() if "loss" in line
    ]
    assert losses[-1] < losses[0] / 3
