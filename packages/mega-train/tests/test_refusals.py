"""A refused start reports all errors at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import pytest
from click.testing import CliRunner, Result

from mega_schema.errors import ConfigError, MegaError
from mega_train.cli import app
from mega_train.config.refusals import Refusals, RefusedRunError, parts, show_table
from mega_train.resolve import ResolvedConfig

SHAPE = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8"


class ResolveConfig(Protocol):
    def __call__(self, **values: Any) -> ResolvedConfig: ...


def _refused_flags(*args: str) -> tuple[list[str], str]:
    """The flags of the table that a command prints, without the heading, and the line it ends with."""
    result: Result = CliRunner().invoke(app, args, standalone_mode=False)
    assert isinstance(result.exception, MegaError), result.output
    return [row.split()[0] for row in result.stderr.splitlines()[1:]], str(result.exception)


def _refused_keys(resolve_config: ResolveConfig, **values: Any) -> list[str]:
    with pytest.raises(RefusedRunError) as caught:
        resolve_config(**values)
    return [str(error.where) for error in caught.value.errors]


def test_a_bare_command_lists_all_that_a_run_needs() -> None:
    flags, line = _refused_flags("gpt")
    needed = ["--data-path", "--num-layers", "--hidden-size", "--num-attention-heads"]
    assert flags == [*needed, "--max-position-embeddings", "--train-iters", "--lr"]
    assert line == (
        f"run: 7 values are refused, listed above: found {', '.join(flags)}; hint: mega-train explain FLAG"
    )


def test_each_row_has_the_reason_and_what_replaces_it(corpus: Path) -> None:
    line = f"gpt --data-path {corpus} {SHAPE} --train-iters 5 --lr 1e-3 --weight-decay -1 --keep-last 2"
    result = CliRunner().invoke(app, line.split(), standalone_mode=False)
    heading, *rows = (" ".join(row.split()) for row in result.stderr.splitlines())
    assert heading == "flag why instead"
    assert rows == [
        "--keep-last needs --save: wanted --save DIR --save RUN",
        "--weight-decay not a finite number of 0 or more: found -1.0, wanted 0 or more",
    ]


def test_a_flag_is_never_broken_and_a_path_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    flag, path = "--ddp-param-name-patterns-for-fp32-local-accumulation", "/".join(["folder"] * 40)
    hint = "words enough to make a table wider than the page: " * 3
    show_table([ConfigError(flag, "is refused", hint=hint), ConfigError("--lr", "is refused", hint=hint)])
    assert flag in capsys.readouterr().err.split()
    show_table([ConfigError(flag, "is refused"), ConfigError(path, "is refused", hint=hint)])
    shown = capsys.readouterr().err
    assert shown.count("/") == path.count("/")
    assert "…" not in shown


def test_a_single_refusal_is_one_line_without_a_table(corpus: Path) -> None:
    flags, line = _refused_flags(*f"gpt --data-path {corpus} {SHAPE} --train-iters 5".split())
    assert (flags, line) == ([], "--lr: missing: wanted a learning rate; hint: --lr 3e-4")


def test_what_follows_from_a_corpus_that_cannot_be_opened_is_not_refused(tmp_path: Path) -> None:
    words = f"gpt --data-path {tmp_path / 'none'} {SHAPE} --lr 1e-3 --reset-position-ids"
    _, line = _refused_flags(*words.split())  # no vocabulary is missing, and no end of a document
    assert f"listed above: found {tmp_path / 'none'}.idx, --train-iters; " in line


def test_errors_of_every_part_of_a_run_are_collected(resolve_config: ResolveConfig) -> None:
    assert _refused_keys(
        resolve_config,
        world=3,
        parallel__tensor_model_parallel_size=2,
        model__num_attention_heads=3,
        train__seed=-1,
        log__log_interval=0,
        optimizer__adam_beta1=1.0,
        optimizer__adam_beta2=2.0,
        train__fp16=True,
        train__bf16=True,
        train__hidden_dropout=1.5,
        train__skip_train_iteration_range=["'x'"],
    ) == [
        "--num-attention-heads",
        "world size",
        "--log-interval",
        "--seed",
        "--adam-beta1",
        "--adam-beta2",
        "--hidden-dropout",
        "--fp16",
        "--skip-train-iteration-range",
    ]


def test_a_check_that_depends_on_a_refused_value_is_left_out(resolve_config: ResolveConfig) -> None:
    # 9 tokens do not fit the model: whether 2 ranks of cp can share them is another question
    length = {
        "batch__seq_length": 9,
        "model__max_position_embeddings": 8,
        "parallel__context_parallel_size": 2,
        "world": 2,
    }
    assert _refused_keys(resolve_config, **length, train__seed=-1) == ["--seq-length", "--seed"]
    # without a duration nothing says when the warm-up must end
    warmup = {"train__train_iters": None, "optimizer__lr_warmup_iters": 99}
    assert _refused_keys(resolve_config, **warmup, batch__micro_batch_size=0) == [
        "--train-iters",
        "--micro-batch-size",
    ]
    # a scale that is none is neither above nor below another
    scales = {"train__fp16": True, "train__initial_loss_scale": -1.0}
    assert _refused_keys(resolve_config, **scales, log__log_interval=0) == [
        "--log-interval",
        "--initial-loss-scale",
    ]


def test_of_one_flag_the_first_error_is_kept() -> None:
    refused = Refusals()
    first, second = MegaError("--lr", "missing"), MegaError("--lr", "not above 0")
    assert not refused.extend([first, second])
    with pytest.raises(MegaError) as caught:
        refused.raise_any()
    assert caught.value is first
    assert parts(first) == (first,)


def test_a_comparison_says_all_that_keeps_a_run_from_beginning(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        "[model]\nnum_layers = 2\nhidden_size = 16\nnum_attention_heads = 2\nvocab_size = 33\n"
        "[batch]\nseq_length = 8\n"
    )
    result = CliRunner().invoke(app, ["diff", str(file), str(file)])
    assert f"{file}: derived values not available: --train-iters: missing" in result.stderr
    assert "--lr: missing" in result.stderr
