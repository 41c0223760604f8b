"""Extract web archives or wiki dumps to JSON lines of id, url, title and text, a task per file or part."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import orjson

from mega_data.error_limit import error_counts
from mega_data.extract.formats import FileRange, read_pages
from mega_data.extract.types import Page, SkippedPage
from mega_data.jsonl_shards import file_states
from mega_data.output_folder import check_file, check_folder, check_stale, is_own_folder
from mega_data.output_formats import file_ending, formatted_name, open_output
from mega_data.readers.compression import DamagedRange, strip_extension
from mega_data.readers.versions import check_unchanged
from mega_data.task_stages import ReusableTasks, TaskResult, TaskStage, open_run_folder
from mega_schema.errors import ConfigError, FormatError
from mega_schema.outputs import check_output

log = logging.getLogger("mega.data")
MAX_LOGGED = 20  # damaged ranges per reason and part; all are counted
_LINE = orjson.OPT_APPEND_NEWLINE


def check_outputs(
    inputs: Sequence[Path], output: Path, work: Path | None, suffix: str, *, keep_dropped: bool
) -> None:
    """Refuse outputs that are inputs, hold inputs, or hold files of other programs.

    Args:
        suffix: suffix of the format of the files of a folder, see `output_formats`.

    Raises:
        ConfigError: one of them is refused.
    """
    dropped = dropped_path(output)
    if not is_one_file(output):
        check_folder(output, work, inputs)
        check_stale(output, (_output_name(path, suffix) for path in inputs))
        if keep_dropped:
            check_output(
                "--keep-dropped", dropped, "folder", inputs=inputs, is_ours=lambda _: is_own_folder(output)
            )
        return
    check_file("--output", output, inputs)
    if keep_dropped:
        check_output("--keep-dropped", dropped, "file", inputs=inputs, is_ours=lambda _: output.exists())


def check_extractor(extractor: str, *, full_page: bool) -> None:
    """Check that an extractor of HTML can run with the options.

    Raises:
        ConfigError: it is not installed, or has no such option.
    """
    if extractor == "resiliparse":
        return
    if full_page:
        hint = "leave one of them out"
        raise ConfigError("--full-page", f"has no effect with --html-extractor {extractor}", hint=hint)
    from mega_data.extract.html import load_trafilatura

    load_trafilatura()


def is_one_file(output: Path) -> bool:
    return file_ending(output) != ""


def _output_name(path: Path, suffix: str) -> str:
    return formatted_name(f"{strip_extension(path)}.jsonl", suffix)


def dropped_path(output: Path) -> Path:
    """Return the path of the dropped pages: outside the output folder, of which readers read all files."""
    if is_one_file(output):
        return output.with_name(f"{output.name.removesuffix(file_ending(output))}.dropped.jsonl")
    return output.with_name(f"{output.name}.dropped")


@dataclass(frozen=True, slots=True)
class Extraction:
    """An extraction run.

    Attributes:
        parts: the result of `formats.split_inputs`; the parts of a file are consecutive.
        output: folder with a file per input, or one file for all if its name is one of a file.
        work: folder of the markers and of the parts to join.
        file_format: one of formats.FORMATS, or `auto`.
        full_page: keep navigation and footers of HTML.
        extractor: of HTML, resiliparse or trafilatura.
        skip: skip and count damaged ranges; else the first one ends the run.
        keep_dropped: write skipped pages, with the reason under "dropped".
        suffix: suffix of the format of the files of a folder, see `output_formats`.
        dropped_to: path of the skipped pages; None is `dropped_path` of the output.
    """

    parts: tuple[FileRange, ...]
    output: Path
    work: Path
    file_format: str = "auto"
    full_page: bool = False
    skip: bool = False
    keep_dropped: bool = False
    suffix: str = ""
    dropped_to: Path | None = None
    extractor: str = "resiliparse"

    @property
    def inputs(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(part.path for part in self.parts))

    def begin(self) -> None:
        """Create the work folder, or resume the same run in an existing one.

        Raises:
            ConfigError: the folder holds another run, or two inputs would have one output.
        """
        if not self.one_file:
            path_of_name = dict[str, Path]()
            for path in self.inputs:
                earlier = path_of_name.setdefault(strip_extension(path), path)
                if earlier != path:
                    hint = "name one output file: --output all.jsonl"
                    raise ConfigError("--input", f"two files of one name: {earlier} and {path}", hint=hint)
        options = {
            "from": self.file_format,
            "full-page": self.full_page,
            "html-extractor": self.extractor,
            "output": str(self.output.resolve()),
        }
        options |= {"keep-dropped": self.keep_dropped, "tasks": len(self.parts), "output-format": self.suffix}
        numbers = {path: number for number, path in enumerate(self.inputs)}
        owners = [numbers[part.path] for part in self.parts]
        reuse = ReusableTasks(
            "done/extract", owners, "skip", self.work / "parts" if self.one_file else self.output
        )
        open_run_folder(self.work, {"inputs": file_states(self.inputs), **options, "skip": self.skip}, reuse)

    @property
    def one_file(self) -> bool:
        return is_one_file(self.output)

    @property
    def dropped_output(self) -> Path:
        return self.dropped_to or dropped_path(self.output)

    def stages(self) -> list[TaskStage]:
        """Return the stages; each is finished before the next begins."""
        sizes = tuple(map(_range_bytes, self.parts))
        first = TaskStage("extract", len(self.parts), self.run, sizes=sizes)
        return [first, TaskStage("join", len(self._joined_files()), self.join, after=first)]

    def run(self, task: int) -> TaskResult:
        """Write the pages of a part; return counts, skipped pages by reason, and bytes lost to damage.

        Raises:
            FormatError: the part is damaged, and damage is not skipped.
        """
        part = self.parts[task]
        reasons = Counter[str]()
        documents = size = lost = damaged_ranges = 0
        first = ""
        with ExitStack() as stack:
            out = stack.enter_context(open_output(self._task_path(task, self.output)))
            dropped = None
            if self.keep_dropped:
                dropped = stack.enter_context(open_output(self._task_path(task, self.dropped_output)))
            stack.enter_context(check_unchanged(part.path))
            for page in read_pages(
                part, self.file_format, full_page=self.full_page, extractor=self.extractor
            ):
                if isinstance(page, Page):
                    row = {"id": page.id, "url": page.url, "title": page.title, "text": page.text}
                    size += out.write(orjson.dumps(row, option=_LINE))
                    documents += 1
                    continue
                reasons[page.reason] += 1
                if isinstance(page, DamagedRange):
                    lost += page.end - page.start
                    damaged_ranges += 1
                    first = first or f"{part.path}: {page.reason} at byte {page.start:,}: {page.why}"
                    self._report_damage(page, part.path, is_logged=reasons[page.reason] <= MAX_LOGGED)
                if dropped is not None:
                    dropped.write(orjson.dumps(_dropped_row(page, part.path), option=_LINE))
        counts = dict(sorted(reasons.items()))
        read = {"read": _range_bytes(part), "lost": lost}
        errors = error_counts(damaged_ranges, first, documents + sum(reasons.values()))
        return {"documents": documents, "bytes": size, **read, "reasons": counts, **errors}

    def _report_damage(self, damage: DamagedRange, path: Path, *, is_logged: bool) -> None:
        what = f"{damage.reason} at byte {damage.start:,}"
        if not self.skip:
            hint = "copy the file again, or skip the damaged parts: --on-error skip"
            raise FormatError(path, what, found=damage.why, hint=hint)
        if is_logged:
            log.warning("%s: %s to %s: %s", path, what, f"{damage.end:,}", damage.why)

    def join(self, number: int) -> TaskResult:
        """Concatenate the parts of one file."""
        output, tasks = self._joined_files()[number]
        folder = self.dropped_output if output.is_relative_to(self.dropped_output) else self.output
        with open_output(output) as out:
            for task in tasks:
                with self._task_path(task, folder).open("rb") as part:
                    shutil.copyfileobj(part, out, 1 << 20)
        return {}

    def _joined_files(self) -> list[tuple[Path, list[int]]]:
        """Return the files that are written from parts, and the tasks of those parts."""
        tasks_of_file = dict[Path, list[int]]()
        for base in [self.output, *([self.dropped_output] if self.keep_dropped else [])]:
            for task in range(len(self.parts)):
                if self._is_partial(task):
                    tasks_of_file.setdefault(self._final_path(task, base), []).append(task)
        return list(tasks_of_file.items())

    def _is_partial(self, task: int) -> bool:
        """Return whether a task writes only a part of an output."""
        return self.one_file or self.parts[task].start > 0 or self.parts[task].end is not None

    def _final_path(self, task: int, base: Path) -> Path:
        suffix = self.suffix if base == self.output else ""
        return base if self.one_file else base / _output_name(self.parts[task].path, suffix)

    def _task_path(self, task: int, base: Path) -> Path:
        """Return the path that a task writes for `base`, the output or the dropped pages."""
        if self._is_partial(task):
            return self.work / ("parts" if base == self.output else "dropped") / f"{task:05d}.jsonl"
        return self._final_path(task, base)


def _range_bytes(part: FileRange) -> int:
    return (part.path.stat().st_size if part.end is None else part.end) - part.start


def _dropped_row(page: SkippedPage | DamagedRange, path: Path) -> dict[str, str | int]:
    if isinstance(page, DamagedRange):
        return {
            "dropped": page.reason,
            "file": str(path),
            "byte": page.start,
            "to": page.end,
            "why": page.why,
        }
    return {"dropped": page.reason, "id": page.id, "url": page.url, "title": page.title}
