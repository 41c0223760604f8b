"""`mega-data train-tokenizer`: train a vocabulary on text."""

from __future__ import annotations

from pathlib import Path

import click

from mega_data.commands.common import (
    RepeatableOptionCommand,
    adapter_option,
    open_adapter,
    placement_options,
    warn_replaced,
)
from mega_data.commands.preprocess import INPUT_HELP
from mega_schema.app.output_option import OUTPUT_FOLDER


@click.command("train-tokenizer", cls=RepeatableOptionCommand)
@click.option("--input", "words", multiple=True, required=True, help=INPUT_HELP)
@click.option(
    "--type", "kind", type=click.Choice(["bpe", "wordpiece", "unigram"]), default="bpe", help="Model."
)
@click.option("--vocab-size", type=int, default=4096, help="Ids, including special tokens and bytes.")
@click.option(
    "--output",
    type=OUTPUT_FOLDER,
    required=True,
    help="Folder for the tokenizer: new, empty, or with a tokenizer.",
)
@click.option("--json-key", default="text", help="Key of the text; meta.text: text in the object meta.")
@click.option("--max-documents", type=click.IntRange(min=1), help="Documents to train on.  [default: all]")
@adapter_option
@click.option("--lowercase", is_flag=True, help="Fold case and accents, as BERT uncased; wordpiece only.")
@click.option(
    "--min-frequency",
    type=click.IntRange(min=1),
    help="Leave out words that occur fewer times; runs in tasks.  [default: 1]",
)
@click.option(
    "--split-mb",
    type=click.IntRange(min=1),
    help="Megabytes of a JSON-lines or Parquet file per task.  [default: 64]",
)
@click.option(
    "--memory", type=click.IntRange(min=1), help="MiB for counting words, per worker.  [default: 256]"
)
@click.option(
    "--work-dir",
    "work",
    type=OUTPUT_FOLDER,
    help="Folder for the counts of words; they serve for another --vocab-size.  [default: OUTPUT/.work]",
)
@placement_options("Processes that count words.", "Count words in tasks, and where.  [default: one process]")
def train_tokenizer(
    words: tuple[str, ...],
    kind: str,
    vocab_size: int,
    output: Path,
    json_key: str,
    max_documents: int | None,
    adapter: str | None,
    lowercase: bool,
    min_frequency: int | None,
    split_mb: int | None,
    memory: int | None,
    work: Path | None,
    workers: int,
    executor: str | None,
    only: str | None,
) -> None:
    """Train a tokenizer on text: GPT-2's byte-level BPE, BERT's WordPiece, or a unigram.

    The folder has tokenizer.json and the files for Megatron's flags: vocab.json and merges.txt, vocab.txt, or
    tokenizer.model. With --workers or --executor, tasks count words: the tokenizer is the same, and runs
    resume.
    """
    from mega_data.commands.train_tokenizer_tasks import CountingOptions, train_in_tasks
    from mega_data.interruptible import run_interruptible
    from mega_data.readers.inputs import expand_inputs
    from mega_data.task_stages import remove_folder
    from mega_data.texts import read_texts
    from mega_data.train_tokenizer import check_kind, describe, save, train
    from mega_schema.outputs import check_output, is_tokenizer

    check_kind(kind, vocab_size, lowercase=lowercase)
    options = CountingOptions(executor, workers, only, work, min_frequency, split_mb, memory)
    inputs = expand_inputs(words, adapter=open_adapter(adapter))
    files = [item.path for item in inputs if not item.is_stdin]
    check_output("--output", output, "folder", inputs=files, is_ours=_is_own_folder)
    has_tasks = options.has_tasks(output, kind)
    if output.is_dir() and is_tokenizer(output, _WORK_FOLDERS) and only in (None, "plan"):
        warn_replaced(output, "tokenizer")
    if has_tasks:
        trained = train_in_tasks(
            inputs,
            output,
            options,
            kind=kind,
            vocab_size=vocab_size,
            key=json_key,
            lowercase=lowercase,
            max_documents=max_documents,
        )
        if trained is None:
            return
    else:
        trained = run_interruptible(
            lambda: train(
                read_texts(inputs, json_key, max_documents), vocab_size, kind=kind, lowercase=lowercase
            )
        )
    remove_folder(output / _WORK)
    save(trained, output)
    click.echo(f"{output}: {describe(trained)}")
    if trained.identity.vocab_size < vocab_size:
        click.echo(f"note: {vocab_size:,} were requested; the text has no more pairs to merge", err=True)


_WORK = ".work"  # the default work folder, and its name during its removal
_WORK_FOLDERS = frozenset({_WORK, f"{_WORK}.removed"})


def _is_own_folder(folder: Path) -> bool:
    """Return whether a folder holds a tokenizer, or the counts of an unfinished run, and nothing else."""
    from mega_schema.outputs import is_tokenizer

    names = {path.name for path in folder.iterdir()}
    return names <= _WORK_FOLDERS or is_tokenizer(folder, _WORK_FOLDERS)
