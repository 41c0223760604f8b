"""The step perplexity: scores of ARPA models against the recursive definition, buckets, and wrong models."""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mega_data.clean.ccnet_text import normalize_text
from mega_data.clean.ngram_model import load_arpa
from mega_data.clean.registry import step_from_flag
from mega_data.clean.step import Row
from mega_data.cli import commands
from mega_data.readers.versions import file_version
from mega_schema.errors import ConfigError, FormatError

Ngrams = dict[tuple[str, ...], tuple[float, float]]  # log10 and log10 of the backoff weight
SMALL = (
    "\\data\\\nngram 1=4\nngram 2=2\n\n"
    "\\1-grams:\n-1.5\t<unk>\n-99\t<s>\t-0.25\n-0.5\t</s>\n-1\tcat\t-0.125\n\n"
    "\\2-grams:\n-0.25\t<s> cat\n-0.75\tcat </s>\n\n\\end\\\n"
)


def random_model(rng: random.Random, order: int, unknown: bool) -> Ngrams:
    """Return n-grams of which only each one's context is certain to be a shorter n-gram."""
    log = lambda: -rng.randrange(1, 4000) / 1000  # noqa: E731
    words = ["<s>", "</s>", *"abcdé", *(["<unk>"] if unknown else [])]
    model: Ngrams = {(word,): (log(), log()) for word in words}
    for size in range(2, order + 1):
        contexts = [ngram for ngram in model if len(ngram) == size - 1 and ngram[-1] != "</s>"]
        for context in contexts:
            for word in rng.sample(words[1:], rng.randrange(4)):
                model[(*context, word)] = (log(), rng.choice([0.0, log()]) if size < order else 0.0)
    return model


def arpa_of(model: Ngrams, order: int) -> str:
    sizes = [[ngram for ngram in model if len(ngram) == size] for size in range(1, order + 1)]
    lines = ["\\data\\", *(f"ngram {size}={len(part)}" for size, part in enumerate(sizes, 1)), ""]
    for size, part in enumerate(sizes, 1):
        lines.append(f"\\{size}-grams:")
        for ngram in part:
            probability, backoff = model[ngram]
            lines.append(f"{probability}\t{' '.join(ngram)}" + (f"\t{backoff}" if backoff else ""))
        lines.append("")
    return "\n".join([*lines, "\\end\\", ""])


def log_by_definition(model: Ngrams, context: tuple[str, ...], word: str) -> float:
    """Return log10 P(word | context) by Katz's recursion."""
    if (*context, word) in model:
        return model[(*context, word)][0]
    if not context:
        return model.get(("<unk>",), (-100.0, 0.0))[0]
    return model.get(context, (0.0, 0.0))[1] + log_by_definition(model, context[1:], word)


def score_by_definition(model: Ngrams, order: int, sentence: list[str]) -> float:
    known = [word if (word,) in model else "<unk>" for word in ("<s>", *sentence, "</s>")]
    return sum(
        log_by_definition(model, tuple(known[max(0, place - order + 1) : place]), known[place])
        for place in range(1, len(known))
    )


@pytest.mark.parametrize("seed", range(12))
def test_scores_are_those_of_the_recursive_definition(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    order = 1 + seed % 4
    model = random_model(rng, order, unknown=seed % 3 > 0)
    text = arpa_of(model, order)
    path = tmp_path / "model.arpa"
    path.write_bytes(gzip.compress(text.encode()) if seed % 2 else text.encode())
    loaded = load_arpa(path, file_version(path))
    sentences = [rng.choices(["a", "b", "c", "d", "é", "new", "<s>"], k=rng.randrange(9)) for _ in range(40)]
    for part in (sentences[:1], sentences):
        log10, words = loaded.score([[word.encode() for word in sentence] for sentence in part])
        assert words == sum(len(sentence) + 1 for sentence in part)
        wanted = sum(score_by_definition(model, order, sentence) for sentence in part)
        assert log10 == pytest.approx(wanted, rel=1e-6)


def apply_step(flag: str, text: str) -> Any:
    verdict = step_from_flag(flag).step.start()(Row({"text": text}, "text", 0, 1))
    return verdict if isinstance(verdict, str) else verdict[0].values


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "small.arpa"
    path.write_text(SMALL)
    return path


def test_perplexity_of_a_document_is_that_of_all_its_lines(model: Path) -> None:
    """-0.25 and -0.75 for "cat"; the unknown word has the backoff weight of <s>, the end none."""
    assert apply_step(f"perplexity:model={model},store=p", "cat") == {"text": "cat", "p": round(10**0.5, 1)}
    log10 = -0.25 - 0.75 + (-0.25 - 1.5) - 0.5
    values = apply_step(f"perplexity:model={model},store=p", "cat\ndog")
    assert values["p"] == round(10 ** (-log10 / 4), 1)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ("min=3.1", {}),
        ("min=3.2", "perplexity below 3.2"),
        ("max=3.2", {}),
        ("max=3.1", "perplexity above 3.1"),
        ("head=4,tail=5,bucket=b", {"b": "head"}),
        ("head=3,tail=4,bucket=b", {"b": "middle"}),
        ("head=2,tail=3,bucket=b", {"b": "tail"}),
        ("head=2,tail=3,keep=head+middle", "perplexity in tail"),
        ("head=2,tail=4,keep=head+middle", {}),
    ],
)
def test_bounds_drop_and_name_documents(model: Path, options: str, wanted: Any) -> None:
    """The perplexity is 3.16."""
    values = apply_step(f"perplexity:model={model},{options}", "cat")
    assert values == (wanted if isinstance(wanted, str) else {"text": "cat", **wanted})


def test_text_is_normalized_as_by_ccnet(model: Path) -> None:
    assert normalize_text(" Él — “A”\t１２３\nÇ… ") == 'el  -  "a"000c...'
    assert apply_step(f"perplexity:model={model},normalize=ccnet,max=3.2", " CÁT\n")["text"] == " CÁT\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "step perplexity: model: missing"),
        ("model=no.arpa,max=5", "step perplexity: model: no such file: found no.arpa"),
        ("model={model}", "step perplexity: keeps every document: wanted min | max | keep | store | bucket"),
        (
            "model={model},store=p,head=5,tail=6",
            "step perplexity: head, tail: no effect: found head 5, tail 6, wanted keep | bucket",
        ),
        ("model={model},max=5,min=6", "step perplexity: max: too small: found 5, wanted 6 or more"),
        ("model={model},max=5,normalize=nfc", "step perplexity: normalize: unknown: found nfc, wanted ccnet"),
        (
            "model={model},keep=best",
            "step perplexity: keep: unknown: found best, wanted head | middle",
        ),
        ("model={model},keep=head", "step perplexity: tail: not the bounds of buckets: found head 0, tail 0"),
        ("model={model},max=5,tokenizer={model}", "step perplexity: tokenizer: not a SentencePiece model"),
    ],
)
def test_wrong_options_are_reported(model: Path, options: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        apply_step(f"perplexity:{options.format(model=model)}", "cat")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (SMALL, "", "not an ARPA file: found end of the file"),
        (SMALL, "mmap lm http://kheafield.com/code format version 5\n", "a binary model of KenLM"),
        ("\\data\\", "data", ":1: not an ARPA file: found 'data'"),
        ("ngram 2=2", "ngram 3=2", ":3: not an ARPA file: found 'ngram 3=2'"),
        ("ngram 1=4", "ngram 1=5", ":10: not an n-gram"),
        ("ngram 2=2", "ngram 2=9", ":14: not an n-gram"),
        ("-1\tcat", "-x\tcat", ":9: not an n-gram: found '-x\\tcat\\t-0.125'"),
        ("-1\tcat", "1\tcat", ":9: not the log10 of a probability"),
        ("-99\t<s>", "-99\ts", "n-grams of 1 word: found no <s>"),
        ("-1.5\t<unk>", "-1.5\tcat", "n-grams of 1 word: found one of them twice"),
        ("cat </s>", "<s> cat", "n-grams of 2 words: found one of them twice"),
        ("cat </s>", "dog </s>", "a word without an n-gram of 1 word: found 'dog'"),
        ("\\end\\", "", "not an ARPA file: found end of the file"),
    ],
)
def test_wrong_models_are_reported(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "wrong.arpa"
    path.write_text(SMALL.replace(old, new))
    with pytest.raises(FormatError) as error:
        load_arpa(path, file_version(path))
    assert message in str(error.value)


def test_a_truncated_gz_model_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "cut.arpa.gz"
    path.write_bytes(gzip.compress(SMALL.encode())[:60])
    with pytest.raises(FormatError, match="not readable"):
        load_arpa(path, file_version(path))


def test_clean_keeps_documents_by_perplexity(tmp_path: Path, model: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "cat"}\n{"text": "dog dog"}\n')
    flags = ["clean", "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(commands, [*flags, "--step", f"perplexity:model={model},max=4"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "in.jsonl").read_text() == '{"text": "cat"}\n'
