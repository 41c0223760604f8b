"""The files of CORE, in the layout of the eval bundle of DCLM and nanochat.

core.yaml           icl_tasks: label, icl_task_type, dataset_uri, num_fewshot, continuation_delimiter
eval_data/          the JSON lines that dataset_uri names
eval_meta_data.csv  `Eval Task` and `Random baseline` in percent
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mega_eval.input_paths import build_path_error
from mega_eval.records import TaskRecord, list_record_files, read_records, read_text_of
from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError, FormatError

MULTIPLE_CHOICE = "multiple_choice"
SCHEMA = "schema"
LANGUAGE_MODELING = "language_modeling"
TASK_TYPES = (MULTIPLE_CHOICE, SCHEMA, LANGUAGE_MODELING)

CONFIG = "core.yaml"
DATA = "eval_data"
BASELINES = "eval_meta_data.csv"


@dataclass(frozen=True, slots=True)
class CoreTask:
    """A task of CORE.

    Attributes:
        label: its name.
        task_type: one of TASK_TYPES.
        path: its examples.
        num_fewshot: examples before each question.
        delimiter: text between question and answer.
        baseline: accuracy of guessing, in [0, 1).
    """

    label: str
    task_type: str
    path: Path
    num_fewshot: int
    delimiter: str
    baseline: float


def read_core_tasks(folder: Path) -> list[CoreTask]:
    """Read the tasks of a bundle.

    Raises:
        FormatError: a file is missing or malformed, or a task has no random baseline.
        ConfigError: PyYAML is not installed.
    """
    wanted = f"a folder with {CONFIG}, {DATA} and {BASELINES}"
    if not folder.is_dir():
        raise build_path_error(folder, "folder", wanted)
    if lacking := [name for name in (CONFIG, DATA, BASELINES) if not (folder / name).exists()]:
        bundle = min(folder.glob(f"*/{CONFIG}"), default=None)
        hint = f"--data {bundle.parent}" if bundle is not None else f"ls {folder}"
        raise FormatError(folder, f"has no {' and no '.join(lacking)}", wanted=wanted, hint=hint)
    path = folder / CONFIG
    baselines = _read_baselines(folder / BASELINES)
    tasks = [_read_task(row, folder, baselines) for row in _read_rows(path)]
    labels = [task.label for task in tasks]
    if len(set(labels)) < len(labels):
        label = next(label for label in labels if labels.count(label) > 1)
        raise FormatError(path, "two tasks have one label", found=label)
    return tasks


def _read_rows(path: Path) -> list[TaskRecord]:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError("mega-eval core", "needs PyYAML", hint=install_hint("mega-eval", "core")) from None
    [file] = list_record_files(path)
    try:
        content = yaml.safe_load(read_text_of(file))
    except yaml.YAMLError as error:
        raise FormatError(path, "not YAML", found=" ".join(str(error).split())) from None
    if not isinstance(content, dict):
        raise FormatError(path, "not a mapping", found=type(content).__name__, wanted="icl_tasks: [...]")
    rows = TaskRecord(f"{path}", content).read_objects("icl_tasks")
    if not rows:
        raise FormatError(path, "no tasks under icl_tasks")
    return rows


def _read_task(row: TaskRecord, folder: Path, baselines: Mapping[str, float]) -> CoreTask:
    label, task_type = row.text("label"), row.text("icl_task_type")
    if task_type not in TASK_TYPES:
        raise FormatError(
            f"{row.where} icl_task_type", "not a task of CORE", found=task_type, wanted=" | ".join(TASK_TYPES)
        )
    counts = row.value("num_fewshot")
    count = counts[0] if isinstance(counts, list) and counts else counts
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise FormatError(
            f"{row.where} num_fewshot", "not a number of examples", found=counts, wanted="a list like [10]"
        )
    if label not in baselines:
        raise FormatError(folder / BASELINES, "no random baseline of a task", wanted=label)
    return CoreTask(
        label=label,
        task_type=task_type,
        path=folder / DATA / row.text("dataset_uri"),
        num_fewshot=count,
        delimiter=row.text("continuation_delimiter") if row.has("continuation_delimiter") else " ",
        baseline=baselines[label],
    )


def _read_baselines(path: Path) -> dict[str, float]:
    """Return the accuracy of guessing of each task, as a fraction."""
    baselines = {}
    for row in read_records(list_record_files(path)):
        text = row.text("Random baseline")
        try:
            baseline = float(text) / 100
        except ValueError:
            baseline = -1.0
        if not 0 <= baseline < 1:
            raise FormatError(
                f"{row.where} Random baseline", "not a percentage", found=text, wanted="0 to 100"
            )
        baselines[row.text("Eval Task")] = baseline
    return baselines
