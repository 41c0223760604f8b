"""A list of steps over the shards of a corpus.

Steps that look at one document follow each other in one pass over a shard. A step that looks at all of them
(duplicates, the counts before decontamination) ends a pass; the next goes on from the files the one before
has left.

    WORK/00-pass/…  WORK/01-duplicates/…  WORK/02-pass/…  ->  OUTPUT/SHARD, OUTPUT/dropped/…, OUTPUT/report.*
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import orjson

from mega_data.clean.ngrams import Decontaminate
from mega_data.clean.registry import Duplicates, Named
from mega_data.clean.rows import Row, Work
from mega_data.clean.tally import Tally, together
from mega_data.dedup.presets import PRESETS
from mega_data.dedup.run import Deduplication
from mega_data.shards import document, identity, lines, output_name, writing
from mega_data.steps import Result, Stage, plan, results
from mega_schema.errors import ConfigError

DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Pass:
    """Steps over single documents, from files to files.

    Attributes:
        dropped: folder of the documents that go, with the reason under "dropped"; None keeps them nowhere.
    """

    work: Path
    inputs: tuple[Path, ...]
    output: Path
    steps: tuple[Named, ...]
    key: str
    dropped: Path | None

    def stages(self) -> list[Stage]:
        counted = any(isinstance(named.step, Decontaminate) for named in self.steps)
        counts = [Stage("count", len(self.inputs), self.count)] if counted else []
        return [*counts, Stage("pass", len(self.inputs), self.run, after=counts[0] if counts else None)]

    def count(self, shard: int) -> Result:
        """How often a shard has the n-grams of each decontamination."""
        steps = [named.step for named in self.steps if isinstance(named.step, Decontaminate)]
        counts = []
        for step in steps:
            path = self.inputs[shard]
            texts = (
                document(line, path, number, self.key)[self.key]
                for number, line in enumerate(lines(path), 1)
                if line.strip()
            )
            counts.append(step.count(texts))
        return {"counts": counts}

    def run(self, shard: int) -> Result:
        """Write what is left of a shard, and count."""
        path = self.inputs[shard]
        tallies = [Tally(named.name) for named in self.steps]
        works = [named.step.start() for named in self._counted()]
        with ExitStack() as stack:
            out = stack.enter_context(writing(self.output / output_name(path)))
            gone: IO[bytes] | None = None
            if self.dropped is not None:
                gone = stack.enter_context(writing(self.dropped / output_name(path)))
            for number, line in enumerate(lines(path), 1):
                if not line.strip():
                    continue
                row = Row(document(line, path, number, self.key), self.key, shard, number)
                for left in _through(row, works, tallies, _record(gone)):
                    # a document that no step changed keeps its bytes
                    kept = line if left is row else orjson.dumps(left.values)
                    out.write(kept.rstrip(b"\r\n") + b"\n")
        return {"steps": [tally.to_dict() for tally in tallies]}

    def _counted(self) -> list[Named]:
        """The steps, decontaminations with the corpus's counts."""
        number, made = 0, []
        for named in self.steps:
            if isinstance(named.step, Decontaminate):
                total = dict[str, int]()
                for found in results(self.stages()[0], self.work):
                    for gram, times in found["counts"][number].items():
                        total[gram] = total.get(gram, 0) + times
                number += 1
                named = replace(named, step=replace(named.step, counts=total))
            made.append(named)
        return made


Record = Callable[[Row, str], object]


def _record(gone: IO[bytes] | None) -> Record:
    if gone is None:
        return lambda row, why: None
    return lambda row, why: gone.write(orjson.dumps({**row.values, DROPPED: why}) + b"\n")


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
    """One run: all passes of a list of steps."""

    inputs: tuple[Path, ...]
    output: Path
    work: Path
    steps: tuple[Named, ...]
    key: str = "text"
    keep_dropped: bool = False

    def begin(self) -> None:
        """Make the work folder, or go on in one of the same run.

        Raises:
            ConfigError: it holds another run, or a step's options cannot be meant.
        """
        if not self.steps:
            raise ConfigError("--step", "no step", hint="--step fix-text --step duplicates")
        for named in self.steps:
            if not isinstance(named.step, Duplicates):
                named.step.start()  # sees whether libraries and files are there
        steps = [[named.name, asdict(named.step)] for named in self.steps]
        wanted = {"inputs": identity(self.inputs), "output": str(self.output.resolve()), "key": self.key}
        plan(self.work, {**wanted, "steps": steps, "keep_dropped": self.keep_dropped})

    def passes(self) -> list[Pass | Deduplication]:
        """What is to be run, one after the other, each in its own folder `work`."""
        groups = list[list[Named]]()
        for named in self.steps:
            alone = isinstance(named.step, Duplicates)
            # the counts of a decontamination are of what the steps before it have left
            if alone or isinstance(named.step, Decontaminate) or not groups or _alone(groups[-1]):
                groups.append([])
            groups[-1].append(named)
        made, inputs = list[Pass | Deduplication](), self.inputs
        for number, group in enumerate(groups):
            name = f"{number:02d}-{group[0].name if _alone(group) else 'pass'}"
            work = self.work / name
            output = self.output if number == len(groups) - 1 else work / "out"
            dropped = self.output / DROPPED / name if self.keep_dropped else None
            if _alone(group):
                step = group[0].step
                how = _preset(step)
                key = step.key or self.key
                made.append(Deduplication(inputs, output, work, how, key, dropped=dropped))
            else:
                made.append(Pass(work, inputs, output, tuple(group), self.key, dropped))
            inputs = tuple(output / output_name(path) for path in self.inputs)
        return made

    def report(self) -> list[dict[str, Any]]:
        """The counts of each step over all shards."""
        found = []
        for one in self.passes():
            shards = results(one.stages()[-1], one.work)
            if isinstance(one, Pass):
                for number in range(len(one.steps)):
                    found.append(together(shard["steps"][number] for shard in shards))
            else:
                found.append(_duplicates(one, shards))
        return found


def _alone(group: Sequence[Named]) -> bool:
    return isinstance(group[0].step, Duplicates)


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
