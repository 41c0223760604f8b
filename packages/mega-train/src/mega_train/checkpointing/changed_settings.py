"""Compare the configuration of a resumed run with the one that its checkpoint recorded in run.toml."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mega_schema.app.config import config_keys, load_config
from mega_schema.checkpoint.checkpoint_dir import RUN_CONFIG
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import ConfigError
from mega_train.config import RunConfig
from mega_train.data.blend_spec import DEFAULT_SPLIT
from mega_train.data.identities import normalize_prefix
from mega_train.resolve.run_mode import is_eval_only

_SPLITS = ("train", "valid", "test")
# they determine the tokens of each sample number
_DATA_KEYS = frozenset(
    {
        *("train.seed", "batch.seq_length"),
        *("data.data_path", "data.data_args_path", "data.per_split_data_args_path"),
        *(f"data.{use}_data_path" for use in _SPLITS),
        *(f"data.{use}_weighted_split_paths" for use in _SPLITS),
        *(f"data.{use}_weighted_split_paths_path" for use in _SPLITS),
        *("data.sft", "data.sft_keys", "data.split", "data.split_rule", "data.blend_rule"),
        *("data.renormalize_blend_weights", "data.dataloader_type", "data.data_sharding"),
        *("objective.prefix_lm", "objective.loss_on_targets_only"),
        *("objective.noise_density", "objective.mean_noise_span_length"),
        *("encoder_data.mask_prob", "encoder_data.short_seq_prob", "encoder_data.mask_type"),
        *("encoder_data.bert_no_binary_head", "encoder_data.sample_rule", "encoder_data.decoder_seq_length"),
        *("task.task", "task.train_data", "task.keep_last_batch", "task.text_keys", "task.label_key"),
        *("task.input_key", "task.target_key", "task.doc_stride", "task.max_query_length"),
    }
)
# those of them that name groups of datasets, and all that name datasets
_GROUP_KEYS = frozenset(f"data.{use}_weighted_split_paths" for use in _SPLITS)
_PATH_KEYS = frozenset({"data.data_path", *(f"data.{use}_data_path" for use in _SPLITS)}) | _GROUP_KEYS
# how a start finds its checkpoint, which may differ between starts
_START_KEYS = frozenset(
    {
        "checkpoint.load",
        "checkpoint.save",
        "checkpoint.finetune",
        "checkpoint.pretrained_checkpoint",
        "checkpoint.load_optim",
        "checkpoint.overwrite",
        "checkpoint.override_data",
    }
)

log = logging.getLogger("mega.train")


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that differs from the one that the checkpoint recorded.

    Attributes:
        is_moved: whether it names other paths of the same datasets.
    """

    key: str
    flag: str
    old: Any
    new: Any
    is_moved: bool = False

    @property
    def decides_data(self) -> bool:
        return self.key in _DATA_KEYS and not self.is_moved

    def __str__(self) -> str:
        moved = ", which contains the same data" if self.is_moved else ""
        return f"{self.key}: {_format_value(self.old)} -> {_format_value(self.new)}{moved}"


def find_changes(
    run: RunConfig, checkpoint: Checkpoint | None, identities: Callable[[], Mapping[str, str]]
) -> list[Change]:
    """Find the settings of a resumed run that changed since its checkpoint was written.

    Nothing is compared if only weights are loaded, if nothing is trained, or if the checkpoint has no
    run.toml or one of another version.

    Args:
        identities: computes the digests of the run's datasets; called only if the paths changed.

    Raises:
        ConfigError: the run would read other data than the one it resumes, without --override-data.
    """
    if checkpoint is None or run.checkpoint.finetune or is_eval_only(run) or not checkpoint.run_config:
        return []
    file = checkpoint.folder / RUN_CONFIG
    try:
        recorded_run = load_config(RunConfig, file, {})
    except ConfigError as error:
        log.warning("%s; it is not compared with this run", str(error).partition("; hint: ")[0])
        return []
    max_seq_len = checkpoint.spec.max_seq_len
    recorded_config, current_config = (
        _with_defaults(recorded_run, max_seq_len),
        _with_defaults(run, max_seq_len),
    )
    changes = []
    for key in config_keys(RunConfig):
        old, new = key.value_in(recorded_config), key.value_in(current_config)
        # the model is the checkpoint's, whatever describes it: flags that contradict it are refused elsewhere
        if key.section != "model" and key.dotted not in _START_KEYS and not _is_same(old, new):
            changes.append(Change(key.dotted, key.flag, old, new))
    datasets = checkpoint.trainer.get("datasets")
    if isinstance(datasets, dict) and any(change.key in _PATH_KEYS for change in changes):
        current_identities = identities()
        changes = [
            replace(
                change, is_moved=change.key in _PATH_KEYS and _is_moved(change, datasets, current_identities)
            )
            for change in changes
        ]
    data_changes = [change for change in changes if change.decides_data]
    if data_changes and not run.checkpoint.override_data:
        raise ConfigError(
            data_changes[0].flag,
            "the run would read different data from the run it resumes",
            found=" ".join(_option_text(change, change.new) for change in data_changes),
            wanted=" ".join(_option_text(change, change.old) for change in data_changes)
            + f", as {file} says",
            hint="--override-data reads these from here on"
            + ("" if datasets else "; also use it if the same data was moved"),
        )
    return changes


def describe_changes(changes: Sequence[Change], checkpoint: Checkpoint) -> str:
    """Format the changes for the start of a run, one line for each."""
    lines = "\n".join(f"  {change}" for change in changes)
    return f"settings that changed since iteration {checkpoint.iteration} was saved:\n{lines}"


def _with_defaults(run: RunConfig, max_seq_len: int) -> RunConfig:
    """Fill in the defaults of the settings that are not given."""
    length = max_seq_len if run.batch.length is None else run.batch.length
    return replace(
        run,
        batch=replace(run.batch, length=length),
        data=replace(run.data, split=run.data.split or DEFAULT_SPLIT),
    )


def _is_same(old: Any, new: Any) -> bool:
    if old == new:
        return True
    if isinstance(old, tuple) and isinstance(new, tuple):
        return len(old) == len(new) and all(map(_is_same_word, old, new))
    return isinstance(old, str | Path) and isinstance(new, str | Path) and _is_same_word(str(old), str(new))


def _is_moved(change: Change, recorded: Mapping[str, str], current_identities: Mapping[str, str]) -> bool:
    """Whether two blends differ only in the paths of their datasets."""

    def words(texts: Any) -> list[str]:
        several = change.key in _GROUP_KEYS
        return [word for text in texts for word in (re.split(r"[\s,]+", text) if several else [text])]

    def is_same(old: str, new: str) -> bool:
        identity = recorded.get(normalize_prefix(old))
        return _is_same_word(old, new) or (
            identity is not None and identity == current_identities.get(normalize_prefix(new))
        )

    old, new = words(change.old), words(change.new)
    return len(old) == len(new) and all(map(is_same, old, new))


def _is_same_word(old: Any, new: Any) -> bool:
    """Whether two words are the same numbers, or paths to the same file."""
    if old == new or not (isinstance(old, str) and isinstance(new, str)):
        return bool(old == new)
    try:
        numbers = [[float(part) for part in re.split(r"[,/\s]+", word.strip())] for word in (old, new)]
    except ValueError:
        return Path(old).resolve() == Path(new).resolve()
    return numbers[0] == numbers[1]


def _option_text(change: Change, value: Any) -> str:
    """Format an option as on the command line; a boolean as its flag, or as the absence of it."""
    if isinstance(value, bool):
        return change.flag if value else f"no {change.flag}"
    return f"{change.flag} {_format_value(value)}"


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or value == ():
        return "none"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
