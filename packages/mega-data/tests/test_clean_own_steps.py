"""Steps of the user: Python functions, patterns, samples and lists of URLs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mega_data.clean import selection
from mega_data.clean.registry import step_from_flag, steps_from_toml
from mega_data.clean.step import Row
from mega_data.cli import commands
from mega_schema.errors import MegaError

FUNCTIONS = """
import sys

def shout(document):
    document["text"] = document["text"].upper()
    document["meta"]["n"] = 1
    return document

def short(document):
    return "too short" if len(document["text"]) < 3 else document

def nothing(document):
    return None

def broken(document):
    return document["absent"]

def leave(document):
    sys.exit(3)

def number(document):
    return 7

def no_text(document):
    return {"id": 1}

def not_json(document):
    return {**document, "x": {1}}

value = 7
"""


def apply_step(flag: str, text: str, **values: Any) -> list[dict[str, Any]] | str:
    row = Row({"text": text, **values}, "text", 0, 1)
    verdict = step_from_flag(flag).step.start()(row)
    return verdict if isinstance(verdict, str) else [result.values for result in verdict]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Create a module of functions in the current folder, with a name of its own for each test."""
    name = f"filters_of_{re.sub(r'[^a-z0-9]', '_', request.node.name.lower())}"
    (tmp_path / f"{name}.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return name


def clean(*arguments: object) -> Any:
    return CliRunner().invoke(commands, ["clean", *map(str, arguments)])


def files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.mark.parametrize("action", ["drop", "keep", "replace"])
def test_a_pattern_that_needs_exponential_time_ends_the_run_with_the_line(
    action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run did not end."""
    monkeypatch.setattr(selection, "_SECONDS", 0.05)
    texts = ["aab", "a" * 40]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ("--step", f"regex:pattern=(a+)+b,action={action}", "--output", tmp_path / "out")
    result = clean("--input", tmp_path / "a.jsonl", *words)
    assert str(result.exception) == (
        f"{tmp_path / 'a.jsonl'}:2: step regex: pattern: needs more than 0 seconds for a document: "
        "found (a+)+b; hint: no repeat within a repeat, such as (a+)+"
    )
    assert not [*(tmp_path / "out").glob("*.jsonl")]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_key_of_a_step_that_no_document_has_is_noted_once(workers: int, tmp_path: Path) -> None:
    """A mistyped key was silent: the step did nothing, or dropped everything."""
    for name, url in (("a", "url"), ("b", "link")):
        rows = [{"text": f"{name} {number}", "meta": {url: "http://a.example"}} for number in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = ("regex:pattern=x,key=ttle", "regex:pattern=x,key=meta.url", "sample:rate=1,key=id")
    words = [word for step in steps for word in ("--step", step)]
    result = clean(
        "--input", tmp_path / "*.jsonl", *words, "--output", tmp_path / "out", "--workers", workers
    )
    assert result.exit_code == 0
    assert [line for line in result.stderr.splitlines() if line.startswith("note: ")] == [
        "note: step regex: no document has the key 'ttle': found text, meta",
        "note: step sample: no document has the key 'id': found text, meta",
    ]


def test_a_function_changes_keeps_or_drops_a_document(module: str) -> None:
    meta = {"n": 0}
    assert apply_step(f"python:{module}:shout", "abc", meta=meta) == [{"text": "ABC", "meta": {"n": 1}}]
    assert meta == {"n": 0}  # the function had a copy
    assert apply_step(f"python:{module}:short", "ab") == "too short"
    assert apply_step(f"python:{module}:short", "abc") == [{"text": "abc"}]
    assert apply_step(f"python:{module}:nothing", "abc") == "by the function"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_function_of_the_current_folder_runs_in_workers_and_errors_name_the_line(
    tmp_path: Path, module: str, workers: int
) -> None:
    for name in ("a", "b"):
        lines = [{"text": text, "meta": {}} for text in ("ab", "abc", name * 5)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    inputs = ("--input", tmp_path / "a.jsonl", "--input", tmp_path / "b.jsonl", "--workers", workers)
    steps = ("--step", f"python:{module}:short", "--step", f"python:{module}:shout")
    outcome = clean(*inputs, "--output", tmp_path / "out", *steps)
    assert outcome.exit_code == 0, outcome.output + repr(outcome.exception)
    assert "python: 4 of 6 documents\n  2  too short" in outcome.stdout
    assert json.loads((tmp_path / "out/b.jsonl").read_text().splitlines()[1])["text"] == "BBBBB"
    outcome = clean(*inputs, "--output", tmp_path / "o2", "--step", f"python:{module}:broken")
    assert isinstance(outcome.exception, MegaError)
    assert re.search(rf"[ab]\.jsonl:1: step python: {module}:broken: raised an error: found KeyError: "
                     rf"'absent' \({module}\.py:\d+\)", str(outcome.exception))  # fmt: skip
    assert not list((tmp_path / "o2").glob("*.jsonl"))


def test_a_changed_function_or_list_is_not_mixed_with_results_of_the_earlier_one(
    tmp_path: Path, module: str
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n')
    (tmp_path / "bad").write_text("word\n")
    flags = ("--step", f"python:{module}:short", "--step", f"c4:bad_words={tmp_path / 'bad'}")
    arguments = ("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", *flags, "--stage", "plan")
    assert clean(*arguments).exit_code == 0
    assert clean(*arguments).exit_code == 0
    source = tmp_path / f"{module}.py"
    source.write_text(FUNCTIONS + "\n")
    assert "contains a run with other steps" in str(clean(*arguments).exception)
    source.write_text(FUNCTIONS)
    assert clean(*arguments).exit_code == 0
    (tmp_path / "bad").write_text("another\n")
    assert "contains a run with other steps" in str(clean(*arguments).exception)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("number", "returned another type: found int, wanted a document, None, or the reason"),
        ("no_text", "returned a document without text under 'text'"),
        ("not_json", "returned a value that is not JSON"),
    ],
)
def test_a_wrong_result_of_a_function_is_named(module: str, function: str, message: str) -> None:
    with pytest.raises(MegaError, match=message):
        apply_step(f"python:{module}:{function}", "abc")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("python", "not a function: found nothing, wanted MODULE:FUNCTION"),
        ("python:some_module", "not a function: found some_module"),
        ("python:no_such_module_there:f", "the module cannot be imported: found ModuleNotFoundError"),
        ("python:json:no_such", "json has no such function: found no_such"),
        ("python:sys:maxsize", "sys has no such function: found maxsize"),
        ("regex", "pattern: missing"),
        ("regex:pattern=(", "pattern: not a pattern: found missing )"),
        ("regex:pattern=a,action=delete", "action: unknown: found delete, wanted drop | keep | replace"),
        ("regex:pattern=a,replacement=b", "replacement: has no effect"),
        (r"regex:pattern=a,action=replace,replacement=\1", "replacement: not a replacement: found invalid"),
        ("sample", "rate: missing"),
        ("sample:rate=0", "rate: not a share: found 0.0, wanted above 0, at most 1"),
        ("sample:rate=1.5", "rate: not a share: found 1.5, wanted above 0, at most 1"),
        ("sample:rate=nan", "rate: wrong value: found 'nan'"),
        ("url-list", "no list: wanted domains | urls | words | soft_words | subwords"),
        ("url-list:urls=missing", "urls: no such file: found missing"),
    ],
)
def test_a_mistake_in_a_step_is_answered_before_any_work(tmp_path: Path, flag: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n')
    outcome = clean("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--step", flag)
    assert isinstance(outcome.exception, MegaError), outcome.exception
    assert message in str(outcome.exception)
    assert not list(tmp_path.glob("out/*.jsonl"))


@pytest.mark.parametrize(
    ("flag", "text", "wanted"),
    [
        ("pattern=b+", "abc", "matches b+"),
        ("pattern=x", "abc", "abc"),
        ("pattern=b,action=keep", "abc", "abc"),
        ("pattern=x,action=keep", "abc", "no match of x"),
        (r"pattern=(b)(c),action=replace,replacement=\2\1", "abcbc", "acbcb"),
        ("pattern=https?://\\S+,action=replace", "see http://a.org now", "see  now"),
        ("pattern=g,key=url", "abc", "matches g"),
        ("pattern=g,key=absent", "abc", "abc"),
        ("pattern=g,key=absent,action=keep", "abc", "no match of g"),
    ],
)
def test_a_pattern_drops_keeps_or_replaces(flag: str, text: str, wanted: str) -> None:
    result = apply_step(f"regex:{flag}", text, url="g.org")
    assert result == (wanted if isinstance(result, str) else [{"text": wanted, "url": "g.org"}])


def test_a_pattern_with_commas_is_read_from_toml(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[[step]]\nname = \"regex\"\npattern = '\\d{2,3}'\n")
    assert steps_from_toml(tmp_path / "c.toml")[0].step.pattern == r"\d{2,3}"


def draw_sample(flag: str, documents: list[dict[str, Any]]) -> set[int]:
    work = step_from_flag(f"sample:{flag}").step.start()
    return {
        n for n, values in enumerate(documents) if work(Row(values, "text", n % 3, n)) != "not in the sample"
    }


def test_a_sample_has_its_rate_and_depends_on_seed_and_document_alone() -> None:
    documents = [{"text": f"document {n}", "id": n} for n in range(4000)]
    tenth, half = draw_sample("rate=0.1", documents), draw_sample("rate=0.5", documents)
    assert 320 < len(tenth) < 480
    assert 1860 < len(half) < 2140
    assert tenth < half  # a lower rate keeps a part of a higher one
    assert draw_sample("rate=0.1,seed=1", documents) != tenth
    assert {3999 - n for n in draw_sample("rate=0.1", documents[::-1])} == tenth
    assert draw_sample("rate=1", documents) == set(range(4000))
    by_id = draw_sample("rate=0.1,key=id", documents)
    assert by_id != tenth
    assert draw_sample("rate=0.1,key=id", [{"text": "other", "id": str(n)} for n in range(4000)]) == by_id
    assert draw_sample("rate=0.1,key=absent", documents) == tenth


def test_a_sample_is_the_same_for_any_workers_and_division_into_files(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document {n}"}) + "\n" for n in range(300)]
    kept_lines = []
    for name, parts, workers in (("one", 1, 1), ("three", 3, 2)):
        (tmp_path / name).mkdir()
        for part in range(parts):
            (tmp_path / name / f"{part}.jsonl").write_text("".join(lines[part::parts]))
        output = tmp_path / f"{name}-out"
        flags = ("--step", "sample:rate=0.3,seed=5", "--workers", workers)
        assert clean("--input", tmp_path / name, "--output", output, *flags).exit_code == 0
        data = b"".join((output / f"{part}.jsonl").read_bytes() for part in range(parts))
        kept_lines.append(sorted(data.splitlines()))
    assert kept_lines[0] == kept_lines[1]
    assert 60 < len(kept_lines[0]) < 120


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("https://www.bad.org/x", "domain bad.org"),
        ("https://notbad.org/x", None),
        ("http://Good.org/Page/", "a listed URL"),
        ("https://good.org/Page", "a listed URL"),
        ("https://good.org/page", None),
        ("https://good.org/Page/2", None),
        ("https://good.org/buy-CASINO-now", "word casino"),
        ("https://good.org/casinos", None),
        ("https://good.org/soft-page", None),
        ("https://good.org/soft/mild.html", "2 or more soft words"),
        ("https://go.od.org/x-y-sub-part", "subword subpart"),
        ("https://[broken/casino", "word casino"),
        (None, None),
    ],
)
def test_lists_of_domains_urls_and_words_drop_documents(
    tmp_path: Path, url: str | None, wanted: str | None
) -> None:
    lists = {
        "domains": "bad.org\n",
        "urls": "# comment\ngood.org/Page\n",
        "words": "Casino\n\n",
        "soft_words": "soft\nmild\n",
        "subwords": "sub-part\nsub\n",
    }
    for name, content in lists.items():
        (tmp_path / name).write_text(content)
    flag = "url-list:" + ",".join(f"{name}={tmp_path / name}" for name in lists)
    values = {} if url is None else {"url": url}
    assert apply_step(flag, "text", **values) == (wanted or [{"text": "text", **values}])


def test_sys_exit_in_a_function_is_an_error_with_its_place(module: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "abc"}\n')
    result = clean("--input", "in.jsonl", "--output", "out", "--step", f"python:{module}:leave")
    assert isinstance(result.exception, MegaError)
    assert "in.jsonl:1" in str(result.exception)
    assert re.search(rf"SystemExit: 3 \({module}.py:\d+\)", str(result.exception))


@pytest.mark.parametrize("name", ["domains", "urls", "words", "soft_words", "subwords"])
def test_a_list_of_urls_that_is_empty_or_not_utf8_is_refused(tmp_path: Path, name: str) -> None:
    entries = tmp_path / "list"
    step = step_from_flag(f"url-list:{name}={entries}").step
    entries.write_bytes(b"# none\n\n")
    with pytest.raises(MegaError, match=rf"^step url-list: {name}: has no entry: found .*list"):
        step.start()
    entries.write_bytes(b"a.org\n\xff.org\n")
    with pytest.raises(MegaError, match=rf"^step url-list: {name}: not UTF-8: found .*list:2"):
        step.start()
