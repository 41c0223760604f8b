"""Names are words of the field: nouns for modules and classes, verbs for functions, one name for one thing.

CONTRIBUTING.md has the rule and `words.toml` the words by which a name is judged. `names_baseline.txt` has
the number of refused names in files that are not mended yet: a number may only fall.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

from tests.repo_rules.identifiers import (
    Definition,
    definitions,
    is_bare,
    is_vague,
    module_definition,
    repeated_names,
)
from tests.repo_rules.repository import relative_name, tracked_files

# Names that the rule would refuse, and why they stay
EXCEPTIONS = {
    "declared": "click's parameter declarations",
    "distributed": "torch.distributed",
    "dotted": "TOML's dotted keys",
    "from_pretrained": "transformers' constructor",
    "fused": "fused kernels",
    "required": "required options",
}
# One thing in two processes that share no module
SAME_CLASS = {"GlobalName": "a global in a pickle, in the sandbox and in its reader"}
# Folders whose modules have equal names by design, each set within one package
PARALLEL_FOLDERS = (
    r"formats/\w+",  # to add a checkpoint format, copy a folder
    r"checkpoint|formats/\w+",  # writer: of our own format and of others
    r"commands|operations|\.",  # a command and what it calls
    r"clean|dedup|extract",  # pipeline: the steps of each
    r"config|resolve",  # the options of a group and their checks
    r"\.|kernels/triton",  # a layer and its kernel
    r"optim|telemetry",  # factory: builds what the options ask for
)
HINTS = {
    "module": "name it by a noun of the field: what it holds",
    "class": "name it by a noun of the field: what an instance is",
    "function": "name it by a verb with its object (find_checkpoint), a boolean by a fact (is_sharded)",
    "variable": "name it by a noun: what the value is (pieces, checkpoint, offset)",
}
BASELINE = Path(__file__).with_name("names_baseline.txt")


def refused_names(path: str, module: ast.Module) -> list[str]:
    """Return a line for each name of a module that the rule refuses: place, name and hint."""
    own = module_definition(path)
    refused = [own] if is_bare(own.name.removeprefix("test_")) else []
    for definition in definitions(path, module):
        is_test = definition.kind == "function" and definition.name.startswith("test_")
        if is_vague(definition) or (definition.kind in ("class", "function") and is_bare(definition.name)):
            refused += [] if is_test else [definition]
    return [
        f"{d.place}: {d.kind} {d.name}: {HINTS[d.kind]}"
        for d in refused
        if d.name.lstrip("_") not in EXCEPTIONS
    ]


def repeated_classes(modules: Mapping[str, ast.Module]) -> list[str]:
    """Return a line for each public class whose name another class has too."""
    classes = [
        Definition(path, node.lineno, "class", node.name)
        for path, module in modules.items()
        for node in module.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in SAME_CLASS
    ]
    return [
        f"{name}: {' and '.join(d.place for d in group)}: name each by what tells it from the others"
        for name, group in sorted(repeated_names(classes).items())
    ]


def repeated_modules(paths: Iterable[str]) -> list[str]:
    """Return a line for each pair of modules of an import root that share a name outside parallel folders."""
    files = {path: PurePosixPath(path.partition("/src/")[2]) for path in paths}
    groups = repeated_names(
        Definition(path, 1, "module", f"{file.parts[0]}.{file.stem}")
        for path, file in files.items()
        if file.stem not in ("__init__", "__main__")
    )
    lines = []
    for name, group in sorted(groups.items()):
        folders = [PurePosixPath(*files[d.path].parts[1:]).parent.as_posix() for d in group]
        if not any(all(re.fullmatch(pattern, folder) for folder in folders) for pattern in PARALLEL_FOLDERS):
            lines.append(f"{name}: {' and '.join(sorted(d.path for d in group))}: rename one of them")
    return lines


@cache
def checked_modules() -> dict[str, ast.Module]:
    """Parse the modules of the packages, the tests and the benchmarks, by path."""
    python = (file for file in tracked_files() if file.suffix == ".py")
    return {
        relative_name(file): ast.parse(file.read_text("utf-8"))
        for file in python
        if relative_name(file).startswith(("packages/", "tests/", "bench/"))
    }


def product_modules() -> dict[str, ast.Module]:
    return {path: module for path, module in checked_modules().items() if "/src/" in path}


def read_baseline() -> dict[str, int]:
    """Return the number of names that are not mended yet, by file."""
    lines = [line.split() for line in BASELINE.read_text("utf-8").splitlines() if not line.startswith("#")]
    return {path: int(count) for count, path in lines}


BAD = """
class Told:
    held: int

    def __add__(self, other):
        return other

def found(one, names):
    made = [name for name in names]
    self.said = made
    def _taken(): ...

def named_as(padding): ...
def find_pieces(seed, *, other): ...
def is_moved(): ...
def check(found, wanted): ...
def test_told(): ...
"""


def test_a_bare_participle_and_an_everyday_word_are_refused_with_a_hint() -> None:
    lines = refused_names("tests/kept.py", ast.parse(BAD))
    assert [line.partition(": ")[2].partition(":")[0] for line in lines] == [
        "module kept",
        "class Told",
        "variable held",
        "function found",
        "variable one",
        "variable made",
        "variable said",
        "function _taken",
        "function named_as",
        "variable other",
    ]
    assert lines[3] == f"tests/kept.py:8: function found: {HINTS['function']}"


@pytest.mark.parametrize(
    "name",
    [
        "find_checkpoint",
        "embedding",
        "is_sharded",
        "padded_vocab_size",
        "open_truncated",
        "SamplingRequest",
        "seed",
    ],
)
def test_a_name_with_a_noun_or_a_verb_is_not_refused(name: str) -> None:
    assert not is_bare(name)


def test_one_name_for_two_classes_or_two_modules_is_refused() -> None:
    first, second = ast.parse("class Piece: ..."), ast.parse("\nclass Piece: ...\nclass _Own: ...")
    (line,) = repeated_classes({"a.py": first, "b.py": second, "c.py": ast.parse("class _Own: ...")})
    assert line.startswith("Piece: a.py:1 and b.py:2: ")
    paths = [f"packages/p/src/top/{file}.py" for file in ("data/memory", "plan/memory", "formats/a/names")]
    (line,) = repeated_modules([*paths, "packages/p/src/top/formats/b/names.py"])
    assert line.startswith("top.memory: packages/p/src/top/data/memory.py and ")


def test_no_name_is_a_bare_participle_or_an_everyday_word() -> None:
    baseline = read_baseline()
    lines = {path: refused_names(path, module) for path, module in checked_modules().items()}
    excess = [line for path, group in lines.items() if len(group) > baseline.get(path, 0) for line in group]
    assert excess == []


def test_the_baseline_counts_no_name_that_is_mended() -> None:
    modules = checked_modules()
    counts = {
        path: len(refused_names(path, modules[path])) if path in modules else 0 for path in read_baseline()
    }
    assert counts == read_baseline(), f"write the lower counts into {relative_name(BASELINE)}"


def test_no_public_class_name_is_used_twice_in_the_product() -> None:
    assert repeated_classes(product_modules()) == []


def test_no_module_name_is_used_twice_where_it_misleads() -> None:
    assert repeated_modules(product_modules()) == []


def test_every_exception_is_in_use() -> None:
    modules = checked_modules()
    names = {d.name.lstrip("_") for path, module in modules.items() for d in definitions(path, module)}
    names |= {module_definition(path).name for path in modules}
    assert EXCEPTIONS.keys() <= names
