import ast
import json

import pytest

from mega_eval.presets.choice_presets import CHOICE_PRESETS
from mega_eval.presets.own_choices import OwnChoices
from mega_eval.records import TaskRecord, list_record_files, read_records
from mega_schema.errors import FormatError
from tests.evaluation.choice_rows import ROWS

PRESETS = {preset.name: preset for preset in CHOICE_PRESETS}


def read(name, row, formulation=None, where="f:1", id="f:1"):
    preset = PRESETS[name]
    return preset.readers[formulation or next(iter(preset.readers))](TaskRecord(where, row, id))


def replace_keys(row, *keys, **changes):
    return {key: value for key, value in row.items() if key not in keys} | changes


ORIGINALS = [
    # preset, row in the layout of Hugging Face, the same in the layout of the original files
    ("boolq", lambda row: replace_keys(row, "label", answer=row["label"] == 1)),
    ("arc", lambda row: replace_keys(row, "choices", question=_arc_question(row))),
    ("mmlu", lambda row: replace_keys(row, "choices", answer="ABCD"[row["answer"]], **_letters(row))),
    (
        "mnli",
        lambda row: {"sentence1": row["premise"], "sentence2": row["hypothesis"], "gold_label": _nli(row)},
    ),
    ("qqp", lambda row: replace_keys(row, "label", is_duplicate=str(row["label"]))),
    ("hellaswag", lambda row: replace_keys(row, label=int(row["label"]))),
]


def _letters(row):
    return dict(zip("ABCD", row["choices"], strict=True))


def _nli(row):
    return ("entailment", "neutral", "contradiction")[row["label"]]


def _arc_question(row):
    columns = zip(row["choices"]["text"], row["choices"]["label"], strict=True)
    return {"stem": row["question"], "choices": [{"text": text, "label": label} for text, label in columns]}


@pytest.mark.parametrize(("name", "convert"), ORIGINALS, ids=[name for name, _ in ORIGINALS])
def test_the_original_layout_gives_the_question_of_hugging_face_s(name, convert):
    for n in range(6):
        row = ROWS[name](n)
        for formulation in PRESETS[name].readers:
            assert read(name, convert(row), formulation) == read(name, row, formulation)


def test_race_folders_give_the_questions_of_the_data_set(tmp_path):
    row = ROWS["race"](3)
    problems = ast.literal_eval(row["problems"])
    original = {
        "article": row["article"],
        "questions": [problem["question"] for problem in problems],
        "options": [problem["options"] for problem in problems],
        "answers": [problem["answer"] for problem in problems],
        "id": "high7.txt",
    }
    (tmp_path / "high").mkdir()
    (tmp_path / "high/7.txt").write_text(json.dumps(original))
    [record] = read_records(list_record_files(tmp_path, PRESETS["race"].suffixes))
    question = PRESETS["race"].readers["continuation"](record)
    expected = read("race", row)
    assert (question.contexts, question.continuations) == (expected.contexts, expected.continuations)
    assert question.tags == {"level": "high"}


def test_the_mmlu_folder_names_the_subjects(tmp_path):
    (tmp_path / "high_school_physics_test.csv").write_text('What?,a,b,"c, d",e,C\n')
    preset = PRESETS["mmlu"]
    [record] = read_records(list_record_files(tmp_path, preset.suffixes), preset.columns)
    question = preset.readers["letters"](record)
    assert question.tags == {"subject": "high_school_physics"}
    assert question.description == (
        "The following are multiple choice questions (with answers) about high school physics.\n\n"
    )
    assert question.contexts[0] == "What?\nA. a\nB. b\nC. c, d\nD. e\nAnswer:"
    assert (question.continuations, question.gold) == (("A", "B", "C", "D"), 2)


@pytest.mark.parametrize(
    ("name", "context"),
    [
        ("arc", "Question: Why 1?\n A. answer 1 A\n B. answer 1 B\n C. answer 1 C\nAnswer:"),
        ("piqa", "Goal: To do 1\n A. do it\n B. do not 1\nAnswer:"),
        (
            "winogrande",
            "Fill in the blank: Ann gave Eve 1 coins because _ was rich .\n A. Ann\n B. Eve\nAnswer:",
        ),
        (
            "hellaswag",
            "Cutting: How 1. A man. He cuts\nChoose the best continuation:\n"
            " A.  ends 1 so. then\n B. walks\n C. runs 1\n D. sleeps é\nAnswer:",
        ),
        (
            "cosmosqa",
            "A story 1.\nQuestion: Why 1?\n A. because 0 of 1\n B. because 1 of 1\n C. because 2 of 1\n"
            " D. because 3 of 1\nAnswer:",
        ),
    ],
)
def test_letters_have_the_layout_of_olmes(name, context):
    question = read(name, ROWS[name](1), "letters")
    assert set(question.contexts) == {context}
    assert question.continuations == tuple("ABCD"[: len(question.continuations)])
    assert question.gold == read(name, ROWS[name](1), "continuation").gold
    assert question.example == f"{context} {'ABCD'[question.gold]}"


def test_cosmosqa_has_a_prompt_like_boolq():
    question = read("cosmosqa", ROWS["cosmosqa"](2))
    assert question.contexts[0] == "A story 2.\nQuestion: Why 2?\nAnswer:"
    assert question.labels[question.gold] == "because 2 of 2"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("boolq", {"label": 2}, "f:1: the answer is none of the choices: found choice 2, wanted 0 to 1"),
        ("boolq", {"answer": "yes"}, "f:1 answer: not a truth value: found 'yes', wanted true | false"),
        ("boolq", {"passage": 3.5, "label": "x"}, "f:1 label: not the number of a choice: found 'x'"),
        ("boolq", {"label": True}, "f:1 label: not the number of a choice: found True"),
        ("hellaswag", {"label": ""}, "f:1 label: not the number of a choice: found ''"),
        (
            "hellaswag",
            {"label": "4"},
            "f:1: the answer is none of the choices: found choice 4, wanted 0 to 3",
        ),
        ("hellaswag", {"endings": ["one"]}, "f:1: cannot choose: found 1 choices, wanted 2 to 26"),
        ("hellaswag", {"endings": "one"}, "f:1 endings: not a list of strings: found str"),
        ("arc", {"answerKey": "E"}, "f:1 answerKey: not the letter of a choice: found 'E', wanted A | B | C"),
        ("arc", {"choices": None}, "f:1 choices: not an object: found null, wanted {...}"),
        (
            "arc",
            {"question": {"stem": "Why?", "choices": [1]}},
            "f:1 question choices: not a list of objects",
        ),
        ("mmlu", {"choices": None, "A": "a"}, "f:1: no key 'B'"),
        ("winogrande", {"sentence": "no gap"}, "f:1 sentence: no blank to fill: found 'no gap'"),
        ("winogrande", {"answer": "0"}, "f:1 answer: not the number of a choice: found '0', wanted a whole"),
        ("winogrande", {"answer": "3"}, "f:1: the answer is none of the choices: found choice 2"),
        ("mnli", {"label": "maybe"}, "f:1 label: not the number of a choice: found 'maybe'"),
        ("qqp", {"label": None}, "f:1 label: not the number of a choice: found None"),
        ("race", {"problems": "[{"}, "f:1 problems: not a Python list: found '[{'"),
        ("race", {"problems": [1]}, "f:1 problems: not a list of questions"),
        ("race", {"problems": []}, "f:1: no questions about the passage"),
        (
            "race",
            {"problems": [{"question": "q", "options": ["a"] * 4, "answer": "E"}]},
            "f:1 question 1 answer",
        ),
        (
            "race",
            {"problems": None, "questions": ["q"], "answers": [], "options": []},
            "f:1: questions, options and answers differ in number: found 1, 0, 0",
        ),
    ],
)
def test_a_malformed_record_is_one_line_that_names_it(name, changes, message):
    row = {**ROWS[name](1), **changes}
    with pytest.raises(FormatError) as error:
        read(name, row)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def own(row, formulation="continuation", prompt="{question}", choices="choices", answer="answer", **keys):
    return OwnChoices(prompt, choices, answer, **keys).preset.readers[formulation](TaskRecord("f:1", row))


def test_a_file_of_your_own_names_its_keys():
    row = {"stem": "Why {so}?", "text": "Some text.", "a": "one", "b": "two", "right": "b", "topic": "x"}
    question = own(
        row | {"right": "two"}, "continuation", "{text}\n{stem}\nA:", "a, b", "right", tag_key="topic"
    )
    assert question.contexts == ("Some text.\nWhy {so}?\nA:",) * 2
    assert (question.continuations, question.gold, question.tags) == (("one", "two"), 1, {"topic": "x"})
    letters = own(row | {"right": "B"}, "letters", "{stem}\nAnswer:", "a,b", "right")
    assert letters.contexts[0] == "Why {so}?\n A. one\n B. two\nAnswer:"


@pytest.mark.parametrize(
    ("answer", "first", "gold"),
    [(0, 0, 0), (2, 0, 2), (1, 1, 0), ("C", 0, 2), ("4", 0, 1), ("2", 0, 2), ("3", 1, 2), ("8", 0, 0)],
)
def test_an_answer_is_a_number_a_letter_or_a_text(answer, first, gold):
    row = {"question": "q", "choices": ["8", "4", "none"], "answer": answer}
    assert own(row, first_answer=first).gold == gold


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answer": "nine"}, "f:1 answer: the answer is none of the choices: found 'nine'"),
        ({"answer": 3}, "f:1: the answer is none of the choices: found choice 3, wanted 0 to 2"),
        ({"answer": -1}, "f:1 answer: not the number of a choice: found -1"),
        ({"choices": ["a", " "]}, "f:1 choices: a choice without text: found ' '"),
        ({"choices": []}, "f:1: cannot choose: found 0 choices, wanted 2 to 26"),
    ],
)
def test_a_malformed_record_of_your_own_is_one_line(changes, message):
    with pytest.raises(FormatError) as error:
        own({"question": "q", "choices": ["a", "b", "c"], "answer": 0} | changes)
    assert str(error.value).startswith(message)
