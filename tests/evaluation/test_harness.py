"""Our numbers, and those of lm-evaluation-harness through our adapter, equal its own for `transformers`."""

from __future__ import annotations

import json
import os
import random
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mega_eval.cli import cli
from mega_eval.commands.harness import BAR_SWITCHES
from mega_eval.models.endpoint_client import NoAnswerError
from mega_eval.tasks.wikitext_pages import split_pages
from mega_schema.app import cli_runner
from mega_schema.errors import ConfigError
from tests.evaluation.harness_models import CONTEXT, WORDS, convert_model, save_model, write_sentences
from tests.shared_data import ROOT

# lm-eval and the libraries under it warn of their own future
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

LAMBADA_TASK = """
include: {tasks}/lambada/lambada_{convention}.yaml
task: lambada_{convention}_local
dataset_path: json
dataset_name: null
validation_split: null
test_split: test
dataset_kwargs: {{data_files: {{test: {file}}}}}
"""
WIKITEXT_TASK = """
include: {tasks}/wikitext/wikitext.yaml
task: wikitext_local
dataset_path: json
dataset_name: null
training_split: null
validation_split: null
dataset_kwargs: {{data_files: {{test: {file}}}}}
"""
CHOICE_TASK = """
task: choice_local
dataset_path: json
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
dataset_kwargs: {{data_files: {{test: {file}}}}}
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
GENERATION_TASK = """
task: generation_local
dataset_path: json
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["q"], max_gen_toks: 9}}
dataset_kwargs: {{data_files: {{test: {file}}}}}
metric_list: [{{metric: exact_match}}]
"""
TASKS = (
    "lambada_openai_local",
    "lambada_standard_local",
    "wikitext_local",
    "choice_local",
    "generation_local",
)


# for what does not depend on the model: each command of lm-eval reads all of its task files, for seconds
one_model = pytest.mark.parametrize("pair", ["gpt2"], indirect=True)


@dataclass(frozen=True)
class TaskFiles:
    """Folder of the harness's task files, and the data they name."""

    folder: Path
    passages: Path
    raw_passages: Path
    corpus: Path


@dataclass(frozen=True)
class ModelPair:
    """The same weights for `transformers` and for us."""

    original: Path
    run: Path


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelPair:
    folder = tmp_path_factory.mktemp(request.param)
    save_model(folder / "original", request.param)
    convert_model(folder / "original", folder / "run")
    return ModelPair(folder / "original", folder / "run")


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture(scope="module")
def task_files(tmp_path_factory: pytest.TempPathFactory) -> TaskFiles:
    import lm_eval

    folder = tmp_path_factory.mktemp("tasks")
    rng = random.Random(7)
    sentences = write_sentences(24)
    # a passage longer than the context, one of one word, words after a line break and after two spaces
    passages = [*sentences, " ".join(sentences[:6]), "alone", "a quiet\nriver boat", "the old  boat"]
    raw = [sentence.lower().replace(".", " .").strip(" .") for sentence in sentences]
    corpus = "\n \n = First = \n \n " + " \n ".join(write_sentences(12, seed=8))
    corpus += " \n = = Part = = \n \n it 's @-@ fine ( so ) \n = Second = \n \n " + " ".join(
        write_sentences(4)
    )
    questions = [
        {
            "question": rng.choice(sentences),
            "choices": rng.sample(WORDS, 3) + [" ".join(rng.sample(WORDS, 3))],
            "answer": rng.randrange(4),
        }
        for _ in range(12)
    ]
    files = TaskFiles(
        folder,
        write_lines(folder / "passages.jsonl", [{"text": text} for text in passages]),
        write_lines(folder / "raw.jsonl", [{"text": text} for text in raw]),
        folder / "wiki.test.tokens",
    )
    files.corpus.write_text(corpus, "utf-8")
    pages = write_lines(folder / "pages.jsonl", [{"page": page} for page in split_pages(corpus)])
    choices = write_lines(folder / "choices.jsonl", questions)
    answers = [{"question": row["question"], "answer": "x"} for row in questions[:5]]
    sources = {
        "openai": (LAMBADA_TASK, files.passages),
        "standard": (LAMBADA_TASK, files.raw_passages),
        "wikitext": (WIKITEXT_TASK, pages),
        "choice": (CHOICE_TASK, choices),
        "generation": (GENERATION_TASK, write_lines(folder / "answers.jsonl", answers)),
    }
    tasks = Path(lm_eval.__file__).parent / "tasks"
    for name, (template, file) in sources.items():
        text = template.format(tasks=tasks, convention=name, file=file)
        (folder / f"{name}.yaml").write_text(text, "utf-8")
    return files


def run_harness(model: Any, folder: Path) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    results: dict[str, Any] = simple_evaluate(
        model=model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, log_samples=True
    )
    return results


@pytest.fixture(scope="module")
def original_results(pair: ModelPair, task_files: TaskFiles) -> dict[str, Any]:
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(pair.original), device="cpu", dtype="float32", batch_size=4)
    return run_harness(model, task_files.folder)


@pytest.fixture
def evaluate(pair: ModelPair, tmp_path: Path) -> Callable[..., dict[str, float]]:
    """A function that runs a command of mega-eval and returns its metrics."""

    def run(*words: object) -> dict[str, float]:
        output = tmp_path / "result.json"
        argv = [*words, "--load", pair.run, "--output", output, "--overwrite", "--device", "cpu"]
        with pytest.raises(SystemExit) as exit_info:
            cli_runner.run_command(cli, [str(word) for word in argv])
        assert not exit_info.value.code
        metrics = json.loads(output.read_bytes())["metrics"]
        return {name: metric["value"] for name, metric in metrics.items()}

    return run


@pytest.mark.parametrize("source", ["run", "original"])
def test_every_loglikelihood_and_answer_of_the_adapter_is_that_of_hflm(
    pair: ModelPair, task_files: TaskFiles, original_results: dict[str, Any], source: str
) -> None:
    from mega_eval.harness import MegaLM

    ours = run_harness(MegaLM(getattr(pair, source), device="cpu"), task_files.folder)
    for task in TASKS:
        for sample, original in zip(ours["samples"][task], original_results["samples"][task], strict=True):
            if task == "generation_local":
                assert sample["resps"] == original["resps"]
                continue
            for (response,), (expected,) in zip(sample["resps"], original["resps"], strict=True):
                if task == "wikitext_local":
                    assert response == pytest.approx(expected, abs=1e-4 * CONTEXT)
                else:
                    assert response[0] == pytest.approx(expected[0], abs=1e-4)
                    assert response[1] == expected[1]
        for name, value in original_results["results"][task].items():
            is_number = isinstance(value, float)
            assert ours["results"][task][name] == (pytest.approx(value, rel=1e-4) if is_number else value)
    assert ours["config"]["model_sha"]


@pytest.mark.parametrize("convention", ["openai", "standard"])
def test_lambada_equals_the_harness(
    evaluate: Callable[..., dict[str, float]],
    task_files: TaskFiles,
    original_results: dict[str, Any],
    convention: str,
) -> None:
    expected = original_results["results"][f"lambada_{convention}_local"]
    file = task_files.passages if convention == "openai" else task_files.raw_passages
    metrics = evaluate("lambada", file, "--convention", convention)
    assert metrics["accuracy"] == expected["acc,none"]
    assert metrics["target_perplexity"] == pytest.approx(expected["perplexity,none"], rel=1e-5)


def test_wikitext_by_pages_equals_the_harness(
    evaluate: Callable[..., dict[str, float]], task_files: TaskFiles, original_results: dict[str, Any]
) -> None:
    expected = original_results["results"]["wikitext_local"]
    metrics = evaluate("wikitext2", task_files.corpus, "--convention", "lm-eval")
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert metrics[name] == pytest.approx(expected[f"{name},none"], rel=1e-5)


@one_model
def test_the_command_runs_the_harness_offline_on_local_task_files(
    pair: ModelPair,
    task_files: TaskFiles,
    original_results: dict[str, Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [
        "run",
        "--tasks",
        "choice_local",
        "--include_path",
        task_files.folder,
        "--output_path",
        tmp_path / "out",
    ]
    argv = ["harness", "--load", pair.run, "--device", "cpu", "--", *words]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        cli_runner.run_command(cli, [str(word) for word in argv])
    assert not exit_info.value.code
    out, err = capfd.readouterr()
    assert "choice_local" in out
    assert "INFO" not in err
    assert "git repository" not in err  # pytest's folder is none
    (file,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_bytes())
    assert (
        results["results"]["choice_local"]["acc,none"]
        == original_results["results"]["choice_local"]["acc,none"]
    )
    assert results["config"]["model"] == "mega"
    # the harness names the folder after this argument; without it, the name was random letters
    assert results["config"]["model_args"]["pretrained"] == str(pair.run)
    assert file.parent.name == re.sub(r"/+", "__", str(pair.run))


@pytest.mark.parametrize(("words", "expected"), [([], "1"), (["--verbosity=INFO"], None)])
def test_bars_of_lm_eval_are_shown_on_a_terminal_only_unless_a_level_is_named(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch, words: list[str], expected: str | None
) -> None:
    monkeypatch.delenv("LMEVAL_LOG_LEVEL", raising=False)
    for name in BAR_SWITCHES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    seen: list[str | None] = []
    monkeypatch.setattr(
        "lm_eval.__main__.cli_evaluate", lambda: seen.extend(map(os.environ.get, BAR_SWITCHES))
    )
    argv = ["harness", "--load", str(pair.run), "--", "run", "--tasks", "a", *words]
    assert CliRunner().invoke(cli, argv).exit_code == 0
    assert seen == [expected] * 2


def test_the_entry_point_is_the_adapter() -> None:
    from mega_eval.harness import MegaLM

    project = tomllib.loads((ROOT / "packages/mega-eval/pyproject.toml").read_text("utf-8"))["project"]
    entry = EntryPoint("mega", project["entry-points"]["lm_eval.models"]["mega"], "lm_eval.models")
    assert entry.load() is MegaLM


def call_harness(*words: object) -> str:
    """Run the command without a model; return the last line of an error."""
    outcome = CliRunner().invoke(cli, ["harness", *map(str, words)])
    assert isinstance(outcome.exception, ConfigError), outcome.output
    return str(outcome.exception)


@one_model
def test_a_task_that_is_absent_or_whose_data_is_absent_is_one_line(
    pair: ModelPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    options = ("--load", pair.run, "--device", "cpu", "--", "run", "--tasks")
    assert call_harness(*options, "no_such_task").startswith("lm-eval: Tasks not found: no_such_task")
    message = call_harness(*options, "lambada_openai")
    assert message.startswith("--tasks: a data set is not on this machine: found ")
    assert "HF_HUB_OFFLINE=0" in message


@one_model
def test_a_task_that_samples_is_an_error_that_names_its_setting(pair: ModelPair) -> None:
    from lm_eval.api.instance import Instance

    from mega_eval.harness import MegaLM

    model = MegaLM(pair.run, device="cpu")
    for settings, message in (
        ({"do_sample": True, "temperature": 0.8}, "generation_kwargs: the task samples"),
        ({"max_gen_toks": CONTEXT}, "max_gen_toks: leaves no room for the prompt"),
    ):
        request = Instance(request_type="generate_until", doc={}, arguments=("a", settings), idx=0)
        with pytest.raises(ConfigError, match=message):
            model.generate_until([request])


def test_the_command_starts_its_processes_itself_and_refuses_torchrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = call_harness("--load", "run", "--", "run", "--tasks", "a")
    assert message.startswith("mega-eval harness: does not run under torchrun")
    assert "found 2 processes" in message


@pytest.mark.parametrize(
    ("level", "words", "expected"),
    [
        (None, [], "WARNING"),
        (None, ["--verbosity", "DEBUG"], None),
        (None, ["--verbosity=DEBUG"], None),
        ("INFO", [], "INFO"),
    ],
)
def test_the_log_of_lm_eval_has_warnings_only_unless_a_level_is_named(
    pair: ModelPair,
    monkeypatch: pytest.MonkeyPatch,
    level: str | None,
    words: list[str],
    expected: str | None,
) -> None:
    monkeypatch.delenv("LMEVAL_LOG_LEVEL", raising=False)
    if level is not None:
        monkeypatch.setenv("LMEVAL_LOG_LEVEL", level)
    seen = []
    monkeypatch.setattr(
        "lm_eval.__main__.cli_evaluate", lambda: seen.append(os.environ.get("LMEVAL_LOG_LEVEL"))
    )
    argv = ["harness", "--load", str(pair.run), "--", "run", "--tasks", "a", *words]
    assert CliRunner().invoke(cli, argv).exit_code == 0
    assert seen == [expected]
    assert os.environ.get("LMEVAL_LOG_LEVEL") == level


def test_an_option_of_checkpoints_is_refused_for_a_server_before_lm_eval_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    message = call_harness("--url", "http://127.0.0.1:9", "--tp", "2", "--", "run", "--tasks", "a")
    assert message == "--tp: is set by the server, not by mega-eval; hint: leave --tp out"


@one_model
def test_without_lm_eval_the_command_names_the_extra(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    message = call_harness("--load", pair.run, "--", "ls", "tasks")
    assert "lm-eval is not installed; hint: " in message
    assert "mega-eval[harness]" in message


def test_the_batch_size_of_the_harness_has_no_effect_on_a_server() -> None:
    from mega_eval.harness import MegaLM

    with pytest.raises(NoAnswerError, match="http://127.0.0.1:9: no server answers"):
        MegaLM(url="http://127.0.0.1:9", batch_size=8)
