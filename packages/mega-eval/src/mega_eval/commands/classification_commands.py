"""Evaluate fine-tuned classifiers: the command `classify`, and `mnli` and `qqp` where --load is one.

Imports neither torch nor numpy, for `--help`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import click

from mega_eval.commands.data_files import choose_paths, data_files
from mega_eval.commands.task_options import DEVICE_OPTION, DTYPE_OPTION, PATH, RESULT_OPTIONS
from mega_schema.app.click_options import add_options
from mega_schema.errors import ConfigError, FormatError
from mega_schema.tasks.pair_tasks import PairFiles
from mega_schema.tasks.race_examples import LabelledExample

ENCODER_OPTIONS = (
    click.option(
        "--labels",
        metavar="A,B,...",
        help="Names of the classes in the order of the model's outputs.  [default: the model's]",
    ),
    click.option(
        "--seq-length",
        type=click.IntRange(min=4),
        help="Tokens of the longest sample; longer texts are cut.  [default: the model's]",
    ),
)
_OPTIONS = (
    click.option(
        "--load",
        type=PATH,
        required=True,
        help="Run of mega-train finetune (its best checkpoint), a checkpoint, or a Hugging Face folder of a "
        "BERT for sequence classification.",
    ),
    *RESULT_OPTIONS,
    click.option(
        "--limit",
        type=click.IntRange(min=1),
        help="Evaluate only the first examples of every file, as many as this; then the result is marked as "
        "not publishable.",
    ),
    *ENCODER_OPTIONS,
    DTYPE_OPTION,
    click.option(
        "--micro-batch-size",
        type=click.IntRange(min=1),
        help="Most examples in one forward pass.  [default: 4,096 tokens]",
    ),
    DEVICE_OPTION,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationOptions:
    """The values of the options of a classification, by the names of their flags."""

    load: Path
    output: Path | None
    overwrite: bool
    report: bool
    limit: int | None
    labels: str | None
    seq_length: int | None
    dtype: str
    micro_batch_size: int | None
    device: str


def classification_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of every classification."""
    return add_options(function, _OPTIONS)


@click.command()
@classification_options
@data_files("JSON lines, CSV or TSV with labels, also .gz.")
@click.option(
    "--text-keys",
    default="text",
    show_default=True,
    metavar="KEY[,KEY]",
    help="Column or JSON key of the text, or of the two texts.",
)
@click.option("--label-key", default="label", show_default=True, help="Column or JSON key of the label.")
def classify(
    paths: tuple[Path, ...], data: tuple[Path, ...], text_keys: str, label_key: str, **keywords: Any
) -> None:
    """Any classification by a fine-tuned encoder: accuracy, macro F1 and loss, with intervals."""
    keys = text_keys.split(",")
    if len(keys) > 2:
        raise ConfigError("--text-keys", "are too many", found=text_keys, wanted="1 or 2")
    files = PairFiles("CLASSIFY", keys, label_key)
    run_classification("classify", files, choose_paths(paths, data), ClassificationOptions(**keywords))


def run_classification(
    task: str, files: PairFiles, paths: Sequence[Path], options: ClassificationOptions
) -> None:
    """Evaluate the files, print the table and write the result."""
    from mega_eval.commands.classification_run import write_classification
    from mega_eval.result import check_writable

    if options.output is not None:
        check_writable(options.output, [*paths, options.load], overwrite=options.overwrite)
    write_classification(task, files, paths, read_files(files, paths), options)


def read_files(files: PairFiles, paths: Sequence[Path]) -> dict[str, Sequence[LabelledExample]]:
    """Read the examples of every file by its name without suffix.

    Raises:
        ConfigError: two files have the same name.
        FormatError: a file is not one of the task, or has no labels.
    """
    examples_by_name: dict[str, Sequence[LabelledExample]] = {}
    for path in paths:
        if (name := path.name.partition(".")[0]) in examples_by_name:
            raise ConfigError("--data", "two files have the same name", found=name)
        examples, _ = files.read(path)
        if examples[0].label is None:
            hint = "mega-train finetune --epochs 0 writes predictions of a test set"
            raise FormatError(path, "has no labels", wanted="labels to compare with", hint=hint)
        examples_by_name[name] = examples
    return examples_by_name


def match_labels(
    model_labels: Sequence[str], names: str | None, examples: Mapping[str, Sequence[LabelledExample]]
) -> tuple[str, ...]:
    """Return the classes in the order of the model's outputs, by the names of the data.

    Names that differ from the data's in upper and lower case only are the data's.

    Args:
        names: of --labels; None: the model's names.

    Raises:
        ConfigError: --labels has another number of names than the model has outputs.
        FormatError: a label of the data is not a class of the model.
    """
    labels = tuple(model_labels) if names is None else tuple(names.split(","))
    if len(labels) != len(model_labels) or len(set(labels)) < len(labels):
        wanted = f"{len(model_labels)} different names for {' '.join(model_labels)}"
        raise ConfigError("--labels", "do not fit the model's outputs", found=names, wanted=wanted)
    of_data = dict[str | None, str]()  # where each label is first
    for example in chain.from_iterable(examples.values()):
        of_data.setdefault(example.label, example.where)
    by_lower = {label.lower(): label for label in of_data if label is not None}
    matched = tuple(by_lower.get(label.lower(), label) for label in labels)
    for label, where in of_data.items():
        if label not in matched:
            hint = f"--labels with the {len(labels)} names of the data, in the order of {' '.join(labels)}"
            raise FormatError(where, "unknown label", found=label, wanted=" | ".join(labels), hint=hint)
    return matched
