import json
import math
import random
import re
import sys

import numpy as np
import pytest

from mega_eval.comparison import find_column
from mega_eval.presets.core_bundle import CoreTask, read_core_tasks
from mega_eval.records import list_record_files, read_records
from mega_eval.report_page.examples_data import find_judges
from mega_eval.tasks.core import evaluate
from mega_schema.errors import ConfigError, FormatError
from tests.evaluation.hash_model import HashModel

CONFIG = """icl_tasks:
- label: mc
  dataset_uri: a/mc.jsonl
  num_fewshot: [2]
  icl_task_type: multiple_choice
  continuation_delimiter: "\\nAnswer: "
- label: schema
  dataset_uri: a/schema.jsonl
  num_fewshot:
  - 1
  icl_task_type: schema
- label: lm
  dataset_uri: lm.jsonl
  num_fewshot: [3]
  icl_task_type: language_modeling
"""
BASELINES = "Eval Task,Task Category,Random baseline\nmc,x,25.0\nschema,x,50\nlm,x,0\nunused,x,10\n"


def write_bundle(folder, config=CONFIG, baselines=BASELINES):
    (folder / "eval_data/a").mkdir(parents=True)
    (folder / "core.yaml").write_text(config)
    (folder / "eval_meta_data.csv").write_text(baselines)
    rows = {
        "a/mc.jsonl": [
            {"query": f"Why {n}?", "choices": [f"it {n}", f"it is {n}", "so"][: 2 + n % 2], "gold": n % 2}
            for n in range(14)
        ],
        "a/schema.jsonl": [
            {
                "context_options": [f"Ann {n} as Ann", f"Ann {n} as Eve"],
                "continuation": f"ran {n}.",
                "gold": n % 2,
            }
            for n in range(12)
        ],
        "lm.jsonl": [{"context": f" one {n} ", "continuation": f"two {n}"} for n in range(11)],
    }
    for name, records in rows.items():
        (folder / "eval_data" / name).write_text("".join(json.dumps(row) + "\n" for row in records))
    return folder


def read(folder):
    return [(task, read_records(list_record_files(task.path))) for task in read_core_tasks(folder)]


class Reference:
    """CORE of one task, from its published definition: losses at each position, and the mean over a span."""

    def __init__(self, model, task, rows, limit=None):
        rows = [row.values for row in rows]
        random.Random(1337).shuffle(rows)
        self.model, self.task, self.rows = model, task, rows[:limit]

    def accuracy(self):
        return float(np.mean([self.is_correct(index) for index in range(len(self.rows))]))

    def join(self, row, choice):
        if self.task.task_type == "multiple_choice":
            return row["query"] + self.task.delimiter + row["choices"][choice]
        if self.task.task_type == "schema":
            return row["context_options"][choice] + self.task.delimiter + row["continuation"]
        return row["context"].strip() + self.task.delimiter + row["continuation"]

    def losses(self, text):
        ids = [256, *text.encode()][-self.model.context_length :]
        return [math.nan] + [-self.model.logprob(np.array(ids[: n + 1])) for n in range(1, len(ids))], ids

    def is_correct(self, index):
        row = self.rows[index]
        rest = [n for n in range(len(self.rows)) if n != index]
        shots = random.Random(1234 + index).sample(rest, self.task.num_fewshot)
        before = "".join(self.join(self.rows[n], self.rows[n].get("gold", 0)) + "\n\n" for n in shots)
        if self.task.task_type == "language_modeling":
            losses, _ = self.losses(before + self.join(row, 0))
            size = len(row["continuation"]) + len(self.task.delimiter)
            return all(loss < 1 for loss in losses[-size:])
        count = len(row.get("choices", row.get("context_options")))
        texts = [before + self.join(row, choice) for choice in range(count)]
        if self.task.task_type == "schema":
            texts = [text[::-1] for text in texts]
        shared = next(n for n in range(10_000) if len({text[n : n + 1] for text in texts}) > 1)
        means = []
        for text in texts:
            losses, _ = self.losses(text[::-1] if self.task.task_type == "schema" else text)
            size = shared if self.task.task_type == "schema" else len(text) - shared
            means.append(np.mean(losses[-size:]))
        return int(np.argmin(means)) == row["gold"]


@pytest.mark.parametrize("context_length", [10_000, 50])
def test_accuracies_are_those_of_the_published_definition(tmp_path, context_length):
    tasks = read(write_bundle(tmp_path / "bundle"))
    model = HashModel(context_length=context_length)
    # most targets are the greedy choice, so that language modeling is right sometimes
    model.logprob = lambda tokens: -0.5 if tokens[-1] % 5 else -9 * (sum(map(int, tokens[-9:])) % 97) / 97
    result = evaluate(model, tasks)
    for task, rows in tasks:
        expected = Reference(model, task, rows).accuracy()
        assert result.values[f"accuracy_{task.label}"] == pytest.approx(expected)
        centered = (expected - task.baseline) / (1 - task.baseline)
        assert result.values[f"centered_{task.label}"] == pytest.approx(centered)
    parts = [result.values[f"centered_{label}"] for label in ("mc", "schema", "lm")]
    assert result.values["core"] == pytest.approx(np.mean(parts))
    assert 0 < result.values["accuracy_lm"] < 1
    assert (result.counts["questions_cut"] > 0) == (context_length == 50)


@pytest.mark.parametrize("context_length", [10_000, 50])
def test_choices_are_those_of_the_published_definition(tmp_path, context_length):
    tasks = read(write_bundle(tmp_path / "bundle"))[:2]
    model = HashModel(context_length=context_length)
    result = evaluate(model, tasks)
    for task, rows in tasks:
        expected = Reference(model, task, rows).accuracy()
        assert 0 < expected < 1
        assert result.values[f"accuracy_{task.label}"] == pytest.approx(expected)


def test_the_files_of_nanochat_s_bundle_are_read_with_all_their_keys_and_columns(tmp_path):
    folder = tmp_path / "eval_bundle"
    config = """icl_tasks:
-
  label: jeopardy
  dataset_uri: world_knowledge/jeopardy_all.jsonl
  num_fewshot: [10]
  icl_task_type: language_modeling
  continuation_delimiter: "\\nAnswer: "
  has_categories: true
-
  label: winograd
  dataset_uri: language_understanding/winograd_wsc.jsonl
  num_fewshot: [0]
  icl_task_type: schema
"""
    baselines = (
        "Eval Task,Task Category,Task Type,#shots,#datapoints,Random baseline,Centered Metric?,"
        "Description\r\n"
        'jeopardy,world knowledge,language modeling,10,2117,0,,"Questions, of ""Jeopardy""\r\n'
        'on two lines"\r\n'
        "winograd,language understanding,schema,0,273,50.0,,Pronouns\r\n"
        "mmlu_zeroshot,world knowledge,multiple choice,0,14042,25,,not in core.yaml\r\n"
    )
    write_bundle(folder, config, baselines)
    jeopardy, winograd = read_core_tasks(folder)
    assert jeopardy == CoreTask(
        "jeopardy",
        "language_modeling",
        folder / "eval_data/world_knowledge/jeopardy_all.jsonl",
        10,
        "\nAnswer: ",
        0.0,
    )
    assert (winograd.num_fewshot, winograd.delimiter, winograd.baseline) == (0, " ", 0.5)


def test_core_and_each_task_are_made_from_scores_of_examples_so_that_results_are_compared(tmp_path):
    result = evaluate(HashModel(), read(write_bundle(tmp_path / "bundle")))
    columns = {name: find_column(result, metric) for name, metric in result.metrics.items()}
    assert {name: len(column.rows) for name, column in columns.items() if column} == {
        "core": 37,
        "accuracy_mc": 14,
        "accuracy_schema": 12,
        "accuracy_lm": 11,
    }
    assert find_judges(result) == ["correct"]


def test_the_interval_of_the_mean_comes_from_the_variances_of_the_tasks(tmp_path):
    result = evaluate(HashModel(), read(write_bundle(tmp_path / "bundle")))
    variances = [
        (result.metrics[f"accuracy_{label}"].stderr / (1 - baseline)) ** 2
        for label, baseline in (("mc", 0.25), ("schema", 0.5), ("lm", 0))
    ]
    metric = result.metrics["core"]
    assert metric.stderr == pytest.approx(math.sqrt(sum(variances)) / 3)
    assert metric.interval == pytest.approx(
        (metric.value - 1.96 * metric.stderr, metric.value + 1.96 * metric.stderr), abs=1e-4
    )
    assert metric.count == len(result.examples) == 14 + 12 + 11


def test_limit_takes_the_first_records_after_shuffling(tmp_path):
    tasks = read(write_bundle(tmp_path / "bundle"))
    model = HashModel()
    result = evaluate(model, tasks[:1], limit=6)
    task, rows = tasks[0]
    assert result.values["accuracy_mc"] == Reference(model, task, rows, limit=6).accuracy()
    assert evaluate(model, tasks, limit=2).counts["questions"] == 6


def test_examples_are_unique_and_name_their_task(tmp_path):
    result = evaluate(HashModel(), read(write_bundle(tmp_path / "bundle")))
    assert len({example.id for example in result.examples}) == len(result.examples)
    assert {example.tags["core_task"] for example in result.examples} == {"mc", "schema", "lm"}
    example = next(example for example in result.examples if example.id == "mc/mc.jsonl:4")
    assert (example.expected, [label for label, _ in example.choices]) == (
        "it is 3",
        ["it 3", "it is 3", "so"],
    )
    assert example.prompt.endswith("\n\nWhy 3?\nAnswer: it is 3")


@pytest.mark.parametrize(
    ("config", "baselines", "message"),
    [
        ("icl_tasks: [", BASELINES, "core.yaml: not YAML: found while parsing"),
        ("[]", BASELINES, "core.yaml: not a mapping: found list"),
        ("icl_tasks: []", BASELINES, "core.yaml: no tasks under icl_tasks"),
        ("tasks: []", BASELINES, "core.yaml: no key 'icl_tasks'"),
        ("icl_tasks: [{label: mc}]", BASELINES, "core.yaml icl_tasks 1: no key 'icl_task_type'"),
        (
            CONFIG.replace("schema\n", "generation\n", 2),
            BASELINES,
            "icl_tasks 2 icl_task_type: not a task of CORE",
        ),
        (
            CONFIG.replace("[2]", "[x]"),
            BASELINES,
            "icl_tasks 1 num_fewshot: not a number of examples: found ['x']",
        ),
        (
            CONFIG.replace("label: lm", "label: mc"),
            BASELINES,
            "core.yaml: two tasks have one label: found mc",
        ),
        (CONFIG, BASELINES.replace("lm,", "ml,"), "no random baseline of a task: wanted lm"),
        (CONFIG, BASELINES.replace("25.0", "many"), "csv:2 Random baseline: not a percentage: found many"),
        (CONFIG, BASELINES.replace("25.0", "100"), "csv:2 Random baseline: not a percentage: found 100"),
        (CONFIG, "Task,Random baseline\nmc,1\n", "csv:2: no key 'Eval Task'"),
    ],
)
def test_a_malformed_bundle_is_one_line(tmp_path, config, baselines, message):
    with pytest.raises(FormatError) as error:
        read_core_tasks(write_bundle(tmp_path / "bundle", config, baselines))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_without_yaml_the_hint_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match=r"mega-eval core: needs PyYAML; hint: .*mega-eval\[core\]"):
        read_core_tasks(write_bundle(tmp_path / "bundle"))


def test_missing_files_and_records_are_one_line(tmp_path):
    with pytest.raises(FormatError, match=r"none: no such folder: wanted a folder with core\.yaml"):
        read_core_tasks(tmp_path / "none")
    folder = write_bundle(tmp_path / "bundle")
    (folder / "eval_data/lm.jsonl").write_text('{"context": "a", "continuation": "b"}\n')
    with pytest.raises(
        FormatError, match=r"lm\.jsonl: too few records: found 1, wanted more than num_fewshot, 3"
    ):
        evaluate(HashModel(), read(folder))
    (folder / "eval_meta_data.csv").unlink()
    with pytest.raises(FormatError, match=r"bundle: has no eval_meta_data\.csv: wanted a folder with core"):
        read_core_tasks(folder)
    with pytest.raises(
        FormatError, match=r"has no core\.yaml and no eval_data and .*; hint: --data .*/bundle"
    ):
        read_core_tasks(tmp_path)
    with pytest.raises(FormatError, match=r"core\.yaml: is a file: .*; hint: name its folder, .*/bundle"):
        read_core_tasks(folder / "core.yaml")
    with pytest.raises(FormatError, match=r"bundel: no such folder: .*; hint: did you mean .*/bundle\?"):
        read_core_tasks(tmp_path / "bundel")


@pytest.mark.parametrize(
    ("task_type", "row", "message"),
    [
        (
            "multiple_choice",
            {"query": "q", "choices": ["a", "b"], "gold": 2},
            "the answer is none of the choices",
        ),
        ("multiple_choice", {"query": "q", "choices": ["a"], "gold": 0}, "cannot choose: found 1 choices"),
        ("schema", {"context_options": ["a", "b"], "gold": 0}, "no key 'continuation'"),
        ("language_modeling", {"context": "a", "continuation": " "}, "continuation: nothing to predict"),
    ],
)
def test_a_malformed_record_is_one_line_that_names_it(tmp_path, task_type, row, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    task = CoreTask("t", task_type, path, 0, " ", 0.0)
    with pytest.raises(FormatError, match=r"rows\.jsonl:1") as error:
        evaluate(HashModel(), [(task, read_records([path]))])
    assert re.search(re.escape(message), str(error.value))
