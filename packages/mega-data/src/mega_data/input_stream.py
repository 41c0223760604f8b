"""The inputs of `preprocess` as one stream of blocks, from the place on that an earlier run got to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice

from mega_data.readers.blocks import DAMAGED, Block, Damage
from mega_data.readers.inputs import Input
from mega_data.readers.streams import blocks
from mega_data.resumable_output import Place
from mega_data.sentences import SAMPLE
from mega_schema.errors import CorruptFileError

_SAMPLE_TEXTS, _SAMPLE_CHARACTERS, _SAMPLE_INPUTS = 64, 1 << 14, 4


class InputStream:
    """The blocks that are still to be done, with the number of their input.

    Args:
        keys: of the texts.
        unit: what a document of a plain text is, see readers.streams.
        size: bytes of a block.
        skip: damage ends its input, with a fault; else it ends the run.
    """

    def __init__(
        self, given: Sequence[Input], keys: Sequence[str], unit: str, size: int, *, skip: bool
    ) -> None:
        self._given, self._keys, self._unit, self._size, self._skip = given, keys, unit, size, skip
        self._place = (0, 0)
        self._begun: list[tuple[int, Block]] = []
        self._rest = self._blocks()

    def begin(self, place: Place) -> None:
        """Go on from a place; before blocks were read, unless the place is the beginning."""
        self._place = (place.input, place.position)

    def __iter__(self) -> Iterator[tuple[int, Block]]:
        yield from self._begun
        yield from self._rest

    def sample(self) -> list[str]:
        """Some texts from the beginnings of some of the inputs."""
        self._read_first()
        found = [block for _, block in self._begun]
        step = max(1, len(self._given) // _SAMPLE_INPUTS)
        for one in self._given[self._place[0] + 1 :: step][:_SAMPLE_INPUTS]:
            if not one.stream:
                with suppress(CorruptFileError):  # which is met again when the input is read
                    found += islice(blocks(one, keys=self._keys, size=1 << 16, unit=self._unit), 1)
        texts = list[str]()
        for block in found:
            for row in block.rows(self._keys).texts[:_SAMPLE_TEXTS]:
                texts += [text[:_SAMPLE_CHARACTERS] for text in row if isinstance(text, str)]
        return _up_to(texts, 4 * _SAMPLE_CHARACTERS)

    def _read_first(self) -> None:
        if not self._begun:
            self._begun = [item for item in [next(self._rest, None)] if item is not None]

    def beginnings(self) -> Iterator[str]:
        """Texts of each input from its beginning, as much of each; of stdin, its first block."""
        share = max(SAMPLE // len(self._given), 1 << 16)
        if self._given[0].stream:
            self._read_first()
        for number, one in enumerate(self._given):
            begun = (block for at, block in self._begun if at == number)
            again = blocks(one, keys=self._keys, size=self._size, unit=self._unit)
            read: Iterator[Block] = begun if one.stream else again
            held = 0
            for text in (text for block in read for row in block.rows(self._keys).texts for text in row):
                if isinstance(text, str) and held < share:
                    yield text[: share - held]
                    held += len(text)
                if held >= share:
                    break

    def _blocks(self) -> Iterator[tuple[int, Block]]:
        number, position = self._place
        for at, one in enumerate(self._given[number:], number):
            start = position if at == number else 0
            if start == DAMAGED:
                continue
            try:
                for block in blocks(one, start, keys=self._keys, size=self._size, unit=self._unit):
                    yield at, block
            except CorruptFileError as error:
                if not self._skip:
                    raise
                yield at, Damage(error.what, str(error.found))


def _up_to(texts: list[str], characters: int) -> list[str]:
    kept, held = list[str](), 0
    for text in texts:
        if held >= characters:
            break
        kept.append(text)
        held += len(text)
    return kept
