"""The commands that make a checkpoint of ours out of checkpoints of ours."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from mega_ckpt.commands.common import DEGREE, FORCE, JSON, PATH, PP, TP, progress


@click.command()
@click.option("--load", required=True, type=PATH, help="Folder of a run, or of one checkpoint of it.")
@click.option("--save", required=True, type=PATH, help="Folder of the run to write into; another one.")
@TP
@PP
@click.option(
    "--vp",
    "--num-virtual-stages-per-pipeline-rank",
    "vp",
    type=DEGREE,
    default=1,
    show_default=True,
    help="Stages of each pipeline rank.",
)
@click.option("--ep", "--expert-model-parallel-size", "ep", type=DEGREE, default=1, hidden=True)
@click.option(
    "--dtype",
    type=click.Choice(["keep", "fp32", "bf16", "fp16"]),
    default="keep",
    show_default=True,
    help="Of the model's weights; the optimizer's state stays float32.",
)
@click.option("--no-optim", is_flag=True, help="Leave the optimizer's state behind.")
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
    """Write a checkpoint again as a tp x pp layout would have written it."""
    from mega_ckpt.reshard import reshard as rewrite
    from mega_schema.checkpoint import Checkpoint
    from mega_schema.errors import ConfigError
    from mega_schema.layout import Layout

    if ep > 1:
        raise ConfigError("--ep", "the model has no experts", found=ep, wanted=1, hint="leave --ep out")
    begun = time.monotonic()
    layout, kind = Layout(tp=tp, pp=pp, vp=vp), None if dtype == "keep" else dtype
    folder = rewrite(
        Checkpoint.open(load),
        save,
        layout,
        optimizer=not no_optim,
        dtype=kind,
        force=force,
        progress=progress("resharding"),
    )
    size, seconds = sum(Checkpoint(folder).files.values()), time.monotonic() - begun
    if as_json:
        told = {"folder": str(folder), "bytes": size, "seconds": seconds, "tp": tp, "pp": pp, "vp": vp}
        click.echo(json.dumps(told))
        return
    click.echo(
        f"{folder}: {size:,} bytes in {seconds:.1f} s, tp={tp} pp={pp}" + (f" vp={vp}" if vp > 1 else "")
    )
