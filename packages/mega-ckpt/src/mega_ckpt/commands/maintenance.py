"""The commands prune and export-tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import click

from mega_ckpt.commands.common import DEGREE, FORCE, JSON, PATH
from mega_schema.app.output_option import OUTPUT_FOLDER


@click.command()
@click.argument("run", type=PATH)
@click.option("--keep-last", type=DEGREE, metavar="N", help="Keep the N newest checkpoints.")
@click.option(
    "--keep-every", type=DEGREE, metavar="N", help="Keep checkpoints whose iteration is a multiple of N."
)
@click.option("--dry-run", is_flag=True, help="List what would be removed and remove nothing.")
@JSON
def prune(run: Path, keep_last: int | None, keep_every: int | None, dry_run: bool, as_json: bool) -> None:
    """Remove checkpoints of RUN as `mega-train --keep-last --keep-every` would; the newest stays."""
    from mega_ckpt.operations.prune import prune as remove
    from mega_schema.errors import ConfigError

    if keep_last is None and keep_every is None:
        raise ConfigError("--keep-last", "missing, and so is --keep-every", hint="--keep-last 3")
    result = remove(run, last=keep_last or 1, every=keep_every, dry_run=dry_run)
    if as_json:
        report = {
            "removed": result.removed,
            "kept": result.remaining,
            "bytes": result.bytes,
            "dry_run": dry_run,
        }
        click.echo(json.dumps(report))
        return
    would = "would remove" if dry_run else "removed"
    click.echo(f"{run}: {would} {_iterations(result.removed)}: {result.bytes:,} bytes")
    click.echo(f"{run}: {'would keep' if dry_run else 'kept'} {_iterations(result.remaining)}")


def _iterations(iterations: list[int]) -> str:
    return (
        f"{len(iterations)} ({', '.join(f'{iteration:,}' for iteration in iterations)})"
        if iterations
        else "none"
    )


@click.command("export-tokenizer")
@click.argument("folder", type=PATH)
@click.option("--save", required=True, type=OUTPUT_FOLDER, help="Folder to write.")
@FORCE
def export_tokenizer(folder: Path, save: Path, force: bool) -> None:
    """Write the tokenizer of the checkpoint FOLDER as files that Hugging Face's libraries load."""
    from mega_ckpt.formats.huggingface.tokenizer import export_tokenizer as export
    from mega_schema.checkpoint.reader import Checkpoint

    names = export(Checkpoint.open(folder), save, force=force)
    click.echo(f"{save}: {', '.join(names)}")
