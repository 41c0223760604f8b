import json

import pytest

from mega_eval.presets.answer_prompts import NQ_PROMPT, SQUAD_PROMPT, read_answers, read_squad
from mega_eval.records import TaskRecord, list_record_files, read_records
from mega_eval.tasks.answer_items import build_answer_items
from mega_eval.tasks.fewshot import FewShot
from mega_eval.tasks.generated_answers import evaluate, normalize_like_harness, score_answer
from mega_schema.errors import ConfigError, FormatError
from mega_schema.tasks.answer_text import normalize_answer, word_f1
from tests.evaluation.hash_model import HashModel

TEXTS = [
    "The Beatles",
    "beatles, the",
    "An  apple a day!",
    "",
    "the",
    "U.S.A.",
    "14 December 1972 UTC",
    "« Élan » – theatre",
    "Theory of A",
]


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The Beatles!", "beatles"),
        ("  an\tApple,  a day", "apple day"),
        ("U.S.A.", "usa"),
        ("theatre", "theatre"),
        ("the", ""),
    ],
)
def test_an_answer_is_normalized_as_by_squad(text, normalized):
    assert normalize_answer(text) == normalized


@pytest.mark.filterwarnings("ignore")
def test_the_match_of_the_harness_is_its_own():
    judge = pytest.importorskip("lm_eval.api.metrics")
    for gold in TEXTS:
        for text in TEXTS:
            expected = judge.exact_match_hf_evaluate(
                predictions=[text.strip()],
                references=[gold],
                ignore_case=True,
                ignore_punctuation=True,
                regexes_to_ignore=[r"\b(?:The |the |An |A |The |a |an )"],
            )["exact_match"]
            assert score_answer(text, [gold])["exact_harness"] == expected
    assert normalize_like_harness("The end") == "end"


def test_words_count_as_often_as_they_occur_in_both():
    assert word_f1("new new york", "new york city") == pytest.approx(2 * 2 / 6)
    assert word_f1("", "") == 1
    assert word_f1("", "x") == 0


def test_the_best_accepted_answer_counts():
    scores = score_answer("Paul McCartney", ["John", "McCartney"])
    assert (scores["exact"], scores["f1"]) == (0, pytest.approx(2 / 3))
    assert score_answer("the john.", ["John", "McCartney"])["exact"] == 1


def rows_of(name, count):
    return [
        TaskRecord(
            f"{name}:{n}", {"question": f"who is {name}{n}", "answer": [f"{name} {n}", "x"]}, f"{name}:{n}"
        )
        for n in range(count)
    ]


def test_prompts_have_the_layout_of_nq_open():
    fewshot = FewShot(count=2, sampler="first")
    [item] = build_answer_items(rows_of("q", 1), NQ_PROMPT, fewshot, rows_of("e", 3))
    assert item.prompt == (
        "Answer these questions:\n\nQ: who is e0?\nA: e 0\nQ: who is e1?\nA: e 1\nQ: who is q0?\nA:"
    )
    assert item.answers == ("q 0", "x")


def test_a_result_has_matches_f1_and_counts():
    items = build_answer_items(rows_of("q", 4), NQ_PROMPT, FewShot())
    model = HashModel(context_length=80)
    model.answers = {items[0].prompt: " The Q 0", items[1].prompt: "q", items[2].prompt: " "}
    result = evaluate(model, items, task="nq", convention="generation", max_tokens=40, stop=NQ_PROMPT.stop)
    assert result.values == {
        "exact_match": 0.25,
        "f1": pytest.approx((1 + 2 / 3) / 4),
        "exact_match_harness": 0.25,
    }
    length = len(items[0].prompt)
    assert result.counts == {"questions": 4, "exact_matches": 1, "empty_answers": 1, "prompts_cut": 4}
    assert result.tokens_read == 4 * 40 < 4 * length
    assert [example.prediction for example in result.examples] == ["The Q 0", "q", "", "nothing"]
    assert result.examples[0].expected == "q 0 | x"
    [request, *_] = model.requests
    assert (request.max_tokens, request.stop) == (40, ("\n", ".", ","))
    with pytest.raises(
        ConfigError, match="--max-tokens: the model's context has no room for a prompt: found 80"
    ):
        evaluate(model, items, task="nq", convention="generation", max_tokens=80, stop=())


def test_the_real_files_are_read(shared):
    records = read_records(list_record_files(shared / "data/eval/nq-open/nq_open.validation.jsonl.gz"))
    items = build_answer_items(records, NQ_PROMPT, FewShot(count=5))
    assert len(items) == 3610
    assert items[0].answers == ("14 December 1972 UTC", "December 1972")
    assert all(item.prompt.count("\nA:") == 6 for item in items)
    for language in ("en", "tr"):
        records, unanswerable = read_squad(shared / f"data/eval/xquad/xquad.{language}.json.gz")
        assert (len(records), unanswerable) == (1190, 0)
        assert len({record.id for record in records}) == 1190
        [item, *_] = build_answer_items(records, SQUAD_PROMPT, FewShot(), limit=1)
        assert item.prompt.startswith("Context: ")
        assert item.prompt.endswith("\n\nAnswer:")
        assert item.answers[0] in item.prompt


def test_questions_without_answer_are_skipped_and_counted(tmp_path):
    qas = [
        {"id": "1", "question": "q?", "answers": [{"text": "a"}]},
        {"id": "2", "question": "r?", "answers": []},
    ]
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": "a b", "qas": qas}]}]}))
    [record], unanswerable = read_squad(path)
    assert (record.id, unanswerable) == ("1", 1)
    assert read_answers(record) == ["a"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("oops", "not JSON"),
        ("[]", "not a JSON object: found list"),
        ("{}", "no key 'data'"),
        ('{"question": "who"}\n{"question": "what"}\n', "is JSON lines: wanted one object in SQuAD's layout"),
        ('{"question": "who", "answer": ["a"]}', "squad.json, if its lines have question and answer"),
        ('{"data": [\n1,]}', "squad.json:2: not JSON: found trailing comma is not allowed at column 2"),
        ('{"data": [1]}', "data: not a list of objects"),
        ('{"data": []}', "no question with an answer"),
        ('{"data": [{"paragraphs": [{"context": "a"}]}]}', "data 1 paragraphs 1: no key 'qas'"),
    ],
)
def test_a_malformed_squad_file_is_one_line(tmp_path, content, message):
    path = tmp_path / "squad.json"
    path.write_text(content)
    with pytest.raises(FormatError) as error:
        read_squad(path)
    assert message in str(error.value)
    assert "squad.json" in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"question": "q"}, "f:1: no key 'answers'"),
        ({"answer": []}, r"f:1 answer: no answer: found \[\]"),
        ({"answer": 3}, "f:1 answer: not a list of strings: found int"),
    ],
)
def test_a_question_without_answers_is_refused(values, message):
    with pytest.raises(FormatError, match=message):
        read_answers(TaskRecord("f:1", values))
