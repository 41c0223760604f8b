"""Span corruption from a decoder: text with spans replaced by sentinels, followed by the spans.

A sample reads R tokens of the stream of documents and splits them at random into K spans of text and K spans
of noise, which alternate (arXiv:1910.10683 §3.1.4; BigScience's mlm_dataset.py).

    inputs    text 0  sentinel 0  text 1  sentinel 1 ... separator        R - noise + K + 1 tokens
    targets   sentinel 0  noise 0  sentinel 1  noise 1 ... separator      noise + K + 1 tokens

The sample is the inputs and then the targets. Only targets have a loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mega_schema.errors import ConfigError
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer_folder
from mega_train.data.prefix_reader import PREFIX
from mega_train.data.sft import EXAMPLE, LEARNT, POSITION, TOKEN

Ints = NDArray[np.int64]
_SEPARATORS = ("[SEP]", "<SEP>", "<sep>", "[EOS]", "<EOS>", "<eos>", "</s>")


@dataclass(frozen=True, slots=True)
class SpanVocabulary:
    """The special tokens of span corruption.

    Attributes:
        sentinels: ids of `<extra_id_0>` and so on.
        separator: the id that ends inputs and targets.
    """

    sentinels: tuple[int, ...]
    separator: int

    @classmethod
    def from_tokenizer(cls, tokenizer: Path | Tokenizer | None) -> SpanVocabulary:
        """Look up the sentinels and the separator: that of BERT, the end of a text, or of a document.

        Raises:
            ConfigError: there is no tokenizer, or it has no sentinel or no separator.
            FormatError: the tokenizer cannot be read.
        """
        if tokenizer is None:
            raise ConfigError(
                "--tokenizer-type",
                "missing, and no dataset records its tokenizer",
                wanted="the tokenizer of the data, which has the sentinels of span corruption",
                hint="mega-data preprocess --vocab-extra-ids 100",
            )
        if isinstance(tokenizer, Path):
            tokenizer = open_tokenizer_folder(tokenizer)
        identity = tokenizer.identity
        pieces = tokenizer.pieces(range(identity.vocab_size))
        number_by_name = {piece: number for number, piece in enumerate(pieces) if piece}
        sentinels = list[int]()
        while (name := f"<extra_id_{len(sentinels)}>") in number_by_name:
            sentinels.append(number_by_name[name])
        separators = [number_by_name[name] for name in _SEPARATORS if name in number_by_name]
        if identity.eod is not None:
            separators.append(identity.eod)
        if not (sentinels and separators):
            raise ConfigError(
                "--noise-density",
                "the tokenizer of the data has no sentinels or no separator",
                found=identity.type,
                wanted="<extra_id_0> and so on, and [SEP], </s> or an end-of-document token",
                hint="mega-data preprocess --vocab-extra-ids 100 --tokenizer-type SentencePieceTokenizer",
            )
        return cls(tuple(sentinels), separators[0])


@dataclass(frozen=True, slots=True)
class SpanLengths:
    """The lengths of a sample of span corruption; all samples have the same.

    Attributes:
        tokens: of the stream of documents that a sample reads.
        noise: tokens in spans of noise.
        spans: spans of noise, and of text.
    """

    tokens: int
    noise: int
    spans: int

    @property
    def inputs(self) -> int:
        return self.tokens - self.noise + self.spans + 1

    @property
    def targets(self) -> int:
        return self.noise + self.spans + 1

    @classmethod
    def from_tokens(cls, tokens: int, density: float, mean_length: float) -> SpanLengths:
        """Round the noise of `tokens` tokens, then its spans."""
        noise = round(tokens * density)
        return cls(tokens, noise, round(noise / mean_length))

    @classmethod
    def fit(cls, length: int, density: float, mean_length: float) -> SpanLengths:
        """Return the largest sample whose inputs and targets are at most `length` + 1 tokens together.

        Raises:
            ConfigError: a value is out of range, or no span fits.
        """
        if not 0 < density < 1:
            raise ConfigError("--noise-density", "out of range", found=density, wanted="above 0, below 1")
        if not 1 <= mean_length < length:
            wanted = "1 or more tokens, and fewer than a sample has"
            raise ConfigError("--mean-noise-span-length", "out of range", found=mean_length, wanted=wanted)
        lengths = cls.from_tokens(length, density, mean_length)
        while lengths.inputs + lengths.targets > length + 1 and lengths.tokens > 1:
            lengths = cls.from_tokens(lengths.tokens - 1, density, mean_length)
        if lengths.spans < 1 or min(lengths.noise, lengths.tokens - lengths.noise) < lengths.spans:
            raise ConfigError(
                "--noise-density",
                "leaves no whole spans of noise with text between them",
                found=f"{lengths.noise} of {lengths.tokens} tokens in {lengths.spans} spans",
                wanted="1 span or more, and a token of text for each",
                hint="a longer --seq-length, or another --noise-density or --mean-noise-span-length",
            )
        return lengths


@dataclass(frozen=True, slots=True)
class SpanRule:
    """The rule by which the tokens of a sample are corrupted.

    Attributes:
        length: tokens of a sample, without the last target.
        lengths: of its parts.
        seed: of the run; sample i draws from a generator of the seed `seed + i`.
        is_prefix: whether the tokens of the inputs see each other.
    """

    length: int
    lengths: SpanLengths
    seed: int
    is_prefix: bool

    def check_sentinels(self, vocabulary: SpanVocabulary) -> None:
        """Check that there is a sentinel for each span.

        Raises:
            ConfigError: there are too few.
        """
        spans, sentinels = self.lengths.spans, len(vocabulary.sentinels)
        if sentinels < spans:
            raise ConfigError(
                "--noise-density",
                "the tokenizer of the data has too few sentinels for the spans of a sample",
                found=f"{sentinels} sentinels",
                wanted=f"{spans} or more",
                hint=f"mega-data preprocess --vocab-extra-ids {spans}, or a longer --mean-noise-span-length",
            )

    def corrupt(self, tokens: Ints, number: int, vocabulary: SpanVocabulary) -> Ints:
        """Return (5, length + 1) of `prefix_reader`: inputs as prefix, targets, separators as padding.

        Args:
            tokens: (R,) of the stream of documents.
            number: of the sample.
        """
        rng = np.random.RandomState((self.seed + number) % 2**32)
        lengths = self.lengths
        noise_K = _partition(lengths.noise, lengths.spans, rng)
        text_K = _partition(lengths.tokens - lengths.noise, lengths.spans, rng)
        ends = np.cumsum(np.stack((text_K, noise_K), 1).ravel())
        pieces = np.split(tokens, ends[:-1])
        sentinels = [np.array([sentinel]) for sentinel in vocabulary.sentinels[: lengths.spans]]
        separator = np.array([vocabulary.separator])
        inputs = [x for text, sentinel in zip(pieces[::2], sentinels, strict=True) for x in (text, sentinel)]
        targets = [
            x for noise, sentinel in zip(pieces[1::2], sentinels, strict=True) for x in (sentinel, noise)
        ]
        sample = np.concatenate((*inputs, separator, *targets, separator))
        row = np.zeros((5, self.length + 1), np.int64)
        row[TOKEN] = vocabulary.separator
        row[TOKEN, : len(sample)] = sample
        row[EXAMPLE, len(sample) :] = 1
        row[POSITION] = np.arange(self.length + 1)
        row[LEARNT, lengths.inputs : len(sample)] = 1
        if self.is_prefix:
            row[PREFIX, : lengths.inputs] = 1
        return row


def _partition(items: int, parts: int, rng: np.random.RandomState) -> Ints:
    """Split `items` items at random into parts of 1 or more; every such partition is equally likely."""
    bounds = np.sort(rng.permutation(items - 1)[: parts - 1]) + 1
    return np.diff(bounds, prepend=0, append=items)
