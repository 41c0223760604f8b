"""A list of steps over the shards of a corpus.

Steps that look at one document follow each other in one pass over a shard. A step that looks at all of them
(duplicates, spans, the counts before decontamination) ends a pass; the next goes on from the files the one
before has left.

    WORK/00-pass/…  WORK/01-duplicates/…  WORK/02-pass/…  ->  OUTPUT/SHARD, OUTPUT/dropped/…, OUTPUT/report.*
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from mega_data.clean.decontaminate import Decontaminate
from mega_data.clean.registry import Duplicates, Named
from mega_data.clean.sentence_dedup import SpanPass, Spans
from mega_data.clean.stats import Tally, together
from mega_data.clean.step import Row, Work
from mega_data.dedup.pipeline import MEMORY, Deduplication
from mega_data.dedup.presets import PRESETS
from mega_data.jsonl_shards import (
    documents,
    errors_in,
    identity,
    output_name,
    parted,
    pass_over,
    refuse,
    size,
)
from mega_data.readers.inputs import DROPPED, QUARANTINE
from mega_data.task_stages import Result, Reuse, Stage, plan, result, results
from mega_data.texts import dump_line, text_of
from mega_schema.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Pass:
    """Steps over single documents, from files to files.

    Attributes:
        dropped: folder of the documents that go, with the reason under "dropped"; None keeps them nowhere.
        quarantine: folder of the lines that are no documents; None ends the run at the first.
        id_key: where documents must have an id; "" asks for none.
    """

    work: Path
    inputs: tuple[Path, ...]
    output: Path
    steps: tuple[Named, ...]
    key: str
    dropped: Path | None
    quarantine: Path | None
    id_key: str

    def stages(self) -> list[Stage]:
        sizes = tuple(map(size, self.inputs))
        stages = self._counting(sizes)
        after = stages[-1] if stages else None
        return [*stages, Stage("pass", len(self.inputs), self.run, after=after, sizes=sizes)]

    def _counting(self, sizes: tuple[int, ...] = ()) -> list[Stage]:
        """The stages before a decontamination."""
        if not any(isinstance(named.step, Decontaminate) for named in self.steps):
            return []
        count = Stage("count", len(self.inputs), self.count, sizes=sizes)
        return [count, Stage("total", 1, self.total, after=count)]

    def count(self, shard: int) -> Result:
        """How often a shard has the n-grams of each decontamination."""
        steps = [named.step for named in self.steps if isinstance(named.step, Decontaminate)]
        faults = pass_over if self.quarantine else refuse
        seen = 0

        def texts() -> Iterator[str]:
            nonlocal seen
            seen = 0
            for _, _, values in documents(self.inputs[shard], self.key, faults, self.id_key):
                seen += 1
                yield text_of(values, self.key)

        counts = [step.count(texts()) for step in steps]
        return {"counts": counts, "read": size(self.inputs[shard]), "documents": seen}

    def run(self, shard: int) -> Result:
        """Write what is left of a shard, and count."""
        path = self.inputs[shard]
        tallies = [Tally(named.name) for named in self.steps]
        works = [named.step.start() for named in self._counted()]
        with parted(path, self.output, self.dropped, self.quarantine) as (out, gone, wrong):
            for number, line, values in documents(path, self.key, wrong or refuse, self.id_key):
                row = Row(values, self.key, shard, number)
                for left in _through(row, works, tallies, _record(gone)):
                    # a document that no step changed keeps its bytes
                    kept = line if left is row else dump_line(left.values)
                    out.write(kept.rstrip(b"\r\n") + b"\n")
        errors = errors_in(wrong, tallies[0].documents_in)
        seen = {"read": size(path), "documents": tallies[0].documents_in}
        return {"steps": [tally.to_dict() for tally in tallies], **seen, **errors}

    def total(self, _: int) -> Result:
        """How often the corpus has the n-grams of each decontamination."""
        totals = [Counter[str]() for named in self.steps if isinstance(named.step, Decontaminate)]
        for found in results(self._counting()[0], self.work):
            for total, counts in zip(totals, found["counts"], strict=True):
                total.update(counts)
        return {"counts": totals}

    def _counted(self) -> list[Named]:
        """The steps, decontaminations with the corpus's counts."""
        stages, made = self._counting(), list[Named]()
        counts = iter(result(stages[-1], 0, self.work)["counts"] if stages else ())
        for named in self.steps:
            if isinstance(named.step, Decontaminate):
                named = replace(named, step=replace(named.step, counts=next(counts)))
            made.append(named)
        return made


Record = Callable[[Row, str], object]


def _record(gone: IO[bytes] | None) -> Record:
    if gone is None:
        return lambda row, why: None
    return lambda row, why: gone.write(dump_line({**row.values, DROPPED: why}))


def _through(row: Row, works: Sequence[Work], tallies: Sequence[Tally], record: Record) -> Iterator[Row]:
    """What the steps leave of a document."""
    if not works:
        yield row
        return
    tally = tallies[0]
    tally.entered(row.text)
    verdict = works[0](row)
    if isinstance(verdict, str):
        tally.dropped(verdict, row.text)
        record(row, f"{tally.step}: {verdict}")
        return
    for left in verdict:
        tally.left(left.text)
        tally.changed += left.text != row.text
        if tally.step == "language" and isinstance(language := left.values.get("language"), str):
            tally.languages[language] += 1
        yield from _through(left, works[1:], tallies[1:], record)


@dataclass(frozen=True, slots=True)
class Cleaning:
    """One run: all passes of a list of steps.

    Attributes:
        keep_dropped: write the documents that go to `output`/dropped.
        skip: write the lines that are no documents to `output`/quarantine; else the first ends the run.
        id_key: where documents have an id; "" is nowhere.
        memory: bytes that sorting may take, for steps that look at all documents.
    """

    inputs: tuple[Path, ...]
    output: Path
    work: Path
    steps: tuple[Named, ...]
    key: str = "text"
    keep_dropped: bool = False
    skip: bool = False
    id_key: str = ""
    memory: int = MEMORY

    def begin(self) -> None:
        """Make the work folder, or go on in one of the same run.

        Raises:
            ConfigError: it holds another run, or a step's options cannot be meant.
        """
        if not self.steps:
            raise ConfigError("--step", "no step", hint="--step fix-text --step duplicates")
        for named in self.steps:
            if isinstance(named.step, Spans) and not named.step.sentences:
                raise ConfigError("step spans: sentences", "none in a span", found=0, wanted="1 or more")
            if not _alone([named]):
                named.step.start()  # sees whether libraries and files are there
        steps = [[named.name, asdict(named.step)] for named in self.steps]
        wanted = {"inputs": identity(self.inputs), "output": str(self.output.resolve()), "key": self.key}
        options = {"keep_dropped": self.keep_dropped, "skip": self.skip, "id_key": self.id_key}
        first = self.passes()[0]
        stage = first.stages()[0]
        reuse = Reuse(f"{first.work.name}/done/{stage.name}", range(stage.tasks), "skip", self.output)
        plan(self.work, {**wanted, "steps": steps, **options}, reuse)

    def passes(self) -> list[Pass | Deduplication | SpanPass]:
        """What is to be run, one after the other, each in its own folder `work`."""
        groups = list[list[Named]]()
        for named in self.steps:
            # the counts of a decontamination are of what the steps before it have left
            alone = _alone([named]) or isinstance(named.step, Decontaminate)
            if alone or not groups or _alone(groups[-1]):
                groups.append([])
            groups[-1].append(named)
        made, inputs = list[Pass | Deduplication | SpanPass](), self.inputs
        for number, group in enumerate(groups):
            name = f"{number:02d}-{group[0].name if _alone(group) else 'pass'}"
            output = self.output if number == len(groups) - 1 else self.work / name / "out"
            made.append(self._pass(name, group, inputs, output))
            inputs = tuple(output / output_name(path) for path in self.inputs)
        return made

    def _pass(
        self, name: str, group: list[Named], inputs: tuple[Path, ...], output: Path
    ) -> Pass | Deduplication | SpanPass:
        work = self.work / name
        dropped = self.output / DROPPED / name if self.keep_dropped else None
        quarantine = self.output / QUARANTINE / name if self.skip else None
        step = group[0].step
        if isinstance(step, Duplicates):
            how, key = _preset(step), step.key or self.key
            one = Deduplication(inputs, output, work, how, key, self.memory)
            return replace(one, dropped=dropped, quarantine=quarantine, id_key=self.id_key)
        beside = (dropped, quarantine, self.id_key)
        if isinstance(step, Spans):
            return SpanPass(work, inputs, output, group[0].name, step, self.key, self.memory, *beside)
        return Pass(work, inputs, output, tuple(group), self.key, *beside)

    def skipped(self) -> int:
        """Lines that are no documents, over all shards."""
        passes = self.passes()
        return sum(int(shard["skipped"]) for one in passes for shard in results(one.stages()[-1], one.work))

    def report(self) -> list[dict[str, Any]]:
        """The counts of each step over all shards."""
        found = []
        for one in self.passes():
            shards = results(one.stages()[-1], one.work)
            if isinstance(one, Deduplication):
                found.append(_duplicates(one, shards))
                continue
            for number in range(len(shards[0]["steps"])):
                found.append(together(shard["steps"][number] for shard in shards))
        return found


def _alone(group: Sequence[Named]) -> bool:
    """Whether the steps are one that looks at all documents together."""
    return isinstance(group[0].step, Duplicates | Spans)


def _preset(step: Duplicates) -> Any:
    if step.preset not in PRESETS:
        found = step.preset
        raise ConfigError("step duplicates: preset", "unknown", found=found, wanted=" | ".join(PRESETS))
    how = PRESETS[step.preset]
    return replace(how, jaccard=step.jaccard) if step.jaccard and how.unit != "text" else how


def _duplicates(one: Deduplication, shards: Sequence[Result]) -> dict[str, Any]:
    total = together(shards)
    gone = total["documents"] - total["kept"]
    return {
        "step": one.work.name.partition("-")[2],
        "documents_in": total["documents"],
        "documents_out": total["kept"],
        "bytes_in": total["bytes"],
        "bytes_out": total["kept_bytes"],
        "changed": 0,
        "reasons": {"like an earlier one": gone} if gone else {},
        "languages": {},
        "lengths_in": {},
        "lengths_out": {},
        "examples": {},
    }
