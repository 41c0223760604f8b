"""The commands that only read: what is in a checkpoint, and whether it is sound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mega_ckpt.commands.common import JSON, MODEL_NAME, PATH, TRUE_VOCAB, progress
from mega_ckpt.formats.registry import NAMES
from mega_schema.errors import escape_controls

if TYPE_CHECKING:
    from mega_ckpt.formats.interface import Reading
    from mega_ckpt.operations.diff import Compared

_BARS = "▁▂▃▄▅▆▇█"
_WIDEST = 24  # powers of two that a line shows, the largest ones


@click.command()
@click.argument("folder", type=PATH)
@click.option("--from", "have", type=click.Choice([*NAMES]), help="What it is.  [default: its files tell]")
@click.option("--tensors", is_flag=True, help="Every tensor too: shape, dtype, pieces.")
@click.option("--stats", is_flag=True, help="Norm, range, NaNs and magnitudes of every tensor: reads it all.")
@TRUE_VOCAB
@MODEL_NAME
@JSON
def inspect(
    folder: Path,
    have: str | None,
    tensors: bool,
    stats: bool,
    true_vocab_size: int | None,
    model: str | None,
    as_json: bool,
) -> None:
    """Print what is in the checkpoint FOLDER (a run's folder means its latest).

    Tensors of another format are told by our names.
    """
    from mega_ckpt.formats import registry
    from mega_ckpt.operations.inspect import summary, summary_of
    from mega_ckpt.operations.stats import all_of, all_of_source
    from mega_schema.checkpoint import Checkpoint
    from mega_schema.checkpoint_formats import detect_format

    form = have or detect_format(folder)
    if form is None:  # a folder of no format is one of ours without what it lacks
        form = registry.guessed(folder, "--from") if folder.is_file() else "mega"
    if form == "mega":
        checkpoint = Checkpoint.open(folder)
        told = summary(checkpoint, tensors=tensors)
        if stats:
            told["stats"] = all_of(checkpoint, progress("reading"))
    else:
        source = registry.read(form, folder, _reading(true_vocab_size, model))
        told = summary_of(source, form, tensors=tensors)
        if stats:
            told["stats"] = all_of_source(source, progress("reading"))
    click.echo(json.dumps(told) if as_json else "\n".join(map(escape_controls, _lines(told))))


@click.command()
@click.argument("folder", type=PATH)
@click.option(
    "--accept",
    "accepts",
    is_flag=True,
    help="After an edit that was meant: write the checksums of side files and manifest anew.",
)
@JSON
def verify(folder: Path, accepts: bool, as_json: bool) -> None:
    """Read every byte of the checkpoint FOLDER and hold it against its manifest and its model."""
    from dataclasses import asdict

    from mega_ckpt.checkpoint.verify import verify as check
    from mega_ckpt.operations.accept import accept
    from mega_schema.checkpoint import Checkpoint

    accepted = accept(folder) if accepts else []
    checkpoint = Checkpoint.open(folder)
    sound = check(checkpoint, progress("reading"))
    counts = f"{sound.tensors:,} tensors, {sound.pieces:,} pieces, {sound.bytes:,} bytes"
    if as_json:
        told = {"folder": str(checkpoint.folder), "sound": True, **asdict(sound)}
        click.echo(json.dumps(told | {"accepted": accepted} if accepts else told))
    else:
        if accepts:
            names = ", ".join(accepted) or "nothing had changed"
            click.echo(escape_controls(f"{checkpoint.folder}: accepted: {names}"))
        click.echo(escape_controls(f"{checkpoint.folder}: sound: {counts}"))


@click.command()
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option("--from", "have", type=click.Choice([*NAMES]), help="What A is.  [default: its files tell]")
@click.option("--to", "want", type=click.Choice([*NAMES]), help="What B is.  [default: its files tell]")
@click.option("--no-optim", is_flag=True, help="Compare the weights alone.")
@TRUE_VOCAB
@MODEL_NAME
@JSON
@click.pass_context
def diff(
    context: click.Context,
    a: Path,
    b: Path,
    have: str | None,
    want: str | None,
    no_optim: bool,
    true_vocab_size: int | None,
    model: str | None,
    as_json: bool,
) -> None:
    """Say which tensors of A and B differ, and by how much. Exit code: 0 the same, 1 different."""
    from mega_ckpt.formats.registry import guessed, read
    from mega_ckpt.operations.diff import compare

    reading = _reading(true_vocab_size, model)
    sources = [
        read(name or guessed(path, flag), path, reading)
        for path, name, flag in ((a, have, "--from"), (b, want, "--to"))
    ]
    found = compare(*sources, optimizer=not no_optim, progress=progress("comparing"))
    if as_json:
        click.echo(json.dumps(found.to_dict()))
    else:
        click.echo("\n".join(map(escape_controls, _differences(found))))
    context.exit(0 if found.same else 1)


def _reading(vocab: int | None, model: str | None) -> Reading:
    from mega_ckpt.formats import user_overrides
    from mega_ckpt.formats.interface import Reading

    return Reading(vocab, model=user_overrides.parse_model(model) if model else None)


def _differences(found: Compared) -> list[str]:
    lines = [
        f"{one.space}  {one.name}  {one.what}: {one.a or 'none'}, {one.b or 'none'}"
        + (
            f"; {one.differing:,} of {one.elements:,} numbers, at most {one.absolute:.3g}, "
            f"{one.relative:.3g} of the larger"
            if one.elements
            else ""
        )
        for one in found.differences
    ]
    lines += [f"only A has {space}, which is not compared" for space in found.only_a]
    lines += [f"only B has {space}, which is not compared" for space in found.only_b]
    counted = f"{found.tensors:,} tensors compared"
    return [
        *lines,
        f"{counted}: {f'{len(found.differences):,} differences' if found.differences else 'the same'}",
    ]


def _lines(told: dict[str, Any]) -> list[str]:
    model = told["model"]
    lines = [
        f"folder      {told['folder']}",
        f"iteration   {told['iteration']:,}",
        f"model       {model['family']}: {model['layers']} layers, hidden {model['hidden']}, "
        f"{model['heads']} heads, {model['kv_heads']} kv heads, vocabulary {model['vocab']:,}, "
        f"context {model['context']:,}",
        f"parameters  {told['parameters']:,}",
        f"tokenizer   {_tokenizer(told['tokenizer'])}",
    ]
    if "format" in told:
        lines.insert(1, f"format      {told['format']}: {NAMES[told['format']][1]}")
    else:
        written = " ".join(f"{axis}={degree}" for axis, degree in told["written_by"].items())
        lines.insert(-1, f"written by  {written}")
    for space, has in told["namespaces"].items():
        cut = f", {has['pieces']:,} pieces, {has['files']:,} files" if "pieces" in has else ""
        size, kinds = f"{has['bytes']:>15,} bytes", ",".join(has["dtypes"])
        lines.append(f"{space:<16} {size}  {kinds}  {has['tensors']:,} tensors{cut}")
    lines += [f"without a place in ours: {what}" for what in told.get("left", ())]
    for space, entries in told.get("tensors", {}).items():
        for name, has in entries.items():
            lines.append(f"{space}  {name}  {has['dtype']}  {_shape(has['shape'])}")
            lines += [f"    {_box(piece)}  {piece['file']}" for piece in has.get("pieces", ())]
    for space, entries in told.get("stats", {}).items():
        lines += [f"{space}  {name}  {_stats(has)}" for name, has in entries.items()]
    return lines


def _stats(has: dict[str, Any]) -> str:
    bad = "".join(f"  {has[key]:,} {word}" for key, word in (("nan", "NaN"), ("inf", "infinite")) if has[key])
    if has["mean"] is None:
        return f"no finite number{bad}"
    line = f"norm {has['norm']:.4g}  mean {has['mean']:.3g}  min {has['min']:.4g}  max {has['max']:.4g}{bad}"
    counts = {int(exponent): count for exponent, count in has["magnitudes"].items()}
    if not counts:
        return f"{line}  all 0"
    first, last, most = min(counts), max(counts), max(counts.values())
    first = max(first, last - _WIDEST + 1)
    bars = [counts.get(exponent, 0) for exponent in range(first, last + 1)]
    shape = "".join(_BARS[(len(_BARS) - 1) * count // most] if count else " " for count in bars)
    return f"{line}  2^{first} {shape} 2^{last + 1}"


def _tokenizer(identity: dict[str, Any] | None) -> str:
    if identity is None:
        return "none"
    return f"{identity['type']}, {identity['vocab_size']:,} ids, sha256 {identity['sha256'][:12]}"


def _shape(shape: list[int]) -> str:
    return " x ".join(str(n) for n in shape)


def _box(piece: dict[str, Any]) -> str:
    spans = zip(piece["start"], piece["shape"], strict=True)
    return f"[{', '.join(f'{start}:{start + extent}' for start, extent in spans)}]"
