"""Run `mega-data train-tokenizer` on counts of words that tasks write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mega_data.commands.common import is_whole_run, run_job, work_folder
from mega_data.encode_tasks import check_task_inputs
from mega_data.error_limit import ErrorCount, ErrorLimit
from mega_data.interruptible import run_interruptible
from mega_data.output_folder import WORK, check_work_folder
from mega_data.readers.inputs import InputFile
from mega_data.readers.ranges import plan_tasks
from mega_data.task_stages import PLAN, remove_folder
from mega_data.tokenizer_counts.count_tasks import WordCountTasks
from mega_data.train_tokenizer import train_on_counts
from mega_schema.errors import ConfigError
from mega_schema.tokenizer.tokenizer import FastTokenizer

SPLIT_MB = 64
MEMORY_MIB = 256


@dataclass(frozen=True, slots=True)
class CountingOptions:
    """The options of a run that counts words in tasks; None: not given.

    Attributes:
        executor, workers, only: see `executors.dispatch.execute`.
        work: the folder of the counts.
    """

    executor: str | None
    workers: int
    only: str | None
    work: Path | None
    min_frequency: int | None
    split_mb: int | None
    memory: int | None

    def list_named(self) -> list[str]:
        """Return the names of the options that a run has."""
        values = {
            "--executor": self.executor,
            "--workers": self.workers if self.workers > 1 else None,
            "--stage": self.only,
            "--work-dir": self.work,
            "--min-frequency": self.min_frequency,
            "--split-mb": self.split_mb,
            "--memory": self.memory,
        }
        return [name for name, value in values.items() if value is not None]

    def has_tasks(self, output: Path, kind: str) -> bool:
        """Return whether the run has tasks: an option asks for them, or an unfinished run has some.

        Raises:
            ConfigError: an option asks for them, and a tokenizer of this kind is not trained on counts.
        """
        names = self.list_named()
        if kind == "unigram" and names:
            what = "does not fit --type unigram: SentencePiece trains on sentences, not on counts of words"
            raise ConfigError(names[0], what, hint="leave it out, or --type bpe")
        return bool(names) or (kind != "unigram" and (output / WORK / PLAN).exists())


def train_in_tasks(
    inputs: Sequence[InputFile],
    output: Path,
    options: CountingOptions,
    *,
    kind: str,
    vocab_size: int,
    key: str,
    lowercase: bool,
    max_documents: int | None,
) -> FastTokenizer | None:
    """Count the words of the inputs in tasks, and train a tokenizer on the counts.

    Returns:
        The tokenizer, or None if this process ran only a part of the tasks.

    Raises:
        ConfigError: options do not fit each other, or an input cannot be divided into tasks.
        FormatError: a row is wrong.
    """
    names = options.list_named()
    if max_documents is not None:
        what = f"does not fit {names[0]}" if names else f"does not fit the tasks in {output / WORK}"
        hint = "leave it out: each task would have to know the documents of those before it"
        raise ConfigError("--max-documents", what, hint=hint)
    check_task_inputs(inputs, f"leave {', '.join(names)} out" if names else f"rm -r {output / WORK}")
    check_work_folder(output, options.work, [item.path for item in inputs])
    executor = options.executor or "local"
    whole_run = is_whole_run(executor, options.only)
    with work_folder(options.work, output / WORK, output, whole_run=whole_run, lock=output) as folder:
        groups = plan_tasks(inputs, (options.split_mb or SPLIT_MB) * 1_000_000)
        memory = (options.memory or MEMORY_MIB) << 20
        job = WordCountTasks(groups, folder, kind, lowercase, key, memory)
        errors = ErrorCount(ErrorLimit())
        results = run_job(
            job, folder, executor=executor, workers=options.workers, only=options.only, errors=errors
        )
        if results is None:
            return None
        try:
            job.check_has_text()
        except ConfigError:  # counts of no text serve for no other run, and would refuse corrected inputs
            remove_folder(folder)
            raise
        return run_interruptible(
            lambda: train_on_counts(
                job.counts(),
                job.letters(),
                vocab_size,
                kind=kind,
                lowercase=lowercase,
                min_frequency=options.min_frequency or 1,
            )
        )
