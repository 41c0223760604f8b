"""Records of the multiple-choice tasks, in the layout of the Hugging Face data sets."""

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
