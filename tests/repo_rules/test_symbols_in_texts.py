"""Texts name classes, modules and members that exist: documents, READMEs and docstrings of the packages."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache

import pytest

from tests.repo_rules.markdown import documents
from tests.repo_rules.repository import relative_name, sources
from tests.repo_rules.symbols import Symbols, code_in_text, read_symbols

# Names of other programs, and words of ours that are no Python names
FOREIGN = frozenset(
    (
        *("AutoModelForCausalLM.from_pretrained", "OrderedDict", "SummaryWriter", "argparse.Namespace"),
        *(
            "BertWordPieceCase",
            "BertWordPieceLowerCase",
            "ByteLevel",
            "GPT2BPETokenizer",
            "HuggingFaceTokenizer",
        ),
        *("GPTSentencePieceTokenizer", "Llama2Tokenizer", "SentencePieceTokenizer", "TikTokenizer"),
        *("CollnetChain", "CollnetDirect", "Tree", "FileSystemWriter", "Shard(dim)", "TrainSchedule"),
        *("KeyboardInterrupt(words)", "KillWait", "ReadWriteMany", "TrainJob"),
        "mega_train.loss",  # a metric of OpenTelemetry
        *("optim.exp_avg", "optim.exp_avg_sq", "optim.main", "optim.momentum"),  # namespaces of a checkpoint
    )
)
SOURCE = {
    "packages/p/src/mega_x/build.py": """
from mega_x.base import Base

class Mesh(Base):
    size: int
    def destroy(self): self.group = None

class Left(Other): ...
def fill_weights(): ...
""",
    "packages/p/src/mega_x/base.py": "class Base:\n    def join(self): ...",
}


@cache
def symbols() -> Symbols:
    return read_symbols(sources())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Save", "no class Save"),
        ("Mesh.leave", "Mesh has no leave"),
        ("rates.Courses.rate", "no class Courses"),
        ("build.fill", "no module build has fill"),
        ("mega_x.bild", "mega_x has no bild"),
        ("mega_x.build.Mesh.leave(x)", "Mesh has no leave"),
        ("mega_y.build", "no package mega_y"),
        *(
            (text, "")
            for text in ("Mesh.join", "Mesh.size", "Mesh.group", "Left.anything", "mega_x.base.Base")
        ),
        *(
            (text, "")
            for text in (
                "build.fill_weights()",
                "json.Thing",
                "trainer.json",
                "batch.micro",
                "--lr",
                "np.float32",
            )
        ),
    ],
)
def test_a_name_that_does_not_exist_is_explained(text: str, reason: str) -> None:
    assert (
        read_symbols({path: ast.parse(code) for path, code in SOURCE.items()}).explain_unknown(text) == reason
    )


def codes_in_documents() -> list[tuple[str, str]]:
    """Return each inline code of the documents, after its place.

    Dated benchmark results and changelogs are left out: they have the names of their time.
    """
    return [
        (f"{relative_name(file)}:{line}", code)
        for file in documents()
        if not relative_name(file).startswith("bench/results/") and file.name != "CHANGELOG.md"
        for line, code in code_in_text(file.read_text("utf-8"))
    ]


def codes_in_docstrings() -> list[tuple[str, str]]:
    """Return each inline code of the packages' docstrings, after its place."""
    return [
        (f"{path}:{getattr(node, 'lineno', 1)}", code)
        for path, module in sources().items()
        for node in ast.walk(module)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        for _, code in code_in_text(ast.get_docstring(node) or "")
    ]


@pytest.mark.parametrize("codes", [codes_in_documents, codes_in_docstrings])
def test_every_name_in_a_text_exists(codes: Callable[[], list[tuple[str, str]]]) -> None:
    unknown = [
        f"{place}: `{code}`: {reason}"
        for place, code in codes()
        if code not in FOREIGN and (reason := symbols().explain_unknown(code))
    ]
    assert unknown == []


def test_every_foreign_name_is_in_a_text() -> None:
    codes = {code for _, code in [*codes_in_documents(), *codes_in_docstrings()]}
    assert FOREIGN - codes == set()
