"""The commands that write a checkpoint from checkpoints: reshard and average."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import click

from mega_ckpt.commands.common import DEGREE, FORCE, JSON, PATH, PP, TP, VP
from mega_schema.app.output_option import OUTPUT_FOLDER
from mega_schema.app.progress import progress_bar


@click.command()
@click.option("--load", required=True, type=PATH, help="Folder of a run or of one checkpoint.")
@click.option("--save", required=True, type=OUTPUT_FOLDER, help="Run folder to write into; not the source.")
@TP
@PP
@VP
@click.option("--ep", "--expert-model-parallel-size", "ep", type=DEGREE, default=1, hidden=True)
@click.option(
    "--dtype",
    type=click.Choice(["keep", "fp32", "bf16", "fp16"]),
    default="keep",
    show_default=True,
    help="Dtype of the model's weights; the optimizer state stays float32.",
)
@click.option("--no-optim", is_flag=True, help="Drop the optimizer state.")
@FORCE
@JSON
def reshard(
    load: Path,
    save: Path,
    tp: int,
    pp: int,
    vp: int,
    ep: int,
    dtype: str,
    no_optim: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Rewrite a checkpoint with the files of another tensor x pipeline parallel layout."""
    from mega_ckpt.operations.reshard import reshard as rewrite
    from mega_schema.checkpoint.reader import Checkpoint
    from mega_schema.errors import ConfigError
    from mega_schema.parallel_layout import Layout

    if ep > 1:
        raise ConfigError("--ep", "the model has no experts", found=ep, wanted=1, hint="leave --ep out")
    start = time.monotonic()
    layout = Layout(tp=tp, pp=pp, vp=vp)
    kind = None if dtype == "keep" else dtype
    folder = rewrite(
        Checkpoint.open(load),
        save,
        layout,
        optimizer=not no_optim,
        dtype=kind,
        force=force,
        progress=partial(progress_bar, "resharding"),
    )
    size = sum(Checkpoint(folder).files.values())
    seconds = time.monotonic() - start
    if as_json:
        report = {"folder": str(folder), "bytes": size, "seconds": seconds, "tp": tp, "pp": pp, "vp": vp}
        click.echo(json.dumps(report))
        return
    click.echo(
        f"{folder}: {size:,} bytes in {seconds:.1f} s, tp={tp} pp={pp}" + (f" vp={vp}" if vp > 1 else "")
    )


@click.command()
@click.argument("folders", type=PATH, nargs=-1, required=True)
@click.option("--save", required=True, type=OUTPUT_FOLDER, help="Run folder to write into; not the source.")
@click.option("--weights", help="Comma-separated weights, one per folder; divided by their sum.")
@click.option(
    "--ema", type=float, metavar="DECAY", help="Exponential moving average over the folders, oldest first."
)
@FORCE
@JSON
def average(
    folders: tuple[Path, ...], save: Path, weights: str | None, ema: float | None, force: bool, as_json: bool
) -> None:
    """Average the weights of the checkpoints FOLDERS of one model, without optimizer state."""
    from mega_ckpt.operations.average import average as averaged
    from mega_ckpt.operations.average import ema_weights
    from mega_schema.checkpoint.reader import Checkpoint
    from mega_schema.errors import ConfigError

    if weights is not None and ema is not None:
        raise ConfigError("--ema", "excludes --weights", hint="leave one of them out")
    parts = [1.0] * len(folders) if ema is None else ema_weights(len(folders), ema)
    if weights is not None:
        try:
            parts = [float(word) for word in weights.split(",")]
        except ValueError:
            raise ConfigError(
                "--weights", "are not numbers", found=weights, hint="--weights 0.5,0.3,0.2"
            ) from None
    sources = [Checkpoint.open(folder) for folder in folders]
    folder = averaged(sources, save, parts, force=force, progress=partial(progress_bar, "averaging"))
    shares = [part / sum(parts) for part in parts]
    if as_json:
        click.echo(json.dumps({"folder": str(folder), "weights": shares}))
    else:
        click.echo(f"{folder}: mean of {len(folders)}, weights {' '.join(f'{part:.4g}' for part in shares)}")
