"""The index of a use: which samples its parts have, in which order, and of which part the next is.

    document.npy  sample.npy  shuffle.npy    a SampleIndex of each part, one behind the other
    corpus.npy    number.npy                 of a blend: the part of each sample, and which of its samples

It is made once, by one rank, and mapped by all (`kept`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_train.data.array_cache import Arrays, Files, write
from mega_train.data.blend import Block, blend_blocks, normalised, part_samples
from mega_train.data.blend_spec import Source
from mega_train.data.datasets import Corpora
from mega_train.data.gpt_dataset import Passes, SampleIndex, Samples, build_index, order_type, passes, too_few
from mega_train.data.splits import Range

_FORMAT = 1
_CHUNK = 1 << 22  # lengths hashed at a time


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of a dataset's sequences, and the passes through them."""

    corpus: IndexedDataset
    sequences: Range
    passes: Passes

    @property
    def documents(self) -> int:
        """Of all epochs together."""
        return (self.sequences[1] - self.sequences[0]) * self.passes.epochs

    def values(self) -> dict[str, object]:
        """All that its index follows from beside the seed."""
        told, lengths = blake2b(digest_size=16), self.corpus.lengths[slice(*self.sequences)]
        for at in range(0, len(lengths), _CHUNK):
            told.update(lengths[at : at + _CHUNK].tobytes())
        return {"lengths": told.hexdigest(), "from": self.sequences[0], **asdict(self.passes)}

    def build(self, seed: int) -> SampleIndex:
        numbers = np.arange(*self.sequences, dtype=np.int32)
        return build_index(self.corpus.lengths, numbers, self.passes, seed)


@dataclass(frozen=True, slots=True)
class Mixture:
    """How the pieces of a blend are mixed.

    Attributes:
        shares: of each piece.
        size: samples of the blend.
        all: whether it holds every sample of every piece.
    """

    shares: NDArray[np.float64]
    size: int
    all: bool


@dataclass(frozen=True, slots=True)
class Recipe:
    """What an index is made of.

    Attributes:
        mixture: None where there is one piece, whose samples are read as they come.
    """

    pieces: tuple[Piece, ...]
    mixture: Mixture | None
    seed: int

    @classmethod
    def of(
        cls,
        source: Source,
        corpora: Corpora,
        *,
        length: int,
        samples: int | None,
        seed: int,
        renormalize: bool = False,
    ) -> Recipe:
        """As Megatron core: of each part its share of the samples and half a percent more.

        Args:
            samples: how many are wanted; None asks for all of one epoch, and then parts have no weights.
            renormalize: weigh the parts by what each adds.

        Raises:
            ConfigError: a part has no sample.
        """
        counts: Sequence[int | None] = [samples if len(source.parts) == 1 else None] * len(source.parts)
        shares = None
        if source.weights is not None:
            assert samples is not None
            shares = normalised(source.weights)
            both = [part_samples(share, samples, source.blend_rule) for share in shares.tolist()]
            added, counts = zip(*both, strict=True)
        pieces = _pieces(source, corpora, counts, length)
        if shares is not None:
            size, everything = sum(added), False
            # normalised anew: Megatron does it twice, and the second may change a last bit, and so an order
            shares = normalised(added if renormalize else shares)
        elif len(pieces) > 1:
            sizes = [piece.passes.count for piece in pieces]
            size, everything = min(sum(sizes), samples or sum(sizes)), samples is None
            shares = normalised(sizes)
        return cls(pieces, None if shares is None else Mixture(shares, size, everything), seed)

    def values(self) -> dict[str, object]:
        """All that the index follows from; JSON can tell it."""
        mixture = self.mixture
        return {
            "format": _FORMAT,
            "seed": self.seed,
            "parts": [piece.values() for piece in self.pieces],
            # hex says every bit of a double
            "shares": None if mixture is None else [float(share).hex() for share in mixture.shares],
            "size": None if mixture is None else mixture.size,
            "all": mixture is not None and mixture.all,
        }

    def write(self, folder: Path) -> None:
        """Write the arrays, holding those of one piece in memory at a time."""
        counts = [piece.passes.count for piece in self.pieces]
        files: Files = {
            "document": (np.int32, (sum(piece.documents for piece in self.pieces),)),
            "sample": (np.int64, (sum(counts) + len(counts), 2)),
            "shuffle": (order_type(max(counts)), (sum(counts),)),
        }
        built = (piece.build(self.seed) for piece in self.pieces)
        write(folder, files, ({name: getattr(index, name) for name in files} for index in built))
        if self.mixture is not None:
            shape = (self.mixture.size,)
            files = {"corpus": (np.int16, shape), "number": (np.int64, shape)}
            mixed = self._blend(self.mixture)
            write(folder, files, ({"corpus": corpus, "number": number} for corpus, number in mixed))

    def _blend(self, mixture: Mixture) -> Iterator[Block]:
        sizes = np.array([piece.passes.count for piece in self.pieces], np.int64) if mixture.all else None
        return blend_blocks(mixture.shares, mixture.size, sizes)

    def opened(self, arrays: Arrays, *, copy: bool = False) -> Stream:
        """The samples, read by the arrays that `write` wrote."""
        documents = [0, *accumulate(piece.documents for piece in self.pieces)]
        firsts = [0, *accumulate(piece.passes.count for piece in self.pieces)]
        parts = []
        for k, piece in enumerate(self.pieces):
            index = SampleIndex(
                arrays["document"][documents[k] : documents[k + 1]],
                arrays["sample"][firsts[k] + k : firsts[k + 1] + k + 1],
                arrays["shuffle"][firsts[k] : firsts[k + 1]],
                piece.passes.epochs,
            )
            parts.append(Samples(piece.corpus, index, extra=piece.passes.extra, copy=copy))
        mixed = None if self.mixture is None else (arrays["corpus"], arrays["number"])
        return Stream(parts, mixed)


class Stream:
    """The samples of one use, in the order in which the run counts them.

    Attributes:
        parts: the samples of each corpus.
        mixed: of a blend: the part of each sample, and which of the part's samples it is.
    """

    def __init__(self, parts: Sequence[Samples], mixed: tuple[np.ndarray, np.ndarray] | None = None) -> None:
        self.parts, self.mixed = parts, mixed

    def __len__(self) -> int:
        return len(self.parts[0]) if self.mixed is None else len(self.mixed[0])

    def __getitem__(self, i: int) -> np.ndarray:
        """Tokens of sample `i`, (length + extra,) int64."""
        part, number = self._place(i)
        return self.parts[part][number]

    def corpus(self, i: int) -> Path:
        """Prefix of the dataset that sample `i` is from."""
        return self.parts[self._place(i)[0]].corpus.prefix

    def _place(self, i: int) -> tuple[int, int]:
        if self.mixed is None:
            return 0, i
        part = int(self.mixed[0][i])
        # past the share that was asked for, a blend may want more of a part than was made of it
        return part, int(self.mixed[1][i]) % len(self.parts[part])


def _pieces(source: Source, corpora: Corpora, counts: Sequence[int | None], length: int) -> tuple[Piece, ...]:
    pieces, without = [], []
    for part, samples in zip(source.parts, counts, strict=True):
        corpus = corpora.opened[part.prefix]
        sequences = part.cut.of(len(corpus))
        tokens = int(corpus.lengths[slice(*sequences)].sum(dtype=np.int64))
        todo = passes(tokens, length=length, samples=samples, separate_below=source.separate_below)
        if todo is None:
            found = f"{tokens} tokens in {sequences[1] - sequences[0]} sequences"
            without.append((part.prefix, found, 2 if samples else length + 1))
        else:
            pieces.append(Piece(corpus, sequences, todo))
    if without:
        prefix, found, wanted = without[0]
        part_name = f"the {source.name} split"
        if len(source.parts) > 1:
            part_name += f" of {prefix}"
            found += f"; as few in {len(without):,} of {len(source.parts):,} datasets" * (len(without) > 1)
        raise too_few(found, wanted, source.flag, part_name)
    return tuple(pieces)
