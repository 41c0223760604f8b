"""Commands that install an optional dependency work from a checkout, and one place says how."""

from __future__ import annotations

import re
from pathlib import Path

from mega_schema.app.install_hint import install_hint
from tests.repo_rules.repository import PACKAGES, relative_name, tracked_files

# a package of ours in quotes, with its extras, after pip's options or a path
COMMAND = re.compile(r"pip install (?:-\S+ )*(['\"])(?:\S*/)?(mega-\w+)\[([\w,-]+)\]\1")
CALL = re.compile(r"install_hint\(['\"](mega-\w+)['\"], ['\"](\w+)['\"]\)")


def checked_texts() -> dict[str, str]:
    """The text of sources and documents; a changelog tells of the past."""
    places = ("packages/", "docs/", "README.md", "demo/", "bench/")
    files = [
        file
        for file in tracked_files()
        if relative_name(file).startswith(places) and "/tests/" not in relative_name(file)
    ]
    texts_of_source = [
        file for file in files if file.suffix in (".py", ".md") and file.name != "CHANGELOG.md"
    ]
    return {relative_name(file): file.read_text("utf-8") for file in texts_of_source}


def test_sources_take_the_command_from_one_function() -> None:
    literal = re.compile(r"pip install[^\n]*mega-\w")
    files = {name for name, text in checked_texts().items() if name.endswith(".py") and literal.search(text)}
    assert files == set()


def test_documents_give_the_command_that_hints_give() -> None:
    seen, wrong = 0, []
    for name, text in checked_texts().items():
        for match in COMMAND.finditer(text) if name.endswith(".md") else ():
            seen += 1
            if match[0] != install_hint(match[2], *match[3].split(",")):
                wrong.append(f"{name}: {match[0]}")
    assert wrong == []
    assert seen > 5  # the search itself works


def test_every_extra_that_a_hint_or_a_document_names_exists() -> None:
    extras = {package.name: set(package.project.get("optional-dependencies", {})) for package in PACKAGES}
    named_extras = {
        (package, extra)
        for text in checked_texts().values()
        for pattern in (CALL, re.compile(r"()\b(mega-\w+)\[([\w,]+)\]"))
        for *_, package, listed in pattern.findall(text)
        for extra in listed.split(",")
    }
    assert {pair for pair in named_extras if pair[1] not in extras[pair[0]]} == set()
    assert len(named_extras) > 15


def test_the_command_names_a_folder_of_the_checkout() -> None:
    command = install_hint("mega-data", "clean", "extract")
    assert command == 'pip install -e "packages/mega-data[clean,extract]"'
    root = Path(__file__).parents[2]
    assert (root / command.split('"')[1].partition("[")[0] / "pyproject.toml").is_file()
