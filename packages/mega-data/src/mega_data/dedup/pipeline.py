"""Remove near-duplicates from a corpus in five stages of tasks that exchange files in a work folder.

    keys     a task per shard    text -> band keys, one per line and band
    pairs    a task per band     equal keys -> pairs of documents
    sets     a task per shard    shingle sets of the documents that have a pair, if pairs are checked
    groups   one task            pairs, checked -> the root (smallest document) of each document's group
    filter   a task per shard    lines whose document is its own root, byte for byte

A document's number is its place: shards sorted by name, then lines. So the kept documents depend neither on
the workers nor on the executor nor on the order of the input files.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from mega_data.dedup.corpus_shards import CorpusShards
from mega_data.dedup.presets import Preset
from mega_data.dedup.stages import BandKeys, BandPairs, DocumentFilter, DuplicateGroups, PairedSets
from mega_data.dedup.work_files import WorkFiles
from mega_data.jsonl_shards import file_bytes, file_states
from mega_data.task_stages import ReusableTasks, TaskStage, open_run_folder

DEFAULT_MEMORY = 256 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Deduplication:
    """A deduplication run.

    Attributes:
        inputs: shards in the order of `jsonl_shards.find_shards`.
        output: folder of the kept lines, a file per shard.
        work: folder of intermediate files; may be removed after the run.
        memory: bytes for sorting pairs.
        dropped: folder of the dropped documents, each with the document that it duplicates; None does not
            write them.
        quarantine: folder for lines that are not documents; None: the first such line ends the run.
        id_key: key of the id by which `dropped` names documents; "" names them by file and line.
        suffix: suffix of the format of the kept lines, see `output_formats`.
    """

    inputs: tuple[Path, ...]
    output: Path
    work: Path
    preset: Preset
    key: str = "text"
    memory: int = DEFAULT_MEMORY
    dropped: Path | None = None
    quarantine: Path | None = None
    id_key: str = ""
    suffix: str = ""

    def begin(self) -> None:
        """Create the work folder, or resume the same run in an existing one.

        Raises:
            ConfigError: the folder holds another run.
        """
        options = {"preset": asdict(self.preset), "key": self.key, "id_key": self.id_key}
        options["output_format"] = self.suffix
        folders = {"output": str(self.output.resolve()), "dropped": str(self.dropped)}
        skip = {"skip": self.quarantine is not None}
        reuse = ReusableTasks("done/keys", range(len(self.inputs)), "skip", self.output)
        open_run_folder(self.work, {"inputs": file_states(self.inputs), **folders, **options, **skip}, reuse)

    def stages(self) -> list[TaskStage]:
        """Return the stages; each is finished before the next begins."""
        shards = len(self.inputs)
        sizes = tuple(map(file_bytes, self.inputs))
        files = WorkFiles(self.work, self.preset)
        corpus = CorpusShards(self.inputs, self.key, self.id_key, self.quarantine)
        keys = BandKeys(files, corpus, keeps_ids=self.dropped is not None and self.id_key != "")
        pairs = BandPairs(files, shards, self.memory)
        document_filter = DocumentFilter(files, corpus, self.output, self.dropped, self.suffix)
        stages = [TaskStage("keys", shards, keys.run, sizes=sizes)]
        stages.append(TaskStage("pairs", self.preset.bands, pairs.run, after=stages[-1]))
        if self.preset.jaccard is not None:
            sets = PairedSets(files, corpus)
            stages.append(TaskStage("sets", shards, sets.run, after=stages[-1], sizes=sizes))
        stages.append(TaskStage("groups", 1, DuplicateGroups(files).run, after=stages[-1]))
        stages.append(TaskStage("filter", shards, document_filter.run, after=stages[-1], sizes=sizes))
        return stages
