import hashlib
import json
import random
import re
import string
from collections import Counter

import numpy as np
import pytest
from click.testing import CliRunner

from mega_eval import metrics
from mega_eval.cli import cli
from mega_eval.contamination import NgramIndex, TaskText, TrainingSet
from mega_eval.contamination_subsets import split_metrics
from mega_eval.ngram_hash import WordHasher, hash_ngrams, mix_hashes, normalize_text
from mega_schema.dataset.indexed_dataset import DatasetInfo, IndexedDataset, IndexedWriter
from mega_schema.errors import ConfigError, FormatError
from mega_schema.tokenizer.tokenizer import open_tokenizer
from tests.result_files import make_examples, write_made_up


class CodePoints:
    """A tokenizer whose tokens are characters; id 0 ends a document."""

    identity = open_tokenizer("NullTokenizer", vocab_size=1).identity

    def encode(self, text):
        return [ord(character) for character in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


def write_training_set(prefix, texts):
    """Write a document for each text, some in two sequences, with an end-of-document token."""
    with IndexedWriter(prefix, "int32") as writer:
        for number, text in enumerate(texts):
            ids = [ord(character) for character in text]
            if number % 3 == 0:
                writer.add(ids[: len(ids) // 2])
                ids = ids[len(ids) // 2 :]
            writer.add([*ids, 1])
            writer.end_document()
    return TrainingSet(prefix, IndexedDataset(prefix), CodePoints())


def find_by_brute_force(examples, texts, length):
    """Return (n-grams, matches, document of the first match) of each example, by comparing lists of words."""

    def list_ngrams(text):
        bare = "".join(c for c in text.lower() if c not in string.punctuation)
        words = [word for word in re.split(f"[{re.escape(string.whitespace)}]", bare) if word]
        return [tuple(words[i : i + length]) for i in range(len(words) - length + 1)]

    documents = [list_ngrams(text) for text in texts]
    overlaps = []
    for example in examples:
        own = {ngram for text in example.texts for ngram in list_ngrams(text)}
        holders = [n for n, document in enumerate(documents) if own.intersection(document)]
        matched = own.intersection(*[{ngram for document in documents for ngram in document}])
        overlaps.append((len(own), len(matched), holders[0] if holders else None))
    return overlaps


def summarize(index):
    return [
        (overlap.ngrams, overlap.matched, overlap.first.document if overlap.first else None)
        for overlap in index.overlaps
    ]


@pytest.mark.parametrize("seed", range(8))
def test_words_are_matched_as_brute_force_matches_them(tmp_path, monkeypatch, seed):
    monkeypatch.setattr("mega_eval.contamination._CHUNK_TOKENS", 150)
    rng = random.Random(seed)
    words = ["a", "b", "Ab", "don't", "x-y", "É", "été", "q,", "(b)", "..."]
    separators = [" ", "  ", "\n", "\t", "\u00a0"]

    def make_text(longest):
        return "".join(rng.choice(words) + rng.choice(separators) for _ in range(rng.randrange(longest)))

    texts = [make_text(60) for _ in range(30)] + [""]
    examples = [TaskText(str(n), (make_text(12), make_text(12))) for n in range(40)]
    index = NgramIndex(examples, length=4, unit="word")
    index.scan(write_training_set(tmp_path / "train", texts))
    wanted = find_by_brute_force(examples, texts, 4)
    assert summarize(index) == wanted
    assert 0 < sum(matched > 0 for _, matched, _ in wanted) < 40


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_matched_within_documents_and_across_chunks(tmp_path, monkeypatch, seed):
    monkeypatch.setattr("mega_eval.contamination._CHUNK_TOKENS", 37)
    rng = random.Random(seed)
    texts = ["".join(rng.choices("abc", k=rng.randrange(80))) for _ in range(12)]
    examples = [TaskText(str(n), ("".join(rng.choices("abc", k=rng.randrange(12))),)) for n in range(60)]
    index = NgramIndex(examples, length=6, unit="token", tokenizer=CodePoints())
    index.scan(write_training_set(tmp_path / "train", texts))
    wanted = []
    for example in examples:
        text = example.texts[0]
        own = {text[i : i + 6] for i in range(len(text) - 5)}
        holders = [n for n, document in enumerate(texts) if any(ngram in document for ngram in own)]
        matched = sum(any(ngram in document for document in texts) for ngram in own)
        wanted.append((len(own), matched, holders[0] if holders else None))
    assert summarize(index) == wanted
    assert sum(matched for _, matched, _ in wanted) > 10


def test_no_ngram_crosses_from_one_document_or_text_to_the_next(tmp_path):
    examples = [TaskText("0", ("a b c d",)), TaskText("1", ("e f", "g h")), TaskText("2", ("d y e f",))]
    train = write_training_set(tmp_path / "train", ["x a b", "c d y e f g h"])
    for unit, tokenizer, length in (("word", None, 4), ("token", CodePoints(), 7)):
        index = NgramIndex(examples, length=length, unit=unit, tokenizer=tokenizer)
        index.scan(train)
        assert [overlap.is_dirty for overlap in index.overlaps] == [False, False, True]


def test_hashes_that_collide_are_not_taken_for_equal_ngrams(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "mega_eval.contamination.hash_ngrams",
        lambda items, length: np.full(max(0, len(items) - length + 1), 7, np.uint64),
    )
    examples = [TaskText("0", ("one two",)), TaskText("1", ("three four",))]
    index = NgramIndex(examples, length=2, unit="word")
    index.scan(write_training_set(tmp_path / "train", ["zero one three four five"]))
    assert [overlap.matched for overlap in index.overlaps] == [0, 1]
    assert index.overlaps[1].first.ngram == "three four"


def test_a_word_has_one_hash_wherever_it_is():
    hasher = WordHasher()
    text = b" ".join([b"one", b"two", b"one", b"", b"eno", b"one2", b"two"])
    hashes, starts, ends = hasher.hash_words(text)
    words = [text[start:end] for start, end in zip(starts, ends, strict=True)]
    assert words == [b"one", b"two", b"one", b"eno", b"one2", b"two"]
    assert len(set(zip(words, hashes.tolist(), strict=True))) == len(set(words)) == len(set(hashes.tolist()))
    long = hasher.hash_words(b"x " * 5000 + b"one")[0]
    assert long[-1] == hashes[0]
    assert [len(part) for part in hasher.hash_words(b"")] == [0, 0, 0]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 13, 21])
def test_the_hash_of_an_ngram_depends_on_all_of_its_items_and_on_their_order(length):
    items = mix_hashes(np.random.default_rng(length).integers(0, 3, 400).astype(np.uint64))
    hashes = hash_ngrams(items, length)
    ngrams = [tuple(items[i : i + length].tolist()) for i in range(400 - length + 1)]
    assert len(hashes) == len(ngrams)
    pairs = Counter(zip(ngrams, hashes.tolist(), strict=True))
    assert len(pairs) == len(set(ngrams)) == len(set(hashes.tolist()))
    assert len(hash_ngrams(items[: length - 1], length)) == 0


def test_a_text_is_normalized_as_gpt_3_s_decontamination_does():
    assert normalize_text("It's  A\tTest, (yes) ÉTÉ!\n") == "its  a test yes été ".encode()


def test_metrics_are_computed_on_clean_and_dirty_examples(tmp_path):
    correct = [True] * 8 + [False] * 2 + [True] * 3 + [False] * 7
    losses = [1.0] * 10 + [3.0] * 10
    weights = [float(1 + n % 4) for n in range(20)]
    result = write_made_up(tmp_path / "r.json", make_examples(correct, losses, weights))
    subsets = split_metrics(result, {str(n): n < 10 for n in range(20)})
    accuracy = subsets["accuracy"]
    assert (accuracy.clean.value, accuracy.dirty.value, accuracy.difference) == pytest.approx((0.3, 0.8, 0.5))
    # Newcombe's hybrid score interval (1998, method 10), from Wilson's (0.4902, 0.9433) and (0.1078, 0.6032)
    low, high = 0.5 - np.hypot(0.8 - 0.4902, 0.6032 - 0.3), 0.5 + np.hypot(0.9433 - 0.8, 0.3 - 0.1078)
    assert accuracy.interval == pytest.approx((low, high), abs=2e-4)
    means = [sum(losses[part]) / sum(weights[part]) for part in (slice(10), slice(10, 20))]
    assert subsets["loss"].difference == pytest.approx(means[0] - means[1])
    assert subsets["perplexity"].dirty.value == pytest.approx(np.exp(means[0]))
    assert split_metrics(result, {str(n): True for n in range(20)}) == {}
    with pytest.raises(
        FormatError, match=r"r\.json: its examples are not those of the file: found 0, wanted"
    ):
        split_metrics(result, {"data.jsonl:1": True})


def test_metrics_of_some_of_the_examples_are_split_where_both_subsets_have_some(tmp_path):
    examples = make_examples([True] * 5 + [False] * 15)
    extra = {}
    for name, rows in (("early", range(8)), ("late", range(15, 20))):
        for row in rows:
            examples[row].scores[name] = examples[row].scores["correct"]
        hits = [examples[row].scores["correct"] == 1 for row in rows]
        extra[name] = metrics.proportion(hits, "some examples", example_score=name)
    result = write_made_up(tmp_path / "r.json", examples, extra=extra)
    subsets = split_metrics(result, {str(n): n < 4 for n in range(20)})
    assert (subsets["early"].clean.value, subsets["early"].dirty.value) == (0.25, 1)
    assert subsets["accuracy"].clean.count == 16
    assert "late" not in subsets


@pytest.fixture
def call(tmp_path, monkeypatch):
    """A function that runs the command in a folder with a dataset `train` and a task `data.jsonl`."""
    monkeypatch.chdir(tmp_path)
    tokenizer = open_tokenizer("NullTokenizer", vocab_size=100)
    with IndexedWriter(tmp_path / "train", "uint16", DatasetInfo(tokenizer.identity)) as writer:
        for text in ("1 2 3 4 5 6", "7 8 9 10", "20 21 22 23"):
            writer.add([*map(int, text.split()), tokenizer.identity.eod])
            writer.end_document()
    tokenizer.save(tmp_path / "train.tokenizer")
    lines = [{"text": "2 3 4 5"}, {"text": "9 10 20"}, {"text": "7"}, {"question": "x", "more": ["8, 9 10!"]}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(*words):
        return CliRunner().invoke(cli, ["contamination", *words], catch_exceptions=False).output

    return run


def test_the_command_reports_dirty_examples_and_where_they_are(call, tmp_path):
    output = call(
        "--train", "train", "data.jsonl", "--task", "lambada", "--ngram", "3", "--output", "c.json"
    ).splitlines()
    assert output[0] == "2 of 4 examples are dirty (50.0%) by 3 words"
    assert output[1] == "1 examples are shorter than 3 words and count as clean"
    assert output[2] == "  data.jsonl:1: 2 of 2 n-grams, first in document 0 of train:"
    assert output[3] == "    '2 3 4'"
    record = json.loads((tmp_path / "c.json").read_bytes())
    assert record["counts"] == {"examples": 4, "dirty": 2, "clean": 2, "short": 1}
    assert record["examples"][3]["first"] == {"ngram": "8 9 10", "train": "train", "document": 1}
    assert record["train"][0]["tokens"] == 17
    assert record["task"] == "lambada"
    with pytest.raises(
        ConfigError, match=r"--output: a file of this name exists: found c\.json; hint: .*--ov"
    ):
        call("--train", "train", "data.jsonl", "--output", "c.json")
    assert json.loads((tmp_path / "c.json").read_bytes()) == record
    call("--train", "train", "data.jsonl", "--output", "c.json", "--overwrite")
    assert json.loads((tmp_path / "c.json").read_bytes())["ngram"] == 13


def test_the_file_of_a_task_can_be_the_value_of_task(call, tmp_path):
    output = call("--train", "train", "--task", "data.jsonl", "--ngram", "3", "--output", "c.json")
    assert output.startswith("2 of 4 examples are dirty (50.0%) by 3 words\n")
    assert json.loads((tmp_path / "c.json").read_bytes())["task"] is None
    with pytest.raises(ConfigError, match="--data: more than one file: found other.jsonl data.jsonl"):
        call("--train", "train", "--task", "data.jsonl", "other.jsonl")


def test_several_training_sets_and_keys_are_searched(call, tmp_path):
    lines = [{"text": "2 3 4 5", "note": "7 8 9"}, {"text": "20 21", "note": "1"}]
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ("--data", "two.jsonl", "--ngram", "2", "--unit", "token")
    both = call("--train", "train", "--train", "train", *options)
    assert both.startswith("2 of 2 examples are dirty (100.0%) by 2 tokens\n")
    assert "34 training tokens" in both
    assert call("--train", "train", *options, "--key", "note").startswith("1 of 2 examples")


def test_the_command_gives_metrics_of_both_subsets(call, tmp_path):
    task = tmp_path / "data.jsonl"
    examples = [
        type(example)(
            id=f"renamed.jsonl:{number + 1}",
            prompt="",
            expected="",
            prediction="",
            scores=example.scores,
        )
        for number, example in enumerate(make_examples([True, False, False, True]))
    ]
    result = write_made_up(tmp_path / "r.json", examples)
    with pytest.raises(FormatError, match=r"r\.json: sha256 of the data: is not that of data\.jsonl: found"):
        call("--train", "train", "--data", "data.jsonl", "--ngram", "3", "--result", "r.json")
    record = json.loads(result.path.read_bytes())
    record["data"][0]["sha256"] = hashlib.sha256(task.read_bytes()).hexdigest()
    result.path.write_text(json.dumps(record))
    output = call(
        "--train", "train", "--data", "data.jsonl", "--ngram", "3", "--result", "r.json", "--output", "c.json"
    )
    assert json.loads((tmp_path / "c.json").read_bytes())["task"] == record["task"]
    assert "  clean             0.0000" in output
    assert "  dirty             1.0000" in output
    assert "  dirty - clean    +1.0000" in output


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (("--train", "train"), ConfigError, "--data: missing"),
        (("--train", "train", "--task", "lambada"), ConfigError, "--data: missing"),
        (
            ("--train", "train", "--task", "lambda", "data.jsonl"),
            ConfigError,
            r"--task: not the name of a task: found lambda, wanted arc \|.*did you mean lambada\?",
        ),
        (("--train", "train", "dat.jsonl"), FormatError, r"no such file; hint: did you mean data\.jsonl\?"),
        (("--train", "tran", "data.jsonl"), FormatError, r"tran.*hint: did you mean train\?"),
        (("--train", "none", "--data", "data.jsonl"), FormatError, "none"),
        (
            ("--train", "bare", "--data", "data.jsonl"),
            FormatError,
            "no tokenizer beside the dataset; hint: add",
        ),
        (
            ("--train", "train", "--data", "data.jsonl", "--key", "answer"),
            FormatError,
            r"data\.jsonl:1: no key",
        ),
        (("--train", "train", "--data", "data.jsonl", "--output", "no/x"), ConfigError, "no such folder"),
    ],
)
def test_mistakes_are_one_line(call, tmp_path, words, error, message):
    with IndexedWriter(tmp_path / "bare", "uint16") as writer:
        writer.add([1, 2])
        writer.end_document()
    with pytest.raises(error, match=message):
        call(*words)
