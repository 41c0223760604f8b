"""The command line of mega-train: train a model, in one process or under torchrun."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import click

from mega_schema.app.cli_runner import run_command as run_command
from mega_schema.app.click_options import LocalPath
from mega_schema.app.config import add_flags, load_config
from mega_schema.app.output_option import OUTPUT_FILE
from mega_schema.errors import ConfigError
from mega_schema.spec import Family
from mega_schema.tasks.pair_tasks import TaskName, family_of_task
from mega_train import __version__
from mega_train.commands.finetune_command import FinetuneCommand
from mega_train.commands.grouped_help import GroupedHelp, PrefixHelp
from mega_train.config import RunConfig
from mega_train.config.training import DeviceName, KernelsName
from mega_train.fault_tolerance.error_reporting import SingleRankErrors

_ABSENT_FAMILIES = frozenset({"mamba", "hybrid", "moe", "mixtral", "deepseek", "retro", "vit"})


class _Commands(SingleRankErrors):
    """The commands of `mega-train`; an unsupported model family is an error that names the others."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name.lower() in _ABSENT_FAMILIES:
            raise ConfigError(name, "is not a supported model family", wanted=" | ".join(get_args(Family)))
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mega-train")
def app() -> None:
    """Train language models with tensor, sequence, context, pipeline and data parallelism.

    \b
    One process:   mega-train gpt --preset gpt2-124m --data-path P --train-iters 100 --lr 3e-4
    Several processes:  torchrun --nproc-per-node 4 -m mega_train gpt --tensor-model-parallel-size 2 ...
    """


def _add_training_command(name: Family | Literal["prefix"], help: str) -> Callable[..., int]:
    @app.command(name, cls=PrefixHelp if name == "prefix" else GroupedHelp, help=help)
    @add_flags(RunConfig)
    def command(config: Path | None, sets: Sequence[str], **options: Any) -> int:
        from mega_model.distributed.mesh import World
        from mega_train.checkpointing.foreign_checkpoint import convert_foreign_load
        from mega_train.commands.prefix import as_prefix_run
        from mega_train.engine.train import prepare, train
        from mega_train.resolve.task import check_no_task

        world = World.from_env()
        run = load_config(RunConfig, config, options, sets)
        check_no_task(run, name)
        run, family = as_prefix_run(run) if name == "prefix" else (run, name)
        run = convert_foreign_load(run, world)
        return train(prepare(run, family, world), world, sys.stdout)

    return command


_add_training_command("gpt", "Train a GPT-2 style model.")
_add_training_command("llama", "Train a Llama style model.")
_add_training_command("bert", "Train an encoder, BERT or ModernBERT, to restore masked tokens.")
_add_training_command("t5", "Train T5 to restore masked spans, with an encoder and a decoder.")

_add_training_command("prefix", "Train a prefix language model: each token of the prefix sees all of it.")


@app.command(cls=FinetuneCommand)
@add_flags(RunConfig)
def finetune(config: Path | None, sets: Sequence[str], **options: Any) -> int:
    """Fine-tune BERT on classification, RACE, SQUAD or TAG, or T5 on texts.

    Takes the flags of Megatron's tasks/main.py and those of training. Every epoch ends with a validation and
    a checkpoint.
    """
    from mega_model.distributed.mesh import World
    from mega_train.checkpointing.foreign_checkpoint import convert_foreign_load
    from mega_train.engine.train import prepare, train

    world = World.from_env()
    run = load_config(RunConfig, config, options, sets)
    if run.task.name is None:
        raise ConfigError("--task", "missing", wanted=" | ".join(get_args(TaskName)), hint="--task MNLI")
    family = family_of_task(run.task.name)
    return train(prepare(convert_foreign_load(run, world), family, world), world, sys.stdout)


@app.command(cls=GroupedHelp)
@click.option(
    "--world",
    type=click.IntRange(min=1),
    help="Number of GPUs; those of one replica of the model if not given.",
)
@click.option("--hardware", type=click.Choice(["a100", "h100", "h200"]), default="h100", show_default=True)
@click.option("--search", is_flag=True, help="List the fastest layouts that fit; ignores the given layout.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object, or a list with --search.")
@add_flags(RunConfig)
def plan(
    config: Path | None,
    sets: Sequence[str],
    world: int | None,
    hardware: str,
    search: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Estimate the memory, communication, FLOPs and step time of a run.

    Takes the flags of training. It needs no GPU, no other process and no data.
    """
    from mega_train.commands.plan import estimate_run, search_layouts
    from mega_train.planning.render import write_estimates
    from mega_train.resolve.task import check_no_task

    run = load_config(RunConfig, config, options, sets)
    check_no_task(run, "plan")
    family = run.model.family
    estimates = (
        search_layouts(run, family, world, hardware)
        if search
        else [estimate_run(run, family, world, hardware)]
    )
    write_estimates(estimates, sys.stdout, searched=search, as_json=as_json)


@app.command(cls=GroupedHelp)
@click.option(
    "--world", type=click.IntRange(min=1), default=1, show_default=True, help="Number of processes."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@add_flags(RunConfig)
def validate(
    config: Path | None,
    sets: Sequence[str],
    world: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Check a run without starting it, and print its derived values.

    Takes the flags of training, and opens the datasets and the checkpoint they name. Exits with code 2 if
    training would; if only checkpoints in --save prevent the start, it prints the derived values first.
    """
    from mega_train.commands.config_diff import derived_values, resolve_for_display

    validation = resolve_for_display(load_config(RunConfig, config, options, sets), world)
    values = {
        "start": "refused" if validation.refusal else validation.start,
        **derived_values(validation.config),
    }
    if as_json:
        click.echo(json.dumps(values))
    else:
        for name, value in values.items():
            click.echo(f"{name:48} {value:,}" if type(value) is int else f"{name:48} {value}")
    if validation.refusal is not None:
        raise validation.refusal


@app.command()
@click.argument("first_path", metavar="ONE", type=LocalPath())
@click.argument("second_path", metavar="OTHER", type=LocalPath())
@click.option("--world", type=click.IntRange(min=1), help="Number of processes, if no checkpoint records it.")
@click.option(
    "--family",
    type=click.Choice(get_args(Family)),
    help="Model family; that of the preset, or gpt, if not given.",
)
def diff(first_path: Path, second_path: Path, world: int | None, family: Family | None) -> None:
    """Compare two runs, each a TOML file, a run's folder or a checkpoint's.

    Prints configured values first, then derived ones. Exits with code 1 if anything differs.
    """
    from mega_train.commands.config_diff import diff_sides, load_side

    sides = [load_side(path, family, world) for path in (first_path, second_path)]
    for path, config_side in zip((first_path, second_path), sides, strict=True):
        if config_side.error:
            click.echo(f"{path}: derived values not available: {config_side.error}", err=True)
    rows = list(diff_sides(*sides))
    for name, first, second in rows:
        click.echo(f"{name:48} {first} | {second}")
    if not rows:
        click.echo("no differences")
    sys.exit(1 if rows else 0)


@app.command(context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, metavar="[FLAG|KEY]...")
def explain(words: tuple[str, ...]) -> None:
    """Explain a flag or key of mega-train, or a flag of Megatron or fairseq; by default list all keys."""
    from mega_schema.errors import ConfigError
    from mega_train.commands.explain import explain_word, list_keys

    unknown = list[ConfigError]()
    for word in words:
        try:
            click.echo("\n".join(explain_word(word)))
        except ConfigError as error:
            unknown.append(error)
    for other_error in unknown[:-1]:
        click.echo(f"error: {other_error}", err=True)
    if unknown:
        raise unknown[-1]
    if not words:
        click.echo("\n".join(list_keys()))


@app.command()
def presets() -> None:
    """List the presets."""
    from mega_train.commands.explain import list_presets

    for line in list_presets():
        click.echo(line)


@app.command()
@click.argument("runs", nargs=-1, required=True, type=LocalPath())
@click.option("--output", type=OUTPUT_FILE, default=Path("loss.png"))
def curve(runs: tuple[Path, ...], output: Path) -> None:
    """Plot the loss of RUNS (the folders given to --save) as a PNG."""
    from mega_train.reports.loss_plot import draw_loss

    draw_loss(runs, output)
    click.echo(f"{output}")


@app.command()
@click.argument("run", type=LocalPath())
@click.option("--compare-with", type=LocalPath(), help="Another run to compare with.")
@click.option(
    "--output",
    type=OUTPUT_FILE,
    default=Path("report.html"),
    show_default=True,
)
@click.option(
    "--x-axis",
    type=click.Choice(["iteration", "samples", "tokens", "hours"]),
    default="iteration",
    show_default=True,
    help="Horizontal axis of the curves.",
)
def report(
    run: Path,
    compare_with: Path | None,
    output: Path,
    x_axis: Literal["iteration", "samples", "tokens", "hours"],
) -> None:
    """Write a self-contained HTML report about RUN (the folder given to --save).

    It shows loss, gradient norm, learning rate, throughput and memory as curves with restarts, the time of
    each phase of a step, and the configuration. It can be written during the run.
    """
    from mega_train.reports.html_report import write_report

    write_report(run, compare_with, output, x_axis)
    click.echo(f"{output}")


@app.command()
@click.option("--kernels", type=click.Choice(get_args(KernelsName)), default="auto", show_default=True)
@click.option("--device", type=click.Choice(get_args(DeviceName)), default="auto", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def doctor(kernels: KernelsName, device: DeviceName, as_json: bool) -> int:
    """Show this machine's devices and the kernels training would use, and check each kernel.

    Each kernel is compared with the reference. The exit code is 1 if one fails or differs by more than
    rounding explains.
    """
    from mega_train.commands.doctor import collect_report, format_report

    report = collect_report(kernels, device)
    click.echo(json.dumps(report, indent=1) if as_json else format_report(report))
    return 0 if report["healthy"] else 1


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line."""
    run_command(app, argv)
