"""Check the options of a pipeline's stages together, as their commands do, before any stage starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_data.commands.common import error_limit, output_suffix

if TYPE_CHECKING:
    from mega_data.stage_graph.pipeline_file import PipelineStage


def check_stage(where: str, stage: PipelineStage) -> None:
    """Refuse options of a stage that do not fit each other.

    Args:
        where: begins the message.

    Raises:
        ConfigError: its command would refuse them.
    """
    from mega_schema.errors import ConfigError

    options = stage.options
    try:
        if "max-errors" in options:
            error_limit(str(options.get("on-error", "fail")), str(options["max-errors"]))
        if isinstance(output_format := options.get("output-format"), str):
            output_suffix(output_format)
        if stage.command == "clean":
            _check_clean(options)
        elif stage.command == "dedup":
            _check_dedup(options)
        elif stage.command == "train-tokenizer":
            _check_train_tokenizer(options, stage.output)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.where}", error.what, **error.values, hint=error.hint) from None


def _check_clean(options: Mapping[str, Any]) -> None:
    from mega_data.clean.pipeline import check_steps
    from mega_data.clean.registry import step_from_flag, steps_from_toml

    flags = options.get("step", ())
    words = [str(word) for word in (flags if isinstance(flags, list | tuple) else [flags])]
    steps = [step_from_flag(word) for word in words]
    config = str(options.get("config", ""))
    is_written_by_stage = "{" in config
    if config and not is_written_by_stage and Path(config).is_file():
        steps = [*steps_from_toml(Path(config)), *steps]
    if not is_written_by_stage:
        # a step with the path of another stage's file cannot be started yet
        key, id_key = str(options.get("json-key", "text")), str(options.get("id-key", ""))
        check_steps(steps, key, id_key, starts=not any("{" in word for word in words))


def _check_dedup(options: Mapping[str, Any]) -> None:
    from mega_data.commands.dedup import select_preset
    from mega_data.commands.dedup_substrings import SUBSTRINGS, SubstringOptions, check_preset_options

    preset = str(options.get("preset", "datatrove"))
    span_options = SubstringOptions(*(options.get(name) for name in ("min-tokens", "unit", "max-repeated")))
    given_options = {name: bool(options.get(name)) for name in ("against", "keep-keys")}
    check_preset_options(preset, span_options, {"jaccard": "jaccard" in options, **given_options})
    if preset != SUBSTRINGS:
        select_preset(preset, options.get("jaccard"))


def _check_train_tokenizer(options: Mapping[str, Any], output: Path) -> None:
    from mega_data.commands.train_tokenizer_tasks import CountingOptions
    from mega_data.train_tokenizer import check_kind

    kind = str(options.get("type", "bpe"))
    check_kind(kind, int(options.get("vocab-size", 4096)), lowercase=bool(options.get("lowercase")))
    counting = CountingOptions(
        options.get("executor"),
        int(options.get("workers", 1)),
        None,
        None,
        options.get("min-frequency"),
        options.get("split-mb"),
        options.get("memory"),
    )
    counting.has_tasks(output, kind)
