"""Count the words of inputs in tasks: a file, a range of a large one, or several small ones.

WORK/plan.json, done/      the run and its finished tasks with the checksums of their files, see `task_stages`
WORK/counts/0/00003        counts of the words of a task of stage `count`
WORK/counts/1/00000        their sums by up to FAN_IN tasks, by stage `merge`; further stages until one
                           file has them all
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from mega_data.encode_tasks import row_error
from mega_data.jsonl_shards import file_states
from mega_data.readers.inputs import InputFile
from mega_data.readers.ranges import InputRange, cuts_by_input, read_range
from mega_data.readers.streams import BLOCK_BYTES
from mega_data.task_stages import (
    ReusableTasks,
    TaskResult,
    TaskStage,
    open_run_folder,
    read_result,
    read_results,
)
from mega_data.tokenizer_counts.word_counts import (
    WordCounter,
    bert_splitter,
    byte_level_splitter,
    checksum,
    merge_counts,
)
from mega_schema.errors import ConfigError

FAN_IN: Final = 256  # files that a task merges
_COUNTS: Final = "counts"
_ROW_HINT: Final = "correct or delete the line"


@dataclass(frozen=True, slots=True)
class WordCountTasks:
    """A run that counts the words of inputs.

    Attributes:
        groups: the ranges that each task reads.
        kind: bpe or wordpiece.
        key: key of the text.
        memory: bytes for the words of a task, until they are written.
    """

    groups: tuple[tuple[InputRange, ...], ...]
    folder: Path
    kind: str
    lowercase: bool
    key: str
    memory: int

    def counts(self) -> Path:
        """Return the file of the counts of all inputs.

        Raises:
            ConfigError: it is missing or damaged.
        """
        return self._check_counts(self.stages()[-1], len(self._widths()) - 1, 0)

    def begin(self) -> None:
        """Create the work folder, or resume the same run in an existing one.

        Raises:
            ConfigError: the folder holds another run.
        """
        ranges = [part for group in self.groups for part in group]
        items: list[InputFile] = list({part.input: part.item for part in ranges}.values())
        starts = cuts_by_input(ranges)
        states = file_states([item.path for item in items])
        codes = [item.adapter.code if item.adapter else "" for item in items]
        wanted = {
            "inputs": [[*state, cuts, code] for state, cuts, code in zip(states, starts, codes, strict=True)],
            "formats": [item.format for item in items],
            "split-mb": [len(cuts) for cuts in starts],
            "type": self.kind,
            "lowercase": self.lowercase,
            "json-key": self.key,
            "skip": False,
            "tasks": [*map(len, self.groups)],
        }
        owners = [tuple(part.input for part in group) for group in self.groups]
        open_run_folder(
            self.folder, wanted, ReusableTasks("done/count", owners, "skip", self.folder / _COUNTS)
        )

    def stages(self) -> list[TaskStage]:
        """Return the stages; each is finished before the next begins."""
        sizes = tuple(sum(part.size for part in group) for group in self.groups)
        stages = [TaskStage("count", len(self.groups), self.count, sizes=sizes)]
        for level, width in enumerate(self._widths()[1:], 1):
            name = "merge" if level == 1 else f"merge-{level}"
            stages.append(TaskStage(name, width, partial(self.merge, level), after=stages[-1]))
        return stages

    def _widths(self) -> list[int]:
        """Return the number of files of counts of each stage; there is one merge or more."""
        widths = [len(self.groups)]
        while len(widths) == 1 or widths[-1] > 1:
            widths.append(-(-widths[-1] // FAN_IN))
        return widths

    def count(self, task: int) -> TaskResult:
        """Write the counts of the words of a task; return the letters inside of words in their order.

        Raises:
            FormatError: a row has no text.
        """
        is_bpe = self.kind == "bpe"
        split = byte_level_splitter() if is_bpe else bert_splitter(lowercase=self.lowercase)
        counter = WordCounter(split, self._path(0, task), self.memory)
        for part in self.groups[task]:
            rows_before = 0
            for block in read_range(part, [self.key], BLOCK_BYTES, "file"):
                rows = block.rows([self.key])
                for error in rows.errors:
                    raise row_error(part, error, rows_before, _ROW_HINT)
                for (text,) in rows.texts:
                    for sentence in [text] if isinstance(text, str) else text:
                        counter.add(sentence)
                rows_before += rows.count
        words = counter.finish()
        return {
            "read": sum(part.size for part in self.groups[task]),
            "documents": counter.texts,
            "words": words,
            "file": checksum(self._path(0, task)),
            "letters": "" if is_bpe else "".join(counter.letters),
        }

    def merge(self, level: int, task: int) -> TaskResult:
        """Add up the counts of consecutive files of the stage before.

        Raises:
            ConfigError: one of them is missing or damaged.
        """
        below = self._widths()[level - 1]
        numbers = range(task * FAN_IN, min(below, (task + 1) * FAN_IN))
        stage = self.stages()[level - 1]
        paths = [self._check_counts(stage, level - 1, number) for number in numbers]
        words = merge_counts(paths, self._path(level, task))
        return {"read": 0, "documents": 0, "words": words, "file": checksum(self._path(level, task))}

    def letters(self) -> list[str]:
        """Return the letters inside of words, in the order of their first occurrence in the inputs."""
        results = read_results(self.stages()[0], self.folder)
        return [*dict.fromkeys(letter for result in results for letter in result["letters"])]

    def check_has_text(self) -> None:
        """Refuse inputs without text.

        Raises:
            ConfigError: no task read a text.
        """
        if not any(result["documents"] for result in read_results(self.stages()[0], self.folder)):
            raise ConfigError("--input", "contains no text", wanted="one document or more")

    def _check_counts(self, stage: TaskStage, level: int, number: int) -> Path:
        """Return the path of a file of counts that is as its task wrote it.

        Raises:
            ConfigError: it is missing or damaged.
        """
        path = self._path(level, number)
        hint = f"rm -r {self.folder}, then run the command again"
        if not path.is_file():
            raise ConfigError(path, "is missing", wanted="the counts of words that a task wrote", hint=hint)
        found_state, task_state = checksum(path), read_result(stage, number, self.folder).get("file")
        if found_state != task_state:
            states = {"found": _describe(found_state), "wanted": _describe(task_state)}
            raise ConfigError(path, "is damaged", **states, hint=hint)
        return path

    def _path(self, level: int, number: int) -> Path:
        return self.folder / _COUNTS / str(level) / f"{number:05d}"


def _describe(state: list[int] | None) -> str:
    return f"{state[0]:,} bytes, CRC-32 {state[1]:08x}" if state else "no checksum"
