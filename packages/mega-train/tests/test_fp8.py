"""Training with FP8: option checks, agreement with bfloat16, reproducibility, resuming."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from click.testing import CliRunner

from mega_model import fp8
from mega_model.distributed.mesh import Mesh
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.errors import ConfigError, LayoutError
from mega_schema.fp8_recipe import Fp8Recipe
from mega_train.cli import app
from mega_train.commands.explain import explain_word
from mega_train.compat.flag_translation import format_skipped, translate_flags
from mega_train.config import RunConfig
from mega_train.config.training import TrainConfig
from mega_train.engine import train
from mega_train.engine.train import kernels_summary
from mega_train.engine.trainer import Trainer
from mega_train.engine.validation import evaluate
from mega_train.resolve import ResolvedConfig

SIZES = {"model__hidden_size": 32, "batch__seq_length": 16, "train__train_iters": 100, "optimizer__lr": 0.003}
BF16 = {**SIZES, "train__bf16": True}
HYBRID = {**BF16, "train__fp8_format": '"hybrid"'}


class ResolveConfig(Protocol):
    def __call__(self, **values: Any) -> ResolvedConfig: ...


def _trainer(
    resolve_config: ResolveConfig, corpus: IndexedDataset, resume: Path | None = None, **values: Any
) -> Trainer:
    assert corpus.info is not None
    plan = resolve_config(corpus=corpus.info.tokenizer, **values)
    return Trainer(plan, Mesh(), corpus, checkpoint=Checkpoint.open(resume) if resume else None)


def _steps(run: Trainer, count: int) -> list[tuple[float, float]]:
    return [run.step(run.state.lr) for _ in range(count)]


def _losses(steps: Sequence[tuple[float, float]]) -> list[float]:
    return [loss for loss, _ in steps]


@pytest.mark.parametrize("more", [{}, {"train__fp8_format": '"e4m3"'}, {"train__fp8_wgrad": False}])
def test_a_hundred_steps_follow_bfloat16_within_a_hundredth_of_the_loss(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset, more: dict[str, Any]
) -> None:
    wanted = _losses(_steps(_trainer(resolve_config, open_corpus, **BF16), 100))
    fp8_losses = _losses(_steps(_trainer(resolve_config, open_corpus, **HYBRID | more), 100))
    assert fp8_losses == pytest.approx(wanted, rel=1e-2)
    assert fp8_losses != wanted
    assert fp8_losses[-1] < 0.3 * fp8_losses[0]


def test_it_repeats_bit_for_bit(resolve_config: ResolveConfig, open_corpus: IndexedDataset) -> None:
    first, second = (_steps(_trainer(resolve_config, open_corpus, **HYBRID), 5) for _ in range(2))
    assert first == second


def test_a_resumed_run_goes_on_bitwise_and_a_checkpoint_knows_no_fp8(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset, tmp_path: Path
) -> None:
    run = _trainer(resolve_config, open_corpus, **HYBRID, checkpoint__save=f'"{tmp_path}"')
    _steps(run, 3)
    run.save()
    run.saver.finish()
    on = _steps(run, 3)
    assert _steps(_trainer(resolve_config, open_corpus, tmp_path, **HYBRID), 3) == on
    without = _steps(_trainer(resolve_config, open_corpus, tmp_path, **BF16), 3)
    assert without != on
    assert _losses(without) == pytest.approx(_losses(on), rel=1e-2)


@pytest.mark.parametrize(
    "recompute", [{"recompute__checkpoint_activations": True}, {"recompute__recompute_activations": True}]
)
def test_what_is_computed_again_trains_bitwise_alike(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset, recompute: dict[str, bool]
) -> None:
    unrecomputed = _steps(_trainer(resolve_config, open_corpus, **HYBRID), 3)
    assert _steps(_trainer(resolve_config, open_corpus, **HYBRID, **recompute), 3) == unrecomputed


def test_a_run_without_it_makes_no_product_in_fp8(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = _steps(_trainer(resolve_config, open_corpus, **BF16), 2)

    def never(*arguments: object, **named: object) -> None:
        raise AssertionError("a product in FP8")

    monkeypatch.setattr(fp8, "matmul", never)
    monkeypatch.setattr(fp8, "quantize", never)
    assert _steps(_trainer(resolve_config, open_corpus, **BF16), 2) == wanted
    with pytest.raises(AssertionError, match="a product in FP8"):
        _steps(_trainer(resolve_config, open_corpus, **HYBRID), 1)


def test_validation_computes_as_training_does(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset
) -> None:
    scores = []
    for values in (BF16, HYBRID):
        run = _trainer(resolve_config, open_corpus, **values, evaluation__eval_iters=1, data__split='"8,1,1"')
        scores.append(evaluate(run, next(iter(run.valid.values()))).total)
    assert scores[0] != scores[1]
    assert scores[1] == pytest.approx(scores[0], rel=1e-2)


@pytest.mark.parametrize(
    ("values", "kind", "line"),
    [
        (
            {"train__fp8_format": '"hybrid"'},
            ConfigError,
            "--fp8-format: needs bfloat16: found float32, wanted --bf16; hint: --bf16 --fp8-format hybrid",
        ),
        (
            {"train__fp8_format": '"e4m3"', "train__fp16": True},
            ConfigError,
            "--fp8-format: needs bfloat16: found --fp16, wanted --bf16; hint: --bf16 --fp8-format e4m3",
        ),
        (
            {**BF16, "train__fp8_wgrad": False},
            ConfigError,
            "--no-fp8-wgrad: needs --fp8-format: wanted --fp8-format; hint: --fp8-format hybrid",
        ),
        (
            {
                **HYBRID,
                "parallel__tensor_model_parallel_size": 2,
                "parallel__sequence_parallel": True,
                "parallel__tp_comm_overlap": True,
            }
            | {"world": 2, "cuda": True},
            ConfigError,
            "--fp8-format: excludes --tp-comm-overlap, which multiplies in bfloat16; "
            "hint: leave one of them out",
        ),
        (
            {**HYBRID, "model__ffn_hidden_size": 40},
            LayoutError,
            "--fp8-format: layers.0.up.weight cannot be multiplied in FP8: found 40 x 32 on a rank, tp=1, "
            "wanted multiples of 16; hint: other widths, another --tensor-model-parallel-size, or "
            "--bf16 without --fp8-format",
        ),
        (
            {
                **HYBRID,
                "model__hidden_size": 48,
                "model__num_attention_heads": 4,
                "parallel__tensor_model_parallel_size": 2,
                "world": 2,
            },
            LayoutError,
            "--fp8-format: layers.0.qkv.weight cannot be multiplied in FP8: found 72 x 48 on a rank, tp=2, "
            "wanted multiples of 16",
        ),
    ],
)
def test_what_it_does_not_stand_beside_is_refused(
    resolve_config: ResolveConfig, values: dict[str, Any], kind: type[Exception], line: str
) -> None:
    with pytest.raises(kind) as caught:
        resolve_config(**values)
    assert str(caught.value).startswith(line)


def test_the_plan_says_how_products_are_made(resolve_config: ResolveConfig) -> None:
    assert resolve_config(**BF16).fp8 is None
    assert resolve_config(**HYBRID).fp8 == Fp8Recipe("hybrid")
    assert resolve_config(**HYBRID, train__fp8_wgrad=False).fp8 == Fp8Recipe("hybrid", False)


def test_a_gpu_without_such_products_is_refused_before_ranks_meet(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    assert fp8.unsupported_reason(torch.device("cuda")) == "a GPU of compute capability 8.0"
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    assert fp8.unsupported_reason(torch.device("cuda")) == fp8.unsupported_reason(torch.device("cpu")) == ""
    monkeypatch.setattr(train, "unsupported_reason", lambda device: "a GPU of compute capability 8.0")
    words = "gpt --num-layers 1 --hidden-size 16 --num-attention-heads 1 --seq-length 16 --train-iters 1"
    words += f" --lr 0.1 --bf16 --fp8-format hybrid --data-path {corpus}"
    line = "this device does not support FP8 matrix products: found a GPU of compute capability 8.0"
    with pytest.raises(ConfigError, match=line):
        CliRunner().invoke(app, words.split(), catch_exceptions=False)


def test_the_record_of_a_run_says_it(resolve_config: ResolveConfig, open_corpus: IndexedDataset) -> None:
    choice = _trainer(resolve_config, open_corpus, **BF16).kernel_choice
    run = RunConfig(train=TrainConfig(bf16=True, fp8="hybrid"))
    # whose attention is depends on the processor
    wanted = f"{choice.summary}, torch (products in FP8, hybrid)"
    assert kernels_summary(run, choice, torch.device("cpu")) == wanted
    assert kernels_summary(RunConfig(), choice, torch.device("cpu")) == choice.summary


def test_megatrons_flags_of_it_are_read_and_those_of_its_history_left_out() -> None:
    ours = ("--fp8-format", "--no-fp8-wgrad")
    assert translate_flags(["--fp8-e4m3"], ours).words == ["--fp8-format", "e4m3"]
    assert translate_flags(["--fp8-recipe", "tensorwise"], ours).words == []
    words = "--fp8-format hybrid --fp8-margin 0 --fp8-interval 1 --fp8-amax-history-len 1024 "
    words += "--fp8-amax-compute-algo max --no-fp8-wgrad"
    result = translate_flags(words.split(), ours)
    assert result.words == ["--fp8-format", "hybrid", "--no-fp8-wgrad"]
    why = "FP8 uses current scaling, without amax history or margin"
    flags = "--fp8-margin, --fp8-interval, --fp8-amax-history-len, --fp8-amax-compute-algo"
    assert format_skipped(result.left_out) == f"{flags} ({why})"
    (error,) = translate_flags(["--fp8-recipe", "delayed"], ours).refused
    assert str(error).startswith("--fp8-recipe: not a known value: found delayed")
    assert "--fp8-interval   is left out: FP8 uses" in next(iter(explain_word("--fp8-interval")))
    assert next(iter(explain_word("--fp8-format"))) == "--fp8-format   [train]"
