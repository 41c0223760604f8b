"""Options of Megatron's scripts: mock data, a padded vocabulary, a missing checkpoint, the model's family."""

from __future__ import annotations

import copy
import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from mega_schema.app.config import load_config
from mega_schema.errors import ConfigError
from mega_schema.spec import gpt
from mega_train.cli import main
from mega_train.config import RunConfig
from mega_train.data.mock import MockDataset
from mega_train.resolve import model_spec
from mega_train.telemetry.event_log import read_events

SMALL = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2"
SHORT = "--train-iters 3 --lr 1e-3 --log-interval 1 --eval-iters 0"


def _mega_train(line: str, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of a command."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
        main(line.split())
    assert left.value.code == code, err.getvalue()
    return out.getvalue(), err.getvalue()


def test_mock_documents_count_up_and_end_with_the_end_of_document() -> None:
    mock = MockDataset(vocab=33, eod=32)
    assert len(mock) == 100_000
    assert mock.lengths[:5].tolist() == np.random.default_rng(0).integers(1, 4096, 100_000)[:5].tolist()
    whole = mock.read(3)
    assert whole.tolist() == [*((np.arange(len(whole) - 1) + 1) % 33), 32]
    assert mock.read(3, 5, 4).tolist() == whole[5:9].tolist()
    assert mock.read(3, len(whole) - 2).tolist() == whole[-2:].tolist()
    assert mock.read(3, 2, 0).tolist() == []
    with pytest.raises(IndexError):
        mock.read(3, 0, len(whole) + 1)
    assert copy.copy(mock).read(7).tolist() == mock.read(7).tolist()


def test_a_run_on_mock_data_learns_and_writes_no_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = f"gpt {SMALL} {SHORT} --mock-data --vocab-size 33 --save run --train-iters 40 --lr 0.01"
    _mega_train(line)
    losses = [event["loss"] for event in read_events(Path("run")) if event["event"] == "train_log"]
    assert losses[-1] < losses[0] - 0.5
    assert [path.name for path in Path().iterdir()] == ["run"]
    # resumed without the model's flags, the ids are the checkpoint's
    _mega_train(f"gpt --mock-data --load run --save more {SHORT} --finetune --micro-batch-size 2")


def test_mock_data_excludes_a_corpus_and_needs_a_vocabulary() -> None:
    base = f"gpt {SMALL} {SHORT} --mock-data"
    assert _mega_train(f"{base} --vocab-size 33 --data-path p", 2)[1] == (
        "error: --mock-data: excludes --data-path: found both, wanted one of them\n"
    )
    assert _mega_train(base, 2)[1].startswith("error: --vocab-size: missing: wanted ids for the mock data")
    assert "has no prompts and answers" in _mega_train(f"{base} --vocab-size 33 --sft", 2)[1]


def _run(*sets: str) -> RunConfig:
    base = [
        "model.num_layers=2",
        "model.hidden_size=16",
        "model.num_attention_heads=2",
        "batch.seq_length=8",
        "model.vocab_size=33",
    ]
    return load_config(RunConfig, None, {}, [*base, *sets])


def test_the_vocabulary_is_padded_to_the_rows_that_are_asked_for() -> None:
    spec = model_spec(
        _run("model.pad_vocab_size_to=40", "parallel.tensor_model_parallel_size=2"),
        "gpt",
        vocab=None,
        loaded_spec=None,
    )
    assert spec.vocab_multiple * 2 == 40
    for sets, message in (
        (
            ("model.pad_vocab_size_to=32",),
            "--pad-vocab-size-to: is less than the vocabulary: found 32, wanted 33",
        ),
        (
            ("model.pad_vocab_size_to=41", "parallel.tensor_model_parallel_size=2"),
            "--pad-vocab-size-to: cannot be shared evenly: found 41 rows over tp=2; "
            "hint: --pad-vocab-size-to 42",
        ),
        (
            ("model.pad_vocab_size_to=40", "model.make_vocab_size_divisible_by=16"),
            "--pad-vocab-size-to: disagrees with another flag: found 40, wanted a multiple of",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            model_spec(_run(*sets), "gpt", vocab=None, loaded_spec=None)
        assert str(caught.value).startswith(message)


def test_flags_without_a_shape_describe_a_part_of_the_checkpoints_model() -> None:
    loaded = gpt(layers=2, hidden=16, heads=2, vocab=33, max_seq_len=8, positions="rope", norm="rmsnorm")
    run = load_config(
        RunConfig, None, {}, ["model.normalization=RMSNorm", "model.position_embedding_type=rope"]
    )
    assert model_spec(run, "gpt", vocab=None, loaded_spec=loaded) == loaded
    with pytest.raises(ConfigError, match=r"differs from the checkpoint's"):
        model_spec(
            load_config(RunConfig, None, {}, ["model.normalization=LayerNorm"]),
            "gpt",
            vocab=None,
            loaded_spec=loaded,
        )


def test_a_missing_checkpoint_ends_a_run_that_demands_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    line = f"gpt {SMALL} {SHORT} --mock-data --vocab-size 33 --load {run} --save {run}"
    assert _mega_train(f"{line} --exit-on-missing-checkpoint", 2)[1] == (
        f"error: {run}: contains no checkpoint, and --exit-on-missing-checkpoint is given; "
        "hint: leave it out to start a new run\n"
    )
    assert not run.exists()


def test_validate_accepts_the_first_start_of_a_script_that_always_resumes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    resumes = f"{SMALL} {SHORT} --vocab-size 33 --load {run} --save {run}"
    for data in ("", " --mock-data"):
        values = json.loads(_mega_train(f"validate {resumes}{data} --json")[0])
        assert values["training iterations"] == 3
    assert values["dropout"] == "hidden 0, attention 0"
    assert values["optimizer"] == "adam, betas 0.9 0.999, eps 1e-08, weight decay 0.01, gradient clipping 1"
    assert values["learning rate"] == "0.001 to 0, linear"
    assert not run.exists()
    wsd = "--lr-decay-style WSD --lr-wsd-decay-iters 1 --decoupled-lr 1e-4 --optimizer muon"
    values = json.loads(_mega_train(f"validate {resumes} {wsd} --json")[0])
    assert values["learning rate"] == "0.001 to 0, WSD with exponential decay; embedding and output 0.0001"
    assert values["optimizer"].startswith("muon, momentum 0.95, the rest by adam: betas 0.9 0.999")


def test_the_family_of_a_run_is_in_its_configuration(tmp_path: Path) -> None:
    run = tmp_path / "run"
    _mega_train(f"llama {SMALL} {SHORT} --mock-data --vocab-size 33 --save {run}")
    config = next(run.glob("iter_*")) / "run.toml"
    assert 'family = "llama"' in config.read_text()
    error = _mega_train(f"gpt --config {config} --save {tmp_path / 'x'}", 2)[1]
    assert error == (
        "error: model.family: is not that of the command: found llama, wanted gpt; hint: mega-train llama\n"
    )
    _mega_train(f"llama --config {config} --save {tmp_path / 'x'}")
    values, _ = _mega_train(f"validate --config {config} --save {tmp_path / 'y'} --json")
    assert json.loads(values)["model.family"] == "llama"
    (start, *_) = read_events(run)
    assert start["config"]["model"]["family"] == "llama", "the report's differences see it"


def test_an_unknown_preset_is_told_before_a_corpus_that_is_not_given() -> None:
    error = _mega_train("gpt --preset llama-3-8b --train-iters 1 --lr 1", 2)[1]
    assert error.startswith("error: --preset: unknown model: found llama-3-8b")
