"""Rules of the repository: no names of machines, and no test folder without tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.repo_rules.repository import ROOT, relative_name, tracked_files

# a letter in brackets, so that this file does not hold what it looks for
NOT_OURS = re.compile(
    r"/(?:work|root|opt|home)/\w|/tmp/\w"  # a place on somebody's machine
    r"|[p]ypi\.|[p]ythonhosted|[p]ytorch\.org/whl|[a]rtifactory|-[-]find-links"
)
NOTE = re.compile(r"\b(?:T[O]DO|F[I]XME|X[X]X)\b(?!\(#\d+\))")
CONTAINER = "infra/"  # paths inside an image are the image's


def texts() -> dict[str, str]:
    contents = {}
    for file in tracked_files():
        try:
            contents[relative_name(file)] = file.read_text("utf-8")
        except UnicodeDecodeError:
            continue  # a picture
    return contents


@pytest.mark.parametrize(
    "words", [("", "tmp", "venv"), ("see ", "work", "main"), ("https:", "", "[p]ypi.org")]
)
def test_a_machine_path_or_a_registry_would_be_found(words: tuple[str, ...]) -> None:
    assert NOT_OURS.search("/".join(words).replace("[p]", "p"))


def test_no_file_names_a_place_on_a_machine_or_a_registry() -> None:
    violations = [
        f"{name}:{number}: {line.strip()}"
        for name, text in texts().items()
        if not name.startswith(CONTAINER)
        for number, line in enumerate(text.splitlines(), 1)
        if NOT_OURS.search(line)
    ]
    assert violations == []


def test_files_end_with_one_line_break_and_their_lines_without_spaces() -> None:
    wrong = [
        name
        for name, text in texts().items()
        if text
        and (
            not text.endswith("\n")
            or text.endswith("\n\n")
            or (not name.endswith(".md") and re.search(r"[ \t]$", text, re.MULTILINE))  # a hexdump may
        )
    ]
    assert wrong == []


def test_no_work_is_left_as_a_note() -> None:
    assert [name for name, text in texts().items() if NOTE.search(text)] == []


def test_every_test_file_gave_tests(request: pytest.FixtureRequest) -> None:
    """Counts what this run collected: a file whose tests vanished, or were skipped whole, is a failure."""
    options = request.config.option
    asked = [str(argument) for argument in request.config.args]
    default = options.markexpr == "not long"  # as make test runs: there, too, every file gives a test
    if not default or options.keyword or options.deselect or any("::" in argument for argument in asked):
        pytest.skip("only some tests of a file were asked for, so files without tests mean nothing")
    start = request.config.invocation_params.dir
    folders, left_out = (
        [(start / path).resolve() for path in paths] for paths in (asked, options.ignore or [])
    )
    files_of_tests = {
        file
        for pattern in ("packages/*/tests/**/test_*.py", "tests/**/test_*.py")
        for file in ROOT.glob(pattern)
        if any(file.is_relative_to(folder) for folder in folders)
        and not any(file.is_relative_to(folder) for folder in left_out)
    }
    assert Path(__file__) in files_of_tests
    assert files_of_tests - {item.path for item in request.session.items} == set()


def test_every_package_has_tests() -> None:
    without = [
        package.name
        for package in sorted((ROOT / "packages").iterdir())
        if package.is_dir() and not list(package.glob("tests/test_*.py"))
    ]
    assert without == []


def test_an_empty_list_of_cases_is_a_failure_and_skips_are_told(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.getini("empty_parameter_set_mark") == "fail_at_collect"
    assert "-ra" in pytestconfig.getini("addopts")
    assert pytestconfig.getini("xfail_strict") is True
    assert pytestconfig.getini("filterwarnings") == ["error"]


def test_nothing_is_skipped_without_a_reason() -> None:
    silent = []
    for name, text in texts().items():
        if not Path(name).name.startswith(("test_", "conftest")):
            continue
        for node in ast.walk(ast.parse(text)):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in ("pytest.skip", "pytest.xfail"):
                reasons = node.args + [k.value for k in node.keywords if k.arg == "reason"]  # type: ignore[attr-defined]
            elif called in ("pytest.mark.skip", "pytest.mark.skipif", "pytest.mark.xfail"):
                reasons = [k.value for k in node.keywords if k.arg == "reason"]  # type: ignore[attr-defined]
            else:
                continue
            if not reasons:
                silent.append(f"{name}:{node.lineno}")  # type: ignore[attr-defined]
    assert silent == []


def test_one_module_locates_the_shared_data() -> None:
    """A second look-up could find the data where the first does not, or make an empty list of cases."""
    name = "MEGA_" + "SHARED"
    files = {file for file, text in texts().items() if file.endswith(".py") and name in text}
    assert files == {"tests/shared_data.py"}


def test_the_tests_with_lowest_versions_name_files_that_exist() -> None:
    script = (ROOT / ".ci/test-lowest").read_text("utf-8")
    groups = re.findall(r"(packages/\S+/test_)\{([\w,]+)\}(\.py)", script)
    files = [ROOT / f"{begin}{name}{end}" for begin, names, end in groups for name in names.split(",")]
    assert len(files) > 20
    assert [relative_name(file) for file in files if not file.is_file()] == []
