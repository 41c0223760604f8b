"""Files, windows and metrics of SQuAD, against its evaluation scripts and a search of all spans."""

from __future__ import annotations

import collections
import json
import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_schema.errors import ConfigError, FormatError
from mega_schema.tasks.answer_text import normalize_answer, score_answer
from mega_schema.tasks.pair_features import IGNORED, LABEL, REAL, TOKEN, TYPE, SpecialIds
from mega_schema.tasks.span_features import SpanWindows
from mega_schema.tasks.span_options import SpanOptions
from mega_schema.tasks.span_predictions import SpanPredictions
from mega_schema.tasks.squad_examples import Answer, SpanExample, has_unanswerable, read_squad
from mega_schema.tokenizer.null import NullTokenizer
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer
from tests.shared_data import SHARED
from tests.squad_fixture import write_squad

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "who", "was", "born", "in", "the", "a", "cafe", "of"]
PIECES += ["paris", "##s", "##ian", ",", ".", "1", "##9", "##0", "old", "man", "##ly", "?", "'"]
CONTEXT = "The old Parisian Café, born in 1900.  A manly man's café of Paris."


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("\n".join(PIECES) + "\n", "utf-8")
    return open_tokenizer("BertWordPieceLowerCase", vocab_file=path)


def _example(text: str, *, question: str = "who was born in Paris?", context: str = CONTEXT) -> SpanExample:
    return SpanExample("q", question, context, (Answer(text, context.index(text)),), "here")


def _windows(
    tokenizer: Tokenizer, examples: Sequence[SpanExample], length: int, **options: int
) -> SpanWindows:
    special = SpecialIds.from_tokenizer(tokenizer)
    return SpanWindows(examples, tokenizer, special, length, SpanOptions(**options))


@pytest.mark.parametrize("text", ["old Parisian", "Café", "1900", "Paris", "ian", "man's café"])
def test_the_labels_give_the_answer_back_from_the_passage(tokenizer: Tokenizer, text: str) -> None:
    windows = _windows(tokenizer, [_example(text)], 64, doc_stride=16, max_query_length=8)
    assert len(windows) == 1
    sample, passage, first = windows[0], windows.passage(0), windows.first_position(0)
    start, end = (int(sample[LABEL, column]) - first for column in (0, 1))
    begin = CONTEXT.index(text)
    assert passage.begins[start] <= begin < begin + len(text) <= passage.ends[end]
    # no token outside the answer; the word of "ian" is one piece and a continuation
    assert CONTEXT[passage.begins[start] : passage.ends[end]] == text


def test_windows_overlap_and_keep_question_and_separators(tokenizer: Tokenizer) -> None:
    example = _example("born", question="who was born in the cafe of paris?")
    windows = _windows(tokenizer, [example], 14, doc_stride=3, max_query_length=4)
    special = SpecialIds.from_tokenizer(tokenizer)
    question = tokenizer.encode(example.question)[:4]
    passage = windows.passage(0)
    assert passage.ids.tolist() == tokenizer.encode(CONTEXT)
    room = 14 - 4 - 3
    assert [w.begin for w in windows.windows] == list(range(0, 3 * len(windows), 3))
    assert windows.windows[-1].end == len(passage.ids) > windows.windows[-2].end
    assert all(w.end - w.begin == room for w in windows.windows[:-1])
    answer = passage.find_tokens(CONTEXT.index("born"), CONTEXT.index("born") + 4)
    for i, window in enumerate(windows.windows):
        sample = windows[i]
        count = int(windows.token_counts[i])
        ids = passage.ids[window.begin : window.end].tolist()
        assert sample[TOKEN, :count].tolist() == [special.cls, *question, special.sep, *ids, special.sep]
        assert sample[TYPE, :count].tolist() == [0] * 6 + [1] * (count - 6)
        assert sample[REAL].tolist() == [1] * count + [0] * (14 - count)
        has_answer = window.begin <= answer[0] <= answer[1] < window.end
        expected = [position - window.begin + 6 for position in answer] if has_answer else [0, 0]
        assert sample[LABEL, :2].tolist() == expected
        assert (sample[LABEL, 2:] == IGNORED).all()
    assert sum(window.start_label > 0 for window in windows.windows) == 3


def test_unanswerable_questions_point_at_cls_and_test_sets_nowhere(tokenizer: Tokenizer) -> None:
    examples = [SpanExample("a", "who", CONTEXT, (), ""), SpanExample("b", "who", CONTEXT, None, "")]
    windows = _windows(tokenizer, examples, 64, doc_stride=8, max_query_length=8)
    assert [windows[i][LABEL, :2].tolist() for i in (0, 1)] == [[0, 0], [IGNORED, IGNORED]]
    assert has_unanswerable(examples[:1])
    assert not has_unanswerable(examples[1:])


# --- the formulas of SQuAD's evaluation scripts (1.1 and 2.0), written again


def _official_normalize(text: str) -> str:
    without_punctuation = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(re.compile(r"\b(a|an|the)\b").sub(" ", without_punctuation).split())


def _official_scores(prediction: str, gold: list[str]) -> tuple[float, float]:
    gold = [answer for answer in gold if _official_normalize(answer)] or [""]
    f1s = []
    for answer in gold:
        a, b = _official_normalize(answer).split(), _official_normalize(prediction).split()
        common = sum((collections.Counter(a) & collections.Counter(b)).values())
        if not a or not b:
            f1s.append(float(a == b))
        elif not common:
            f1s.append(0.0)
        else:
            precision, recall = common / len(b), common / len(a)
            f1s.append(2 * precision * recall / (precision + recall))
    exact = max(float(_official_normalize(answer) == _official_normalize(prediction)) for answer in gold)
    return exact, max(f1s)


def _official_threshold(
    scores: dict[str, float], texts: dict[str, str], null: dict[str, float], has_answer: dict[str, bool]
) -> tuple[float, float]:
    current = best = float(sum(not value for value in has_answer.values()))
    threshold = 0.0
    for id in sorted(null, key=lambda id: null[id]):
        if has_answer[id]:
            current += scores[id]
        elif texts[id]:
            current -= 1
        if current > best:
            best, threshold = current, null[id]
    return best / len(scores), threshold


TEXTS = ["The Café!", "cafe", "a man's café", "old, old man", "", "the", "an old man", "Paris.", "1900"]


def test_scores_are_those_of_the_official_scripts() -> None:
    rng = np.random.default_rng(1)
    for prediction in TEXTS:
        assert normalize_answer(prediction) == _official_normalize(prediction)
        for _ in range(8):
            gold = rng.choice(TEXTS, rng.integers(0, 4)).tolist()
            assert score_answer(prediction, gold) == pytest.approx(_official_scores(prediction, gold))


def _predict(
    tokenizer: Tokenizer, examples: Sequence[SpanExample], seed: int, *, allows_null: bool, **options: Any
) -> tuple[SpanPredictions, SpanWindows, np.ndarray]:
    windows = _windows(tokenizer, examples, 20, doc_stride=5, max_query_length=4)
    logits = np.random.default_rng(seed).normal(size=(len(windows), 20, 2)).astype(np.float32)
    predictions = SpanPredictions(windows, logits, SpanOptions(**options), allows_null=allows_null)
    return predictions, windows, logits


@pytest.mark.parametrize("seed", range(6))
def test_the_best_answer_is_that_of_a_search_of_all_spans(tokenizer: Tokenizer, seed: int) -> None:
    examples = [_example("Paris"), _example("1900", question="who")]
    predictions, windows, logits = _predict(tokenizer, examples, seed, allows_null=True, max_answer_length=4)
    for number in range(len(examples)):
        numbers = [i for i, w in enumerate(windows.windows) if w.example == number]
        spans = []
        for i in numbers:
            window, first, passage = windows.windows[i], windows.first_position(i), windows.passage(i)
            for start in range(window.begin, window.end):
                contexts = [
                    min(start - w.begin, w.end - 1 - start) + 0.01 * (w.end - w.begin)
                    if w.begin <= start < w.end
                    else -1
                    for w in (windows.windows[j] for j in numbers)
                ]
                if numbers[contexts.index(max(contexts))] != i:
                    continue  # another window gives this token more context
                for end in range(start, min(start + 4, window.end)):
                    shift = first - window.begin
                    score = logits[i, shift + start, 0] + logits[i, shift + end, 1]
                    spans.append((float(score), CONTEXT[passage.begins[start] : passage.ends[end]]))
        score, text = max(spans)
        best = predictions.candidates[number][0]
        assert (best.text, best.score) == (text, pytest.approx(score, rel=1e-6))
        null = min(float(logits[i, 0].sum()) for i in numbers)
        assert predictions.null_scores[number] == pytest.approx(null, rel=1e-6)
        assert predictions.texts[number] == ("" if null - score > 0 else text)
        texts = [candidate.text for candidate in predictions.candidates[number]]
        assert len(set(texts)) == len(texts)


def test_metrics_of_squad_2_are_those_of_the_official_script(tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(7)
    answers = ["Paris", "1900", "old", "Café", "man"]
    examples = []
    for number in range(60):
        answered = rng.random() < 0.6
        example = _example(str(rng.choice(answers)))
        examples.append(SpanExample(str(number), "who", CONTEXT, example.answers if answered else (), ""))
    windows = _windows(tokenizer, examples, 64, doc_stride=16, max_query_length=4)
    logits = rng.normal(size=(len(windows), 64, 2))
    for i in range(0, 60, 2):  # half of the answers are right
        logits[i, windows[i][LABEL, 0], 0] += 6
        logits[i, windows[i][LABEL, 1], 1] += 6
    logits[:, 0] += 1.5
    predictions = SpanPredictions(windows, logits, SpanOptions(), allows_null=True)
    values = predictions.metrics()
    gold = {e.id: [a.text for a in e.answers or ()] for e in examples}
    texts = dict(zip(gold, predictions.texts, strict=True))
    assert any(texts.values())
    assert not all(texts.values())
    raw = {id: _official_scores(texts[id], gold[id]) for id in gold}
    has_answer = {id: bool(gold[id]) for id in gold}
    null = dict(zip(gold, predictions.null_score_differences.tolist(), strict=True))
    best = {id: c[0].text for id, c in zip(gold, predictions.candidates, strict=True)}
    raw_best = {id: _official_scores(best[id], gold[id]) for id in gold}
    for column, name in enumerate(("exact", "f1")):
        total = "exact_match" if name == "exact" else "f1"
        assert values[total] == pytest.approx(np.mean([score[column] for score in raw.values()]))
        for kind, wanted in (("HasAns", True), ("NoAns", False)):
            scores = [raw[id][column] for id in raw if has_answer[id] is wanted]
            assert values[f"{kind}_{name}"] == pytest.approx(np.mean(scores))
        expected = _official_threshold({id: s[column] for id, s in raw_best.items()}, best, null, has_answer)
        assert (values[f"best_{name}"], values[f"best_{name}_thresh"]) == pytest.approx(expected)
    assert values["best_f1"] >= values["f1"]
    rows = list(predictions.rows())
    assert [row["prediction"] for row in rows] == list(texts.values())


def test_questions_of_squad_1_always_have_an_answer(tokenizer: Tokenizer) -> None:
    predictions, _, logits = _predict(tokenizer, [_example("Paris")], 1, allows_null=False)
    logits[:, 0] += 100
    assert predictions.texts[0]
    assert set(predictions.metrics()) == {"exact_match", "f1"}
    assert "null_score_diff" not in next(predictions.rows())


def test_a_file_is_read_and_a_test_set_has_no_answers(tmp_path: Path) -> None:
    examples = read_squad(write_squad(tmp_path / "a.json", 18, 1, unanswerable=True))
    assert len(examples) == 18
    assert has_unanswerable(examples)
    for example in examples:
        for answer in example.answers or ():
            assert example.context[answer.begin :].startswith(answer.text)
    test_set = read_squad(write_squad(tmp_path / "b.json", 4, 1, labels=False))
    assert [example.answers for example in test_set] == [None] * 4


def test_files_of_xquad_are_read() -> None:
    files = sorted((SHARED / "data/eval/xquad").glob("*.json.gz"))
    if not files:
        pytest.skip("shared data")
    assert all(len(read_squad(path)) == 1190 for path in files)


ANSWER = {"text": "b", "answer_start": 2}
QUESTION = {"id": "q", "question": "what", "answers": [ANSWER]}
REFUSED: Sequence[tuple[Any, str]] = (
    ([], ": is not an object: found list"),
    ({}, ": no list under 'data': found no key"),
    ({"data": []}, ": contains no example: found no question"),
    ({"data": [{"paragraphs": 1}]}, ": data[0]: no list under 'paragraphs': found int"),
    ({"qas": [QUESTION]}, ": data[0].paragraphs[0]: no text under 'context': found qas"),
    ({"context": " \n", "qas": []}, ": data[0].paragraphs[0].context: is empty: wanted a passage"),
    ({"context": "a b"}, ": data[0].paragraphs[0]: no list under 'qas': found context"),
    ({"question": "what"}, "{q}: no id under 'id': found question"),
    ({"id": "q", "answers": []}, "{q} (q): no text under 'question': found answers, id"),
    (QUESTION | {"answers": {}}, "{q} (q): no list under 'answers': found dict"),
    (QUESTION | {"answers": []}, "{q} (q).answers: disagree with is_impossible: found none"),
    (QUESTION | {"is_impossible": True}, "{q} (q).answers: disagree with is_impossible: found is_imp"),
    (QUESTION | {"is_impossible": 1}, "{q} (q).is_impossible: is not true or false: found 1"),
    (QUESTION | {"is_impossible": "false"}, '{q} (q).is_impossible: is not true or false: found "false"'),
    (ANSWER | {"text": "c"}, '{a}.answer_start: is not where the answer begins: found "b", wanted "c"'),
    (
        ANSWER | {"answer_start": 0},
        '{a}.answer_start: is not where the answer begins: found "a", wanted "b"; hint: the passage has it '
        "from character 2",
    ),
    (ANSWER | {"answer_start": 3}, "{a}.answer_start: is outside the passage: found 1 characters from 3"),
    (ANSWER | {"answer_start": -1}, "{a}.answer_start: is outside the passage: found 1 characters from -1"),
    ({"text": "b"}, "{a}: no number under 'answer_start': found text"),
    ({"answer_start": 2}, "{a}: no text under 'text': found answer_start"),
    (ANSWER | {"text": " "}, "{a}.text: is empty: wanted a part of the passage"),
)


def _complete(part: Any) -> Any:
    """Put an answer, a question or a paragraph into a file."""
    if isinstance(part, dict) and ("text" in part or "answer_start" in part):
        part = QUESTION | {"answers": [part]}
    if isinstance(part, dict) and ("id" in part or "question" in part):
        part = {"context": "a b", "qas": [part]}
    if isinstance(part, dict) and ("context" in part or "qas" in part):
        part = {"data": [{"paragraphs": [part]}]}
    return part


@pytest.mark.parametrize(("part", "message"), REFUSED)
def test_a_wrong_file_is_one_line(tmp_path: Path, part: Any, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(_complete(part)), "utf-8")
    question = ": data[0].paragraphs[0].qas[0]"
    message = message.replace("{a}", question + " (q).answers[0]").replace("{q}", question)
    with pytest.raises(FormatError) as error:
        read_squad(path)
    assert str(error.value).startswith(f"{path}{message}"), error.value
    assert "\n" not in str(error.value)


def test_ids_that_are_not_unique_and_texts_that_are_not_json_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(_complete({"context": "a b", "qas": [QUESTION, QUESTION]})), "utf-8")
    with pytest.raises(FormatError, match=r"qas\[1\] \(q\): has the id of another question: found .*qas"):
        read_squad(path)
    path.write_text('{"data": [', "utf-8")
    with pytest.raises(FormatError, match="is not JSON: found Expecting value"):
        read_squad(path)
    test_and_train = [QUESTION, {"id": "r", "question": "who"}]
    path.write_text(json.dumps(_complete({"context": "a b", "qas": test_and_train})), "utf-8")
    with pytest.raises(FormatError, match=r"qas\[1\] \(r\): no key 'answers': wanted answers, as other"):
        read_squad(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"doc_stride": 0}, "--doc-stride: not a count: found 0, wanted 1 or more"),
        ({"n_best_size": 0}, "--n-best-size: not a count: found 0, wanted 1 or more"),
        ({"doc_stride": 33}, "--doc-stride: is not less than the window of the passage: found 33, wanted "),
        ({"max_query_length": 96}, "--seq-length: has no place for a passage: found 100, wanted 101 or more"),
    ],
)
def test_options_that_do_not_fit_are_one_line(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        SpanOptions(**{"doc_stride": 8, **options}).check(100)
    assert str(error.value).startswith(message)


def test_a_tokenizer_without_characters_is_one_line(tokenizer: Tokenizer) -> None:
    null = open_tokenizer("NullTokenizer", vocab_size=9)
    assert isinstance(null, NullTokenizer)
    with pytest.raises(ConfigError, match="--tokenizer-type: does not give the characters of its tokens"):
        SpanWindows([_example("Paris")], null, SpecialIds(1, 2, 0), 100, SpanOptions(doc_stride=8))
