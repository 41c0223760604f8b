"""Documents are consistent with the code: commands parse, code compiles, links work."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from itertools import product
from pathlib import Path

import click
import pytest

from mega_ckpt.formats.registry import NAMES, format_of
from mega_schema.errors import MegaError
from tests.repo_rules.markdown import (
    LINK,
    blocks,
    broken_links,
    check_command,
    commands,
    documents,
    make_targets,
)
from tests.repo_rules.repository import ROOT, relative_name

SHELL = ("", "sh", "bash", "console")  # a block without a language may hold a command line
README = ROOT / "README.md"


@pytest.mark.usefixtures("paths_need_not_exist")
def test_every_command_line_in_a_document_is_one_its_program_takes() -> None:
    wrong, seen = [], 0
    for block in blocks():
        for words in commands(block.text) if block.language in SHELL else ():
            seen += 1
            try:
                check_command(words)
            except (click.ClickException, MegaError, SystemExit) as error:
                wrong.append(f"{block.where}: {' '.join(words)}: {error}")
    assert wrong == []
    assert seen > 30  # the search itself works


@pytest.mark.usefixtures("paths_need_not_exist")
@pytest.mark.parametrize(
    "line",
    [
        "mega-train gpt --tensor-parallel 2",
        "mega-train mamba --lr 1",
        "mega-ckpt reshard --load A",
        "mega-ckpt convert --from hf --to keras --load A --save B",
        "python -m mega_data sample --output x --megabyte 3",
        "torchrun --nproc-per-node 2 -m mega_train gpt --lr high",
        "CUDA_VISIBLE_DEVICES=0 mega-serve --load A --port 70000 &",
    ],
)
def test_a_command_line_with_a_mistake_would_be_found(line: str) -> None:
    (words,) = commands(line)
    with pytest.raises((click.ClickException, MegaError)):
        check_command(words)


def test_how_to_convert_has_one_line_for_each_pair_of_formats() -> None:
    counts = Counter()
    for words in commands((ROOT / "docs/howto/convert.md").read_text("utf-8").partition("for each pair")[2]):
        if words[:2] == ["mega-ckpt", "convert"] and "--check-logits" not in words:
            counts[words[words.index("--from") + 1], words[words.index("--to") + 1]] += 1
    written = [name for name in NAMES if format_of(name).write is not None]
    assert counts == dict.fromkeys({*product(NAMES, written)} - {("mega", "mega")}, 1)


def test_a_command_line_is_read_to_its_end_and_no_further() -> None:
    block = "$ mega-data inspect \\\n  P | head\nls mega-data\nA=1 mega-serve --load 'R S' 2> log &\n"
    assert list(commands(block)) == [["mega-data", "inspect", "P"], ["mega-serve", "--load", "R S"]]


@pytest.mark.parametrize("file", documents(), ids=relative_name)
def test_every_link_leads_to_a_file(file: Path) -> None:
    assert broken_links(file, file.read_text("utf-8")) == []


def test_a_link_that_leads_nowhere_would_be_found() -> None:
    text = "[a](README.md#top) [b](docs/none.md) [c](https://example.org) [d](docs)\n"
    assert broken_links(README, text) == ["docs/none.md"]


def test_every_block_of_python_json_and_toml_can_be_read() -> None:
    for block in blocks():
        if block.language == "python":
            compile(block.text, block.where, "exec")
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "toml":
            tomllib.loads(block.text)


def test_every_make_target_a_document_names_exists() -> None:
    targets = {
        target
        for file in documents()
        for code in re.findall(r"`(make [^`\n]+)`|^(make .+)$", file.read_text("utf-8"), re.MULTILINE)
        for target in re.findall(r"(?<!\S)[a-z]+(?!\S)", "".join(code).partition("#")[0])[1:]
    }
    assert {"demo", "test"} <= targets <= make_targets()


@pytest.mark.parametrize("page", ["docs/tour.md", "docs/glossary.md", "docs/log.md", "CONTRIBUTING.md"])
def test_the_readme_leads_to_every_page_one_should_read(page: str) -> None:
    assert page in [match[1] for match in LINK.finditer(README.read_text("utf-8"))]


def test_every_how_to_and_format_and_decision_is_linked_from_somewhere() -> None:
    linked = {
        (file.parent / match[1].partition("#")[0]).resolve()
        for file in documents()
        for match in LINK.finditer(file.read_text("utf-8"))
    }
    pages = [file for file in documents() if relative_name(file).startswith("docs/")]
    assert [relative_name(page) for page in pages if page not in linked] == []


def test_a_decision_answers_the_same_four_questions() -> None:
    decisions = sorted(ROOT.glob("docs/adr/[0-9]*.md"))
    assert decisions
    assert [file.name[:4] for file in decisions] == [f"{n:04d}" for n in range(1, len(decisions) + 1)]
    for file in decisions:
        headings = re.findall(r"^## (.*)$", file.read_text("utf-8"), re.MULTILINE)
        wanted = ["The question", "What we decided", "What we gave up", "What would make us reopen it"]
        assert headings == wanted, file.name


def test_the_glossary_gives_each_word_one_meaning() -> None:
    text = (ROOT / "docs/glossary.md").read_text("utf-8")
    words = re.findall(r"^\| (?!word \||---)(.+?) \|", text, re.MULTILINE)
    assert len(words) > 25  # the search itself works
    assert [word for word, count in Counter(words).items() if count > 1] == []
