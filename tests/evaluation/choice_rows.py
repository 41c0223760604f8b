"""Files of tasks: records in the layout of Hugging Face, questions in SQuAD's, and a bundle of CORE."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

Row = dict[str, object]


def boolq(n: int) -> Row:
    return {"passage": f"Passage {n}.", "question": f"is it {n}", "label": n % 2}


def hellaswag(n: int) -> Row:
    endings = [f" [substeps] ends {n}  so [title] then", "walks", f"runs {n}", "sleeps é"]
    scene = {"activity_label": "Cutting", "ctx_a": f"[header] How {n} [title] A man.", "ctx_b": "he Cuts"}
    return {**scene, "endings": endings, "label": str(n % 4)}


def cosmosqa(n: int) -> Row:
    answers = {f"answer{choice}": f"because {choice} of {n}" for choice in range(4)}
    return {"context": f"A story {n}.", "question": f"Why {n}?", "label": n % 4, **answers}


def piqa(n: int) -> Row:
    return {"goal": f"To do {n}", "sol1": "do it", "sol2": f"do not {n}", "label": n % 2}


def arc(n: int) -> Row:
    labels = ["1", "2", "3", "4"] if n % 3 == 0 else ["A", "B", "C"]
    texts = [f"answer {n} {label}" for label in labels]
    choices = {"text": texts, "label": labels}
    return {"id": f"q{n}", "question": f"Why {n}?", "choices": choices, "answerKey": labels[n % 3]}


def mmlu(n: int) -> Row:
    return {
        "question": f" What is {n}?\n",
        "choices": [f"{n}", f"{n + 1}", "none", "all of the above"],
        "answer": n % 4,
        "subject": "college_biology",
    }


def winogrande(n: int) -> Row:
    return {
        "sentence": f"Ann gave Eve {n} coins because _ was rich .",
        "option1": "Ann",
        "option2": "Eve",
        "answer": str(n % 2 + 1),
    }


def mnli(n: int) -> Row:
    hypothesis = f"A claim {n} " if n % 2 else f"A sentence {n}."
    return {"premise": f"A premise {n} ", "hypothesis": hypothesis, "label": n % 3}


def qqp(n: int) -> Row:
    return {"question1": f"How {n}?", "question2": f"Why {n}?", "label": n % 2}


def race(n: int) -> Row:
    problems = [
        {
            "question": text,
            "answer": "ABCD"[(n + k) % 4],
            "options": [f"option {n} {k} {letter}" for letter in "abcd"],
        }
        for k, text in enumerate(("What is this?", "It is  _  .", f"The {n} is  _  ."))
    ]
    return {"article": f"An article {n}.", "problems": str(problems)}


def snli(n: int) -> Row:
    label = ("entailment", "neutral", "contradiction")[n % 3]
    return {"sentence1": f"A premise {n}.", "sentence2": f"A claim {n}.", "gold_label": label}


def choice(n: int) -> Row:
    return {"question": f"What {n}?", "choices": [f"this {n}", "that", f"{n}"], "answer": n % 3}


ROWS: dict[str, Callable[[int], Row]] = {
    row.__name__: row
    for row in ((boolq, cosmosqa, hellaswag, piqa, arc, mmlu, winogrande, mnli, qqp, race, snli, choice))
}


def write_rows(path: Path, rows: Iterable[Row]) -> Path:
    """Write JSON lines and return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def write_core_bundle(folder: Path) -> Path:
    """Write a bundle of CORE with a task of each type and return its folder."""
    (folder / "eval_data").mkdir(parents=True)
    tasks = [
        {
            "label": task_type,
            "dataset_uri": f"{task_type}.jsonl",
            "num_fewshot": [1],
            "icl_task_type": task_type,
            "continuation_delimiter": "\nAnswer: " if task_type == "multiple_choice" else " ",
        }
        for task_type in ("multiple_choice", "schema", "language_modeling")
    ]
    (folder / "core.yaml").write_text(json.dumps({"icl_tasks": tasks}))  # JSON is YAML
    baselines = "Eval Task,Random baseline\nmultiple_choice,50\nschema,50\nlanguage_modeling,0\n"
    (folder / "eval_meta_data.csv").write_text(baselines)
    rows: dict[str, list[Row]] = {
        "multiple_choice": [
            {"query": f"Why {n}?", "choices": ["so", f"it {n}"], "gold": n % 2} for n in range(6)
        ],
        "schema": [
            {"context_options": [f"Ann {n}", f"Eve {n}"], "continuation": f"ran {n}.", "gold": n % 2}
            for n in range(6)
        ],
        "language_modeling": [{"context": f"one {n}", "continuation": f"two {n}"} for n in range(6)],
    }
    for name, records in rows.items():
        write_rows(folder / "eval_data" / f"{name}.jsonl", records)
    return folder


def write_squad(path: Path) -> Path:
    """Write four questions in SQuAD's layout and return the path."""
    questions = [
        {"id": f"q{n}", "question": f"who is {n}?", "answers": [{"text": f"name {n}", "answer_start": 0}]}
        for n in range(4)
    ]
    paragraphs = [{"context": "name 0, name 1, name 2 and name 3", "qas": questions}]
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "Names", "paragraphs": paragraphs}]}))
    return path
