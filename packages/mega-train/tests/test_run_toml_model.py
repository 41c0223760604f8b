"""run.toml of a run whose model came from a checkpoint: the file alone starts the same run."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.presets import PRESETS, preset
from mega_schema.spec import ModelSpec, gpt, llama
from mega_train.cli import app
from mega_train.config import BatchConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from mega_train.resolve import model_spec, resolve

SHAPE = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --make-vocab-size-divisible-by 8"
)
TRAINING = "--global-batch-size 4 --train-iters 1 --lr 0.01 --eval-iters 0"
LOADED = {
    "gpt": gpt(layers=2, hidden=16, heads=2, vocab=33, max_seq_len=16),
    "llama": llama(
        layers=2, hidden=16, heads=4, kv_heads=2, ffn=40, vocab=33, max_seq_len=16, sliding_window=4
    ),
    "tied llama": llama(
        layers=2, hidden=16, heads=2, ffn=40, vocab=33, max_seq_len=16, tied=True, rope_scaling=32.0
    ),
    "qkv biases": llama(layers=2, hidden=16, heads=2, ffn=40, vocab=33, max_seq_len=16, qkv_bias=True),
    "gpt-neox": gpt(
        layers=2,
        hidden=16,
        heads=2,
        vocab=33,
        max_seq_len=16,
        positions="rope",
        rotary_fraction=0.5,
        parallel_residual=True,
        tied=False,
        activation="gelu_erf",
        norm_1p=True,
        init="xavier_uniform",
    ),
    "sinusoidal": replace(preset("megatron-11b"), layers=2),
    **{name: spec for name, spec in PRESETS.items() if spec.causal},
}


def _recorded_model(spec: ModelSpec, model_config: ModelConfig) -> ModelConfig:
    run = RunConfig(
        model=model_config,
        batch=BatchConfig(length=8),
        train=TrainConfig(iterations=2, device="cpu"),
        optimizer=OptimizerConfig(lr=0.1),
    )
    return resolve(run, spec.family, 1, corpus=None, loaded_spec=spec, cuda=False).run.model


@pytest.mark.parametrize("name", LOADED)
def test_the_recorded_model_is_the_loaded_one(name: str) -> None:
    spec = LOADED[name]
    recorded = _recorded_model(spec, ModelConfig())
    assert model_spec(RunConfig(model=recorded), spec.family, vocab=None, loaded_spec=None) == spec
    # and goes with the checkpoint that it was recorded of
    assert model_spec(RunConfig(model=recorded), spec.family, vocab=None, loaded_spec=spec) == spec


def test_what_a_person_said_is_recorded_as_it_was_said() -> None:
    assert _recorded_model(preset("gpt2-124m"), ModelConfig(preset="gpt2-124m")) == ModelConfig(
        family="gpt", preset="gpt2-124m"
    )
    model_config = ModelConfig(layers=2, hidden=16, heads=2, vocab=33, max_seq_len=16)
    assert _recorded_model(LOADED["gpt"], model_config) == replace(model_config, family="gpt")


def test_a_model_that_no_keys_describe_is_recorded_by_its_family() -> None:
    spec = gpt(layers=2, hidden=16, heads=2, vocab=33, max_seq_len=16, rope_scaling_low=2.0)
    assert _recorded_model(spec, ModelConfig()) == ModelConfig(family="gpt")


def _do(*args: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT, a Llama, and a run that loads the Llama and names no model, in one folder."""
    folder = tmp_path_factory.mktemp("runs")
    start = ["--data-path", str(corpus), *TRAINING.split()]
    for family in ("gpt", "llama"):
        _do(family, *start, *SHAPE.split(), "--save", str(folder / family))
    _do("llama", *start, "--load", str(folder / "llama"), "--finetune", "--save", str(folder / "tuned"))
    return folder


def test_a_run_begins_anew_from_the_file_of_one_that_loaded_its_model(
    runs: Path, corpus: Path, tmp_path: Path
) -> None:
    file = runs / "tuned/iter_0000001/run.toml"
    recorded = tomllib.loads(file.read_text("utf-8"))["model"]
    assert (recorded["family"], recorded["num_layers"], recorded["normalization"]) == ("llama", 1, "RMSNorm")
    anew = ["--set", "checkpoint.load=none", "--set", "checkpoint.finetune=false", "--save", str(tmp_path)]
    _do("llama", "--config", str(file), *anew)
    assert Checkpoint.open(tmp_path).spec == Checkpoint.open(runs / "llama").spec


def test_a_comparison_has_no_difference_between_a_model_and_its_description(runs: Path) -> None:
    lines = _do("diff", str(runs / "llama"), str(runs / "tuned"), code=1).output.splitlines()
    assert {line.split()[0] for line in lines} == {
        "checkpoint.save",
        "checkpoint.load",
        "checkpoint.finetune",
        "batch.seq_length",  # the Llama's, which is the loaded model's longest
    }


def test_the_page_of_two_families_says_that_they_differ(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    _do("report", str(runs / "gpt"), "--compare-with", str(runs / "llama"), "--output", str(page))
    text = page.read_text("utf-8")
    differ = text[text.index("Differences:") : text.index("<details>")]
    row = differ[differ.index("model.family") :].partition("</tr>")[0]
    assert "gpt" in row
    assert "llama" in row


def test_the_file_of_another_family_is_refused_with_its_command(runs: Path) -> None:
    words = ["gpt", "--config", str(runs / "llama/iter_0000001/run.toml"), "--set", "checkpoint.save=none"]
    result = CliRunner().invoke(app, words)
    assert "is not that of the command: found llama, wanted gpt; hint: mega-train llama" in str(
        result.exception
    )
