"""The table of multiple-choice tasks: files, prompts and answers. Imports no numpy, for `--help`.

The prompts are those of the task of lm-evaluation-harness 0.4.13 that a row names, so that numbers compare.
Each reader takes the layout of the original files and that of the Hugging Face data set.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from mega_eval.presets.question import (
    ChoiceQuestion,
    ask,
    ask_letters,
    check_choices,
    parse_index,
    parse_letter,
)
from mega_eval.presets.race import read_race
from mega_eval.records import TaskRecord
from mega_schema.errors import FormatError

# returns None for a record that annotators gave no answer
Reader = Callable[[TaskRecord], ChoiceQuestion | None]
CONTINUATION = "continuation"
LETTER_CHOICES = "letters"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicePreset:
    """A multiple-choice task.

    Attributes:
        name: of the command and of the task in the result.
        title: one line for `--help`.
        wants: the file, in a few words.
        readers: by formulation; the first is the default.
        sources: by formulation, which program's task has the same prompts and choices.
        suffixes: endings of the files that are read, where --data may be a folder.
        columns: names of the columns of a CSV file without header.
        group: the tag whose values get an accuracy each.
        sampler: the default of --fewshot-sampler.
        draws_spare: whether the harness draws a spare example for each question (`ExamplePool`).
    """

    name: str
    title: str
    wants: str
    readers: MappingProxyType[str, Reader]
    sources: MappingProxyType[str, str]
    suffixes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    group: str | None = None
    sampler: str = "shared"
    draws_spare: bool = True


def read_boolq(record: TaskRecord) -> ChoiceQuestion:
    """Read a BoolQ question: `answer` (original files) or `label`."""
    context = f"{record.text('passage')}\nQuestion: {record.text('question')}?\nAnswer:"
    if record.has("label") and not record.has("answer"):
        gold = parse_index(record, "label")
    else:
        answer = record.value("answer")
        if not isinstance(answer, bool):
            where = f"{record.where} answer"
            raise FormatError(where, "not a truth value", found=repr(answer), wanted="true | false")
        gold = int(answer)
    return ask(record, context, ("no", "yes"), gold)


def _read_cosmosqa(record: TaskRecord) -> tuple[str, list[str], int]:
    context = f"{record.text('context')}\nQuestion: {record.text('question')}"
    return context, [record.text(f"answer{number}") for number in range(4)], parse_index(record, "label")


def read_cosmosqa(record: TaskRecord) -> ChoiceQuestion:
    """Read a Cosmos QA question; the model scores the answers."""
    context, choices, gold = _read_cosmosqa(record)
    return ask(record, f"{context}\nAnswer:", choices, gold)


def read_cosmosqa_letters(record: TaskRecord) -> ChoiceQuestion:
    """Read a Cosmos QA question; the model scores the letters of the answers."""
    return ask_letters(record, *_read_cosmosqa(record))


def clean_hellaswag(text: str) -> str:
    """Remove WikiHow's marks: [title] ends a sentence, others vanish (lm-evaluation-harness' rules)."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _read_hellaswag(record: TaskRecord) -> tuple[str, list[str], int]:
    scene = f"{record.text('ctx_a')} {record.text('ctx_b').capitalize()}"
    choices = [clean_hellaswag(ending) for ending in record.texts("endings")]
    return clean_hellaswag(f"{record.text('activity_label')}: {scene}"), choices, parse_index(record, "label")


def read_hellaswag(record: TaskRecord) -> ChoiceQuestion:
    """Read a HellaSwag scene; the model scores the endings."""
    return ask(record, *_read_hellaswag(record))


def read_hellaswag_letters(record: TaskRecord) -> ChoiceQuestion:
    """Read a HellaSwag scene; the model scores the letters of the endings."""
    context, choices, gold = _read_hellaswag(record)
    return ask_letters(record, f"{context}\nChoose the best continuation:", choices, gold)


def _read_piqa(record: TaskRecord) -> tuple[str, list[str], int]:
    return record.text("goal"), [record.text("sol1"), record.text("sol2")], parse_index(record, "label")


def read_piqa(record: TaskRecord) -> ChoiceQuestion:
    """Read a PIQA goal; the model scores the solutions."""
    goal, choices, gold = _read_piqa(record)
    return ask(record, f"Question: {goal}\nAnswer:", choices, gold)


def read_piqa_letters(record: TaskRecord) -> ChoiceQuestion:
    """Read a PIQA goal; the model scores the letters of the solutions."""
    goal, choices, gold = _read_piqa(record)
    return ask_letters(record, f"Goal: {goal}", choices, gold)


def _read_arc(record: TaskRecord) -> tuple[str, list[str], int]:
    """Return question, choices and answer; original files have the choices inside `question`."""
    if isinstance(record.value("question"), dict):
        inner = record.read_object("question")
        rows = inner.read_objects("choices")
        question, texts, labels = (
            inner.text("stem"),
            [row.text("text") for row in rows],
            [row.text("label") for row in rows],
        )
    else:
        columns = record.read_object("choices")
        question, texts, labels = record.text("question"), columns.texts("text"), columns.texts("label")
    return question, texts, parse_letter(record, "answerKey", labels)


def read_arc(record: TaskRecord) -> ChoiceQuestion:
    """Read an ARC question; the model scores the answers."""
    question, choices, gold = _read_arc(record)
    return ask(record, f"Question: {question}\nAnswer:", choices, gold)


def read_arc_letters(record: TaskRecord) -> ChoiceQuestion:
    """Read an ARC question; the model scores the letters of the answers."""
    question, choices, gold = _read_arc(record)
    return ask_letters(record, f"Question: {question}", choices, gold)


def _read_mmlu(record: TaskRecord) -> tuple[str, list[str], int, str]:
    """Return question, choices, answer and subject; the CSV files have the subject in their names."""
    if record.has("choices"):
        choices, gold = record.texts("choices"), parse_index(record, "answer")
    else:
        choices = [record.text(letter) for letter in "ABCD"]
        gold = parse_letter(record, "answer", "ABCD")
    if record.has("subject"):
        subject = record.text("subject")
    else:
        subject = re.sub(r"_(test|dev|val)\.csv(\.gz)?$", "", record.id.rpartition(":")[0])
    return record.text("question").strip(), choices, gold, subject


def read_mmlu(record: TaskRecord) -> ChoiceQuestion:
    """Read an MMLU question; the model scores the letters of the answers."""
    question, choices, gold, subject = _read_mmlu(record)
    name = subject.replace("_", " ")
    return ask_letters(
        record,
        question,
        choices,
        gold,
        indent="",
        description=f"The following are multiple choice questions (with answers) about {name}.\n\n",
        tags={"subject": subject},
    )


def read_mmlu_continuation(record: TaskRecord) -> ChoiceQuestion:
    """Read an MMLU question; the model scores the answers."""
    question, choices, gold, subject = _read_mmlu(record)
    name = subject.replace("_", " ")
    return ask(
        record,
        f"Question: {question}\nAnswer:",
        choices,
        gold,
        description=f"The following are questions (with answers) about {name}.\n\n",
        tags={"subject": subject},
    )


def _read_winogrande(record: TaskRecord) -> tuple[str, str, list[str], int]:
    before, blank, after = record.text("sentence").partition("_")
    if not blank:
        where = f"{record.where} sentence"
        raise FormatError(where, "no blank to fill", found=repr(before[:40]), wanted="a sentence with a _")
    options = [record.text("option1"), record.text("option2")]
    return before, after.strip(), options, parse_index(record, "answer", first=1)


def read_winogrande(record: TaskRecord) -> ChoiceQuestion:
    """Read a Winogrande sentence in partial evaluation: score what follows the blank after each option."""
    before, after, options, gold = _read_winogrande(record)
    check_choices(record, options, gold)
    contexts = tuple(before + option for option in options)
    return ChoiceQuestion(contexts, (after, after), gold, tuple(options))


def read_winogrande_letters(record: TaskRecord) -> ChoiceQuestion:
    """Read a Winogrande sentence; the model scores the letters of the options."""
    _, _, options, gold = _read_winogrande(record)
    return ask_letters(record, f"Fill in the blank: {record.text('sentence')}", options, gold)


_NLI = MappingProxyType({"entailment": 0, "neutral": 1, "contradiction": 2})


def read_nli(record: TaskRecord) -> ChoiceQuestion | None:
    """Read a premise and a hypothesis of MNLI or SNLI; "-" and -1 mean that annotators disagreed."""
    premise, hypothesis = (
        record.text(name if record.has(name) else original)
        for name, original in (("premise", "sentence1"), ("hypothesis", "sentence2"))
    )
    key = "gold_label" if record.has("gold_label") else "label"
    label = record.value(key)
    if label in ("-", "", -1):
        return None
    gold = _NLI[label] if isinstance(label, str) and label in _NLI else parse_index(record, key)
    hypothesis = hypothesis.strip()
    end = "" if hypothesis.endswith(".") else "."
    context = f"{premise}\nQuestion: {hypothesis}{end} True, False or Neither?\nAnswer:"
    return ask(record, context, ("True", "Neither", "False"), gold)


def read_qqp(record: TaskRecord) -> ChoiceQuestion:
    """Read a pair of questions; `is_duplicate` (GLUE's TSV) or `label`."""
    context = (
        f"Question 1: {record.text('question1')}\nQuestion 2: {record.text('question2')}\n"
        "Question: Do both questions ask the same thing?\nAnswer:"
    )
    key = "is_duplicate" if record.has("is_duplicate") else "label"
    return ask(record, context, ("no", "yes"), parse_index(record, key))


def _preset(
    name: str, title: str, wants: str, /, *formulations: tuple[str, Reader, str], **settings: object
) -> ChoicePreset:
    return ChoicePreset(
        name=name,
        title=title,
        wants=wants,
        readers=MappingProxyType({formulation: reader for formulation, reader, _ in formulations}),
        sources=MappingProxyType({formulation: source for formulation, _, source in formulations}),
        **settings,  # type: ignore[arg-type]
    )


_HARNESS = "lm-evaluation-harness 0.4.13 "
_OLMES = "OLMES (arXiv:2406.08446) "

CHOICE_PRESETS = (
    _preset(
        "boolq",
        "BoolQ: yes or no from a passage.",
        "JSON lines with question, passage and answer (true or false) or label",
        (CONTINUATION, read_boolq, _HARNESS + "boolq"),
    ),
    _preset(
        "cosmosqa",
        "Cosmos QA: four answers about a passage.",
        "CSV or JSON lines with context, question, answer0 to answer3 and label",
        (CONTINUATION, read_cosmosqa, "mega-eval; lm-evaluation-harness has no such task"),
        (LETTER_CHOICES, read_cosmosqa_letters, _OLMES + "layout; OLMES has no such task"),
    ),
    _preset(
        "race",
        "RACE: the last question of a passage, after its other questions with their answers.",
        "folder of RACE's *.txt, or JSON lines with article, questions, options and answers",
        (CONTINUATION, read_race, _HARNESS + "race"),
        suffixes=(".txt",),
        group="level",
        draws_spare=False,
    ),
    _preset(
        "hellaswag",
        "HellaSwag: four endings of a scene.",
        "JSON lines with activity_label, ctx_a, ctx_b, endings and label",
        (CONTINUATION, read_hellaswag, _HARNESS + "hellaswag"),
        (LETTER_CHOICES, read_hellaswag_letters, _OLMES + "HellaSwag MCF"),
    ),
    _preset(
        "piqa",
        "PIQA: two solutions for a goal.",
        "JSON lines with goal, sol1, sol2 and label",
        (CONTINUATION, read_piqa, _HARNESS + "piqa"),
        (LETTER_CHOICES, read_piqa_letters, _OLMES + "PIQA MCF"),
    ),
    _preset(
        "arc",
        "ARC: science questions, easy or challenge; the file decides.",
        "JSON lines with question, choices and answerKey (original or Hugging Face layout)",
        (CONTINUATION, read_arc, _HARNESS + "arc_easy, arc_challenge"),
        (LETTER_CHOICES, read_arc_letters, _OLMES + "ARC MCF"),
        draws_spare=False,
    ),
    _preset(
        "mmlu",
        "MMLU: questions of 57 subjects.",
        "JSON lines with question, choices, answer and subject, or folder of SUBJECT_test.csv",
        (LETTER_CHOICES, read_mmlu, _HARNESS + "mmlu"),
        (CONTINUATION, read_mmlu_continuation, _HARNESS + "mmlu_continuation"),
        suffixes=(".csv", ".csv.gz"),
        columns=("question", "A", "B", "C", "D", "answer"),
        group="subject",
        sampler="first",
        draws_spare=False,
    ),
    _preset(
        "winogrande",
        "Winogrande: the rest of a sentence after each of two options (partial evaluation).",
        "JSON lines with sentence, option1, option2 and answer (1 or 2)",
        (CONTINUATION, read_winogrande, _HARNESS + "winogrande"),
        (LETTER_CHOICES, read_winogrande_letters, _OLMES + "Winogrande MCF"),
    ),
    _preset(
        "mnli",
        "MNLI: true, false or neither.",
        "GLUE's TSV, or JSON lines with premise, hypothesis and label",
        (CONTINUATION, read_nli, _HARNESS + "mnli, mnli_mismatch"),
    ),
    _preset(
        "qqp",
        "QQP: do two questions ask the same thing?",
        "GLUE's TSV, or JSON lines with question1, question2 and label",
        (CONTINUATION, read_qqp, _HARNESS + "qqp"),
    ),
    _preset(
        "snli",
        "SNLI: true, false or neither.",
        "SNLI's JSON lines with sentence1, sentence2 and gold_label",
        (CONTINUATION, read_nli, "mega-eval, with the prompt of " + _HARNESS + "mnli"),
    ),
)
