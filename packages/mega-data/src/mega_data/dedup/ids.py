"""Store the ids of a shard's documents on disk and read one by its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from mega_data.output_formats import open_output


@contextmanager
def open_id_writer(folder: Path, shard: int) -> Iterator[Callable[[Sequence[str]], None]]:
    """Yield a function that appends ids; the files are published at the end."""
    end = 0
    with open_output(folder / f"{shard:05d}.text") as text, open_output(folder / f"{shard:05d}.ends") as ends:

        def add(ids: Sequence[str]) -> None:
            nonlocal end
            parts = [text_id.encode("utf-8", "surrogatepass") for text_id in ids]
            text.write(b"".join(parts))
            id_ends = end + np.cumsum([len(part) for part in parts], dtype=np.int64)
            ends.write(id_ends.astype("<u8").tobytes())
            end = int(id_ends[-1])

        yield add


def read_id(folder: Path, shard: int, place: int) -> str:
    """Read the id of the document at a place, from 0."""
    with (folder / f"{shard:05d}.ends").open("rb") as ends:
        ends.seek(8 * place)
        end = int.from_bytes(ends.read(8), "little")
        ends.seek(max(0, 8 * place - 8))
        start = int.from_bytes(ends.read(8), "little") if place else 0
    with (folder / f"{shard:05d}.text").open("rb") as text:
        text.seek(start)
        return text.read(end - start).decode("utf-8", "surrogatepass")
