"""Filter documents by the perplexity that an n-gram model gives to them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from mega_data.clean.ngram_model import NgramModel, load_arpa
from mega_data.clean.ngram_sentences import Split, open_splitter
from mega_data.clean.step import Row, RowFunction, Verdict
from mega_data.readers.versions import file_version
from mega_schema.errors import ConfigError

BUCKETS = ("head", "middle", "tail")


@dataclass(frozen=True, slots=True)
class PerplexityStep:
    """Keep documents by the perplexity of a model in ARPA format.

    Perplexity is 10 to the power of the mean of -log10 P over the words and the end of each line.

    Attributes:
        model: an ARPA file, plain or .gz.
        tokenizer: a SentencePiece model that splits lines into words; empty splits at ASCII white space.
        normalize: "ccnet" first converts the text as CCNet does, to one line; empty changes nothing.
        min: drop documents of less than this perplexity; 0 drops none.
        max: drop documents of more; 0 drops none.
        head: documents of less are in the bucket "head".
        tail: those of this or more are in "tail", all others in "middle".
        keep: keep only documents of these buckets.
        store: key for the perplexity; empty stores none.
        bucket: key for the bucket; empty stores none.
    """

    model: str = ""
    tokenizer: str = ""
    normalize: str = ""
    min: float = 0.0
    max: float = 0.0
    head: float = 0.0
    tail: float = 0.0
    keep: tuple[str, ...] = ()
    store: str = ""
    bucket: str = ""

    def start(self) -> RowFunction:
        self._check_options()
        path = Path(self.model)
        model = load_arpa(path, file_version(path))
        split = open_splitter(self.tokenizer, self.normalize, "step perplexity: ")

        def work(row: Row) -> Verdict:
            perplexity = self._perplexity(model, split, row.text)
            if perplexity < self.min:
                return f"perplexity below {self.min:g}"
            if self.max and perplexity > self.max:
                return f"perplexity above {self.max:g}"
            name = self._bucket_of(perplexity)
            if self.keep and name not in self.keep:
                return f"perplexity in {name}"
            values = {self.store: round(perplexity, 1), self.bucket: name}
            values.pop("", None)
            return [row.with_values(**values)] if values else [row]

        return work

    def _perplexity(self, model: NgramModel, split: Split, text: str) -> float:
        log10, words = model.score(split(text))
        exponent = -log10 / words
        return 10.0**exponent if exponent < 300 else math.inf

    def _bucket_of(self, perplexity: float) -> str:
        return "head" if perplexity < self.head else "middle" if perplexity < self.tail else "tail"

    def _check_options(self) -> None:
        if not self.model:
            raise ConfigError("step perplexity: model", "missing", hint="model = 'en.arpa.gz'")
        if not Path(self.model).is_file():
            raise ConfigError("step perplexity: model", "no such file", found=self.model)
        if self.max and self.max < self.min:
            wanted = f"{self.min:g} or more, which is min"
            raise ConfigError("step perplexity: max", "too small", found=f"{self.max:g}", wanted=wanted)
        for name in self.keep:
            if name not in BUCKETS:
                raise ConfigError("step perplexity: keep", "unknown", found=name, wanted=" | ".join(BUCKETS))
        if (self.head or self.tail) and not (self.keep or self.bucket):
            found = f"head {self.head:g}, tail {self.tail:g}"
            raise ConfigError("step perplexity: head, tail", "no effect", found=found, wanted="keep | bucket")
        if (self.keep or self.bucket) and not 0 < self.head <= self.tail:
            found = f"head {self.head:g}, tail {self.tail:g}"
            hint = "--step perplexity:model=en.arpa.gz,head=300,tail=900,keep=head+middle"
            raise ConfigError("step perplexity: tail", "not the bounds of buckets", found=found, hint=hint)
        if not (self.min or self.max or self.keep or self.store or self.bucket):
            wanted = "min | max | keep | store | bucket"
            hint = "--step perplexity:model=en.arpa.gz,max=1000"
            raise ConfigError("step perplexity", "keeps every document", wanted=wanted, hint=hint)
