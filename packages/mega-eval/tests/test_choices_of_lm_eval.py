"""lm-evaluation-harness judges prompts, choices, few-shot draws and scores of the presets, on equal files."""

import importlib.util
import json
import math
from pathlib import Path

import pytest

from mega_eval.presets.answer_prompts import NQ_PROMPT
from mega_eval.presets.choice_presets import CHOICE_PRESETS
from mega_eval.records import list_record_files, read_records
from mega_eval.tasks.answer_items import build_answer_items
from mega_eval.tasks.choice_items import build_items
from mega_eval.tasks.fewshot import FewShot
from tests.evaluation.choice_rows import ROWS, write_rows

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None, reason="lm-evaluation-harness is not installed"
    ),
    pytest.mark.filterwarnings("ignore"),
]

PRESETS = {preset.name: preset for preset in CHOICE_PRESETS}
NUMBERS = range(9)


TASKS = [
    # preset, formulation, file of the harness' task, further keys of the task
    ("boolq", "continuation", "super_glue/boolq/default.yaml", {}),
    ("hellaswag", "continuation", "hellaswag/hellaswag.yaml", {}),
    ("piqa", "continuation", "piqa/piqa.yaml", {}),
    ("arc", "continuation", "arc/arc_challenge.yaml", {}),
    ("mmlu", "letters", "mmlu/default/mmlu_college_biology.yaml", {}),
    ("mmlu", "continuation", "mmlu/continuation/mmlu_college_biology.yaml", {}),
    ("winogrande", "continuation", "winogrande/default.yaml", {}),
    ("mnli", "continuation", "glue/mnli/default.yaml", {"validation_split": "validation"}),
    ("qqp", "continuation", "glue/qqp/default.yaml", {}),
    ("race", "continuation", "race/race.yaml", {"training_split": "train"}),
]


@pytest.fixture
def load_harness_task(tmp_path, monkeypatch):
    """A function that loads a task of the harness with local files instead of its data set."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    import datasets
    import lm_eval.tasks

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = Path(lm_eval.tasks.__file__).parent

    def load(file, questions, examples, **keys):
        data = {"test": questions, "validation": questions, "train": examples, "dev": examples}
        task = {
            "include": str(folder / file),
            "task": "local",
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {split: str(path) for split, path in data.items()}},
            **keys,
        }
        (tmp_path / "local.yaml").write_text(json.dumps(task))
        manager = lm_eval.tasks.TaskManager(include_defaults=False, include_path=str(tmp_path))
        [loaded] = manager.load("local")["tasks"].values()
        return loaded

    return load


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize(
    ("name", "formulation", "file", "keys"), TASKS, ids=[f"{name}-{f}" for name, f, *_ in TASKS]
)
def test_requests_are_those_of_the_harness(name, formulation, file, keys, count, load_harness_task, tmp_path):
    preset, row = PRESETS[name], ROWS[name]
    questions = write_rows(tmp_path / "questions.jsonl", [row(n) for n in NUMBERS])
    examples = write_rows(tmp_path / "examples.jsonl", [row(n) for n in range(100, 108)])
    task = load_harness_task(file, questions, examples, num_fewshot=count, **keys)
    task.set_fewshot_seed(1234)
    task.build_all_requests(rank=0, world_size=1)
    items, _ = build_items(
        read_records(list_record_files(questions)),
        preset.readers[formulation],
        FewShot(count=count, sampler="first" if name == "mmlu" else "random", seed=1234),
        read_records(list_record_files(examples)),
        group=preset.group,
        draws_spare=preset.draws_spare,
    )
    ours = [(pair.context, pair.text) for item in items for pair in item.continuations]
    assert ours == [tuple(instance.args) for instance in task.instances]
    assert len(ours) >= 2 * len(NUMBERS)


@pytest.mark.parametrize("count", [0, 3])
def test_prompts_of_nq_are_those_of_the_harness(count, load_harness_task, tmp_path):
    questions, examples = (
        write_rows(
            tmp_path / f"{name}.jsonl",
            [
                {"question": f"who is {name} {n}", "answer": [f"{name} {n}", "x"][: 1 + n % 2]}
                for n in numbers
            ],
        )
        for name, numbers in (("q", NUMBERS), ("e", range(7)))
    )
    task = load_harness_task("nq_open/nq_open.yaml", questions, examples, num_fewshot=count)
    task.set_fewshot_seed(1234)
    task.build_all_requests(rank=0, world_size=1)
    items = build_answer_items(
        read_records([questions]),
        NQ_PROMPT,
        FewShot(count=count, sampler="random"),
        read_records([examples]),
    )
    assert [item.prompt for item in items] == [instance.args[0] for instance in task.instances]
    assert set(task.instances[0].args[1]["until"]) == set(NQ_PROMPT.stop)


def test_scores_are_those_of_the_harness(load_harness_task, tmp_path):
    from mega_eval.tasks.choice import score_question

    questions = write_rows(tmp_path / "questions.jsonl", [ROWS["hellaswag"](n) for n in NUMBERS])
    task = load_harness_task(
        "hellaswag/hellaswag.yaml",
        questions,
        questions,
        metric_list=[
            {"metric": name, "aggregation": "mean", "higher_is_better": True}
            for name in ("acc", "acc_norm", "acc_bytes")
        ]
        + [{"metric": "brier_score"}],
    )
    task.build_all_requests(rank=0, world_size=1)
    items, _ = build_items(read_records([questions]), PRESETS["hellaswag"].readers["continuation"], FewShot())
    theirs, scores = [], []
    for number, item in enumerate(items):
        logprobs = [-5 - math.sin(7 * number + 3 * choice) for choice in range(4)]
        logprobs = [
            value * (1 + 0.3 * len(text)) for value, text in zip(logprobs, item.question.labels, strict=True)
        ]
        scores.append(score_question(item.question, logprobs))
        doc = task.instances[4 * number].doc
        theirs.append(task.process_results(doc, [(value, False) for value in logprobs]))
    for ours, name in (("correct", "acc"), ("correct_norm", "acc_norm"), ("correct_bytes", "acc_bytes")):
        column = [score[ours] for score in scores]
        assert column == [result[name] for result in theirs]
        assert 0 < sum(column) < len(column)
    from lm_eval.api.metrics import brier_score

    brier = brier_score([(int(gold), row) for gold, row in (result["brier_score"] for result in theirs)])
    assert sum(score["brier"] for score in scores) / len(scores) == pytest.approx(brier)
