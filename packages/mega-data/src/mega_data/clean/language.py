"""Identify the language of a text with py3langid's bundled model or a fastText file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from mega_data.clean.array_langid import make_identifier
from mega_data.clean.classifier import load_fasttext, predict_labels
from mega_data.clean.step import Row, RowFunction, Verdict, import_for_step
from mega_data.readers.versions import file_version
from mega_schema.errors import ConfigError

MAX_CHARACTERS = 1000  # read of a text: more do not change the result


@dataclass(frozen=True, slots=True)
class Language:
    """Keep documents in some languages; store each document's language under `store`.

    Attributes:
        keep: language codes of the model, such as "en" or GlotLID's "eng_Latn"; empty keeps all.
        score: minimum probability of the language.
        model: a fastText file such as lid.176.bin or GlotLID's; empty uses py3langid.
        shorter_than: check only texts with fewer characters, as cleanup_fix_dataset.py's
            remove_512_non_english does with 512; 0 checks all.
    """

    keep: tuple[str, ...] = ()
    score: float = 0.0
    model: str = ""
    store: str = "language"
    shorter_than: int = 0

    def start(self) -> RowFunction:
        identify = _fasttext_classifier(self.model) if self.model else _langid_classifier(self.keep)
        kept_languages = frozenset(self.keep)

        def work(row: Row) -> Verdict:
            if self.shorter_than and len(row.text) >= self.shorter_than:
                return [row]
            language, score = identify(" ".join(row.text[:MAX_CHARACTERS].split()))
            if kept_languages and language not in kept_languages:
                return f"is in {language}"
            if score < self.score:
                return f"is {language} with too low a score"
            return [row.with_values(**{self.store: language})]

        return work


def _langid_classifier(keep: Sequence[str]) -> Callable[[str], tuple[str, float]]:
    identifier = _load_langid(import_for_step("language", "py3langid.langid"))
    known = sorted(map(str, identifier.nb_classes))
    if unknown := next((code for code in keep if code not in known), None):
        close = get_close_matches(unknown, known, 1, 0.5) or [c for c in known if c == unknown[:2].lower()]
        hint = f"language:keep={close[0]}" if close else f"one of {' '.join(known)}"
        raise ConfigError("step language: keep", "no such code", found=unknown, wanted="ISO 639-1", hint=hint)

    def identify(text: str) -> tuple[str, float]:
        language, score = identifier.classify(text)
        return language, float(score)

    return identify


@cache
def _load_langid(langid: Any) -> Any:
    return make_identifier(langid)


def _fasttext_classifier(path: str) -> Callable[[str], tuple[str, float]]:
    if not Path(path).is_file():
        raise ConfigError("step language: model", "no such file", found=path)
    model = load_fasttext("language", path, file_version(Path(path)))

    def identify(text: str) -> tuple[str, float]:
        return next(iter(predict_labels(model, text, 1).items()), ("und", 0.0))

    return identify
