"""Cleaning: the effect of each step, and results that do not depend on the workers."""

from __future__ import annotations

import gzip
import json
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from mega_data.clean.decontaminate import Decontaminate, NgramSet
from mega_data.clean.registry import step_from_flag, steps_from_toml
from mega_data.clean.report import render_report
from mega_data.clean.step import Row
from mega_data.cli import commands
from mega_schema.errors import ConfigError, MegaError
from tests.shared_data import SHARED, require_shared

PROSE = (
    "The house stood by the river, and nobody had lived there for years. It was said that the owner would be "
    "back with the spring. We walked to the gate and looked at the garden. Somebody had cut the hedge since "
    "the last time."
)
MANY_WORDS = " ".join(f"w{number}" for number in range(60)) + " "
LONG_LINES = f"the and {'word ' * 12}goes...\n" * 20
TURKISH = "bir gün geldi ve gitti sonra yine geldi oturdu kaldı"


def row(text: str, **values: Any) -> Row:
    return Row({"text": text, **values}, "text", 0, 1)


def apply_step(flag: str, text: str, **values: Any) -> list[str] | str:
    verdict = step_from_flag(flag).step.start()(row(text, **values))
    return verdict if isinstance(verdict, str) else [cleaned.text for cleaned in verdict]


def shared_file(name: str) -> Path:
    return require_shared() / name


def test_fix_text_mends_what_ftfy_mends_and_passes_over_only_what_it_leaves() -> None:
    ftfy = pytest.importorskip("ftfy")
    from mega_data.clean.normalize import LineRepair

    texts = [
        "plain",
        "schÃ¶n",
        "&amp;",
        "“curly”",
        "ﬁne",
        "a\r\nb",
        "çok güzel",
        "e\u0301",
        "한국어",
        "Ａ",
        "\x1b[1m",
    ]
    for file in sorted((SHARED / "data/corpora/noisy/ftfy").glob("*.json")):
        texts += [case["original"] for case in json.loads(file.read_text("utf-8"))]
    rng = random.Random(0)
    texts += [
        "".join(
            chr(rng.choice([rng.randrange(0x20, 0x250), rng.randrange(0x2000, 0xD000)])) for _ in range(9)
        )
        for _ in range(3000)
    ]
    assert [text for text in texts if apply_step("fix-text", text) != [ftfy.fix_text(text)]] == []
    own_repair = LineRepair(SimpleNamespace(**vars(ftfy) | {"fix_and_explain": None}))
    assert [own_repair.fix_text(text) for text in ("plain", "çok güzel", "한국어", "“é”")] == [
        "plain", "çok güzel", "한국어", '"é"',
    ]  # fmt: skip
    assert apply_step("fix-text", "schÃ¶n &amp; gut") == ["schön & gut"]


@pytest.mark.parametrize(
    ("flag", "text", "wanted"),
    [
        ("punctuation", "“He said – ‘no’…”\u00a0so", ["\"He said - 'no'...\" so"]),
        ("whitespace", "a   b\nc", ["a b c"]),
        ("length:minimum=3", "ab", "shorter than 3 characters"),
        ("length:maximum=3", "abcd", "longer than 3 characters"),
        ("length:minimum=3,maximum=4", "abcd", ["abcd"]),
        ("tokens:minimum=4", "one two three", "fewer than 4 tokens"),
        ("tokens:minimum=4", "one two three four", ["one two three four"]),
        ("tokens:minimum=4", "x" * 32, ["x" * 32]),  # 8 characters a token are not counted
        ("javascript", "enable JavaScript", "short, with javascript"),
        ("javascript:shorter_than=5", "enable JavaScript", ["enable JavaScript"]),
        ("c4", "Lorem ipsum dolor", "lorem ipsum"),
        ("c4", "a { b", "a brace"),
        ("c4", f"Home | About\n{PROSE}\nWe use cookies to make the site better.", [PROSE]),
        ("c4", f"{PROSE}\nThis line asks for JavaScript.\nWe show a Cookie Policy to all.", [PROSE]),
        ("c4:words=0,sentences=0", "A.\n\nb", ["A."]),
        ("c4", "Only one good sentence is here.", "fewer than 3 sentences in good lines"),
        ("gopher-quality", "word " * 49, "not 50 to 100,000 words"),
        ("gopher-quality", "a the " * 50, "mean word not of 3 to 10 characters"),
        ("gopher-quality", "the words # going and " * 20, "more than a hash or ellipsis in ten words"),
        ("gopher-quality", "- the others and their words\n" * 20, "more than 90% of lines are bullets"),
        ("gopher-quality", LONG_LINES, "more than 30% of lines end in an ellipsis"),
        ("gopher-quality", "the and 1234 5678 word " * 20, "fewer than 80% of words have a letter"),
        ("gopher-quality", "words without those asked " * 20, "fewer than two stop words"),
        ("gopher-quality:fewest=10,stop_words=ve+bir", TURKISH, [TURKISH]),
        ("gopher-repetition", "same line\n" * 9, "more than 30% of lines are repeated"),
        ("gopher-repetition", "one two " * 30, "more than 20% of characters in one 2-gram"),
        ("gopher-repetition", MANY_WORDS * 2, "more than 15% of characters in repeated 5-grams"),
        ("gopher-repetition", PROSE, [PROSE]),
    ],
)  # fmt: skip
def test_a_step_mends_or_says_why_a_document_goes(flag: str, text: str, wanted: list[str] | str) -> None:
    assert apply_step(flag, text) == wanted


def test_c4_drops_a_word_of_the_list_and_only_whole_words(tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("darn\n\n")
    assert apply_step(f"c4:bad_words={tmp_path / 'bad'}", "well, DARN it") == "a word of the list"
    assert apply_step(f"c4:bad_words={tmp_path / 'bad'},words=1,sentences=1", "undarned.") == ["undarned."]


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("http://www.google.co.uk/x", "domain google"),
        ("http://notgoogle.com/x", None),
        ("http://a.example.com/pic.JPG?size=1", "ends in .jpg"),
        ("http://a.example.com/archive.7z", "ends in .7z"),
        ("http://", "a short address"),
        ("http://1.2.3.4:80/path", None),
        ("ftp://example.com/path", "not an address"),
        ("http://exa mple.com/", "not an address"),
        ("https://example.com", None),
        (None, None),
    ],
)
def test_addresses_are_judged_in_the_order_of_megatrons_rules(url: str | None, wanted: str | None) -> None:
    pytest.importorskip("tldextract")
    assert apply_step("urls", "text", url=url) == (wanted or ["text"])


def test_a_list_of_more_domains_is_read(tmp_path: Path) -> None:
    pytest.importorskip("tldextract")
    (tmp_path / "more").write_text("example other\n")
    assert (
        apply_step(f"urls:domains={tmp_path / 'more'}", "t", url="https://example.com/page")
        == "domain example"
    )


@pytest.mark.parametrize(
    ("listed", "url", "wanted"),
    [
        ("badsite.com", "https://badsite.com/x/y", "domain badsite.com"),
        ("badsite.com", "https://www.BadSite.com/x/y", "domain badsite.com"),
        ("badsite.com", "https://notbadsite.com/x/y", None),
        ("badsite.com", "https://badsite.com.org/x/y", None),
        ("a.badsite.com", "https://badsite.com/x/y", None),
        ("spam", "https://a.spam.org/x/y", "domain spam"),
        ("0.0.0.0 badsite.com # a hosts file", "https://badsite.com/", "domain badsite.com"),
        ("! adblock\n||badsite.com^", "https://x.badsite.com/", "domain badsite.com"),
        ("münchen.de", "https://www.xn--mnchen-3ya.de/rat", "domain xn--mnchen-3ya.de"),
        ("xn--mnchen-3ya.de", "https://münchen.de/rat", "domain xn--mnchen-3ya.de"),
        ("co.uk", "https://[nothing/rat", "not an address"),
        ("x", "https://münchen.de/rat/häuser", None),
        ("x", "https://例え.jp/パス", None),
    ],
)
def test_lists_of_domains_and_international_addresses_are_read(
    tmp_path: Path, listed: str, url: str, wanted: str | None
) -> None:
    pytest.importorskip("tldextract")
    (tmp_path / "list").write_text(f"{listed}\n", "utf-8")
    assert apply_step(f"urls:domains={tmp_path / 'list'}", "t", url=url) == (wanted or ["t"])


def test_languages_are_told_apart() -> None:
    pytest.importorskip("py3langid")
    turkish = "Ertesi sabah erkenden kalkıp yola çıktık, çünkü hava güzeldi ve yolumuz uzundu."
    assert apply_step("language:keep=en", PROSE) == [PROSE]
    assert apply_step("language:keep=en+de", turkish) == "is in tr"
    assert apply_step("language:keep=tr,score=1", turkish) == "is tr with too low a score"
    assert apply_step("language:keep=en,shorter_than=20", turkish) == [turkish]
    (result,) = step_from_flag("language").step.start()(row(turkish))
    assert result.values["language"] == "tr"


TASK = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"


def contaminate(words: str) -> str:
    return f"{'A sentence before. ' * 30}{words}. {'A sentence after it. ' * 30}".strip()


def test_task_text_is_cut_out_with_its_windows_and_the_rest_is_whole_sentences(tmp_path: Path) -> None:
    (tmp_path / "task.jsonl").write_text(json.dumps({"question": TASK.title()}) + "\n")
    text = contaminate(TASK)
    step = step_from_flag(f"decontaminate:tasks={tmp_path / 'task.jsonl'}").step
    verdict = step.start()(row(text, id=7))
    before, after = verdict
    assert text.startswith(before.text)
    assert text.endswith(after.text)
    assert before.text.endswith("before.")
    assert after.text.startswith(" A sentence")
    assert 200 <= text.index("one two") - len(before.text) <= 220
    assert 200 <= len(text) - len(after.text) - text.index(TASK) - len(TASK) <= 240
    assert [piece.values["split_id"] for piece in verdict] == [
        f"task-00000-0000000001-{n:04d}" for n in (0, 1)
    ]
    assert before.values["id"] == 7
    clean = contaminate(TASK.replace("two", "2").replace("nine", "9"))
    assert step.start()(row(clean)) == [row(clean)]


def test_a_short_task_text_counts_whole_and_a_shorter_one_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "task.txt").write_text("alpha beta gamma delta epsilon zeta eta theta\nten nine eight\n")
    flag = f"decontaminate:tasks={tmp_path / 'task.txt'}"
    assert apply_step(flag, contaminate("alpha beta gamma delta epsilon zeta eta theta")) != [
        contaminate("alpha beta gamma delta epsilon zeta eta theta")
    ]
    assert apply_step(flag, contaminate("ten nine eight")) == [contaminate("ten nine eight")]
    # the last words of a document of 13 are not looked at, those of a longer one are
    tail = "alpha beta gamma delta epsilon zeta eta theta"
    assert apply_step(flag, f"1 2 3 4 5 {tail}") == [f"1 2 3 4 5 {tail}"]
    assert apply_step(flag, f"1 2 3 4 5 6 {tail}") == "nothing left besides task text"


def test_many_pieces_drop_the_document(tmp_path: Path) -> None:
    (tmp_path / "task.txt").write_text(TASK)
    assert apply_step(f"decontaminate:tasks={tmp_path / 'task.txt'}", " ".join([contaminate(TASK)] * 12)) == (
        "splits into more than 10 pieces"
    )


def cut_slowly(step: Decontaminate, text: str) -> list[str]:
    """Split as filter_ngrams.py does: after each hit the remaining text is split into words again."""
    pieces, rest = [], text
    while (hit := next(iter(NgramSet(step.task_words(), step.longest).find_hits(rest)), None)) is not None:
        start, gram = hit
        ends = [match.start() for match in re.finditer("[.!?]", rest[: max(0, start - step.window + 1)])]
        piece = rest[: ends[-1] + 1] if ends and ends[-1] > 0 else ""
        if len(piece) > step.window:
            pieces.append(piece)
        after = re.compile("[.!?]").search(rest, start + len(gram) + step.window)
        rest = rest[after.end() :] if after else ""
        if len(rest) <= step.window:
            return pieces
    return [*pieces, rest]


@pytest.mark.parametrize("seed", range(40))
def test_pieces_are_those_of_cutting_the_rest_into_words_again(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice(["a", "b", "Ç", " ", " ", "\u0130", ".", "! "]) for _ in range(600))
    tasks = [" ".join(rng.choice("abç") for _ in range(rng.randint(3, 5))) for _ in range(3)]
    (tmp_path / "t.txt").write_text("\n".join(tasks), "utf-8")
    flag = f"decontaminate:tasks={tmp_path / 't.txt'},longest=5,shortest=3,window=20,pieces=99"
    step = step_from_flag(flag).step
    assert step.split(text, NgramSet(step.task_words(), 5)) == cut_slowly(step, text)


def test_decontamination_takes_time_in_proportion_to_the_hits_and_once_a_process(tmp_path: Path) -> None:
    words = [f"w{n}" for n in range(60_000)]
    tasks = [" ".join(words[start : start + 13]) for start in range(0, 60_000, 13)]
    (tmp_path / "t.txt").write_text("\n".join(tasks))
    step = step_from_flag(f"decontaminate:tasks={tmp_path / 't.txt'},pieces=100000").step
    work = step.start()
    text = ". ".join(f"{task}. {'nothing like it in here. ' * 40}" for task in tasks)
    began = time.process_time()
    assert len(work(row(text))) > 4000
    assert time.process_time() - began < 10  # minutes, where each hit cuts the rest into words again
    began = time.process_time()
    step.start()
    replace(step, counts={tasks[0]: 99}).start()
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize("seed", range(10))
def test_hits_are_those_of_a_search_of_every_place(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    words = [rng.choice("abc") for _ in range(400)]
    tasks = [[rng.choice("abc") for _ in range(rng.randint(2, 7))] for _ in range(6)]
    (tmp_path / "t.txt").write_text("\n".join(map(" ".join, tasks)))
    step = step_from_flag(f"decontaminate:tasks={tmp_path / 't.txt'},longest=5,shortest=3").step
    grams = {
        " ".join(task[start : start + 5])
        for task in tasks
        if len(task) > 2
        for start in range(max(1, len(task) - 4))
    }
    counts = step.count([" ".join(words)])
    wanted: dict[str, int] = {}
    for start in range(len(words)):
        for size in [5, 3, 4] if start + 5 <= len(words) else [3, 4]:
            gram = " ".join(words[start : start + size])
            if gram in grams and start + size <= len(words):
                wanted[gram] = wanted.get(gram, 0) + 1
                break
    assert counts == wanted


def corpus(folder: Path, documents: list[dict[str, Any]], files: int = 3) -> Path:
    folder.mkdir()
    for number in range(files):
        text = "".join(json.dumps(values) + "\n" for values in documents[number::files])
        (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return folder


def clean(*arguments: object) -> str:
    outcome = CliRunner().invoke(commands, ["clean", *map(str, arguments)])
    assert outcome.exit_code == 0, outcome.output + repr(outcome.exception)
    return outcome.stdout


def files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "task.txt").write_text(TASK)
    (tmp_path / "clean.toml").write_text(
        '[[step]]\nname = "punctuation"\n[[step]]\nname = "length"\nminimum = 4\n'
        '[[step]]\nname = "duplicates"\n'
        f'[[step]]\nname = "decontaminate"\ntasks = ["{tmp_path / "task.txt"}"]\n'
    )
    return tmp_path / "clean.toml"


def documents() -> list[dict[str, Any]]:
    texts = ["abc", "“quoted”", '"quoted"', contaminate(TASK), *(f"document {n % 9}" for n in range(20))]
    return [{"id": n, "text": text} for n, text in enumerate(texts)]


def test_a_recipe_gives_the_same_bytes_whatever_the_workers(tmp_path: Path, recipe: Path) -> None:
    folder = corpus(tmp_path / "in", documents())
    result = clean("--input", folder, "--output", tmp_path / "one", "--config", recipe, "--keep-dropped")
    clean(
        "--input", folder, "--output", tmp_path / "two", "--config", recipe, "--keep-dropped", "--workers", 2
    )
    assert files(tmp_path / "one") == files(tmp_path / "two")
    report = json.loads((tmp_path / "one/report.json").read_bytes())["steps"]
    assert [(s["step"], s["documents_in"], s["documents_out"]) for s in report] == [
        ("punctuation", 24, 24), ("length", 24, 23), ("duplicates", 23, 11), ("decontaminate", 11, 12),
    ]  # fmt: skip
    assert report[0]["changed"] == 1
    assert report[1]["reasons"] == {"shorter than 4 characters": 1}
    assert report[1]["examples"] == {"shorter than 4 characters": ["abc"]}
    assert "length: 23 of 24 documents\n  1  shorter than 4 characters" in result
    dropped = b"".join(data for name, data in files(tmp_path / "one").items() if name.startswith("dropped/"))
    assert len(dropped.splitlines()) == 13
    assert json.loads(files(tmp_path / "one")["dropped/00-pass/0.jsonl"]) == {
        "id": 0, "text": "abc", "dropped": "length: shorter than 4 characters",
    }  # fmt: skip


def test_a_phrase_of_the_corpus_stays(tmp_path: Path, recipe: Path) -> None:
    many = [{"text": contaminate(TASK) + str(n)} for n in range(10)]
    folder = corpus(tmp_path / "in", many)
    clean(
        "--input",
        folder,
        "--output",
        tmp_path / "out",
        "--step",
        f"decontaminate:tasks={tmp_path / 'task.txt'}",
    )
    assert json.loads((tmp_path / "out/report.json").read_bytes())["steps"][0]["changed"] == 0
    clean(
        "--input",
        folder,
        "--output",
        tmp_path / "o2",
        "--step",
        f"decontaminate:tasks={tmp_path / 'task.txt'},phrase=11",
    )
    assert json.loads((tmp_path / "o2/report.json").read_bytes())["steps"][0]["changed"] == 20


def test_a_document_no_step_changes_keeps_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text":   "\\u00e9t\\u00e9", "n": 1.0}\r\n\n{"text": "x"}')
    clean("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--step", "length:minimum=1")
    assert (
        tmp_path / "out/a.jsonl"
    ).read_bytes() == b'{"text":   "\\u00e9t\\u00e9", "n": 1.0}\n{"text": "x"}\n'


def test_addresses_seen_before_are_dropped(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "in", [{"text": str(n), "url": f"u{n % 3}"} for n in range(7)], files=1)
    clean("--input", folder, "--output", tmp_path / "out", "--step", "duplicates:key=url")
    assert len((tmp_path / "out/0.jsonl").read_text().splitlines()) == 3


def test_the_report_shows_everything_counted_and_nothing_of_the_text_as_markup(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "in", [{"text": "<b>x"}, {"text": PROSE}, {"text": "y" * 5000}])
    clean("--input", folder, "--output", tmp_path / "out", "--step", "length:minimum=9,maximum=4000")
    html = (tmp_path / "out/report.html").read_text("utf-8")
    assert "&lt;b&gt;x" in html
    assert "<b>x" not in html
    for word in ("shorter than 9 characters", "33.3%", "4,096 to 8,191", "longer than 4,000 characters"):
        assert word in html
    assert "http" not in html  # nothing to load


def test_a_report_of_no_documents_can_be_made() -> None:
    step = {
        "step": "length",
        "documents_in": 0,
        "documents_out": 0,
        "bytes_in": 0,
        "bytes_out": 0,
        "changed": 0,
    }
    empty: dict[str, Any] = {
        n: {} for n in ("reasons", "replaced", "languages", "lengths_in", "lengths_out", "examples")
    }
    assert "No document was dropped" in render_report("none", [step | empty])


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("fix-txt", "did you mean fix-text?"),
        ("length:minimun=3", "--step length: minimun: unknown key"),
        ("length:minimum", "not key=value"),
        ("length:minimum=some", "wanted an integer"),
        ("length:minimum=-1", "not negative"),
        ("language:score=high", "wanted a number"),
        ("language:model=missing.bin", "no such file"),
        ("tokens:tokenizer=missing.json", "no such file"),
        ("c4:bad_words=missing", "no such file"),
        ("urls:domains=missing", "no such file"),
        ("decontaminate", "tasks: missing"),
        ("decontaminate:tasks=missing.jsonl", "no such file"),
        ("duplicates:preset=other", "wanted megatron | datatrove | exact"),
    ],
)
def test_a_mistake_in_a_step_is_answered_before_any_work(tmp_path: Path, flag: str, message: str) -> None:
    folder = corpus(tmp_path / "in", documents())
    outcome = CliRunner().invoke(
        commands, ["clean", "--input", str(folder), "--output", str(tmp_path / "out"), "--step", flag]
    )
    assert isinstance(outcome.exception, MegaError)
    assert message in str(outcome.exception)
    assert not list(tmp_path.glob("out/*.jsonl"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[step]\n", "not TOML"),
        ("[[steps]]\n", "not a list of steps"),
        ("[[step]]\nname = 3\n", "unknown step"),
        (
            '[[step]]\nname = "language"\nkeep = "en"\n[[step]]\nname = "language"\nkeep = [1]\n',
            "step 2: keep",
        ),
        ('[[step]]\nname = "length"\nminimum = 1.5\n', "wanted an integer"),
        ('[[step]]\nname = "decontaminate"\ncounts = {}\n', "unknown key"),
    ],
)
def test_a_mistake_in_a_recipe_is_answered_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "clean.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        steps_from_toml(tmp_path / "clean.toml")


def test_a_task_file_of_another_form_is_named(tmp_path: Path) -> None:
    (tmp_path / "task.jsonl").write_text('{"label": 3}\n')
    with pytest.raises(MegaError, match=r"task\.jsonl:1: not a task's line"):
        apply_step(f"decontaminate:tasks={tmp_path / 'task.jsonl'}", "text")


def test_no_step_is_a_mistake(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "in", documents())
    outcome = CliRunner().invoke(
        commands, ["clean", "--input", str(folder), "--output", str(tmp_path / "out")]
    )
    assert "no step" in str(outcome.exception)


def test_sentences_of_75_languages_are_told_apart_nine_times_in_ten() -> None:
    pytest.importorskip("py3langid")
    zstandard = pytest.importorskip("zstandard")
    with zstandard.open(
        shared_file("data/corpora/noisy/langid-sentences.jsonl.zst"), "rt", encoding="utf-8"
    ) as file:
        samples = [json.loads(line) for line in file][::10]
    work = step_from_flag("language").step.start()
    right = sum(work(row(sample["text"]))[0].values["language"] == sample["lang"] for sample in samples)
    assert right > 0.9 * len(samples)


def test_one_task_at_a_time_as_in_a_job_array_gives_the_same(tmp_path: Path, recipe: Path) -> None:
    folder = corpus(tmp_path / "in", documents(), files=2)
    clean("--input", folder, "--output", tmp_path / "one", "--config", recipe, "--keep-dropped")
    parts = ["--input", folder, "--output", tmp_path / "two", "--config", recipe, "--keep-dropped"]
    stages = {
        "00-pass": ["pass:1", "pass:0"],
        "01-duplicates": ["keys", "sort", "pairs", "groups", "filter:1", "filter:0"],
        "02-pass": ["count:1", "count:0", "total", "pass"],
    }
    clean(*parts, "--stage", "plan")
    for name, several in stages.items():
        for stage in several:
            clean(*parts, "--stage", f"{name}/{stage}")
    clean(*parts)  # all is done: what is left to do is the report
    assert files(tmp_path / "one") == files(tmp_path / "two")
    outcome = CliRunner().invoke(commands, ["clean", *map(str, parts), "--stage", "03-pass/pass"])
    assert "wanted plan | 00-pass | 01-duplicates | 02-pass" in str(outcome.exception)


def test_a_browser_shows_the_report_without_asking_for_anything(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium is installed")
    folder = corpus(tmp_path / "in", documents())
    clean("--input", folder, "--output", tmp_path / "out", "--step", "length:minimum=4")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    page = (tmp_path / "out/report.html").as_uri()
    process = subprocess.run(
        [browser, *flags, "--dump-dom", page], capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    # what the browser made of it: the bars are elements, the texts are in place
    assert process.stdout.count('<span class="bar"') == 4
    assert "shorter than 4 characters" in process.stdout
    assert "<h2>1. length</h2>" in process.stdout


@pytest.mark.parametrize(
    ("flag", "package"),
    [("fix-text", "ftfy"), ("language", "py3langid"), ("urls", "tldextract")],
)
def test_a_library_that_is_not_there_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, flag: str, package: str
) -> None:
    for name in (package, f"{package}.langid"):
        monkeypatch.setitem(sys.modules, name, None)  # as Python marks a module that cannot be imported
    with pytest.raises(
        ConfigError, match=rf"step {flag}: needs {package}.*hint: pip install .*mega-data\[clean\]"
    ):
        step_from_flag(flag).step.start()
