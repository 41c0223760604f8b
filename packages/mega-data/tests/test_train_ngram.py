"""Trained n-gram models: against the equations of Chen and Goodman, and as models that sum to 1."""

from __future__ import annotations

import gzip
import json
import math
import random
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_data.clean import ngram_training
from mega_data.clean.ngram_options import NgramOptions
from mega_data.clean.ngram_training import train_ngram
from mega_data.cli import commands
from mega_schema.errors import ConfigError

Gram = tuple[str, ...]
FALLBACK = {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5}


class Oracle:
    """The probabilities of a model by the definitions, one n-gram after the other."""

    def __init__(self, lines: list[list[str]], options: NgramOptions) -> None:
        self.order = options.order
        self.options = options
        self.counts: dict[int, Counter[Gram]] = {n: Counter() for n in range(1, self.order + 1)}
        before: dict[Gram, set[str]] = defaultdict(set)
        for line in lines:
            words = ["<s>", *line, "</s>"]
            for end in range(1, len(words)):
                for n in range(1, self.order + 1):
                    if end - n + 1 >= 0:
                        gram = tuple(words[end - n + 1 : end + 1])
                        self.counts[n][gram] += 1
                        before[gram[1:]].add(gram[0])
        self.adjusted = {
            n: {
                gram: count if n == self.order or gram[0] == "<s>" else len(before[gram])
                for gram, count in counts.items()
            }
            for n, counts in self.counts.items()
        }
        self.words = {"<unk>", "</s>", *(word for line in lines for word in line)}
        self.discounts = {n: self.discount(n) for n in self.counts}

    def discount(self, n: int) -> dict[int, float]:
        seen = Counter(self.adjusted[n].values())
        if all(seen[k] for k in (1, 2, 3)):
            y = seen[1] / (seen[1] + 2 * seen[2])
            values = {k: k - (k + 1) * y * seen[k + 1] / seen[k] for k in (1, 2, 3)}
            if all(0 <= value <= k for k, value in values.items()):
                return {0: 0.0, **values}
        return FALLBACK

    def is_pruned(self, gram: Gram) -> bool:
        n = len(gram)
        prune = self.options.prune
        return n > 1 and self.counts[n][gram] <= prune[min(n, len(prune)) - 1]

    def continuations(self, context: Gram) -> dict[Gram, int]:
        grams = self.adjusted[len(context) + 1]
        return {gram: count for gram, count in grams.items() if gram[:-1] == context}

    def gamma(self, context: Gram) -> float:
        grams = self.continuations(context)
        discount = self.discounts[len(context) + 1]
        unused = sum(
            count if self.is_pruned(gram) else discount[min(count, 3)] for gram, count in grams.items()
        )
        return unused / sum(grams.values())

    def probability(self, gram: Gram) -> float:
        """Return P(last word | the others); every n-gram whose context was seen has one."""
        context = gram[:-1]
        if not self.continuations(context):
            return self.probability(gram[1:])
        lower = self.probability(gram[1:]) if context else 1 / len(self.words)
        own = 0.0
        if gram in self.adjusted[len(gram)] and not self.is_pruned(gram):
            count = self.adjusted[len(gram)][gram]
            own = count - self.discounts[len(gram)][min(count, 3)]
            own /= sum(self.continuations(context).values())
        return own + self.gamma(context) * lower


def train(lines: list[list[str]], options: NgramOptions, path: Path) -> None:
    train_ngram([[word.encode() for word in line] for line in lines], options, path)


def read_arpa(path: Path) -> dict[Gram, tuple[float, float]]:
    grams = {}
    for line in path.read_text().splitlines():
        log10, *rest = line.split("\t")
        if rest:
            backoff = float(rest[1]) if len(rest) > 1 else 0.0
            grams[tuple(rest[0].split(" "))] = (float(log10), backoff)
    return grams


def check(lines: list[list[str]], options: NgramOptions, path: Path) -> None:
    train(lines, options, path)
    grams = read_arpa(path)
    oracle = Oracle(lines, options)
    wanted = {gram for counts in oracle.counts.values() for gram in counts if not oracle.is_pruned(gram)}
    assert set(grams) == wanted | {("<unk>",), ("<s>",)}
    for gram, (log10, backoff) in grams.items():
        probability = 1.0 if gram == ("<s>",) else oracle.probability(gram)
        assert log10 == pytest.approx(math.log10(probability), abs=1e-5), gram
        is_context = len(gram) < options.order and oracle.continuations(gram)
        weight = max(oracle.gamma(gram), 1e-99) if is_context else 1.0
        assert backoff == pytest.approx(math.log10(weight), abs=1e-5), gram


WORDS = st.lists(st.lists(st.sampled_from("abcd"), max_size=6), min_size=1, max_size=12)


@given(WORDS, st.integers(1, 5), st.sampled_from([(0,), (0, 0, 1), (0, 1), (0, 1, 2)]))
@settings(max_examples=60)
def test_every_probability_and_weight_is_that_of_the_equations(
    tmp_path_factory: pytest.TempPathFactory, lines: list[list[str]], order: int, prune: tuple[int, ...]
) -> None:
    options = NgramOptions(order, prune[:order], fallback=True)
    check(lines, options, tmp_path_factory.mktemp("model") / "m.arpa")


@pytest.fixture(scope="module")
def zipf_lines() -> list[list[str]]:
    """Text whose counts of 1 to 4 give discounts at every order."""
    generator = random.Random(1)
    words = [f"w{number}" for number in range(60)]
    weights = [1 / (rank + 1) for rank in range(60)]
    return [generator.choices(words, weights, k=generator.randrange(12)) for _ in range(150)]


@pytest.mark.parametrize("prune", [(0,), (0, 0, 1), (0, 1, 1, 2)])
def test_discounts_are_computed_from_the_text(
    tmp_path: Path, zipf_lines: list[list[str]], prune: tuple[int, ...]
) -> None:
    check(zipf_lines, NgramOptions(3, prune[:3]), tmp_path / "m.arpa")


def test_blocks_of_the_text_are_added_up(
    tmp_path: Path, zipf_lines: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(zipf_lines, NgramOptions(3), tmp_path / "one.arpa")
    monkeypatch.setattr(ngram_training, "_BLOCK_WORDS", 50)
    train(zipf_lines, NgramOptions(3), tmp_path / "many.arpa")
    assert (tmp_path / "one.arpa").read_bytes() == (tmp_path / "many.arpa").read_bytes()


def arpa_log10(grams: dict[Gram, tuple[float, float]], gram: Gram) -> float:
    """Return log10 P(last word | the others) by the rule of ARPA files."""
    if gram in grams:
        return grams[gram][0]
    return grams.get(gram[:-1], (0.0, 0.0))[1] + arpa_log10(grams, gram[1:])


def test_the_probabilities_of_every_context_add_up_to_one(
    tmp_path: Path, zipf_lines: list[list[str]]
) -> None:
    train(zipf_lines, NgramOptions(3, (0, 0, 1)), tmp_path / "m.arpa")
    grams = read_arpa(tmp_path / "m.arpa")
    vocabulary = [gram[0] for gram in grams if len(gram) == 1 and gram != ("<s>",)]
    contexts = [gram for gram in grams if len(gram) < 3 and gram[-1] not in ("</s>", "<unk>")]
    for context in [(), *random.Random(2).sample(contexts, 40)]:
        total = sum(10 ** arpa_log10(grams, (*context, word)) for word in vocabulary)
        assert total == pytest.approx(1, abs=1e-4), context


def write_documents(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def invoke(*words: object) -> Result:
    result = CliRunner().invoke(commands, ["train-ngram", *map(str, words)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_command_trains_what_the_step_perplexity_scores(
    tmp_path: Path, zipf_lines: list[list[str]]
) -> None:
    corpus = tmp_path / "text.jsonl"
    write_documents(corpus, ["\n".join(map(" ".join, zipf_lines[start::3])) + "\n" for start in range(3)])
    model = tmp_path / "m.arpa.gz"
    result = invoke("--input", corpus, "--output", model, "--order", 3, "--prune", 0, 0, 1)
    counts = re.findall(r"[\d,]+ [123]-grams", result.output)
    assert len(counts) == 3
    assert "in 150 lines" in result.output
    options = NgramOptions(3, (0, 0, 1))
    train(zipf_lines, options, tmp_path / "wanted.arpa")
    assert set(gzip.decompress(model.read_bytes()).split(b"\n")) == {
        *(tmp_path / "wanted.arpa").read_bytes().split(b"\n")
    }
    oracle = Oracle(zipf_lines, options)
    words = ["<s>", *zipf_lines[7], "</s>"]
    grams = [tuple(words[max(0, end - 2) : end + 1]) for end in range(1, len(words))]
    log10 = sum(math.log10(oracle.probability(gram)) for gram in grams)
    wanted = 10 ** (-log10 / (len(words) - 1))
    write_documents(tmp_path / "one.jsonl", [" ".join(zipf_lines[7])])
    words = ["clean", "--input", str(tmp_path / "one.jsonl"), "--output", str(tmp_path / "out")]
    step = f"perplexity:model={model},store=perplexity"
    assert CliRunner().invoke(commands, [*words, "--step", step]).exit_code == 0
    (line,) = next((tmp_path / "out").glob("*.jsonl")).read_text().splitlines()
    assert json.loads(line)["perplexity"] == pytest.approx(wanted, abs=0.06)


def test_special_words_of_the_text_are_skipped(tmp_path: Path) -> None:
    write_documents(tmp_path / "a.jsonl", ["a <s> b", "a b </s> <unk>"])
    write_documents(tmp_path / "b.jsonl", ["a b", "a b"])
    for name in "ab":
        paths = ("--input", tmp_path / f"{name}.jsonl", "--output", tmp_path / f"{name}.arpa")
        result = invoke(*paths, "--discount-fallback")
        assert ("note: 3 words <s>, </s> or <unk> of the text were skipped" in result.output) == (name == "a")
    assert (tmp_path / "a.arpa").read_bytes() == (tmp_path / "b.arpa").read_bytes()


def test_a_final_line_break_begins_no_sentence(tmp_path: Path) -> None:
    for name, text in (("a", "a b\n\nc\n"), ("b", "a b\n\nc")):
        write_documents(tmp_path / f"{name}.jsonl", [text])
        paths = ("--input", tmp_path / f"{name}.jsonl", "--output", tmp_path / f"{name}.arpa")
        assert "3 words in 3 lines" in invoke(*paths, "--discount-fallback").output
    assert (tmp_path / "a.arpa").read_bytes() == (tmp_path / "b.arpa").read_bytes()


def test_a_model_is_plain_or_gz(tmp_path: Path) -> None:
    write_documents(tmp_path / "a.jsonl", ["a b"])
    with pytest.raises(ConfigError) as caught:
        invoke("--input", tmp_path / "a.jsonl", "--output", "m.arpa.zst", "--discount-fallback")
    message = "--output: not plain or .gz: found m.arpa.zst; hint: --output m.arpa.gz"
    assert str(caught.value) == message


def test_ccnet_normalization_makes_one_line(tmp_path: Path) -> None:
    write_documents(tmp_path / "a.jsonl", ["Caf\u00e9 1984\nCAFE 2001"])
    paths = ("--input", tmp_path / "a.jsonl", "--output", tmp_path / "m.arpa")
    assert "1 line" in invoke(*paths, "--discount-fallback", "--normalize", "ccnet").output
    assert {"cafe", "0000cafe"} < {gram[0] for gram in read_arpa(tmp_path / "m.arpa")}


@pytest.mark.parametrize(
    ("texts", "flags", "message"),
    [
        (
            ["a b"],
            ["--order", "2"],
            "--input: no Kneser-Ney discounts for 1-grams: a small",
        ),
        ([], [], "--input: contains no text"),
        (["a"], ["--prune", "1"], "--prune: not thresholds: found 1"),
        (["a"], ["--prune", "0", "2", "1"], "--prune: not thresholds: found 0 2 1"),
        (["a"], ["--order", "2", "--prune", "0", "0", "1"], "--prune: too many values: found 0 0 1"),
        (["a"], ["--tokenizer", "none.model"], "--tokenizer: no such file: found none.model"),
        (
            [" ".join(map(str, range(20_000))) for _ in range(5)],
            ["--memory", "1", "--discount-fallback"],
            "--memory: too small for the n-grams of the text: found 1 MiB; hint: --memory ",
        ),
    ],
)
def test_what_cannot_be_trained_is_one_line(
    tmp_path: Path, texts: list[str], flags: list[str], message: str
) -> None:
    write_documents(tmp_path / "text.jsonl", texts)
    with pytest.raises(ConfigError) as caught:
        invoke("--input", tmp_path / "text.jsonl", "--output", tmp_path / "new.arpa", *flags)
    assert str(caught.value).startswith(message)
    assert not (tmp_path / "new.arpa").exists()


def test_only_an_earlier_model_is_replaced(tmp_path: Path) -> None:
    write_documents(tmp_path / "text.jsonl", ["a b c"])
    words = ("--input", tmp_path / "text.jsonl", "--discount-fallback", "--output")
    for name in ("m.arpa", "m.arpa.gz"):
        invoke(*words, tmp_path / name)
        invoke(*words, tmp_path / name)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"^--output: "):
        invoke(*words, tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"
