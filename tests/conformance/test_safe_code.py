"""No code executes files: no pickle or similar module, except an unpickler without calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parents[2] / "packages").glob("*/src/**/*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {"eval", "exec"}
LOOKUPS = {"getattr", "setattr", "globals", "locals", "vars", "compile", "__import__", "import_module"}
# what a process and its own workers say to each other over pipes, as multiprocessing does, or over Ray;
# never a file
MESSAGES = {
    "mega-data/src/mega_data/encode_tasks.py": ["pickle"],
    "src/mega_data/executors/ray.py": ["pickle"],
    "mega-data/src/mega_data/worker_errors.py": ["pickle"],
    "mega-data/src/mega_data/seed.py": ["pickle"],
}
# a subclass of the standard unpickler that replaces every method that would look up or call
SUBCLASS = {"mega_ckpt/torch_files/sandbox/unpickler.py": ["pickle"]}


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
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).split(".")[-1]
            if (owner, node.attr) in {
                ("torch", "load"),
                ("serialization", "load"),
                ("jit", "load"),
                ("hub", "load"),
                ("yaml", "unsafe_load"),
                ("builtins", "eval"),
                ("builtins", "exec"),
            }:
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {
            "import_module",
            "__import__",
        }:
            named = (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))
            yield from (name for name in named if name.split(".")[0] in MODULES)
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield "allow_pickle"


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from marshal import loads",
        "torch.load(f)",
        "from torch import load",
        "torch.serialization.load(f)",
        "torch.jit.load(f)",
        "importlib.import_module('_pickle')",
        "eval('1')",
        "np.load(f, allow_pickle=True)",
    ],
)
def test_the_gate_sees_what_it_looks_for(code: str) -> None:
    assert list(_dangers(ast.parse(code)))


def test_no_source_file_can_run_what_it_reads() -> None:
    assert len(SOURCES) > 30
    calls = {
        str(path.relative_to(path.parents[3])): dangers
        for path in SOURCES
        if (dangers := list(_dangers(ast.parse(path.read_text("utf-8")))))
    }
    assert calls == {**MESSAGES, **SUBCLASS}


def test_what_reads_pickles_can_look_nothing_up() -> None:
    """Names remain strings: the sandbox has no code to look up an object by its name."""
    reading = [path for path in SOURCES if path.parent.name == "sandbox"]
    assert {path.name for path in reading} >= {
        "allowlist.py",
        "sandbox_process.py",
        "stubs.py",
        "unpickler.py",
    }
    for path in reading:
        tree = ast.parse(path.read_text("utf-8"))
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not used & LOOKUPS, path


def test_the_standard_unpickler_is_inherited_from_and_not_called() -> None:
    (path,) = (path for path in SOURCES if path.parent.name == "sandbox" and path.name == "unpickler.py")
    used = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle"
    }
    assert {word for word in used if not word.isupper() and not word[-1].isdigit()} == {
        "_Unpickler",
        "UnpicklingError",
    }
