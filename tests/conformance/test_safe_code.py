"""Nothing that runs what a file says: no pickle and its kin anywhere in the product."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parents[2] / "packages").glob("*/src/**/*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {"eval", "exec"}
# what a process and its own workers say to each other over pipes, as multiprocessing does; never a file
MESSAGES = {"mega-data/src/mega_data/workers.py": ["pickle"]}


def _dangers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.split(".")[0] in MODULES or (
                module == "torch" and any(a.name == "load" for a in node.names)
            ):
                yield module
        elif isinstance(node, ast.Name) and node.id in CALLS:
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in {("torch", "load"), ("builtins", "eval"), ("builtins", "exec")}:
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield "allow_pickle"


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from marshal import loads",
        "torch.load(f)",
        "eval('1')",
        "np.load(f, allow_pickle=True)",
    ],
)
def test_the_gate_sees_what_it_looks_for(code: str) -> None:
    assert list(_dangers(ast.parse(code)))


def test_no_source_file_can_run_what_it_reads() -> None:
    assert len(SOURCES) > 30
    found = {
        str(path.relative_to(path.parents[3])): dangers
        for path in SOURCES
        if (dangers := list(_dangers(ast.parse(path.read_text("utf-8")))))
    }
    assert found == MESSAGES
