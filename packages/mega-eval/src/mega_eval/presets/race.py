"""RACE (arXiv:1704.04683): a passage with several questions of four options each."""

from __future__ import annotations

import ast

from mega_eval.presets.question import LETTERS, ChoiceQuestion, ask, parse_letter
from mega_eval.records import TaskRecord
from mega_schema.errors import FormatError

_BLANK = "  _  ."  # how RACE writes a blank at the end of a sentence


def read_race(record: TaskRecord) -> ChoiceQuestion:
    """Read a passage as lm-evaluation-harness' `race` does.

    Its last question is asked. The others come before it with their answers: a sentence with a blank at its
    end is completed, a question is followed by its answer.
    """
    problems = _list_problems(record)
    article = record.text("article")
    context = f"Article: {article}\n\n"
    for problem in problems[:-1]:
        question, answer = problem.text("question"), problem.texts("options")[_read_answer(problem)]
        if question.endswith(_BLANK):
            context += f"{question[:-5]}{answer}\n"
        else:
            context += f"Question: {question}\nAnswer: {answer}\n"
    last = problems[-1]
    tags = {"level": level} if (level := _find_level(record)) else {}
    return ask(last, context + last.text("question"), last.texts("options"), _read_answer(last), tags=tags)


def _read_answer(problem: TaskRecord) -> int:
    return parse_letter(problem, "answer", LETTERS[: len(problem.texts("options"))])


def _find_level(record: TaskRecord) -> str:
    """Return middle or high: RACE's ids are high1.txt, middle2.txt."""
    name = str(record.values.get("id", record.id))
    return next((level for level in ("middle", "high") if name.startswith(level)), "")


def _list_problems(record: TaskRecord) -> list[TaskRecord]:
    """Return the questions of a passage.

    The original files have parallel lists; EleutherAI/race has the text of a Python list under `problems`.
    """
    if record.has("problems"):
        rows = record.value("problems")
        if isinstance(rows, str):
            rows = _parse_literal(rows, record)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise FormatError(f"{record.where} problems", "not a list of questions")
        problems = [TaskRecord(f"{record.where} question {n}", row) for n, row in enumerate(rows, 1)]
    else:
        questions, answers, options = (
            record.texts("questions"),
            record.texts("answers"),
            record.value("options"),
        )
        if not isinstance(options, list) or not len(questions) == len(options) == len(answers):
            raise FormatError(
                record.where,
                "questions, options and answers differ in number",
                found=f"{len(questions)}, {len(options) if isinstance(options, list) else 0}, {len(answers)}",
                wanted="equal numbers",
            )
        problems = [
            TaskRecord(
                f"{record.where} question {number}",
                {"question": question, "options": choices, "answer": answer},
            )
            for number, (question, choices, answer) in enumerate(
                zip(questions, options, answers, strict=True), 1
            )
        ]
    if not problems:
        raise FormatError(record.where, "no questions about the passage")
    return problems


def _parse_literal(text: str, record: TaskRecord) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise FormatError(f"{record.where} problems", "not a Python list", found=repr(text[:40])) from None
