"""The inputs of `preprocess` as one stream of blocks, starting at the resume point of an earlier run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice

from mega_data.readers.blocks import DAMAGED_POSITION, Block, DamagedBlock
from mega_data.readers.inputs import InputFile
from mega_data.readers.streams import read_blocks
from mega_data.run_journal import InputPosition
from mega_data.sentences import TRAINING_CHARACTERS
from mega_schema.errors import CorruptFileError

_SAMPLE_TEXTS = 64
_TEXT_CHARACTERS = 1 << 14
_SAMPLE_INPUTS = 4


class InputStream:
    """The blocks still to encode, each with the number of its input.

    Args:
        keys: keys of the texts.
        unit: unit of a document of plain text, see readers.streams.
        size: bytes of a block.
        skip: damage ends the input with a row error; otherwise it ends the run.
    """

    def __init__(
        self, inputs: Sequence[InputFile], keys: Sequence[str], unit: str, size: int, *, skip: bool
    ) -> None:
        self._inputs = inputs
        self._keys = keys
        self._unit = unit
        self._size = size
        self._skip = skip
        self._start = (0, 0)
        self._first_blocks: list[tuple[int, Block]] = []
        self._rest = self._blocks()

    def resume_from(self, point: InputPosition) -> None:
        """Continue from a resume point; call it before blocks are read."""
        self._start = (point.input, point.position)

    def __iter__(self) -> Iterator[tuple[int, Block]]:
        yield from self._first_blocks
        yield from self._rest

    def sample_texts(self) -> list[str]:
        """Return a sample of texts from the beginnings of several inputs."""
        self._read_first()
        sample_blocks = [block for _, block in self._first_blocks]
        step = max(1, len(self._inputs) // _SAMPLE_INPUTS)
        for item in self._inputs[self._start[0] + 1 :: step][:_SAMPLE_INPUTS]:
            if not item.is_stream:
                with suppress(CorruptFileError):  # raised again when the input is read
                    sample_blocks += islice(
                        read_blocks(item, keys=self._keys, size=1 << 16, unit=self._unit), 1
                    )
        texts = list[str]()
        for block in sample_blocks:
            for row in block.rows(self._keys).texts[:_SAMPLE_TEXTS]:
                texts += [text[:_TEXT_CHARACTERS] for text in row if isinstance(text, str)]
        return _first_texts(texts, 4 * _TEXT_CHARACTERS)

    def _read_first(self) -> None:
        if not self._first_blocks:
            self._first_blocks = [item for item in [next(self._rest, None)] if item is not None]

    def first_texts(self) -> Iterator[str]:
        """Yield texts from the beginning of each input, the same amount of each; of stdin the first block."""
        input_characters = max(TRAINING_CHARACTERS // len(self._inputs), 1 << 16)
        if self._inputs[0].is_stream:
            self._read_first()
        for number, item in enumerate(self._inputs):
            first_blocks = (block for index, block in self._first_blocks if index == number)
            reread = read_blocks(item, keys=self._keys, size=self._size, unit=self._unit)
            item_blocks: Iterator[Block] = first_blocks if item.is_stream else reread
            characters = 0
            with suppress(CorruptFileError):  # raised again when the input is read
                for text in (
                    text for block in item_blocks for row in block.rows(self._keys).texts for text in row
                ):
                    if isinstance(text, str) and characters < input_characters:
                        yield text[: input_characters - characters]
                        characters += len(text)
                    if characters >= input_characters:
                        break

    def _blocks(self) -> Iterator[tuple[int, Block]]:
        number, position = self._start
        for index, item in enumerate(self._inputs[number:], number):
            start = position if index == number else 0
            if start == DAMAGED_POSITION:
                continue
            try:
                for block in read_blocks(item, start, keys=self._keys, size=self._size, unit=self._unit):
                    yield index, block
            except CorruptFileError as error:
                if not self._skip:
                    raise
                yield index, DamagedBlock(error.what, str(error.values.get("found", "")))


def _first_texts(texts: list[str], characters: int) -> list[str]:
    selected = list[str]()
    total = 0
    for text in texts:
        if total >= characters:
            break
        selected.append(text)
        total += len(text)
    return selected
