"""A corpus of real text from every Python environment: the documentation of its libraries.

Documents are docstrings of the standard library and of installed packages, and the topics of `help()`.
Sources are parsed, never imported. Order and choice depend only on hashes of names and texts, so the same
packages give the same corpus, and any prefix of it is a random sample.
"""

from __future__ import annotations

import ast
import os
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import orjson

from mega_data.process_pool import map_in_order
from mega_schema.atomic_io import atomic_write, full_disk_errors, own_partial_file
from mega_schema.errors import ConfigError
from mega_schema.outputs import check_output, has_keys

MIN_CHARACTERS = 100  # a shorter docstring is a label
TOPICS = "pydoc_data.topics"
_FILES_PER_BATCH = 16
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Document:
    """A text, and the dotted name of its module."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class CorpusSample:
    """Training text, and held-out text of other modules."""

    train: list[Document]
    held_out: list[Document]

    @property
    def train_bytes(self) -> int:
        return sum(len(document.text.encode()) for document in self.train)

    @property
    def held_out_bytes(self) -> int:
        return sum(len(document.text.encode()) for document in self.held_out)


def collect(
    size: int,
    *,
    held_out_fraction: float = 0.0,
    roots: Sequence[Path] | None = None,
    workers: int = 1,
    progress: Callable[[int], object] = lambda _: None,
) -> CorpusSample:
    """Collect about `size` bytes of training text, or all there is.

    Whole modules are held out, chosen by name, so that similar texts are on one side. A held-out text that
    also occurs in a training module is dropped.

    Args:
        size: bytes of UTF-8 of the training text.
        held_out_fraction: fraction of the modules to hold out.
        roots: folders of modules; None uses those of this Python.
        progress: called with the bytes of training text found since its last call.

    Raises:
        ConfigError: the fraction is not between 0 and 1.
    """
    if not 0 <= held_out_fraction < 1:
        raise ConfigError(
            "--held-out-fraction", "not a fraction", found=held_out_fraction, wanted="0 or more, below 1"
        )
    train: dict[bytes, Document] = {}
    held_out: dict[bytes, Document] = {}
    collected = 0
    for documents in map_in_order(_documents, _batches(_modules(roots or _own_roots())), workers):
        collected_before = collected
        for document in documents:
            # not the hash that orders modules: the held-out ones would all come first
            is_held_out = (
                int.from_bytes(_hash(f"held-out/{document.source}")[:8], "big") < held_out_fraction * 2**64
            )
            digest = _hash(document.text)
            if is_held_out:
                held_out.setdefault(digest, document)
            elif digest not in train:
                train[digest] = document
                collected += len(document.text.encode())
        progress(collected - collected_before)
        if collected >= size:
            break
    held_out_only = {digest: document for digest, document in held_out.items() if digest not in train}
    return CorpusSample(_first_bytes(size, _by_hash(train)), _by_hash(held_out_only))


def check_outputs(output: Path, held_out: Path | None) -> None:
    """Refuse outputs that are one file, or would replace a file that `write_documents` did not write.

    Raises:
        ConfigError: one of them is refused.
    """
    for option, path in (("--output", output), ("--held-out", held_out)):
        if path is not None:
            check_output(option, path, "file", is_ours=has_keys(("text", "source")))
    if held_out is not None and (held_out.resolve() == output.resolve() or _is_same_file(held_out, output)):
        raise ConfigError("--held-out", "is --output", found=held_out, hint="name another file")


def _is_same_file(first: Path, second: Path) -> bool:
    return first.exists() and second.exists() and first.samefile(second)


def write_documents(path: Path, documents: Iterable[Document]) -> None:
    """Write one JSON object a line, `{"text": ..., "source": ...}`; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        full_disk_errors(path),
        atomic_write(path, own_partial_file(path)) as partial,
        partial.open("wb") as file,
    ):
        for document in documents:
            file.write(orjson.dumps({"text": document.text, "source": document.source}) + b"\n")


def _own_roots() -> list[Path]:
    paths = sysconfig.get_paths()
    return [Path(paths[name]) for name in ("stdlib", "purelib", "platlib")]


def _modules(roots: Iterable[Path]) -> list[tuple[str, Path]]:
    """Return dotted names and files: the topics first, the rest in hash order."""
    modules: dict[str, Path] = {}
    for root in roots:
        for folder, inner, files in os.walk(root):
            inner[:] = sorted(name for name in inner if name.isidentifier() and name not in _SKIPPED_FOLDERS)
            for name in sorted(files):
                path = Path(folder) / name
                parts = path.relative_to(root).with_suffix("").parts
                if path.suffix == ".py" and path.stem.isidentifier():
                    dotted = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                    modules.setdefault(dotted, path)
    return sorted(modules.items(), key=lambda module: (module[0] != TOPICS, _hash(module[0])))


def _batches(modules: list[tuple[str, Path]]) -> Iterator[list[tuple[str, Path]]]:
    for start in range(0, len(modules), _FILES_PER_BATCH):
        yield modules[start : start + _FILES_PER_BATCH]


def _documents(modules: list[tuple[str, Path]]) -> list[Document]:
    """Parse the texts of some modules; a file that is not Python of our version has none."""
    documents = []
    for name, path in modules:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of invalid escapes in other packages
                tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        texts = _topics(tree) if name == TOPICS else ((name, text) for text in _docstrings(tree))
        documents += [Document(text, source) for source, text in texts if _is_text(text)]
    return documents


def _docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of the module and of every class and function in it, without indentation."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
        # definitions are in statements, so expressions, most of the tree, need no visit
        kinds = (ast.stmt, ast.ExceptHandler, ast.match_case)
        pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, kinds)]


def _topics(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the entries of the dictionary of `help()` topics, each as its own source."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            for topic, text in ast.literal_eval(statement.value).items():
                yield f"{TOPICS}:{topic}", str(text).strip()


def _is_text(text: str) -> bool:
    """Return whether the text is long enough and valid UTF-8: a literal may have half of a surrogate pair."""
    return len(text) >= MIN_CHARACTERS and not any("\ud800" <= char <= "\udfff" for char in text)


def _by_hash(documents: dict[bytes, Document]) -> list[Document]:
    return [documents[digest] for digest in sorted(documents)]


def _first_bytes(size: int, documents: list[Document]) -> list[Document]:
    """Return the first documents, until they hold `size` bytes."""
    total = 0
    for count, document in enumerate(documents):
        if total >= size:
            return documents[:count]
        total += len(document.text.encode())
    return documents


def _hash(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()
