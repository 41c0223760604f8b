"""Find names that are bare participles or everyday words in Python modules."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text("utf-8"))
VAGUE, FUNCTION_WORDS, IRREGULAR, NOT_PARTICIPLES = (
    frozenset(_WORDS[key].split()) for key in ("vague", "function_words", "irregular", "not_participles")
)


@dataclass(frozen=True, slots=True)
class Definition:
    """A name that a module defines.

    Args:
        kind: "module", "class", "function" (also a method) or "variable" (also a parameter or an attribute).
        scope: the class or function around it, if any.
    """

    path: str
    line: int
    kind: str
    name: str
    scope: ast.AST | None = None

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}"


def module_definition(path: str) -> Definition:
    """Return the name of a module; a package has the name of its folder."""
    file = PurePosixPath(path)
    return Definition(path, 1, "module", file.parent.name if file.stem == "__init__" else file.stem)


def definitions(path: str, node: ast.AST, scope: ast.AST | None = None) -> Iterator[Definition]:
    """Yield the classes, functions and variables that a module defines."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.ClassDef():
                yield Definition(path, child.lineno, "class", child.name, scope)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield Definition(path, child.lineno, "function", child.name, scope)
            case ast.arg():
                yield Definition(path, child.lineno, "variable", child.arg, scope)
            case ast.Name(ctx=ast.Store()):
                yield Definition(path, child.lineno, "variable", child.id, scope)
            case ast.Attribute(ctx=ast.Store()):
                yield Definition(path, child.lineno, "variable", child.attr, scope)
        is_scope = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        yield from definitions(path, child, child if is_scope else scope)


def words_of(name: str) -> list[str]:
    """Split snake_case or CamelCase into lower-case words, without digits."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def is_bare(name: str) -> bool:
    """Whether a name consists of participles, prepositions, pronouns and the like alone."""
    words = words_of(name)
    if name.startswith("__") or words[:1] in (
        ["is"],
        ["has"],
        ["can"],
        ["should"],
    ):  # a special method, a fact
        return False
    return bool(words) and all(word in FUNCTION_WORDS or is_participle(word) for word in words)


def is_participle(word: str) -> bool:
    """Whether a word is a participle, by its ending or by the list of irregular ones."""
    regular = len(word) > 4 and word.endswith(("ed", "ing")) and word not in NOT_PARTICIPLES
    return regular or word in IRREGULAR


def is_vague(definition: Definition) -> bool:
    """Whether a variable has an everyday word as its name.

    Two are allowed: `found` where an error line is built, because MegaError has a field of that name, and
    `other` for the second operand of an operator.
    """
    name = definition.name.lstrip("_")
    if definition.kind != "variable" or name not in VAGUE:
        return False
    if name == "other" and isinstance(definition.scope, ast.FunctionDef):
        return not definition.scope.name.startswith("__")
    return not (name == "found" and definition.scope is not None and _has_error_line(definition.scope))


def _has_error_line(scope: ast.AST) -> bool:
    """Whether a class or a function names another field of an error line, or passes `found` to one."""
    for node in ast.walk(scope):
        names = {ast.keyword: "arg", ast.arg: "arg", ast.Name: "id"}.get(type(node), "")
        name = getattr(node, names, None) if names else None
        if name in ("what", "wanted") or (name == "found" and isinstance(node, ast.keyword)):
            return True
    return False


def repeated_names(group: Iterable[Definition]) -> dict[str, list[Definition]]:
    """Group definitions by name; keep the names that are defined more than once."""
    groups: defaultdict[str, list[Definition]] = defaultdict(list)
    for definition in group:
        groups[definition.name].append(definition)
    return {name: group for name, group in groups.items() if len(group) > 1}
