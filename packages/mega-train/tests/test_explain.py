"""`explain`, `validate` and `diff`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from click.testing import CliRunner, Result

from mega_schema.app.config import config_keys, to_toml
from mega_schema.arch import table
from mega_schema.checkpoint.checkpoint_dir import FORMAT
from mega_schema.checkpoint.reader import MODEL, boxes_to_write
from mega_schema.checkpoint.side_files import rewrite_checksums
from mega_schema.checkpoint.writer import CheckpointWriter
from mega_schema.errors import ConfigError
from mega_schema.parallel_layout import Layout
from mega_train.cli import app
from mega_train.commands.explain import explain_word
from mega_train.config import RunConfig
from mega_train.resolve import ResolvedConfig

TINY = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 33"
SHORT = "--train-iters 10 --lr 0.01 --eval-iters 0"


class ResolveConfig(Protocol):
    def __call__(self, **values: Any) -> ResolvedConfig: ...


def _invoke(*args: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == code, result.output
    return result


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--lr-warmup-fraction", "--lr-warmup-fraction   [optimizer]\n"),
        ("optimizer.lr_warmup_fraction", "--lr-warmup-fraction   [optimizer]\n"),
        ("--no-load-optim", "--no-load-optim   [checkpoint] load_optim = false\n"),
        ("load_optim", "--no-load-optim   [checkpoint] load_optim = false\n"),
        ("--no-async-save", "--async-save/--no-async-save   [checkpoint]\n"),
        ("optimizer.clip_grad", "  a number; 1.0 by default"),
        ("seq-length", "--seq-length   [batch]\n"),
        ("position-embedding-type", "  rotary is read as --position-embedding-type rope"),
        (
            "--preset",
            "llama3-8b          llama      8.03 billion   32 layers, hidden 4096, 32 heads",
        ),
        ("--squared-relu", "--squared-relu   is read as --activation squared_relu"),
        ("--criterion", "--criterion cross_entropy   is read as nothing: it is so here"),
        ("--num-workers", "--num-workers   is left out: samples are read from a memory map"),
        (
            "--ckpt-step",
            "--ckpt-step   is refused: an iteration is named by its folder; hint: --load RUN/iter_NNNNNNN",
        ),
        ("--moe-router-topk", "--moe-router-topk   is refused: mixture-of-experts layers are not supported"),
        ("--deepspeed_config", "--deepspeed_config   is read for batch, ZeRO stage, clipping and precision"),
    ],
)
def test_a_word_is_explained(word: str, message: str) -> None:
    assert message in _invoke("explain", word).output


def test_known_words_are_explained_beside_unknown_ones() -> None:
    result = _invoke("explain", "lr", "--foo", "parallel.tp", code=1)
    assert result.stdout.startswith("--lr ")
    assert result.stderr == "error: --foo: is neither a key nor a flag\n"
    assert str(result.exception).endswith("did you mean parallel.tensor_model_parallel_size?")


def test_without_a_word_every_key_is_listed() -> None:
    lines = _invoke("explain").output
    for key in config_keys(RunConfig):
        assert f"  {key.name} " in lines
        assert key.flag not in lines
    assert len(_invoke("presets").output.splitlines()) >= 15


def test_a_word_that_nothing_is_called_by_is_answered_with_a_near_one() -> None:
    with pytest.raises(ConfigError) as caught:
        list(explain_word("optimizer.warmup_fractoin"))
    assert str(caught.value) == (
        "optimizer.warmup_fractoin: is neither a key nor a flag; hint: did you mean "
        "optimizer.lr_warmup_fraction?"
    )
    with pytest.raises(ConfigError, match=r"did you mean --vocab-size\?"):
        list(explain_word("vocab-sise"))


@pytest.mark.parametrize("word", ["--foo", "foo", "--learning-rate"])
def test_a_word_that_nothing_is_near_gets_no_suggestion(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        list(explain_word(word))
    assert str(caught.value) == f"{word}: is neither a key nor a flag"


def test_validate_says_what_follows_and_starts_nothing(tmp_path: Path) -> None:
    words = (
        f"validate {TINY} {SHORT} --world 8 --tensor-model-parallel-size 2 --save {tmp_path / 'run'} --json"
    )
    content = json.loads(_invoke(*words.split(), "--global-batch-size", "16").output)
    assert (content["tp"], content["dp"], content["gradient accumulation steps"]) == (2, 4, 4)
    assert (content["tokens per step"], content["training samples"]) == (128, 160)
    assert content["model.hidden_size"] == 16
    plain = _invoke(*f"validate --family llama {TINY} {SHORT} --use-flash-attn".split())
    assert f"{'model.family':48} llama" in plain.stdout
    assert plain.stderr.startswith("left out: --use-flash-attn")
    assert not list(tmp_path.iterdir())


def test_validate_opens_the_corpus(corpus: Path) -> None:
    words = ["validate", *SHORT.split(), "--data-path", str(corpus), "--json"]
    shape = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8"
    assert json.loads(_invoke(*words, *shape.split()).output)["model.vocab_size"] == 33
    result = CliRunner().invoke(app, [*words[:-2], f"{corpus}-not", *shape.split()])
    assert result.exit_code != 0


def test_validate_says_how_the_run_would_start(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = [*TINY.split(), *SHORT.split(), "--data-path", str(corpus), "--save", str(run)]
    assert json.loads(_invoke("validate", *flags, "--json").output)["start"] == "from new weights"
    _invoke("gpt", *flags, "--train-iters", "2", "--lr-decay-iters", "10")
    loads = ["--lr-decay-iters", "10", "--load", str(run), "--json"]
    assert json.loads(_invoke("validate", *flags, *loads).output)["start"] == f"from iteration 2 of {run}"
    other_run = ["--save", str(tmp_path / "other")]
    tuned = json.loads(_invoke("validate", *flags, *loads, *other_run, "--finetune").output)
    assert tuned["start"] == f"with the weights of {run / 'iter_0000002'}"
    second = json.loads(_invoke("validate", *flags, "--overwrite", "--json").stdout)
    assert second["start"] == f"from new weights; supersedes iteration 2 in {run}"


def test_validate_shows_a_run_that_its_save_folder_keeps_from_starting(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = [*TINY.split(), *SHORT.split(), "--data-path", str(corpus), "--save", str(run)]
    _invoke("gpt", *flags)
    config = str(run / "iter_0000010/run.toml")
    for command in ("validate", "gpt"):
        result = CliRunner().invoke(app, [command, "--config", config])
        assert str(result.exception).startswith(
            "--save: contains checkpoints that this run does not load: found iteration 10"
        )
        assert f"hint: --load {run} --save {run} resumes from them" in str(result.exception)
        assert (f"{'start':48} refused" in result.stdout) == (command == "validate")
    assert "from iteration 10" in _invoke("validate", "--config", config, "--load", str(run)).stdout


def test_runs_differ_in_what_was_said_and_what_follows(tmp_path: Path) -> None:
    first, second, half = (tmp_path / f"{name}.toml" for name in ("one", "other", "half"))
    base = (
        "[model]\nnum_layers = 2\nhidden_size = 16\nnum_attention_heads = 2\nvocab_size = 33\n[batch]\n"
        "seq_length = 8\n[train]\ntrain_iters = 10\n[optimizer]\nlr = 0.1\n"
    )
    first.write_text(base)
    second.write_text(base.replace("hidden_size = 16", "hidden_size = 32").replace("lr = 0.1", "lr = 0.2"))
    half.write_text(base.replace("heads = 2", "heads = 3"))
    assert _invoke("diff", str(first), str(first)).output == "no differences\n"
    missing = tmp_path / "missing"
    assert str(_invoke("diff", str(first), str(missing), code=1).exception) == (
        f"{missing}: no such file or folder: wanted a TOML file, or the folder of a run or checkpoint"
    )
    lines = _invoke("diff", str(first), str(second), code=1).output.splitlines()
    names = [line.split("  ")[0] for line in lines]
    assert names[:2] == ["model.hidden_size", "optimizer.lr"]
    assert {"model.ffn_hidden_size", "model.kv_channels", "parameters"} <= set(names)
    assert "0.1 | 0.2" in lines[1]
    result = _invoke("diff", str(first), str(half), code=1)
    assert result.stderr.startswith(
        f"{half}: derived values not available: --num-attention-heads: does not divide"
    )
    assert result.stdout.split() == ["model.num_attention_heads", "2", "|", "3"]


def test_a_checkpoint_is_compared_by_its_configuration_and_layout(
    resolve_config: ResolveConfig, tmp_path: Path
) -> None:
    plan = resolve_config()
    save = CheckpointWriter(tmp_path / "run", 3)
    save.begin()
    rows = [row for row in table(plan.spec) if row.tied_to is None]
    boxes = [box for row in rows for box in boxes_to_write(row.name, row.shape, row.slabs(0, 1), "F32")]
    save.write(MODEL, 0, boxes, lambda box: np.zeros(box.slab.shape, np.float32))
    state = {"iteration": 3, "consumed_samples": 12}
    save.commit(plan.spec, layout=Layout(dp=2), trainer=state, run_config=to_toml(plan.run))
    file = tmp_path / "run.toml"
    file.write_text(to_toml(plan.run))
    lines = _invoke("diff", str(tmp_path / "run"), str(file), code=1).output.splitlines()
    assert [line.split() for line in lines] == [
        ["dp", "2", "|", "1"],
        ["gradient", "accumulation", "steps", "2", "|", "4"],
    ]
    _invoke("diff", str(tmp_path / "run"), str(file), "--world", "2")
    bare = tmp_path / "run" / "iter_0000003"
    (bare / "run.toml").unlink()
    rewrite_checksums(bare, FORMAT)
    result = CliRunner().invoke(app, ["diff", str(bare), str(file)])
    assert str(result.exception) == f"{bare}: contains no configuration: wanted run.toml"
