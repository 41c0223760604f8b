"""Render `--help` with the everyday options first, and `--help-all` with every option below its section."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import click

from mega_schema.app.config import config_keys
from mega_train.compat.compatible_command import MegatronCompatibleCommand
from mega_train.config import RunConfig

# the options of --help, in this order
EVERYDAY = (
    "--config",
    "--preset",
    "--num-layers",
    "--hidden-size",
    "--num-attention-heads",
    "--seq-length",
    "--data-path",
    "--micro-batch-size",
    "--global-batch-size",
    "--train-iters",
    "--lr",
    "--bf16",
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--save",
    "--save-interval",
    "--load",
)
TITLES: Mapping[str, str] = MappingProxyType(
    {
        "model": "architecture, sizes, positions, initialization",
        "parallel": "tensor, pipeline, context and data parallelism",
        "recompute": "activation checkpointing",
        "batch": "batch sizes, ramp-up, sequence length",
        "curriculum": "shorter samples first",
        "train": "duration, seed, precision, dropout, kernels, device",
        "optimizer": "optimizer, learning rate and weight decay schedules",
        "data": "datasets, blends, splits, masks",
        "objective": "prefix language models, span corruption",
        "encoder_data": "samples of BERT and T5",
        "task": "tasks of mega-train finetune",
        "tokenizer": "the tokenizer of datasets that do not record theirs",
        "evaluation": "validation during training",
        "checkpoint": "saving, loading, fine-tuning",
        "log": "logging, TensorBoard, Weights & Biases, Prometheus",
        "profile": "torch's profiler",
    }
)
HelpRecord = tuple[str, str]  # an option with its type, and its description
_HELP_ALL = "mega_train.help_all"
_COMMON_FLAGS = ("--config", "--set", "--help-all", "--help")
_NAME_COLUMNS = 35  # columns of option names and types
_TYPES: Mapping[str, str] = MappingProxyType(
    {"INTEGER": "N", "INTEGER RANGE": "N", "FLOAT": "X"}
)  # short names of types in --help


class GroupedHelp(MegatronCompatibleCommand):
    """A command that takes the options of `RunConfig`, with help in groups.

    Everything but the help is as in `MegatronCompatibleCommand`.

    Attributes:
        everyday: the flags that --help describes.
    """

    everyday: ClassVar[Sequence[str]] = EVERYDAY

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the command's parameters with --help-all before --help."""
        *params, last = super().get_params(ctx)
        return [*params, _help_all_option(), last]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the everyday options and a line for each section, or with --help-all every option."""
        sections = {key.name: key.section for key in config_keys(RunConfig)}
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        command_options = [
            option
            for option in options
            if option.name not in sections and _flag_of(option) not in _COMMON_FLAGS
        ]
        common = [option for option in options if _flag_of(option) in _COMMON_FLAGS]
        if ctx.meta.get(_HELP_ALL):
            _write_group(formatter, "Options of this command", _records(ctx, command_options))
            _write_group(formatter, "Configuration and help", _records(ctx, common))
            for section, title in TITLES.items():
                members = [option for option in options if sections.get(option.name or "") == section]
                _write_group(formatter, f"[{section}] {title}", _records(ctx, members))
            return
        _write_group(
            formatter,
            "Options of this command",
            [_shorten(record) for record in _records(ctx, command_options)],
        )
        by_flag = {_flag_of(option): option for option in options}
        everyday = _records(ctx, [by_flag[flag] for flag in self.everyday])
        _write_group(formatter, "Everyday options", [_shorten(record) for record in everyday])
        other_options = [option for option in common if _flag_of(option) not in self.everyday]
        _write_group(formatter, "Other options", _records(ctx, other_options))
        counts = Counter(sections.values())
        _write_group(
            formatter,
            "All options by section of the TOML file (--help-all describes them)",
            [(f"{section} ({counts[section]})", title) for section, title in TITLES.items()],
        )


class PrefixHelp(GroupedHelp):
    """The help of `mega-train prefix`, with the options of its loss and its samples."""

    everyday = (*EVERYDAY, "--loss-on-targets-only", "--noise-density", "--reset-attention-mask")


def _help_all_option() -> click.Option:
    def show(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta[_HELP_ALL] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    return click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show every option, grouped by section, and exit.",
    )


def _records(ctx: click.Context, options: Iterable[click.Option]) -> list[HelpRecord]:
    return [record for option in options if (record := option.get_help_record(ctx)) is not None]


def _write_group(formatter: click.HelpFormatter, heading: str, records: Sequence[HelpRecord]) -> None:
    if records:
        with formatter.section(heading):
            formatter.write_dl(records, col_max=_NAME_COLUMNS)


def _shorten(record: HelpRecord) -> HelpRecord:
    """Shorten an option: its type as one letter, no default value and no range."""
    name, text = record
    flag, _, kind = name.partition(" ")
    return f"{flag} {_TYPES.get(kind, kind)}".rstrip(), text.partition("  [")[0]


def _flag_of(option: click.Option) -> str:
    return next((name for name in option.opts if name.startswith("--")), option.opts[0])
