"""Read what a search for contamination needs: the task's texts, the training sets and a result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mega_eval.contamination import ExampleOverlap, TaskText, TrainingSet
from mega_eval.documents import read_text
from mega_eval.records import is_record_file, read_records
from mega_eval.result import fingerprint_files
from mega_eval.result_reader import EvaluationResult
from mega_schema.checkpoint.checkpoint_tokenizer import open_checkpoint_tokenizer
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.dataset.indexed_dataset import open_dataset, sibling
from mega_schema.errors import FormatError
from mega_schema.tokenizer.identity import IDENTITY
from mega_schema.tokenizer.tokenizer import check_same_tokenizer, open_tokenizer_folder


def check_data(result: EvaluationResult, data: Path) -> None:
    """Check that a result is of this file.

    Raises:
        FormatError: the file's hash is not one of the result's.
    """
    sha256 = str(fingerprint_files([data])[0]["sha256"])
    if sha256 not in result.data_hashes:
        raise FormatError(
            f"{result.path}: sha256 of the data",
            f"is not that of {data}",
            found=", ".join(digest[:12] for digest in result.data_hashes) or "none",
            wanted=sha256[:12],
        )


def read_texts(path: Path, keys: Sequence[str]) -> list[TaskText]:
    """Read the texts of each example: of these keys, or all strings of a record; or lines of text.

    Raises:
        FormatError: the file has no examples, or a record has no text under a key.
    """
    if not is_record_file(path):
        lines = read_text(path).split("\n")
        numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        return [TaskText(f"{path.name}:{number}", (line,)) for number, line in numbered]
    examples = []
    for record in read_records([path]):
        values = [record.value(key) for key in keys] if keys else [record.values]
        texts = tuple(_list_strings(values))
        if keys and not texts:
            raise FormatError(record.where, "no text", wanted=" or ".join(keys))
        examples.append(TaskText(record.id, texts))
    return examples


def _list_strings(value: object) -> Iterator[str]:
    """Yield the strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _list_strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _list_strings(item)


def open_training_sets(
    prefixes: Sequence[Path], tokenizer: Path | None, *, is_shared: bool
) -> list[TrainingSet]:
    """Open datasets and their tokenizers.

    Args:
        tokenizer: a folder of a tokenizer, or a checkpoint; None takes that of each dataset.
        is_shared: whether all datasets must have one tokenizer.

    Raises:
        MegaError: a dataset or a tokenizer is missing, or they do not fit.
    """
    training_sets: list[TrainingSet] = []
    for prefix in prefixes:
        dataset = open_dataset(prefix)
        folder = sibling(dataset.prefix, ".tokenizer") if tokenizer is None else tokenizer
        if (folder / IDENTITY).is_file():
            opened = open_tokenizer_folder(folder)
        elif tokenizer is not None:
            opened = open_checkpoint_tokenizer(Checkpoint.open(tokenizer))
        else:
            hint = "add --tokenizer DIR, a tokenizer's folder or a checkpoint"
            raise FormatError(folder, "no tokenizer beside the dataset", hint=hint)
        if dataset.info is not None:
            check_same_tokenizer(dataset.info.tokenizer, opened.identity, prefix)
        if is_shared and training_sets:
            check_same_tokenizer(opened.identity, training_sets[0].tokenizer.identity, prefix)
        training_sets.append(TrainingSet(prefix, dataset, opened))
    return training_sets


def match_ids(result: EvaluationResult, overlaps: Sequence[ExampleOverlap]) -> dict[str, bool]:
    """Return whether each example is dirty, by its id in the result; a renamed file has the same lines."""
    by_id = {overlap.id: overlap.is_dirty for overlap in overlaps}
    names = {overlap.id.rpartition(":")[0] for overlap in overlaps}
    by_line = {overlap.id.rpartition(":")[2]: overlap.is_dirty for overlap in overlaps}
    for name in (example.id for example in result.examples):
        file, _, line = name.rpartition(":")
        if name not in by_id and file and file not in names and line in by_line:
            by_id[name] = by_line[line]
    return by_id
