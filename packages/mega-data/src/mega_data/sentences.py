"""Split text into sentences with nltk's Punkt: with a published model, or one trained on the input.

Punkt learns abbreviations and sentence starters from raw text, so a sample of the corpus is enough to train a
model for any language. A published model is used if `NLTK_DATA` or nltk's default folders have
`tokenizers/punkt_tab`. The older `tokenizers/punkt/LANG.pickle` is not read, because a pickle can run code.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, Final

from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError

log = logging.getLogger("mega.data")

MAX_CHARACTERS: Final = 1_000_000  # split by Punkt at once, as in Megatron
TRAINING_CHARACTERS: Final = 2_000_000  # of the corpus to train on


@dataclass(frozen=True)
class SentenceSplitter:
    """A function from a text to its sentences; sent to worker processes.

    Attributes:
        model: Punkt's parameters: abbreviations, collocations, sentence starters, and the cases of each word.
        keep_newlines: a sentence keeps the white space after it, which may hold line breaks.
        name: name and hash of the model, for PREFIX.json.
    """

    model: tuple[Any, ...]
    keep_newlines: bool
    name: str

    def __call__(self, text: str) -> list[str]:
        sentences = list[str]()
        for start in range(0, len(text), MAX_CHARACTERS):
            sentences += self._split(text[start : start + MAX_CHARACTERS])
        return sentences

    @cached_property
    def _punkt(self) -> Any:
        punkt = _punkt_module("--split-sentences")
        parameters = punkt.PunktParameters()
        abbreviations, collocations, starters, cases = self.model
        parameters.abbrev_types = set(abbreviations)
        parameters.sent_starters = set(starters)
        parameters.collocations = {tuple(pair) for pair in collocations}
        parameters.ortho_context.update(cases)
        return punkt.PunktSentenceTokenizer(parameters, lang_vars=_language_vars(punkt))

    def _split(self, text: str) -> list[str]:
        spans = list(self._punkt.span_tokenize(text))
        if not self.keep_newlines:
            return [text[start:end] for start, end in spans]
        # from the start of one sentence to the start of the next: joined they are the text
        starts = [0, *(start for start, _ in spans[1:]), len(text)]
        return [text[start:end] for start, end in zip(starts, starts[1:], strict=False) if end > start]

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "keep_newlines": self.keep_newlines, "name": self.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def make_splitter(language: str, sample: Iterable[str], *, keep_newlines: bool = False) -> SentenceSplitter:
    """Build a splitter for the language with a published or newly trained model; log its source.

    Args:
        language: nltk's name of the language: english, turkish, ...
        sample: texts of the corpus, read only if no model is found.

    Raises:
        ConfigError: nltk is not installed, or `language` is not a name.
    """
    if not re.fullmatch(r"[a-z_]+", language):
        raise ConfigError(
            "--lang", "not the name of a language", found=language, wanted="english, turkish, ..."
        )
    punkt = _punkt_module("--split-sentences")
    try:
        parameters = punkt.PunktTokenizer(language)._params
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
        hint = "nltk.download('punkt_tab') again, or unset NLTK_DATA to train a model on the input"
        raise ConfigError("NLTK_DATA: punkt_tab", "damaged", found=str(error), hint=hint) from None
    except (LookupError, OSError):
        parameters = _train_parameters(punkt, language, sample)
        name = f"punkt trained on the corpus ({language})"
    else:
        name = f"punkt ({language})"
        log.info("splitting sentences with nltk's model of %s", language)
    model = _sorted_model(parameters)
    digest = hashlib.sha256(json.dumps(model).encode()).hexdigest()
    return SentenceSplitter(model, keep_newlines, f"{name}, sha256 {digest[:16]}")


def _train_parameters(punkt: Any, language: str, sample: Iterable[str]) -> Any:
    texts = list[str]()
    characters = 0
    for text in sample:
        texts.append(text[: TRAINING_CHARACTERS - characters])
        characters += len(texts[-1])
        if characters >= TRAINING_CHARACTERS:
            break
    log.warning(
        "splitting sentences with a Punkt model trained on %.1f million characters of the input: "
        "nltk has none of %s here",
        characters / 1e6,
        language,
    )
    trainer = punkt.PunktTrainer(lang_vars=_language_vars(punkt))
    for text in texts:
        trainer.train(text, finalize=False)
    trainer.finalize_training()
    return trainer.get_params()


def _language_vars(punkt: Any) -> Any:
    """Return Punkt's rules without nltk's limit of 5 seconds for each regular expression.

    The expressions take linear time, and a text has at most MAX_CHARACTERS characters. A limit in seconds
    would make the result depend on the load of the machine. nltk before 3.10 has no limit.
    """

    def strip_timeout(pattern: Any) -> Any:
        return type(pattern)(pattern._rx, None) if hasattr(pattern, "_rx") else pattern

    class LanguageVars(punkt.PunktLanguageVars):  # type: ignore[misc]
        __slots__ = ()
        re_boundary_realignment = strip_timeout(punkt.PunktLanguageVars.re_boundary_realignment)

        def period_context_re(self) -> Any:
            return strip_timeout(super().period_context_re())

        def _word_tokenizer_re(self) -> Any:
            return strip_timeout(super()._word_tokenizer_re())

    return LanguageVars()


def _sorted_model(parameters: Any) -> tuple[Any, ...]:
    """Return the model sorted, so that the same corpus gives the same model."""
    return (
        tuple(sorted(parameters.abbrev_types)),
        tuple(sorted(tuple(pair) for pair in parameters.collocations)),
        tuple(sorted(parameters.sent_starters)),
        dict(sorted(parameters.ortho_context.items())),
    )


def _punkt_module(flag: str) -> Any:
    try:
        return import_module("nltk.tokenize.punkt")
    except ImportError:
        hint = install_hint("mega-data", "sentences")
        raise ConfigError(flag, "needs a library that is not installed", wanted="nltk", hint=hint) from None
