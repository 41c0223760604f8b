"""Remove near-duplicates from a corpus in stages of tasks that exchange files in a work folder.

    keys     a task per shard    text -> band keys, one per line and band
    sort     a task per group    keys of consecutive shards -> runs, sorted and indexed by key
    pairs    a task per band     equal keys of all runs -> pairs of documents; for a large corpus a task per
                                 band and part of the key range
    paired   one task            pairs -> a bit for each document that has one, if pairs are checked
    sets     a task per shard    shingle sets of the documents that have a pair, if pairs are checked
    groups   one task            pairs, checked -> the root (smallest document) of each document's group; of
                                 a large corpus without checks several stages of tasks, see `star_groups`
    filter   a task per shard    lines whose document is its own root, byte for byte
    join     a task per input    the files of an input that is divided into ranges

A shard is an input, or a range of a large one.

A document's number is its place: shards sorted by name, then lines. So the kept documents depend neither on
the workers nor on the executor nor on the order of the input files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mega_data.dedup.corpus_shards import CorpusShards
from mega_data.dedup.earlier_output import EarlierShard
from mega_data.dedup.kernels import load_kernels
from mega_data.dedup.presets import Preset
from mega_data.dedup.sorted_runs import MAX_CELLS
from mega_data.dedup.stages import (
    BandKeys,
    BandPairs,
    DocumentFilter,
    DuplicateGroups,
    PairedSets,
    PairFlags,
    SortedKeys,
)
from mega_data.dedup.star_groups import StarGroups
from mega_data.dedup.work_files import WorkFiles
from mega_data.jsonl_shards import file_bytes, file_states
from mega_data.range_outputs import RangeOutputs, planned_ranges, range_bytes
from mega_data.readers.ranges import whole_files
from mega_data.task_stages import ReusableTasks, TaskResult, TaskStage, open_run_folder

DEFAULT_MEMORY = 256 << 20  # bytes
GROUP_BYTES = 2 << 30  # of shards whose keys a task sorts, and
MAX_GROUPS = 1 << 10  # so that a task reads long parts of few runs
RANGE_BYTES = 64 << 30  # of a corpus for each part of the key range
LAYOUT = 4  # of the files in the work folder


@dataclass(frozen=True, slots=True)
class Deduplication:
    """A deduplication run.

    Attributes:
        outputs: the shards of the run in the order of `jsonl_shards.find_shards`, and their output files; a
            dropped document has the name of the document that it duplicates.
        work: folder of intermediate files; may be removed after the run.
        memory: bytes for sorting pairs.
        id_key: key of the id by which dropped documents name others; "" names them by file and line.
        earlier: shards of earlier outputs; documents that duplicate one of their documents are dropped.
        kept_keys: folder of the keys of the kept documents, for `earlier` of later runs; None does not write
            them.
    """

    outputs: RangeOutputs
    work: Path
    preset: Preset
    key: str = "text"
    memory: int = DEFAULT_MEMORY
    id_key: str = ""
    earlier: tuple[EarlierShard, ...] = ()
    kept_keys: Path | None = None

    def begin(self) -> None:
        """Create the work folder, or resume the same run in an existing one.

        Raises:
            ConfigError: the folder holds another run.
        """
        load_kernels()  # compiled once, before the workers need them
        options: dict[str, Any] = {"preset": asdict(self.preset), "key": self.key, "id_key": self.id_key}
        options |= {"output_format": self.outputs.suffix, "layout": LAYOUT}
        options |= {"earlier": len(self.earlier), "kept_keys": str(self.kept_keys)}
        folders = {"output": str(self.outputs.output.resolve()), "dropped": str(self.outputs.dropped)}
        skip = {"skip": self.outputs.quarantine is not None}
        earlier = file_states([shard.source for shard in self.earlier])
        planned = planned_ranges(self.outputs.ranges)
        inputs = {**planned, "inputs": [*earlier, *planned["inputs"]]}
        owners = [*range(len(earlier)), *(len(earlier) + part.input for part in self.outputs.ranges)]
        reuse = ReusableTasks("done/keys", owners, "skip", self.outputs.output)
        open_run_folder(self.work, {**inputs, **folders, **options, **skip}, reuse)

    def stages(self) -> list[TaskStage]:
        """Return the stages; each is finished before the next begins."""
        earlier = whole_files(shard.documents for shard in self.earlier)
        corpus = CorpusShards(earlier, self.outputs, self.key, self.id_key)
        sizes = tuple(map(range_bytes, corpus.shards))
        new_sizes = sizes[len(earlier) :]
        weights = (*(file_bytes(shard.source) for shard in self.earlier), *new_sizes)
        key_sizes = tuple(0 if shard.keys else file_bytes(shard.documents) for shard in self.earlier)
        groups = group_shards(weights)
        earlier_keys = tuple(shard.keys for shard in self.earlier)
        files = WorkFiles(self.work, self.preset, len(groups), count_ranges(sum(weights)), earlier_keys)
        keys = BandKeys(files, corpus, keeps_ids=self.outputs.dropped is not None and self.id_key != "")
        document_filter = DocumentFilter(files, corpus, self.kept_keys)
        stages = [TaskStage("keys", len(sizes), keys.run, sizes=(*key_sizes, *new_sizes))]

        def add(
            name: str, tasks: int, work: Callable[[int], TaskResult], sizes: tuple[int, ...] = ()
        ) -> None:
            stages.append(TaskStage(name, tasks, work, after=stages[-1], sizes=sizes))

        add("sort", len(groups), SortedKeys(files, groups, self.memory).run)
        pair_tasks = self.preset.bands * files.ranges
        stars = None
        if files.ranges > 1 and self.preset.jaccard is None:
            stars = StarGroups(files, len(groups), pair_tasks, self.memory)
        add("pairs", pair_tasks, BandPairs(files, self.memory, stars).run)
        if self.preset.jaccard is not None:
            add("paired", 1, PairFlags(files, self.memory).run)
            add("sets", len(sizes), PairedSets(files, corpus).run, sizes)
        if stars is None:
            add("groups", 1, DuplicateGroups(files, self.memory).run)
        else:
            for star_stage in stars.stages():
                add(*star_stage)
        add("filter", len(new_sizes), document_filter.run, new_sizes)
        return self.outputs.add_join(stages, self.work, document_filter.join_keys)


def group_shards(sizes: Sequence[int]) -> tuple[range, ...]:
    """Divide shards of these bytes into groups of consecutive ones, each sorted by one task."""
    limit = max(GROUP_BYTES, sum(sizes) // MAX_GROUPS)
    groups = list[range]()
    start = size = 0
    for shard, shard_bytes in enumerate(sizes):
        if size and size + shard_bytes > limit:
            groups.append(range(start, shard))
            start = shard
            size = 0
        size += shard_bytes
    return (*groups, range(start, len(sizes)))


def count_ranges(size: int) -> int:
    """Return the number of parts of the key range for a corpus of these bytes, a power of two."""
    return min(MAX_CELLS, 1 << (size // RANGE_BYTES).bit_length())
