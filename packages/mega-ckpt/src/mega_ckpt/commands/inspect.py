"""The commands that only read: inspect, verify and diff."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mega_ckpt.commands.common import JSON, MODEL_NAME, PATH, TRUE_VOCAB
from mega_ckpt.formats.registry import NAMES
from mega_schema.app.progress import progress_bar
from mega_schema.errors import escape_controls

if TYPE_CHECKING:
    from mega_ckpt.formats.interface import ReadOptions
    from mega_ckpt.operations.diff import DiffResult

_BARS = "▁▂▃▄▅▆▇█"
_WIDEST = 24  # powers of two on a line, the largest ones


@click.command()
@click.argument("folder", type=PATH)
@click.option(
    "--from",
    "have",
    type=click.Choice([*NAMES]),
    help="Format of FOLDER.  [default: detected from its files]",
)
@click.option("--tensors", is_flag=True, help="List every tensor: shape, dtype, pieces.")
@click.option(
    "--stats", is_flag=True, help="Norm, range, NaNs and magnitudes of every tensor; reads all data."
)
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
    """Print the content of the checkpoint FOLDER (for a run's folder, its latest checkpoint).

    Tensors of other formats are listed under Mega's names.
    """
    from mega_ckpt.formats import registry
    from mega_ckpt.operations.inspect import summarize_checkpoint, summarize_source
    from mega_ckpt.operations.stats import checkpoint_stats, source_stats
    from mega_schema.checkpoint.formats import detect_format
    from mega_schema.checkpoint.reader import Checkpoint

    format_name = have or detect_format(folder)
    if format_name is None:  # an unknown folder is reported as an incomplete Mega checkpoint
        format_name = registry.require_format(folder, "--from") if folder.is_file() else "mega"
    if format_name == "mega":
        checkpoint = Checkpoint.open(folder)
        summary = summarize_checkpoint(checkpoint, tensors=tensors)
        if stats:
            summary["stats"] = checkpoint_stats(checkpoint, partial(progress_bar, "reading"))
    else:
        source = registry.read_source(format_name, folder, _read_options(true_vocab_size, model))
        summary = summarize_source(source, format_name, tensors=tensors)
        if stats:
            summary["stats"] = source_stats(source, partial(progress_bar, "reading"))
    click.echo(json.dumps(summary) if as_json else "\n".join(map(escape_controls, _summary_lines(summary))))


@click.command()
@click.argument("folder", type=PATH)
@click.option(
    "--accept",
    "accepts",
    is_flag=True,
    help="Accept edited side files: rewrite their checksums and that of the manifest.",
)
@JSON
def verify(folder: Path, accepts: bool, as_json: bool) -> None:
    """Read every byte of the checkpoint FOLDER and check it against manifest and model."""
    from dataclasses import asdict

    from mega_ckpt.checkpoint.verify import verify as check
    from mega_ckpt.operations.accept import accept_edits
    from mega_schema.checkpoint.reader import Checkpoint

    accepted = accept_edits(folder) if accepts else []
    checkpoint = Checkpoint.open(folder)
    result = check(checkpoint, partial(progress_bar, "reading"))
    counts = f"{result.tensors:,} tensors, {result.pieces:,} pieces, {result.bytes:,} bytes"
    if as_json:
        report = {"folder": str(checkpoint.folder), "sound": True, **asdict(result)}
        click.echo(json.dumps(report | {"accepted": accepted} if accepts else report))
    else:
        if accepts:
            names = ", ".join(accepted) or "nothing had changed"
            click.echo(escape_controls(f"{checkpoint.folder}: accepted: {names}"))
        click.echo(escape_controls(f"{checkpoint.folder}: sound: {counts}"))


@click.command()
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option(
    "--from", "have", type=click.Choice([*NAMES]), help="Format of A.  [default: detected from its files]"
)
@click.option(
    "--to", "want", type=click.Choice([*NAMES]), help="Format of B.  [default: detected from its files]"
)
@click.option("--no-optim", is_flag=True, help="Compare only the weights.")
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
    """List the tensors that differ between A and B. Exit code: 0 the same, 1 different."""
    from mega_ckpt.formats.registry import read_source, require_format
    from mega_ckpt.operations.diff import diff_checkpoints

    reading = _read_options(true_vocab_size, model)
    sources = [
        read_source(name or require_format(path, flag), path, reading)
        for path, name, flag in ((a, have, "--from"), (b, want, "--to"))
    ]
    result = diff_checkpoints(*sources, optimizer=not no_optim, progress=partial(progress_bar, "comparing"))
    if as_json:
        click.echo(json.dumps(result.to_dict()))
    else:
        click.echo("\n".join(map(escape_controls, _diff_lines(result))))
    context.exit(0 if result.is_same else 1)


def _read_options(vocab: int | None, model: str | None) -> ReadOptions:
    from mega_ckpt.formats import user_overrides
    from mega_ckpt.formats.interface import ReadOptions

    return ReadOptions(vocab, model=user_overrides.parse_model(model) if model else None)


def _diff_lines(result: DiffResult) -> list[str]:
    lines = [
        f"{entry.space}  {entry.name}  {entry.what}: {entry.a or 'none'}, {entry.b or 'none'}"
        + (
            f"; {entry.differing:,} of {entry.elements:,} elements differ, max {entry.absolute:.3g}, "
            f"max relative {entry.relative:.3g}"
            if entry.elements
            else ""
        )
        for entry in result.differences
    ]
    lines += [f"only A has {space}, which is not compared" for space in result.only_a]
    lines += [f"only B has {space}, which is not compared" for space in result.only_b]
    counted = f"{result.tensors:,} tensors compared"
    return [
        *lines,
        f"{counted}: {f'{len(result.differences):,} differences' if result.differences else 'the same'}",
    ]


def _summary_lines(summary: dict[str, Any]) -> list[str]:
    model = summary["model"]
    lines = [
        f"folder      {summary['folder']}",
        f"iteration   {summary['iteration']:,}",
        f"model       {model['family']}: {model['layers']} layers, hidden {model['hidden']}, "
        f"{model['heads']} heads, {model['kv_heads']} kv heads, vocabulary {model['vocab']:,}, "
        f"context {model['max_seq_len']:,}",
        f"parameters  {summary['parameters']:,}",
        f"tokenizer   {_tokenizer(summary['tokenizer'])}",
    ]
    if "format" in summary:
        lines.insert(1, f"format      {summary['format']}: {NAMES[summary['format']][1]}")
    else:
        written = " ".join(f"{axis}={degree}" for axis, degree in summary["written_by"].items())
        lines.insert(-1, f"written by  {written}")
    for space, entry in summary["namespaces"].items():
        counts = f", {entry['pieces']:,} pieces, {entry['files']:,} files" if "pieces" in entry else ""
        size = f"{entry['bytes']:>15,} bytes"
        kinds = ",".join(entry["dtypes"])
        lines.append(f"{space:<16} {size}  {kinds}  {entry['tensors']:,} tensors{counts}")
    lines += [f"not supported by Mega: {what}" for what in summary.get("left", ())]
    for space, entries in summary.get("tensors", {}).items():
        for name, entry in entries.items():
            lines.append(f"{space}  {name}  {entry['dtype']}  {_shape(entry['shape'])}")
            lines += [f"    {_box(piece)}  {piece['file']}" for piece in entry.get("pieces", ())]
    for space, entries in summary.get("stats", {}).items():
        lines += [f"{space}  {name}  {_stats(entry)}" for name, entry in entries.items()]
    return lines


def _stats(stats: dict[str, Any]) -> str:
    non_finite = "".join(
        f"  {stats[key]:,} {word}" for key, word in (("nan", "NaN"), ("inf", "infinite")) if stats[key]
    )
    if stats["mean"] is None:
        return f"no finite number{non_finite}"
    line = (
        f"norm {stats['norm']:.4g}  mean {stats['mean']:.3g}  min {stats['min']:.4g}  max {stats['max']:.4g}"
    )
    line += non_finite
    counts = {int(exponent): count for exponent, count in stats["magnitudes"].items()}
    if not counts:
        return f"{line}  all 0"
    first = min(counts)
    last = max(counts)
    max_count = max(counts.values())
    first = max(first, last - _WIDEST + 1)
    bars = [counts.get(exponent, 0) for exponent in range(first, last + 1)]
    shape = "".join(_BARS[(len(_BARS) - 1) * count // max_count] if count else " " for count in bars)
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
