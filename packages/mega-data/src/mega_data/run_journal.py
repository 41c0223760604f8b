"""The journal of an unfinished run: the valid sizes of its files, and the resume point."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from mega_data.dataset_files import sync

FORMAT: Final = 2
JOURNAL: Final = "journal.json"
INPUTS: Final = "inputs"
InputState = list[str | int] | None  # identifies an input and its version; None if nothing does
Snapshot = dict[str, Any]  # a resume point, with the counts and file sizes at it


@dataclass(slots=True)
class InputPosition:
    """The position of a run in its inputs.

    Attributes:
        input: number of the current input.
        position: start of its next block.
        rows: its rows before that.
        size: bytes of text read from all inputs.
        consumed: bytes on disk of that text; files may be compressed.
        skipped: skipped rows.
        damage: the first damaged file, and why its rest was skipped; "" for none.
    """

    input: int = 0
    position: int = 0
    rows: int = 0
    size: int = 0
    consumed: int = 0
    skipped: int = 0
    damage: str = ""


@dataclass(frozen=True, slots=True)
class RunJournal:
    """The journal in the folder of a run.

    Attributes:
        run: hash of the options.
        skip: wrong rows are skipped.
    """

    folder: Path
    run: str
    skip: bool

    def write(self, snapshot: Snapshot) -> None:
        """Replace the journal."""
        journal = {"format": FORMAT, "run": self.run, "skip": self.skip, **snapshot}
        temporary = self.folder / f"{JOURNAL}.new"
        with temporary.open("wb") as journal_file:
            journal_file.write(json.dumps(journal).encode())
            sync(journal_file)
        temporary.replace(self.folder / JOURNAL)

    def last_usable(self, inputs: Sequence[InputState]) -> tuple[Snapshot, int]:
        """Return the last snapshot of an earlier process that is valid for these inputs.

        Returns:
            The snapshot, empty if there is none; the number of inputs started before it.
        """
        journal = self._read()
        if not journal:
            return {}, 0
        lines = (self.folder / INPUTS).read_bytes()[: journal["sizes"][INPUTS]].splitlines()
        started = [json.loads(line) for line in lines]
        pairs = zip(started, inputs, strict=False)
        unchanged = sum(
            1 for _ in takewhile(lambda pair: pair[1] is not None and pair[0]["input"] == pair[1], pairs)
        )
        snapshots = [*enumerate(started[: unchanged + 1])]
        if unchanged == len(started):
            snapshots.append((unchanged, journal))
        for count, snapshot in reversed(snapshots):
            # rows that one run skips end another
            if snapshot["place"]["size"] and (
                journal["skip"] == self.skip or not snapshot["place"]["skipped"]
            ):
                return snapshot, count
        return {}, 0

    def _read(self) -> dict[str, Any]:
        """Read the journal of an earlier run with these options; {} if its files are too short for it."""
        try:
            journal = json.loads((self.folder / JOURNAL).read_bytes())
            if journal["format"] != FORMAT or journal["run"] != self.run:
                return {}
            for name, size in journal["sizes"].items():
                if (self.folder / name).stat().st_size < size:
                    return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        assert isinstance(journal, dict)
        return journal
