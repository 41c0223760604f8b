"""Run a list of cleaning steps over the shards of a corpus.

Steps that need one document run one after the other in one pass over a shard. A step that needs the whole
corpus (duplicates, spans, counting for decontamination) ends a pass. The next pass reads the files of that
pass.

    WORK/00-pass/…  WORK/01-duplicates/…  WORK/02-pass/…  ->  OUTPUT/SHARD, OUTPUT/dropped/…, OUTPUT/report.*
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from mega_data.clean.decontaminate import Decontaminate
from mega_data.clean.missing_keys import MISSING_KEYS, find_missing_keys, missing_keys, watch_keys
from mega_data.clean.python_step import DocumentError, PythonStep
from mega_data.clean.registry import DuplicateFilter, NamedStep
from mega_data.clean.sentence_dedup import SentenceDedup, SentenceDedupStep
from mega_data.clean.stats import StepStats, merge_stats
from mega_data.clean.step import Row, RowFunction
from mega_data.clean.stored_keys import check_stored_keys
from mega_data.dedup.pipeline import DEFAULT_MEMORY, Deduplication
from mega_data.dedup.presets import PRESETS
from mega_data.jsonl_shards import (
    LineCount,
    exact_place,
    fail_on_row,
    file_states,
    quarantine_counts,
    read_documents,
    skip_row,
)
from mega_data.range_outputs import RangeOutputs, lines_before, planned_ranges, range_bytes, result_stage
from mega_data.readers.inputs import DROPPED, QUARANTINE
from mega_data.readers.ranges import InputRange
from mega_data.task_stages import (
    ReusableTasks,
    TaskResult,
    TaskStage,
    open_run_folder,
    read_result,
    read_results,
)
from mega_data.texts import dump_line, text_of
from mega_schema.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CleaningPass:
    """Steps over single documents, from files to files.

    Attributes:
        outputs: of each task; dropped documents have the reason under "dropped".
        id_key: key of the id that each document must have; "" requires none.
    """

    work: Path
    outputs: RangeOutputs
    steps: tuple[NamedStep, ...]
    key: str
    id_key: str

    @property
    def inputs(self) -> tuple[InputRange, ...]:
        return self.outputs.ranges

    def stages(self) -> list[TaskStage]:
        sizes = tuple(map(range_bytes, self.inputs))
        stages = self._count_stages(sizes)
        after = stages[-1] if stages else None
        stages.append(TaskStage("pass", len(self.inputs), self.run, after=after, sizes=sizes))
        return self.outputs.add_join(stages, self.work)

    def _count_stages(self, sizes: tuple[int, ...] = ()) -> list[TaskStage]:
        """Return the stages before a decontamination."""
        if not any(isinstance(named_step.step, Decontaminate) for named_step in self.steps):
            return []
        count = TaskStage("count", len(self.inputs), self.count, sizes=sizes)
        return [count, TaskStage("total", 1, self.total, after=count)]

    def count(self, shard: int) -> TaskResult:
        """Count the n-grams of each decontamination in a shard."""
        steps = [named_step.step for named_step in self.steps if isinstance(named_step.step, Decontaminate)]
        on_error = skip_row if self.outputs.quarantine else fail_on_row
        documents = 0
        lines = LineCount()

        def texts() -> Iterator[str]:
            nonlocal documents
            documents = 0
            rows = read_documents(self.inputs[shard], self.key, on_error, self.id_key, lines)
            for _, _, values in rows:
                documents += 1
                yield text_of(values, self.key)

        counts = [step.count(texts()) for step in steps]
        read = range_bytes(self.inputs[shard])
        return {"counts": counts, "read": read, "documents": documents, "lines": lines.value}

    def run(self, shard: int) -> TaskResult:
        """Write the cleaned documents of a shard and return its counts."""
        part = self.inputs[shard]
        stats = [StepStats(named_step.name) for named_step in self.steps]
        functions = watch_keys(named_step.step for named_step in self._steps_with_counts())
        first_line = self._lines_before(shard)
        lines = LineCount()
        with self.outputs.open(shard) as (out, dropped, quarantine):
            record = _dropped_recorder(dropped)
            on_error = quarantine or fail_on_row
            for number, line, values in read_documents(part, self.key, on_error, self.id_key, lines):
                row = Row(values, self.key, part.input, first_line + number)
                try:
                    for result in _apply_steps(row, functions, stats, record):
                        # a document that no step changed keeps its bytes
                        output_line = line if result is row else dump_line(result.values)
                        out.write(output_line.rstrip(b"\r\n") + b"\n")
                except DocumentError as error:
                    raise error.locate(exact_place(part, number)) from error.__cause__
        errors = quarantine_counts(quarantine, stats[0].documents_in)
        counts = {"read": range_bytes(part), "documents": stats[0].documents_in, "lines": lines.value}
        steps = [step_stats.to_dict() for step_stats in stats]
        return {"steps": steps, MISSING_KEYS: missing_keys(functions), **counts, **errors}

    def _lines_before(self, shard: int) -> int:
        """Return the lines of the input before a range; 0 if no step uses the number of a line."""
        stages = self._count_stages()
        return lines_before(self.inputs, read_results(stages[0], self.work))[shard] if stages else 0

    def total(self, _: int) -> TaskResult:
        """Sum the n-gram counts of each decontamination over the corpus."""
        totals = [Counter[str]() for named_step in self.steps if isinstance(named_step.step, Decontaminate)]
        for shard_counts in read_results(self._count_stages()[0], self.work):
            for total, counts in zip(totals, shard_counts["counts"], strict=True):
                total.update(counts)
        return {"counts": totals}

    def _steps_with_counts(self) -> list[NamedStep]:
        """Return the steps, decontaminations with the counts of the corpus."""
        stages = self._count_stages()
        steps = list[NamedStep]()
        counts = iter(read_result(stages[-1], 0, self.work)["counts"] if stages else ())
        for named_step in self.steps:
            if isinstance(named_step.step, Decontaminate):
                named_step = replace(named_step, step=replace(named_step.step, counts=next(counts)))
            steps.append(named_step)
        return steps


RecordDropped = Callable[[Row, str], object]


def _dropped_recorder(dropped: IO[bytes] | None) -> RecordDropped:
    if dropped is None:
        return lambda row, reason: None
    return lambda row, reason: dropped.write(dump_line({**row.values, DROPPED: reason}))


def _apply_steps(
    row: Row, functions: Sequence[RowFunction], stats: Sequence[StepStats], record: RecordDropped
) -> Iterator[Row]:
    """Apply the steps to one document and yield the resulting documents."""
    if not functions:
        yield row
        return
    step_stats = stats[0]
    step_stats.count_in(row.text)
    verdict = functions[0](row)
    if isinstance(verdict, str):
        step_stats.count_dropped(verdict, row.text)
        record(row, f"{step_stats.step}: {verdict}")
        return
    for result in verdict:
        step_stats.count_out(result.text)
        step_stats.changed += result.text != row.text
        if step_stats.step == "language" and isinstance(language := result.values.get("language"), str):
            step_stats.languages[language] += 1
        if result.counts:
            step_stats.replaced.update(result.counts)
            result = result.with_counts(None)
        yield from _apply_steps(result, functions[1:], stats[1:], record)


@dataclass(frozen=True, slots=True)
class Cleaning:
    """A cleaning run: all passes of a list of steps.

    Attributes:
        keep_dropped: write dropped documents to `output`/dropped.
        skip: write lines that are not documents to `output`/quarantine; otherwise the first one ends the run.
        id_key: key of the id of each document; "" for none.
        memory: bytes for sorting, in steps that compare all documents.
        suffix: suffix of the format of the kept documents, see `output_formats`.
    """

    inputs: tuple[InputRange, ...]
    output: Path
    work: Path
    steps: tuple[NamedStep, ...]
    key: str = "text"
    keep_dropped: bool = False
    skip: bool = False
    id_key: str = ""
    memory: int = DEFAULT_MEMORY
    suffix: str = ""

    def begin(self) -> None:
        """Create the work folder, or resume the same run in an existing one.

        Raises:
            ConfigError: the folder holds another run, or a step's options are invalid.
        """
        check_steps(self.steps, self.key, self.id_key)
        steps = [_recorded_step(named_step) for named_step in self.steps]
        wanted = {**planned_ranges(self.inputs), "output": str(self.output.resolve()), "key": self.key}
        options = {
            "keep_dropped": self.keep_dropped,
            "skip": self.skip,
            "id_key": self.id_key,
            "output_format": self.suffix,
        }
        first = self.passes()[0]
        stage = first.stages()[0]
        markers = f"{first.work.name}/done/{stage.name}"
        reuse = ReusableTasks(markers, [part.input for part in self.inputs], "skip", self.output)
        open_run_folder(self.work, {**wanted, "steps": steps, **options}, reuse)

    def passes(self) -> list[CleaningPass | Deduplication | SentenceDedup]:
        """Return the passes in their order, each with its own folder `work`."""
        groups = list[list[NamedStep]]()
        for named_step in self.steps:
            # a decontamination counts the output of the steps before it
            is_own_pass = _is_whole_corpus([named_step]) or isinstance(named_step.step, Decontaminate)
            if is_own_pass or not groups or _is_whole_corpus(groups[-1]):
                groups.append([])
            groups[-1].append(named_step)
        passes = list[CleaningPass | Deduplication | SentenceDedup]()
        inputs = self.inputs
        for number, group in enumerate(groups):
            name = f"{number:02d}-{group[0].name if _is_whole_corpus(group) else 'pass'}"
            output = self.output if number == len(groups) - 1 else self.work / name / "out"
            outputs = self._outputs(name, inputs, output)
            passes.append(self._make_pass(name, group, outputs))
            inputs = outputs.as_inputs()
        return passes

    def _outputs(self, name: str, inputs: tuple[InputRange, ...], output: Path) -> RangeOutputs:
        is_last = output == self.output
        return RangeOutputs(
            inputs,
            output,
            self.work / name / "parts",
            dropped=self.output / DROPPED / name if self.keep_dropped else None,
            quarantine=self.output / QUARANTINE / name if self.skip else None,
            suffix=self.suffix if is_last else "",
            is_joined=is_last,
        )

    def _make_pass(
        self, name: str, group: list[NamedStep], outputs: RangeOutputs
    ) -> CleaningPass | Deduplication | SentenceDedup:
        work = self.work / name
        step = group[0].step
        if isinstance(step, DuplicateFilter):
            preset = _dedup_preset(step)
            return Deduplication(outputs, work, preset, step.key or self.key, self.memory, self.id_key)
        if isinstance(step, SentenceDedupStep):
            return SentenceDedup(work, outputs, group[0].name, step, self.key, self.memory, self.id_key)
        return CleaningPass(work, outputs, tuple(group), self.key, self.id_key)

    def count_inputs(self) -> int:
        return len({part.input for part in self.inputs})

    def count_skipped(self) -> int:
        """Count the lines of all shards that are not documents."""
        passes = self.passes()
        return sum(
            int(shard["skipped"])
            for cleaning_pass in passes
            for shard in read_results(result_stage(cleaning_pass.stages()), cleaning_pass.work)
        )

    def missing_keys(self) -> Iterator[tuple[NamedStep, list[str]]]:
        """Yield the steps whose key no document has, and the keys of a document."""
        for cleaning_pass in self.passes():
            if isinstance(cleaning_pass, CleaningPass):
                shards = read_results(result_stage(cleaning_pass.stages()), cleaning_pass.work)
                for number, named_step in enumerate(cleaning_pass.steps):
                    if keys := find_missing_keys(number, shards):
                        yield named_step, keys

    def report(self) -> list[dict[str, Any]]:
        """Return the counts of each step over all shards."""
        report = []
        for cleaning_pass in self.passes():
            shards = read_results(result_stage(cleaning_pass.stages()), cleaning_pass.work)
            if isinstance(cleaning_pass, Deduplication):
                report.append(_dedup_stats(cleaning_pass, shards))
                continue
            for number in range(len(shards[0]["steps"])):
                report.append(merge_stats(shard["steps"][number] for shard in shards))
        return report


def check_steps(
    steps: Sequence[NamedStep], key: str = "text", id_key: str = "", *, starts: bool = True
) -> None:
    """Refuse steps that cannot run.

    Args:
        key: key of the text; no step may store another value there.
        id_key: key of the id; as `key`.
        starts: start those that need no other document: a library or a file may be missing.

    Raises:
        ConfigError: there is no step, or the options of one do not fit each other.
    """
    if not steps:
        raise ConfigError("--step", "no step", hint="--step fix-text --step duplicates")
    for named_step in steps:
        check_stored_keys(named_step.name, named_step.step, key, id_key)
    for named_step in steps:
        if isinstance(named_step.step, SentenceDedupStep) and not named_step.step.sentences:
            raise ConfigError(
                "step spans: sentences", "not a number of sentences", found=0, wanted="1 or more"
            )
        if starts and not _is_whole_corpus([named_step]):
            named_step.step.start()


def _recorded_step(named_step: NamedStep) -> list[Any]:
    """Return a step as the plan records it, with the state of the files and the code that it uses."""
    step = named_step.step.with_code() if isinstance(named_step.step, PythonStep) else named_step.step
    options = asdict(step)
    words = [word for value in options.values() for word in (value if isinstance(value, tuple) else [value])]
    used_files = [Path(word) for word in words if isinstance(word, str) and word and _is_file(word)]
    return [named_step.name, options, file_states(used_files)]


def _is_file(word: str) -> bool:
    """Return whether an option's value is the path of a file; it may be a pattern or a list of codes."""
    try:
        return Path(word).is_file()
    except (OSError, ValueError):  # too long, or with a NUL
        return False


def _is_whole_corpus(group: Sequence[NamedStep]) -> bool:
    """Return whether the group is one step that compares all documents."""
    return isinstance(group[0].step, DuplicateFilter | SentenceDedupStep)


def _dedup_preset(step: DuplicateFilter) -> Any:
    if step.preset not in PRESETS:
        found = step.preset
        raise ConfigError("step duplicates: preset", "unknown", found=found, wanted=" | ".join(PRESETS))
    preset = PRESETS[step.preset]
    return replace(preset, jaccard=step.jaccard) if step.jaccard and preset.unit != "text" else preset


def _dedup_stats(deduplication: Deduplication, shards: Sequence[TaskResult]) -> dict[str, Any]:
    total = merge_stats(shards)
    dropped = total["documents"] - total["kept"]
    return {
        "step": deduplication.work.name.partition("-")[2],
        "documents_in": total["documents"],
        "documents_out": total["kept"],
        "bytes_in": total["bytes"],
        "bytes_out": total["kept_bytes"],
        "changed": 0,
        "reasons": {"like an earlier one": dropped} if dropped else {},
        "replaced": {},
        "languages": {},
        "lengths_in": {},
        "lengths_out": {},
        "examples": {},
    }
