"""Rules of the code that no linter checks."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.repo_rules.repository import ROOT, sources

LONGEST_FILE, LONGEST_FUNCTION = 400, 70  # lines
FRESH = {"list", "dict", "set", "bytearray", "array", "deque", "defaultdict", "Counter", "OrderedDict"}
LITERALS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


def changeable(module: ast.Module) -> list[int]:
    """Lines on which a module gives a name to something that could be changed later."""
    return [
        statement.lineno
        for statement in ast.walk(module)
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        and not _inside_function(module, statement)
        and _names(statement) != ["__all__"]
        and _can_change(statement.value)
    ]


def _can_change(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        called = value.func
        called = called.value if isinstance(called, ast.Subscript) else called  # list[int]()
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        return name in FRESH
    return isinstance(value, LITERALS)


def _names(statement: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return [ast.unparse(target) for target in targets]


def _inside_function(module: ast.Module, statement: ast.stmt) -> bool:
    functions = (
        node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return any(f.lineno <= statement.lineno <= (f.end_lineno or 0) for f in functions)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("A = {}\nB: dict[str, int] = dict()\nC = collections.deque()", [1, 2, 3]),
        ("if True:\n    A = list[int]()\nclass B:\n    c = [1]", [2, 4]),
        ("A = (1, 2)\nB = frozenset({1})\nC = MappingProxyType({1: 2})\n__all__ = ['A']", []),
        ("def f():\n    a = []\n    return a", []),
    ],
)
def test_the_search_for_changeable_names_finds_them_and_no_others(source: str, lines: list[int]) -> None:
    assert changeable(ast.parse(source)) == lines


def test_no_module_and_no_class_holds_something_that_can_change() -> None:
    violations = [f"{name}:{line}" for name, module in sources().items() for line in changeable(module)]
    assert violations == []


def test_no_function_writes_a_global() -> None:
    violations = [
        f"{name}:{node.lineno}"
        for name, module in sources().items()
        for node in ast.walk(module)
        if isinstance(node, ast.Global)
    ]
    assert violations == []


def test_every_module_says_what_it_is_for() -> None:
    violations = [name for name, m in sources().items() if not ast.get_docstring(m)]
    assert violations == []


def test_no_file_and_no_function_is_too_long_to_read_at_once() -> None:
    long = []
    for name, module in sources().items():
        if (lines := len((ROOT / name).read_text("utf-8").splitlines())) > LONGEST_FILE:
            long.append(f"{name}: {lines} lines")
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > LONGEST_FUNCTION:
                    long.append(f"{name}: {node.name}: {lines} lines")
    assert long == []


def test_packages_import_only_what_the_contracts_allow() -> None:
    # in a process of its own: it would switch off the loggers of ours
    check = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    process = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
