"""Fast versions of steps against their plain definitions."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mega_data.clean import repetition, words
from mega_data.clean.array_langid import make_identifier
from mega_data.clean.kernels import load_kernels
from mega_data.clean.quality import GopherQuality
from mega_data.clean.repetition import repetition_reason
from mega_data.clean.step import Row
from mega_data.clean.words import word_table


@pytest.fixture(params=["c++", "numpy"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a test with the kernels of this machine and without any."""
    if request.param == "numpy":
        for module in (words, repetition):
            monkeypatch.setattr(module, "load_kernels", lambda: None)
    elif load_kernels() is None:
        pytest.skip("no kernels in C++ here")
    word_table.cache_clear()
    yield
    word_table.cache_clear()


def repetition_by_definition(text: str) -> str:
    """Return the reason of table A1 of arXiv:2112.11446, with all n-grams as tuples."""
    paragraphs = re.split(r"\n{2,}", text.strip())
    lines = re.split(r"\n+", text.strip())
    for name, parts in (("lines", lines), ("paragraphs", paragraphs)):
        repeated = [part for number, part in enumerate(parts) if part in parts[:number]]
        if len(repeated) > 0.3 * len(parts):
            return f"more than 30% of {name} are repeated"
        if sum(map(len, repeated)) > 0.2 * len(text):
            return f"more than 20% of characters in repeated {name}"
    words = text.split()
    limits = {2: 0.2, 3: 0.18, 4: 0.16, 5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.1}
    for size, limit in limits.items():
        ngrams = [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
        if not ngrams:
            return ""
        if size < 5:
            ngram, count = Counter(ngrams).most_common(1)[0]  # the first of several
            if count > 1 and count * sum(map(len, ngram)) > limit * len(text):
                return f"more than {limit:.0%} of characters in one {size}-gram"
            continue
        seen, covered = set[tuple[str, ...]](), set[int]()
        for start, ngram in enumerate(ngrams):
            if ngram in seen:
                covered.update(range(start, start + size))
            seen.add(ngram)
        if sum(len(words[place]) for place in covered) > limit * len(text):
            return f"more than {limit:.0%} of characters in repeated {size}-grams"
    return ""


def random_text(rng: random.Random) -> str:
    """Return a text of words, phrases that occur again, and line breaks."""
    vocabulary = ["w" * rng.randrange(1, 9) + str(n) for n in range(rng.choice([2, 5, 20, 200, 5000]))]
    phrases = [rng.choices(vocabulary, k=rng.randrange(2, 14)) for _ in range(3)]
    words = list[str]()
    while len(words) < rng.randrange(150):
        words += rng.choice(phrases) if rng.random() < 0.1 else [rng.choice(vocabulary)]
    return "".join(word + rng.choice([" ", " ", " ", " ", "  ", "\n", "\n\n"]) for word in words)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("seed", range(10))
def test_repetition_is_that_of_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    texts = [random_text(rng) for _ in range(100)]
    assert [repetition_reason(text) for text in texts] == [repetition_by_definition(text) for text in texts]


@pytest.mark.usefixtures("_kernels")
@given(st.text("ab \n", max_size=60))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_repetition_of_few_characters_is_that_of_the_definition(text: str) -> None:
    assert repetition_reason(text) == repetition_by_definition(text)


@pytest.mark.usefixtures("_kernels")
def test_a_large_vocabulary_is_counted_exactly() -> None:
    """The numbers of a 5-gram of 20,000 distinct words do not fit in 64 bits."""
    words = [f"word{number}" for number in range(20_000)]
    assert repetition_reason(" ".join(words)) == ""
    assert (
        repetition_reason(" ".join(words + words[:6000])) == "more than 15% of characters in repeated 5-grams"
    )


@pytest.mark.usefixtures("_kernels")
def test_a_word_table_counts_the_words() -> None:
    table = word_table("the cat saw\nthe dog")
    assert list(table.distinct) == ["the", "cat", "saw", "dog"]
    assert (table.distinct[-1], [*table.distinct[1:3]]) == ("dog", ["cat", "saw"])
    assert table.numbers.tolist() == [0, 1, 2, 0, 3]
    assert table.lengths.tolist() == [3, 3, 3, 3, 3]
    assert table.counts.tolist() == [2, 1, 1, 1]
    assert table.characters.tolist() == [6, 3, 3, 3]
    assert len(word_table("")) == len(word_table(" \u2003\n")) == 0


@pytest.mark.usefixtures("_kernels")
@given(st.text(st.one_of(st.sampled_from("ab\u0130é \n\x1c\x85\u2028\u3000\ud800"), st.characters())))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_words_are_those_of_python(text: str) -> None:
    table = word_table(text)
    assert [table.distinct[number] for number in table.numbers.tolist()] == text.split()
    assert list(table.distinct) == list(dict.fromkeys(text.split()))


def test_white_space_is_that_of_python() -> None:
    spaces = [chr(code) for code in range(0x110000) if chr(code).isspace()]
    assert word_table("a".join(spaces)).lengths.tolist() == [1] * (len(spaces) - 1)
    assert word_table("".join(map(chr, range(0x3001, 0x110000)))).lengths.tolist() == [0x110000 - 0x3001]
    assert len(word_table("".join(map(chr, range(0x3001))))) == len("".join(map(chr, range(0x3001))).split())


def quality_by_definition(text: str, step: GopherQuality) -> str:
    """Return the reason of appendix A.1.1 of arXiv:2112.11446, word by word."""
    bullets, ends = ("•", "‣", "◦", "⁃", "▪", "-", "*"), ("...", "…")
    words, lines = text.split(), text.splitlines()
    if not step.fewest <= len(words) <= step.most:
        return f"not {step.fewest} to {step.most:,} words"
    if words and not 3 <= sum(map(len, words)) / len(words) <= 10:
        return "mean word not of 3 to 10 characters"
    if max(text.count("#"), text.count("...") + text.count("…")) > 0.1 * len(words):
        return "more than a hash or ellipsis in ten words"
    if sum(line.lstrip().startswith(bullets) for line in lines) > 0.9 * len(lines):
        return "more than 90% of lines are bullets"
    if sum(line.rstrip().endswith(ends) for line in lines) > 0.3 * len(lines):
        return "more than 30% of lines end in an ellipsis"
    if sum(any(map(str.isalpha, word)) for word in words) < 0.8 * len(words):
        return "fewer than 80% of words have a letter"
    stops = {word.strip(".,;:!?\"'()").lower() for word in words} & set(step.stop_words)
    return "fewer than two stop words" if len(stops) < min(2, len(set(step.stop_words))) else ""


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(
    "options", [{}, {"fewest": 3, "stop_words": ("the",)}, {"fewest": 0, "stop_words": ()}]
)
def test_quality_is_that_of_the_definition(options: dict[str, object]) -> None:
    step = GopherQuality(**options)  # type: ignore[arg-type]
    work = step.start()
    rng = random.Random(0)
    pieces = [
        "The",
        "(and)",
        "word",
        "12",
        "3-4",
        "x1",
        "#",
        "...",
        "…",
        "longerwords",
        "\n",
        "\n- ",
        "\n• ",
        "...\n",
        "a\x0b",
    ]
    reasons = Counter[str]()
    for _ in range(1500):
        weights = [rng.random() ** 6 for _ in pieces]
        text = "".join(
            piece + rng.choice(["", " ", " "]) for piece in rng.choices(pieces, weights, k=rng.randrange(150))
        )
        verdict = work(Row({"text": text}, "text", 0, 1))
        wanted = quality_by_definition(text, step)
        assert (verdict if isinstance(verdict, str) else "") == wanted
        reasons[wanted] += 1
    assert len(reasons) >= 6


PIECES = [
    *(
        "\n",
        "<",
        "&amp;",
        "&lt;b>",
        "&",
        "‘",
        "’",
        "“",
        "”",
        "ʼ",
        "\u0301",
        "a",
        "Ã",
        "©",
        "¼",
        "\x1b[1m",
        "\r\n",
    ),
    *("\r", "ﬁ", "é", "e", "Ａ", "\u2028", "â€™", "â€œ", " ", "\x0c", "\t", "schÃ¶n", "\ufeff"),
]


def test_ftfy_by_line_is_ftfy_of_the_text() -> None:
    ftfy = pytest.importorskip("ftfy")
    from mega_data.clean.normalize import FixText

    work = FixText().start()
    rng = random.Random(0)
    texts = ["".join(rng.choices(PIECES, k=rng.randrange(1, 14))) for _ in range(6000)]
    # ftfy cuts at a million characters, and entities stay after a "<" in an earlier line only
    texts += [
        "&amp;" + "y" * 999_998 + "<&amp;\n&amp;",
        "x" * 1_000_001 + "‘&amp;<",
        "&amp;\n‘é’ <b>\n&amp;\x00\n",
    ]
    for text in texts:
        (result,) = work(Row({"text": text}, "text", 0, 1))
        assert result.text == ftfy.fix_text(text), ascii(text[:100])


def test_languages_have_the_scores_of_py3langid() -> None:
    langid = pytest.importorskip("py3langid.langid")
    identifier = make_identifier(langid)
    assert type(identifier) is not langid.LanguageIdentifier
    plain = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
    rng = random.Random(0)
    alphabets = [(32, 127), (32, 0x250), (0x370, 0x530), (0x4E00, 0x9000), (1, 0x3000)]
    texts = ["", "a", "\ud800", "é" * 999, "THE HOUSE", "the house stood by the river " * 30]
    texts += [
        "".join(chr(rng.randrange(*alphabet)) for _ in range(rng.randrange(60)))
        for alphabet in alphabets
        for _ in range(60)
    ]
    assert [identifier.classify(text) for text in texts] == [plain.classify(text) for text in texts]


def test_another_version_of_py3langid_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Identifier:
        @classmethod
        def from_model_file(cls, *_: object, **__: object) -> Identifier:
            return cls()

    identifier = make_identifier(SimpleNamespace(LanguageIdentifier=Identifier, MODEL_FILE="model"))
    assert type(identifier) is Identifier
    assert "py3langid runs without arrays" in caplog.text
