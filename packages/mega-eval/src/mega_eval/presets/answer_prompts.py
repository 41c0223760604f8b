"""Questions that a model answers by generating text: NQ-open and SQuAD. Imports no numpy, for `--help`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import orjson

from mega_eval.json_text import parse_object
from mega_eval.records import TaskRecord, read_text_of
from mega_schema.errors import FormatError


@dataclass(frozen=True, slots=True)
class AnswerPrompt:
    """How a question is put to the model.

    Attributes:
        template: the question; {KEY} is the value of a key of the record. The answer follows after a space.
        description: text before the few-shot examples.
        separator: text after an example.
        stop: strings that end an answer.
    """

    template: str
    description: str = ""
    separator: str = "\n\n"
    stop: tuple[str, ...] = ("\n",)

    def fill(self, record: TaskRecord) -> str:
        """Return the question of a record.

        Raises:
            FormatError: it lacks a key of the template.
        """
        return re.sub(r"\{([^{}]+)\}", lambda match: record.text(match[1]), self.template)


# those of lm-evaluation-harness 0.4.13
NQ_PROMPT = AnswerPrompt("Q: {question}?\nA:", "Answer these questions:\n\n", "\n", ("\n", ".", ","))
SQUAD_PROMPT = AnswerPrompt("Context: {context}\n\nQuestion: {question}\n\nAnswer:")


def read_answers(record: TaskRecord) -> list[str]:
    """Return the accepted answers of a question: `answer` or `answers`, a list or one text.

    Raises:
        FormatError: there are none.
    """
    key = "answer" if record.has("answer") else "answers"
    value = record.value(key)
    answers = [record.text(key)] if isinstance(value, str) else record.texts(key)
    if not any(answer.strip() for answer in answers):
        raise FormatError(f"{record.where} {key}", "no answer", found=value, wanted='["...", "..."]')
    return answers


def read_squad(path: Path) -> tuple[list[TaskRecord], int]:
    """Read the questions of a file in SQuAD's layout.

    Returns:
        Records with id, title, context, question and answers, and the number of questions without answer.

    Raises:
        FormatError: the file has another layout, or no question with an answer.
    """
    text = read_text_of(path)
    if _is_json_lines(text):
        raise FormatError(
            path,
            "is JSON lines",
            wanted='one object in SQuAD\'s layout, {"data": [{"paragraphs": [...]}]}',
            hint=f"mega-eval nq {path}, if its lines have question and answer",
        )
    content = parse_object(text, path)
    records, unanswerable = [], 0
    for article in TaskRecord(f"{path}", content).read_objects("data"):
        for paragraph in article.read_objects("paragraphs"):
            for question in paragraph.read_objects("qas"):
                answers = [answer.text("text") for answer in question.read_objects("answers")]
                if not any(answers):
                    unanswerable += 1
                    continue
                values = {
                    "id": question.text("id"),
                    "title": article.values.get("title", ""),
                    "context": paragraph.text("context"),
                    "question": question.text("question"),
                    "answers": answers,
                }
                records.append(TaskRecord(f"{path} question {values['id']}", values, str(values["id"])))
    if not records:
        raise FormatError(path, "no question with an answer")
    return records, unanswerable


def _is_json_lines(text: str) -> bool:
    """Return whether the first line is an object of its own, and not in SQuAD's layout."""
    first, _, rest = text.lstrip().partition("\n")
    try:
        value = orjson.loads(first)
    except orjson.JSONDecodeError:
        return False
    return isinstance(value, dict) and "data" not in value and bool("question" in value or rest.strip())
