"""`mega-eval squad` of a fine-tuned BERT gives the figures of its training, from transformers' class too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from click.testing import CliRunner

from mega_ckpt.cli import cli as convert_cli
from mega_eval.cli import cli
from mega_eval.result_reader import read_result
from mega_schema.tasks.pair_features import LABEL, REAL, TOKEN, TYPE, SpecialIds
from mega_schema.tasks.span_features import SpanWindows
from mega_schema.tasks.span_options import SpanOptions
from mega_schema.tasks.squad_examples import read_squad
from mega_schema.tokenizer.tokenizer import open_tokenizer
from mega_train.telemetry.event_log import read_events
from tests.encoder_fixture import write_corpus
from tests.squad_fixture import write_squad
from tests.train_command import run_mega_train

WINDOWS = ["--doc-stride", "8", "--max-query-length", "4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of SQuAD 2.0, its files, and the model in Hugging Face's format."""
    folder = tmp_path_factory.mktemp("squad")
    write_corpus(folder / "toy")
    write_squad(folder / "train.json", 60, 1, unanswerable=True)
    write_squad(folder / "dev.json", 40, 2, unanswerable=True)
    words = ["--task", "SQUAD", "--train-data", str(folder / "train.json"), "--save", str(folder / "run")]
    words += ["--valid-data", str(folder / "dev.json"), "--epochs", "2", "--micro-batch-size", "16", "--lr"]
    words += ["1e-2", "--seq-length", "24", "--num-layers", "2", "--hidden-size", "32", *WINDOWS]
    words += ["--num-attention-heads", "4", "--no-bias-gelu-fusion", "--tokenizer-type", "BertWordPieceCase"]
    run_mega_train("finetune", *words, "--vocab-file", str(folder / "vocab.txt"))
    last = sorted((folder / "run").glob("iter_*"))[-1]
    words = ["convert", "--from", "mega", "--to", "hf", "--load", str(last), "--save", str(folder / "hf")]
    outcome = CliRunner().invoke(convert_cli, [*words, "--check-logits", "16"])
    assert outcome.exit_code == 0, (outcome.output, outcome.exception)
    return folder


def _evaluate(load: Path, output: Path, *words: object, code: int = 0) -> dict[str, Any]:
    """The result of the command, or with another exit code its error."""
    argv = ["squad", "--load", str(load), "--output", str(output), *map(str, words)]
    outcome = CliRunner().invoke(cli, argv)
    if code:
        assert outcome.exception is not None
        return {"error": str(outcome.exception)}
    assert outcome.exit_code == 0, (outcome.output, outcome.exception)
    assert read_result(output).examples
    result: dict[str, Any] = json.loads(output.read_text("utf-8"))
    return result


def _values(result: dict[str, Any]) -> dict[str, float]:
    return {name: metric["value"] for name, metric in result["metrics"].items()}


def test_a_run_and_transformers_class_have_the_figures_of_training(folder: Path, tmp_path: Path) -> None:
    last = sorted((folder / "run").glob("iter_*"))[-1]
    event = [event for event in read_events(folder / "run") if event["event"] == "validation"][-1]
    result = _evaluate(last, tmp_path / "ours.json", folder / "dev.json", *WINDOWS, "--report")
    values = _values(result)
    assert values.pop("loss") == pytest.approx(event["loss"], rel=1e-4)
    assert values == pytest.approx(event["metrics"], rel=1e-4)
    low, high = result["metrics"]["f1"]["interval"]
    assert low < values["f1"] < high
    assert (tmp_path / "ours.html").exists()
    theirs = _evaluate(
        folder / "hf", tmp_path / "theirs.json", folder / "dev.json", *WINDOWS, "--seq-length", 24
    )
    assert _values(theirs) == pytest.approx(_values(result), rel=1e-4)
    assert "transformers" in theirs["versions"]
    best = json.loads((folder / "run/best_checkpoint.json").read_text("utf-8"))
    result = _evaluate(folder / "run", tmp_path / "best.json", folder / "dev.json", *WINDOWS, "--limit", 7)
    assert (result["model"]["iteration"], result["counts"]["questions"]) == (best["iteration"], 7)


@torch.no_grad()
def test_the_loss_is_that_of_transformers_where_no_sample_is_padded(folder: Path, tmp_path: Path) -> None:
    tokenizer = open_tokenizer("BertWordPieceCase", vocab_file=folder / "vocab.txt")
    options = SpanOptions(doc_stride=4, max_query_length=4)
    examples = [e for e in read_squad(folder / "dev.json") if len(e.context.split()) > 16]
    windows = SpanWindows(examples, tokenizer, SpecialIds.from_tokenizer(tokenizer), 16, options)
    samples = torch.from_numpy(
        np.stack([windows[i] for i in range(len(windows)) if windows.token_counts[i] == 16])
    )
    assert len(samples) > 20
    model = transformers.BertForQuestionAnswering.from_pretrained(folder / "hf", local_files_only=True).eval()
    output = model(
        samples[:, TOKEN],
        attention_mask=samples[:, REAL],
        token_type_ids=samples[:, TYPE],
        start_positions=samples[:, LABEL, 0],
        end_positions=samples[:, LABEL, 1],
    )
    logits_BL2 = torch.stack((output.start_logits, output.end_logits), -1)
    ours = F.cross_entropy(logits_BL2, samples[:, LABEL, :2], reduction="sum") / 2 / len(samples)
    torch.testing.assert_close(ours, output.loss, atol=1e-5, rtol=1e-5)


REFUSED = (
    (["--max-tokens", "8"], "--max-tokens: does not apply to a fine-tuned encoder: found 8"),
    (["--prompt", "{question}"], "--prompt: does not apply to a fine-tuned encoder: found {question}"),
    (["--num-fewshot", "2"], "--num-fewshot: does not apply to a fine-tuned encoder: found 2"),
    (["--seq-length", "99"], "--seq-length: is longer than the model's context: found 99, wanted at most 24"),
    (["--doc-stride", "17"], "--doc-stride: is not less than the window of the passage: found 17"),
)


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_options_that_do_not_fit_are_one_line(
    folder: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    error = _evaluate(folder / "run", tmp_path / "a.json", folder / "dev.json", *WINDOWS, *words, code=2)
    assert error["error"].startswith(message), error
    assert list(tmp_path.iterdir()) == []


def test_test_sets_and_other_heads_are_one_line(folder: Path, tmp_path: Path) -> None:
    test_set = write_squad(tmp_path / "test.json", 2, 1, labels=False)
    error = _evaluate(folder / "run", tmp_path / "a.json", test_set, *WINDOWS, code=2)["error"]
    assert error.startswith(f"{test_set}: has no answers: wanted answers to compare with")
    (folder / "rows.csv").write_text("text,label\nw10,a\nw11,b\n", "utf-8")
    words = ["classify", "--load", str(folder / "run"), "--output", str(tmp_path / "b.json")]
    outcome = CliRunner().invoke(cli, [*words, str(folder / "rows.csv")])
    assert "model.task_head: is not that of the task: found span, wanted classification" in str(
        outcome.exception
    )
