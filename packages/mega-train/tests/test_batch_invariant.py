"""Training with --batch-invariant: refusals, and agreement with the other kernels."""

from __future__ import annotations

from typing import Any, Protocol

import pytest
import torch

from mega_model.distributed.mesh import Mesh
from mega_model.kernels import dispatch
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.errors import MegaError
from mega_train.engine.trainer import Trainer, choose_run_kernels
from mega_train.resolve import ResolvedConfig

SIZES = {"model__hidden_size": 32, "batch__seq_length": 16, "train__train_iters": 100, "optimizer__lr": 0.003}
INVARIANT = {**SIZES, "train__batch_invariant": True}


class ResolveConfig(Protocol):
    def __call__(self, **values: Any) -> ResolvedConfig: ...


def _losses(
    resolve_config: ResolveConfig, corpus: IndexedDataset, count: int = 20, **values: Any
) -> list[float]:
    assert corpus.info is not None
    run = Trainer(resolve_config(corpus=corpus.info.tokenizer, **values), Mesh(), corpus)
    return [run.step(run.state.lr)[0] for _ in range(count)]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"train__bf16": True},
        {"family": "llama", "recompute__recompute_activations": True},
        {"train__attention_dropout": 0.1, "train__hidden_dropout": 0.1},
        {"data__reset_attention_mask": True, "data__reset_position_ids": True},
    ],
)
def test_it_trains_as_the_other_kernels_do(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset, more: dict[str, Any]
) -> None:
    wanted = _losses(resolve_config, open_corpus, **SIZES, **more)
    losses = _losses(resolve_config, open_corpus, **INVARIANT, **more)
    assert losses == pytest.approx(wanted, rel=2e-2 if more.get("train__bf16") else 1e-4)
    assert losses != wanted
    assert losses[-1] < 0.9 * losses[0]
    assert _losses(resolve_config, open_corpus, **INVARIANT, **more) == losses


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train__fp16": True}, "has no products of float16: found --fp16, wanted --bf16 or float32"),
        (
            {"train__bf16": True, "train__fp8_format": '"hybrid"'},
            "has no products in FP8: found --fp8-format hybrid; hint: leave one of them out",
        ),
        (
            {"train__kernels": '"reference"'},
            "has kernels of its own: found --kernels reference, wanted --kernels auto",
        ),
        (
            {"parallel__context_parallel_size": 2, "world": 2},
            "attention sums the keys of a sequence in order, on one rank: found context parallelism over 2 "
            "ranks, wanted 1; hint: leave --context-parallel-size out",
        ),
        (
            {
                "model__hidden_size": 48,
                "model__num_attention_heads": 6,
                "parallel__tensor_model_parallel_size": 3,
                "world": 3,
            },
            "sums 48 inputs in 8 segments, which tp does not divide: found tp 3, wanted 1 | 2 | 4 | 8",
        ),
    ],
)
def test_an_option_that_needs_other_kernels_is_refused(
    resolve_config: ResolveConfig, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(MegaError) as caught:
        resolve_config(**INVARIANT | values)
    assert str(caught.value) == f"--batch-invariant: {message}"


def test_a_gpu_is_refused(resolve_config: ResolveConfig) -> None:
    train = resolve_config(**INVARIANT).run.train
    with pytest.raises(MegaError) as caught:
        choose_run_kernels(train, torch.device("cuda"))
    assert str(caught.value) == (
        "--batch-invariant: has kernels for CPUs only: found cuda, wanted --device cpu"
    )


def test_a_machine_without_numba_is_refused(
    resolve_config: ResolveConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "has_numba", lambda: False)
    with pytest.raises(MegaError) as caught:
        choose_run_kernels(resolve_config(**INVARIANT).run.train, torch.device("cpu"))
    assert str(caught.value) == (
        "--batch-invariant: needs numba, which is not installed; hint: "
        'pip install -e "packages/mega-train[cpu]"'
    )


def test_the_kernels_are_named(resolve_config: ResolveConfig) -> None:
    choice = choose_run_kernels(resolve_config(**INVARIANT).run.train, torch.device("cpu"))
    assert choice.sources["linear"] == choice.sources["cross_entropy"] == "batch-invariant"
    assert choice.sources["add_product"] != "batch-invariant"
