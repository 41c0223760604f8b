import math

import numpy as np
import pytest

from mega_eval.harness_encoding import Continuation, build_continuation_windows
from mega_eval.presets.choice_presets import CHOICE_PRESETS
from mega_eval.presets.question import ChoiceQuestion, ask
from mega_eval.records import TaskRecord, list_record_files, read_records
from mega_eval.tasks.choice import ChoiceItem, calibration_error, evaluate, score_question
from mega_eval.tasks.choice_items import build_items
from mega_eval.tasks.fewshot import FewShot
from mega_schema.errors import ConfigError, FormatError
from tests.evaluation.hash_model import Characters, HashModel

PRESETS = {preset.name: preset for preset in CHOICE_PRESETS}
ROW = TaskRecord("f:1", {})


def build(pairs, max_length=100, tokenizer=None):
    rows = [Continuation("f:1", *pair) for pair in pairs]
    return build_continuation_windows(rows, tokenizer or Characters(), max_length)


def test_spaces_at_the_end_of_a_context_belong_to_the_continuation():
    windows, _ = build([("ab", " cd"), ("ab \n", "cd")])
    assert [window.tokens.tolist() for window in windows] == [list(b"ab cd"), list(b"ab \ncd")]
    assert [window.target_length for window in windows] == [3, 4]


def test_without_context_a_token_of_the_tokenizer_begins_the_window():
    for bos, first in ((None, 256), (255, 255)):
        [window, blank], _ = build([("", "cd"), (" ", "cd")], tokenizer=Characters(bos))
        assert window.tokens.tolist() == [first, *b"cd"]
        assert blank.tokens.tolist() == [first, *b" cd"]


def test_letters_that_merge_over_the_border_are_targets_as_in_lm_eval(gpt2):
    for context, text in (
        ("The answer is", " correct"),
        ("3 + 4 =", " 7"),
        ("new", "paper\n"),
        ("a b", "cd ef"),
    ):
        [window], _ = build([(context, text)], tokenizer=gpt2)
        whole, start = gpt2.encode(context + text), gpt2.encode(context)
        assert window.tokens.tolist() == [*start, *whole[len(start) :]]
        assert window.target_length == len(whole) - len(start)


def test_a_long_context_loses_its_beginning_and_is_counted():
    windows, truncations = build([("abcdefgh", " x"), ("ab", " x")], max_length=4)
    assert bytes(windows[0].tokens.tolist()) == b"fgh x"
    assert truncations == [True, False]


def test_a_choice_without_tokens_is_refused():
    with pytest.raises(FormatError, match="f:1: a choice has no tokens after its context"):
        build([("ab", "")])


def test_scores_follow_their_definitions():
    question = ask(ROW, "q", ["aa", "é", "aaaa"], 1)
    logprobs = [math.log(p) for p in (0.1, 0.06, 0.04)]
    scores = score_question(question, logprobs)
    # é is one character of two bytes: per character 0.1^(1/2) = 0.32 wins over 0.06, and 0.04^(1/4) over both
    assert (scores["correct"], scores["correct_norm"], scores["correct_bytes"]) == (0, 0, 0)
    assert scores["gold_bits_per_byte"] == pytest.approx(-math.log2(0.06) / 2)
    assert scores["confidence"] == pytest.approx(0.5)
    assert scores["brier"] == pytest.approx(0.5**2 + 0.7**2 + 0.2**2)
    assert score_question(ask(ROW, "q", ["aa", "é", "aaaa"], 2), logprobs)["correct_norm"] == 1
    # equal scores: the first
    assert score_question(ask(ROW, "q", ["a", "b"], 0), [-1, -1])["correct"] == 1
    assert score_question(ask(ROW, "q", ["a", "b"], 1), [-1, -1])["correct"] == 0


def test_characters_and_bytes_are_different_lengths():
    question = ask(ROW, "q", ["éé", "ab"], 0)
    scores = score_question(question, [-3.0, -2.5])
    assert (scores["correct_norm"], scores["correct_bytes"]) == (0, 1)


def test_calibration_error_is_the_gap_of_each_bin():
    # two questions at 0.95 of which one is right, one at 0.35 that is right
    assert calibration_error([0.95, 0.95, 0.35], [1, 0, 1]) == pytest.approx((2 * 0.45 + 0.65) / 3)
    assert calibration_error([1.0, 1.0], [1, 1]) == 0


def test_partial_evaluation_scores_one_text_after_each_option():
    model = HashModel()
    row = {"sentence": "Ann paid Eve as _ was rich .", "option1": "Ann", "option2": "Eve", "answer": "2"}
    question = PRESETS["winogrande"].readers["continuation"](TaskRecord("f:1", row))
    result = evaluate(model, [ChoiceItem("1", "f:1", question)], task="t", convention="c")
    assert [bytes(window.tokens.tolist()) for window in model.windows] == [
        b"Ann paid Eve as Ann was rich .",
        b"Ann paid Eve as Eve was rich .",
    ]
    assert {window.target_length for window in model.windows} == {len(" was rich .")}
    [example] = result.examples
    assert [label for label, _ in example.choices] == ["Ann", "Eve"]
    assert example.expected == "Eve"


def reference_scores(model, question, prefix):
    """Return accuracy, normalized accuracy and bits per byte of a question, from the definitions alone."""
    sums = []
    for context, text in zip(question.contexts, question.continuations, strict=True):
        context = prefix + context
        tokens = model.tokenizer.encode(context + " " + text)
        start = len(model.tokenizer.encode(context))
        suffix = tokens[-model.context_length - 1 :]
        cut = len(tokens) - len(suffix)
        sums.append(sum(model.logprob(np.array(suffix[: n + 1 - cut])) for n in range(start, len(tokens))))
    rates = [value / len(text) for value, text in zip(sums, question.continuations, strict=True)]
    gold = question.gold
    bits = -sums[gold] / math.log(2) / len(question.continuations[gold].encode())
    return sums.index(max(sums)) == gold, rates.index(max(rates)) == gold, bits


@pytest.mark.parametrize(
    ("name", "file"),
    [("boolq", "boolq/boolq.validation.jsonl.gz"), ("cosmosqa", "cosmosqa/valid.csv.gz")],
)
def test_metrics_of_a_real_file_are_those_of_the_definitions(shared, gpt2, name, file):
    records = read_records(list_record_files(shared / "data/eval" / file))
    items, skipped = build_items(records, PRESETS[name].readers["continuation"], FewShot(count=2), limit=40)
    assert (len(items), skipped) == (40, 0)
    model = HashModel(gpt2, context_length=300)
    result = evaluate(model, items, task=name, convention="continuation", counts={"further": 3})
    expected = [reference_scores(model, item.question, item.prefix) for item in items]
    means = [float(np.mean(column)) for column in zip(*expected, strict=True)]
    assert [result.values[key] for key in ("accuracy", "accuracy_norm", "bits_per_byte")] == pytest.approx(
        means
    )
    assert result.metrics["bits_per_byte"].interval is not None
    assert result.counts["correct"] == sum(hit for hit, _, _ in expected)
    assert 0 < result.counts["questions_cut"] < 40
    assert result.counts["further"] == 3
    assert len({example.id for example in result.examples}) == 40


def test_the_answers_of_the_real_files_are_distributed_as_published(shared):
    counts = {}
    for name, file in (("boolq", "boolq/boolq.validation.jsonl.gz"), ("cosmosqa", "cosmosqa/valid.csv.gz")):
        records = read_records(list_record_files(shared / "data/eval" / file))
        questions = [PRESETS[name].readers["continuation"](record) for record in records]
        counts[name] = (len(questions), sum(question.gold == 1 for question in questions))
    # 62.17 % of BoolQ's validation answers are yes
    assert counts["boolq"] == (3270, 2033)
    assert counts["cosmosqa"][0] == 2985


def test_nli_files_of_three_layouts_are_read_and_examples_without_label_are_skipped(shared):
    read = PRESETS["mnli"].readers["continuation"]
    [row] = read_records([shared / "data/eval/mnli-sample/dev_matched.tsv"])
    question = read(row)
    assert question.contexts[0] == (
        "The new rights are nice enough\nQuestion: Everyone really likes the newest benefits. "
        "True, False or Neither?\nAnswer:"
    )
    assert question.labels[question.gold] == "Neither"
    rows = read_records([shared / "data/eval/snli-sample/snli.jsonl"])
    labels = [read(row).labels[read(row).gold] for row in rows]
    expected = {"entailment": "True", "neutral": "Neither", "contradiction": "False"}
    assert labels == [expected[row.text("gold_label")] for row in rows]
    rows = read_records([shared / "data/eval/breaking-nli/breaking_nli.jsonl.gz"])
    assert {read(row).gold for row in rows} == {0, 1, 2}
    unlabelled = TaskRecord("f:1", {"sentence1": "a", "sentence2": "b", "gold_label": "-"})
    labelled = TaskRecord("f:2", {"sentence1": "a", "sentence2": "c", "gold_label": "neutral"})
    items, skipped = build_items([unlabelled, labelled], read, FewShot())
    assert (len(items), skipped) == (1, 1)
    with pytest.raises(FormatError, match="f:1: no question has an answer"):
        build_items([unlabelled], read, FewShot())


def test_accuracy_of_each_subject_is_reported():
    questions = [
        ChoiceQuestion(("q", "q"), ("a", "b"), n % 2, ("a", "b"), tags={"subject": "x" if n < 3 else "y"})
        for n in range(8)
    ]
    items = [ChoiceItem(str(n), f"f:{n}", question) for n, question in enumerate(questions)]
    result = evaluate(HashModel(), items, task="t", convention="c", group="subject")
    assert [result.metrics[f"accuracy_{name}"].count for name in "xy"] == [3, 5]
    same = evaluate(HashModel(), items[:3], task="t", convention="c", group="subject")
    assert "accuracy_x" not in same.metrics


def read_plain(record):
    return ask(record, record.text("q"), ["a", "b"], 0, tags={"subject": record.text("s")})


def rows_of(name, count, subject="x"):
    return [TaskRecord(f"{name}:{n}", {"q": f"{name}{n}", "s": subject}, f"{name}:{n}") for n in range(count)]


@pytest.mark.parametrize("sampler", ["shared", "first", "random"])
def test_a_question_is_never_its_own_example(sampler):
    rows = rows_of("f", 6)
    items, _ = build_items(rows, read_plain, FewShot(count=5, sampler=sampler, seed=3))
    for item in items:
        examples = item.prefix.split("\n\n")[:-1]
        own = item.question.contexts[0]
        assert sorted([*examples, f"{own} a"]) == sorted(f"f{n} a" for n in range(6))


def test_the_default_draw_is_one_prefix_for_all_questions():
    candidates = rows_of("c", 20)
    items, _ = build_items(rows_of("f", 9), read_plain, FewShot(count=4, seed=3), candidates)
    [prefix] = {item.prefix for item in items}
    reseeded, _ = build_items(rows_of("f", 9), read_plain, FewShot(count=4, seed=4), candidates)
    assert reseeded[0].prefix != prefix
    first, _ = build_items(rows_of("f", 9), read_plain, FewShot(count=2, sampler="first"), candidates)
    assert {item.prefix for item in first} == {"c0 a\n\nc1 a\n\n"}
    random, _ = build_items(rows_of("f", 9), read_plain, FewShot(count=4, sampler="random"), candidates)
    assert len({item.prefix for item in random}) > 5


def test_a_copy_of_the_question_among_the_examples_is_replaced():
    question = rows_of("f", 1)
    copies = [TaskRecord(f"c:{n}", question[0].values) for n in range(3)]
    for sampler in ("shared", "first", "random"):
        fewshot = FewShot(count=2, sampler=sampler)
        [item], _ = build_items(question, read_plain, fewshot, [*copies, *rows_of("g", 2)])
        assert sorted(item.prefix.split("\n\n")[:-1]) == ["g0 a", "g1 a"]


def test_examples_come_from_the_question_s_subject():
    rows = [*rows_of("f", 2, "x"), *rows_of("g", 2, "y")]
    candidates = [*rows_of("c", 3, "x"), *rows_of("d", 3, "y")]
    items, _ = build_items(rows, read_plain, FewShot(count=3), candidates, group="subject")
    assert [{text[0] for text in item.prefix.split("\n\n")[:-1]} for item in items] == [{"c"}] * 2 + [
        {"d"}
    ] * 2


def test_too_few_examples_are_one_line():
    with pytest.raises(ConfigError) as error:
        build_items(rows_of("f", 3), read_plain, FewShot(count=3, where="few.jsonl"))
    assert str(error.value) == (
        "--num-fewshot: few.jsonl has 3 examples, 2 without the question itself: "
        "found 3, wanted at most 2; hint: --num-fewshot 2"
    )
    with pytest.raises(ConfigError, match=r"few\.jsonl has 3 examples: found 9999, wanted at most 3; hint"):
        build_items(
            rows_of("f", 2), read_plain, FewShot(count=9999, where="few.jsonl"), rows_of("g", 3, "other")
        )
    rows = [*rows_of("f", 3), *rows_of("g", 1, "y")]
    with pytest.raises(
        ConfigError, match=r"has 1 examples of y, 0 without .* at most 0; hint: --fewshot-data F"
    ):
        build_items(rows, read_plain, FewShot(count=1), group="subject")
