"""Filter documents by a fastText classifier: quality, topic, toxicity."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from mega_data.clean.step import Row, RowFunction, Verdict, import_for_step
from mega_data.readers.versions import FileVersion, file_version
from mega_schema.errors import ConfigError

_PREFIX = "__label__"
_DICTIONARY_OFFSET = 92  # of the first word: magic and version, 13 training options, five counts
_MAX_WORD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ClassifierStep:
    """Keep or drop documents by the probabilities that a fastText model gives to labels.

    Attributes:
        model: a fastText file, .bin or .ftz.
        keep: keep only documents with at least `score` for one of these labels.
        drop: drop documents with at least `score` for one of these labels.
        store: key for the probabilities, an object of label and number; empty stores none.
    """

    model: str = ""
    keep: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    score: float = 0.5
    store: str = ""

    def start(self) -> RowFunction:
        if not self.model:
            raise ConfigError("step classifier: model", "missing", hint="model = 'quality.bin'")
        if not Path(self.model).is_file():
            raise ConfigError("step classifier: model", "no such file", found=self.model)
        if self.keep and self.drop:
            raise ConfigError("step classifier: drop", "has no effect with keep", hint="use two steps")
        if not (self.keep or self.drop or self.store):
            hint = "--step classifier:model=quality.bin,keep=hq,score=0.8"
            raise ConfigError("step classifier", "no label", wanted="keep | drop | store", hint=hint)
        model = load_fasttext("classifier", self.model, file_version(Path(self.model)))
        self._check_labels(model)

        def work(row: Row) -> Verdict:
            scores = predict_labels(model, row.text, -1)
            if self.keep and not any(scores.get(label, 0.0) >= self.score for label in self.keep):
                return f"below {self.score} of {' and '.join(self.keep)}"
            for label in self.drop:
                if scores.get(label, 0.0) >= self.score:
                    return f"is {label}"
            return [row.with_values(**{self.store: scores})] if self.store else [row]

        return work

    def _check_labels(self, model: Any) -> None:
        known = sorted(predict_labels(model, _first_word(Path(self.model)), -1))
        for name, labels in (("keep", self.keep), ("drop", self.drop)):
            for label in labels:
                if known and label not in known:
                    close = get_close_matches(label, known, 1, 0.5)
                    hint = f"did you mean {close[0]}?" if close else f"one of {' '.join(known[:20])}"
                    raise ConfigError(f"step classifier: {name}", "no such label", found=label, hint=hint)


def predict_labels(model: Any, text: str, count: int) -> dict[str, float]:
    """Return the `count` most probable labels of a text, and their probabilities, from the highest on.

    Args:
        count: -1 for all labels. A text without a known word has none.
    """
    words = " ".join(text.split())  # the library refuses line breaks, and characters without UTF-8
    labels, numbers = model.predict(words.encode("utf-8", "replace").decode("utf-8"), k=count)
    return {label.removeprefix(_PREFIX): float(number) for label, number in zip(labels, numbers, strict=True)}


@lru_cache(maxsize=2)
def load_fasttext(step: str, path: str, version: FileVersion) -> Any:
    """Load a fastText model; `version` of the file is part of the cache key.

    Raises:
        ConfigError: the library is not installed, or the file is no fastText model.
    """
    library = import_for_step(step, "fasttext", "fasttext-predict")
    try:
        return library.load_model(path)
    except ValueError as error:
        raise ConfigError(f"step {step}: model", "not a fastText model", found=error) from None


def _first_word(model: Path) -> str:
    """Return the first word of a model: the library lists the labels only with a prediction."""
    with model.open("rb") as file:
        file.seek(_DICTIONARY_OFFSET)
        word = file.read(_MAX_WORD_BYTES).partition(b"\0")[0]
    return word.decode("utf-8", "replace")
