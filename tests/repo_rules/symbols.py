"""The symbols of the packages' source, to check Python names in texts against."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(.*\))?")
_CLASS = re.compile(r"[A-Z][A-Z0-9]*[a-z]\w*")
_INLINE_CODE = re.compile(r"`([^`\n]+)`")
_FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
FILE_SUFFIXES = (
    "bin",
    "html",
    "idx",
    "json",
    "jsonl",
    "md",
    "model",
    "pt",
    "py",
    "safetensors",
    "toml",
    "txt",
)


@dataclass(frozen=True, slots=True)
class Symbols:
    """Names by module and by class.

    Attributes:
        modules: by dotted name, the names that a module defines or imports, and a package's modules.
        members: by class, its attributes and methods.
        bases: by class, the names of its bases.
    """

    modules: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    members: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    bases: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def explain_unknown(self, text: str) -> str:
        """Return what is unknown in the Python name of an inline code, or ""; also for what is no such name.

        A name without a dot is checked if it is in CamelCase. A dotted one is checked if it begins with a
        package, a module or a class of ours.
        """
        if not _NAME.fullmatch(text):
            return ""
        first, *others = parts = text.partition("(")[0].split(".")
        if parts[-1] in FILE_SUFFIXES or (others and first in sys.stdlib_module_names):
            return ""
        if first.startswith("mega_") and others:
            return self._explain_path(parts)
        for owner, member in zip(parts, others, strict=False):
            if owner in self.members:
                return "" if self.has_member(owner, member) else f"{owner} has no {member}"
        known = self.members.keys() | vars(builtins).keys()
        if classes := [part for part in parts if _CLASS.fullmatch(part) and part not in known]:
            return f"no class {classes[0]}"
        defined = [names for path, names in self.modules.items() if path.rpartition(".")[2] == first]
        if others and defined and not any(others[0] in names for names in defined):
            return f"no module {first} has {others[0]}"
        return ""

    def has_member(self, name: str, member: str) -> bool:
        """Whether a class or a base of it has the member; a base outside the source has every one."""
        bases = self.bases[name]
        return member in self.members[name] or any(
            base not in self.members or self.has_member(base, member) for base in bases
        )

    def _explain_path(self, parts: list[str]) -> str:
        paths = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
        path = next((path for path in paths if path in self.modules), None)
        if path is None:
            return f"no package {parts[0]}"
        name, *members = [*parts[path.count(".") + 1 :], ""]
        if name and name not in self.modules[path]:
            return f"{path} has no {name}"
        is_member = members and members[0] and name in self.members
        return f"{name} has no {members[0]}" if is_member and not self.has_member(name, members[0]) else ""


def read_symbols(modules: Mapping[str, ast.Module]) -> Symbols:
    """Collect the symbols of modules, by path: packages/NAME/src/ROOT/MODULE.py."""
    symbols = Symbols()
    for path, module in modules.items():
        name = path.partition("/src/")[2].removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        symbols.modules[name] |= _defined_names(module)
        while "." in name:
            name, _, child = name.rpartition(".")
            symbols.modules[name].add(child)
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                symbols.members[node.name] |= _defined_names(node)
                symbols.bases[node.name] |= {_last_name(base) for base in node.bases} - {"Protocol"}
    return symbols


def code_in_text(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each inline code of Markdown or of a docstring."""
    text = _FENCED.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in _INLINE_CODE.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match[1]


def _last_name(base: ast.expr) -> str:
    base = base.value if isinstance(base, ast.Subscript) else base
    return base.attr if isinstance(base, ast.Attribute) else ast.unparse(base)


def _defined_names(scope: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(scope):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.alias(name=name, asname=asname):
                names.add(asname or name)
    return names
