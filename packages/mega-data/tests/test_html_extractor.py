"""HTML pages with trafilatura."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from mega_data.cli import commands
from mega_data.extract import html
from mega_schema.errors import ConfigError

PARAGRAPH = "The house stood by the river, and nobody had lived there for years, as people said. "
PAGE = (
    "<html><head><title>A  page</title></head><body><nav><a href='/'>Home</a></nav>"
    f"<article><h1>A page</h1><p>{PARAGRAPH * 4}</p><p>{PARAGRAPH * 3}</p></article></body></html>"
)


@pytest.fixture(autouse=True)
def _forget_the_library() -> Iterator[None]:
    html.load_trafilatura.cache_clear()
    yield
    html.load_trafilatura.cache_clear()


def replace_library(monkeypatch: pytest.MonkeyPatch, extract: Callable[..., str | None]) -> None:
    monkeypatch.setitem(sys.modules, "trafilatura", SimpleNamespace(extract=extract))


def run_extract(folder: Path, *flags: str) -> Any:
    (folder / "a.html").write_text(PAGE)
    arguments = ["--input", folder / "a.html", "--output", folder / "out.jsonl", *flags]
    return CliRunner().invoke(commands, ["extract", *map(str, arguments)])


def test_the_library_gets_the_page_and_its_text_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def extract(markup: str, **options: object) -> str:
        calls.append((markup, options))
        return " main text\n"

    replace_library(monkeypatch, extract)
    outcome = run_extract(tmp_path, "--html-extractor", "trafilatura")
    assert outcome.exit_code == 0, outcome.output + repr(outcome.exception)
    page = json.loads((tmp_path / "out.jsonl").read_text())
    assert (page["title"], page["text"]) == ("A page", "main text")
    # its deduplication would make a page depend on earlier ones
    assert calls == [(PAGE, {"favor_precision": True, "include_comments": False, "deduplicate": False})]


def test_a_page_without_text_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_library(monkeypatch, lambda markup, **options: None)
    outcome = run_extract(tmp_path, "--html-extractor", "trafilatura")
    assert outcome.exit_code == 1
    assert "left out 1: no text" in outcome.output


def test_a_slow_page_is_skipped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def extract(markup: str, **options: object) -> str:
        while True:
            try:
                sum(range(1000))
            except Exception:  # as the library handles errors of its parsers
                return "not reached"

    replace_library(monkeypatch, extract)
    monkeypatch.setattr(html, "_PAGE_SECONDS", 0.1)
    outcome = run_extract(tmp_path, "--html-extractor", "trafilatura", "--keep-dropped")
    assert "left out 1: too slow for trafilatura" in outcome.output
    dropped = json.loads((tmp_path / "out.dropped.jsonl").read_text())
    assert dropped["dropped"] == "too slow for trafilatura"


def test_a_missing_library_and_an_option_without_effect_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trafilatura", None)  # as Python marks a module that cannot be imported
    error = run_extract(tmp_path, "--html-extractor", "trafilatura").exception
    assert isinstance(error, ConfigError)
    assert "--html-extractor: trafilatura is not installed" in str(error)
    assert "mega-data[trafilatura]" in str(error)
    error = run_extract(tmp_path, "--html-extractor", "trafilatura", "--full-page").exception
    assert "--full-page: has no effect with --html-extractor trafilatura" in str(error)
    assert not (tmp_path / "out.jsonl").exists()


def test_trafilatura_itself_finds_the_main_text() -> None:
    pytest.importorskip("trafilatura")
    title, text = html.html_text(PAGE.encode(), extractor="trafilatura")
    assert title == "A page"
    assert text.count("nobody had lived there") == 7
    assert "Home" not in text
