"""The commands that only read: what is in a checkpoint, and whether it is sound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from mega_ckpt.commands.common import JSON, PATH, progress


@click.command()
@click.argument("folder", type=PATH)
@click.option("--tensors", is_flag=True, help="Every tensor too: shape, dtype, pieces.")
@JSON
def inspect(folder: Path, tensors: bool, as_json: bool) -> None:
    """Print what is in the checkpoint FOLDER (a run's folder means its latest)."""
    from mega_ckpt.inspect import summary
    from mega_schema.checkpoint import Checkpoint

    told = summary(Checkpoint.open(folder), tensors=tensors)
    click.echo(json.dumps(told) if as_json else "\n".join(_lines(told)))


@click.command()
@click.argument("folder", type=PATH)
@JSON
def verify(folder: Path, as_json: bool) -> None:
    """Read every byte of the checkpoint FOLDER and hold it against its manifest and its model."""
    from dataclasses import asdict

    from mega_ckpt.verify import verify as check
    from mega_schema.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(folder)
    sound = check(checkpoint, progress("reading"))
    counts = f"{sound.tensors:,} tensors, {sound.pieces:,} pieces, {sound.bytes:,} bytes"
    if as_json:
        click.echo(json.dumps({"folder": str(checkpoint.folder), "sound": True, **asdict(sound)}))
    else:
        click.echo(f"{checkpoint.folder}: sound: {counts}")


def _lines(told: dict[str, Any]) -> list[str]:
    model, written = told["model"], told["written_by"]
    lines = [
        f"folder      {told['folder']}",
        f"iteration   {told['iteration']:,}",
        f"model       {model['family']}: {model['layers']} layers, hidden {model['hidden']}, "
        f"{model['heads']} heads, {model['kv_heads']} kv heads, vocabulary {model['vocab']:,}, "
        f"context {model['context']:,}",
        f"parameters  {told['parameters']:,}",
        f"written by  {' '.join(f'{axis}={degree}' for axis, degree in written.items())}",
        f"tokenizer   {_tokenizer(told['tokenizer'])}",
    ]
    for space, has in told["namespaces"].items():
        lines.append(
            f"{space:<16} {has['bytes']:>15,} bytes  {','.join(has['dtypes'])}  {has['tensors']:,} tensors, "
            f"{has['pieces']:,} pieces, {has['files']:,} files"
        )
    for space, entries in told.get("tensors", {}).items():
        for name, has in entries.items():
            lines.append(f"{space}  {name}  {has['dtype']}  {_shape(has['shape'])}")
            lines += [f"    {_box(piece)}  {piece['file']}" for piece in has["pieces"]]
    return lines


def _tokenizer(identity: dict[str, Any] | None) -> str:
    if identity is None:
        return "none"
    return f"{identity['type']}, {identity['vocab_size']:,} ids, sha256 {identity['sha256'][:12]}"


def _shape(shape: list[int]) -> str:
    return " x ".join(str(n) for n in shape)


def _box(piece: dict[str, Any]) -> str:
    spans = zip(piece["start"], piece["shape"], strict=True)
    return f"[{', '.join(f'{start}:{start + extent}' for start, extent in spans)}]"
