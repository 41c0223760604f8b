"""`mega-train`: train a model, alone or under torchrun."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import click

from mega_schema.app.cli_runner import run as run_command
from mega_schema.app.config import flags, load
from mega_schema.app.output_option import OUTPUT_FILE
from mega_schema.errors import ConfigError
from mega_schema.spec import Family
from mega_train import __version__
from mega_train.commands.grouped_help import GroupedHelp
from mega_train.config import RunConfig
from mega_train.config.training import Kernels
from mega_train.fault_tolerance.error_reporting import SingleRankErrors

_ABSENT_FAMILIES = frozenset({"bert", "t5", "mamba", "hybrid", "moe", "mixtral", "deepseek", "retro", "vit"})


class _Commands(SingleRankErrors):
    """The commands of `mega-train`, which tell a family that is not here from a misspelt command."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name.lower() in _ABSENT_FAMILIES:
            hint = "mega-data preprocess --split-sentences makes its data" if name.lower() == "bert" else ""
            raise ConfigError(name, "is no family that is trained here yet", wanted="gpt | llama", hint=hint)
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mega-train")
def app() -> None:
    """Train language models in tensor, sequence, context, pipeline and data parallel.

    \b
    One process:   mega-train gpt --preset gpt2-124m --data-path P --train-iters 100 --lr 3e-4
    More of them:  torchrun --nproc-per-node 4 -m mega_train gpt --tensor-model-parallel-size 2 ...
    """


def _add_training_command(name: Family, help: str) -> Callable[..., int]:
    @app.command(name, cls=GroupedHelp, help=help)
    @flags(RunConfig)
    def command(config: Path | None, sets: Sequence[str], **options: Any) -> int:
        from mega_model.distributed.mesh import World
        from mega_train.checkpointing.foreign_checkpoint import convert_foreign_load
        from mega_train.engine.train import prepare, train

        world = World.from_env()
        run = convert_foreign_load(load(RunConfig, config, options, sets), world)
        return train(prepare(run, name, world), world, sys.stdout)

    return command


_add_training_command("gpt", "Train a GPT-2 style model.")
_add_training_command("llama", "Train a Llama style model.")


@app.command(cls=GroupedHelp)
@click.option(
    "--world", type=click.IntRange(min=1), help="GPUs; those of one copy of the model if not given."
)
@click.option("--hardware", type=click.Choice(["a100", "h100", "h200"]), default="h100", show_default=True)
@click.option(
    "--search", is_flag=True, help="List the fastest layouts that fit; the layout given is ignored."
)
@click.option("--json", "as_json", is_flag=True, help="A JSON object, or with --search a list of them.")
@flags(RunConfig)
def plan(
    config: Path | None,
    sets: Sequence[str],
    world: int | None,
    hardware: str,
    search: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Say what a run would need and how fast it would be: memory, traffic, FLOPs, time.

    Takes the flags of training and starts nothing: no GPU, no other process, no corpus.
    """
    from mega_train.commands.plan import estimate_run, search_layouts
    from mega_train.planning.render import write_estimates

    run = load(RunConfig, config, options, sets)
    family = run.model.family
    estimates = (
        search_layouts(run, family, world, hardware)
        if search
        else [estimate_run(run, family, world, hardware)]
    )
    write_estimates(estimates, sys.stdout, searched=search, as_json=as_json)


@app.command(cls=GroupedHelp)
@click.option("--world", type=click.IntRange(min=1), default=1, show_default=True, help="Processes.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object.")
@flags(RunConfig)
def validate(
    config: Path | None,
    sets: Sequence[str],
    world: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Check a run without starting it, and say what follows from its flags.

    Takes the flags of training, and opens the corpora and the checkpoint they name. Ends with code 2 where
    training would, after what follows if only checkpoints in --save keep the run from starting.
    """
    from mega_train.commands.config_diff import derived_values, resolve_for_display

    validation = resolve_for_display(load(RunConfig, config, options, sets), world)
    values = {
        "start": "refused" if validation.refusal else validation.start,
        **derived_values(validation.config),
    }
    if as_json:
        click.echo(json.dumps(values))
    else:
        for name, value in values.items():
            click.echo(f"{name:34} {value:,}" if type(value) is int else f"{name:34} {value}")
    if validation.refusal is not None:
        raise validation.refusal


@app.command()
@click.argument("one", type=click.Path(path_type=Path))
@click.argument("other", type=click.Path(path_type=Path))
@click.option("--world", type=click.IntRange(min=1), help="Processes, where no checkpoint says how many.")
@click.option("--family", type=click.Choice(["gpt", "llama"]), help="That of the preset, or gpt.")
def diff(one: Path, other: Path, world: int | None, family: Family | None) -> None:
    """Say what differs between two runs, each a TOML file, a run's folder or a checkpoint's.

    First the values that were said, then what follows from them. Ends with code 1 if anything differs.
    """
    from mega_train.commands.config_diff import diff_sides, load_side

    sides = [load_side(path, family, world) for path in (one, other)]
    for path, config_side in zip((one, other), sides, strict=True):
        if config_side.error:
            click.echo(f"of {path} nothing follows: {config_side.error}", err=True)
    rows = list(diff_sides(*sides))
    for name, first, second in rows:
        click.echo(f"{name:34} {first} | {second}")
    sys.exit(1 if rows else 0)


@app.command(context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, metavar="[KEY|FLAG]...")
def explain(words: tuple[str, ...]) -> None:
    """Say what a key or a flag is, ours or one of Megatron's or fairseq's; without one, list all of ours."""
    from mega_train.commands.explain import explain_word, list_keys

    for line in [line for word in words for line in explain_word(word)] if words else list_keys():
        click.echo(line)


@app.command()
def presets() -> None:
    """List the models that --preset names."""
    from mega_train.commands.explain import list_presets

    for line in list_presets():
        click.echo(line)


@app.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--output", type=OUTPUT_FILE, default=Path("loss.png"))
def curve(runs: tuple[Path, ...], output: Path) -> None:
    """Draw the loss of RUNS (the folders given to --save) as a PNG."""
    from mega_train.reports.loss_plot import draw_loss

    draw_loss(runs, output)
    click.echo(f"{output}")


@app.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--against", type=click.Path(path_type=Path), help="Another run to compare it with.")
@click.option(
    "--output",
    type=OUTPUT_FILE,
    default=Path("report.html"),
    show_default=True,
)
@click.option(
    "--over",
    type=click.Choice(["iteration", "samples", "tokens", "hours"]),
    default="iteration",
    show_default=True,
    help="What the curves lie over.",
)
def report(
    run: Path, against: Path | None, output: Path, over: Literal["iteration", "samples", "tokens", "hours"]
) -> None:
    """Write a page about RUN (the folder given to --save): one file of HTML that loads nothing.

    Loss, gradient norm, learning rate, throughput and memory as curves, restarts marked in them; where the
    time of a step goes; the configuration. It can be written while the run goes on.
    """
    from mega_train.reports.html_report import write_report

    write_report(run, against, output, over)
    click.echo(f"{output}")


@app.command()
@click.option("--kernels", type=click.Choice(get_args(Kernels)), default="auto", show_default=True)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="A JSON object.")
def doctor(kernels: Kernels, device: Literal["auto", "cpu", "cuda"], as_json: bool) -> int:
    """Say what this machine has, whose kernels a run would take and why, and hold each to its definition.

    The exit code is 1 if a kernel is further from its definition than roundings explain, or fails.
    """
    from mega_train.commands.doctor import collect_report, format_report

    report = collect_report(kernels, device)
    click.echo(json.dumps(report, indent=1) if as_json else format_report(report))
    return 0 if report["healthy"] else 1


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point."""
    run_command(app, argv)
