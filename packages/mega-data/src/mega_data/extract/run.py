"""Files of the web or of a wiki to JSON lines {"id", "url", "title", "text"}: a task per file."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import orjson

from mega_data.extract.forms import pages
from mega_data.extract.pages import Page
from mega_data.readers.packed import unpacked_name
from mega_data.shards import identity, writing
from mega_data.steps import Result, Stage, plan
from mega_schema.errors import ConfigError

log = logging.getLogger("mega.data")
LOGGED = 20  # places of one file that are told; all are counted


@dataclass(frozen=True, slots=True)
class Extraction:
    """One run.

    Attributes:
        inputs: as `forms.sources` orders them.
        output: folder of a file per input, or one file of all when its name ends with .jsonl.
        work: folder of the markers, and of the parts of one file.
        form: one of forms.FORMS, or `auto`.
    """

    inputs: tuple[Path, ...]
    output: Path
    work: Path
    form: str = "auto"
    whole: bool = False

    def begin(self) -> None:
        """Make the work folder, or go on in one of the same run.

        Raises:
            ConfigError: it holds another run, or two inputs would have one output.
        """
        if not self.one_file:
            found = dict[str, Path]()
            for path in self.inputs:
                other = found.setdefault(unpacked_name(path), path)
                if other != path:
                    hint = "name one output file: --output all.jsonl"
                    raise ConfigError("--input", f"two files of one name: {other} and {path}", hint=hint)
        options = {"form": self.form, "whole": self.whole, "output": str(self.output.resolve())}
        plan(self.work, {"inputs": identity(self.inputs), **options})

    @property
    def one_file(self) -> bool:
        return self.output.suffix == ".jsonl"

    def stages(self) -> list[Stage]:
        """The stages, each to be done whole before the next begins."""
        stages = [Stage("extract", len(self.inputs), self.run)]
        if self.one_file:
            stages.append(Stage("join", 1, self.join, after=stages[0]))
        return stages

    def run(self, shard: int) -> Result:
        """Write the part of one input; what it had, and what was left out by reason."""
        source, reasons = self.inputs[shard], Counter[str]()
        documents = size = 0
        with writing(self.part(shard)) as out:
            for page in pages(source, self.form, whole=self.whole):
                if isinstance(page, Page):
                    row = {"id": page.id, "url": page.url, "title": page.title, "text": page.text}
                    size += out.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
                    documents += 1
                else:
                    reasons[page.reason] += 1
                    if page.where and reasons[page.reason] <= LOGGED:
                        log.warning("%s", page.where)
        return {"documents": documents, "bytes": size, "reasons": dict(sorted(reasons.items()))}

    def join(self, _: int) -> Result:
        """Write the one file from its parts."""
        with writing(self.output) as out:
            for shard in range(len(self.inputs)):
                with self.part(shard).open("rb") as part:
                    shutil.copyfileobj(part, out, 1 << 20)
        return {"bytes": self.output.stat().st_size}

    def part(self, shard: int) -> Path:
        """Where the pages of an input go."""
        if self.one_file:
            return self.work / "parts" / f"{shard:05d}.jsonl"
        return self.output / f"{unpacked_name(self.inputs[shard])}.jsonl"
