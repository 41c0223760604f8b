"""The command line of mega-ckpt: reads arguments, prints one line or a table."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import click

from mega_ckpt import __version__
from mega_ckpt.format_names import NAMES
from mega_schema import command

PATH = click.Path(path_type=Path)
DEGREE = click.IntRange(min=1)
TP = click.option(
    "--tp",
    "--tensor-model-parallel-size",
    "--target-tensor-parallel-size",
    "tp",
    type=DEGREE,
    default=1,
    show_default=True,
    help="Ranks that share every layer.",
)
PP = click.option(
    "--pp",
    "--pipeline-model-parallel-size",
    "--target-pipeline-parallel-size",
    "pp",
    type=DEGREE,
    default=1,
    show_default=True,
    help="Stages of the pipeline.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mega-ckpt")
def cli() -> None:
    """Work on checkpoints without a trainer or a GPU."""


@cli.command()
@click.option("--load", required=True, type=PATH, help="Folder of a run, or of one checkpoint of it.")
@click.option("--save", required=True, type=PATH, help="Folder of the run to write into; another one.")
@TP
@PP
@click.option("--no-optim", is_flag=True, help="Leave the optimizer's state behind.")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint of this iteration.")
def reshard(load: Path, save: Path, tp: int, pp: int, no_optim: bool, overwrite: bool) -> None:
    """Write a checkpoint again as a tp x pp layout would have written it."""
    from mega_ckpt.reshard import reshard as rewrite
    from mega_schema.checkpoint import Checkpoint
    from mega_schema.layout import Layout

    begun = time.monotonic()
    source = Checkpoint.open(load)
    folder = rewrite(source, save, Layout(tp=tp, pp=pp), optimizer=not no_optim, overwrite=overwrite)
    size = sum(Checkpoint(folder).files.values())
    click.echo(f"{folder}: {size:,} bytes in {time.monotonic() - begun:.1f} s, tp={tp} pp={pp}")


@cli.command()
@click.argument("folder", type=PATH)
@click.option("--tensors", is_flag=True, help="Every tensor too: shape, dtype, pieces.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object instead of a table.")
def inspect(folder: Path, tensors: bool, as_json: bool) -> None:
    """Print what is in the checkpoint FOLDER (a run's folder means its latest)."""
    from mega_ckpt.inspect import summary
    from mega_schema.checkpoint import Checkpoint

    told = summary(Checkpoint.open(folder), tensors=tensors)
    click.echo(json.dumps(told) if as_json else "\n".join(_lines(told)))


@cli.command()
@click.argument("folder", type=PATH)
def verify(folder: Path) -> None:
    """Read every byte of the checkpoint FOLDER and hold it against its manifest and its model."""
    from mega_ckpt.verify import verify as check
    from mega_schema.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(folder)
    sound = check(checkpoint)
    counts = f"{sound.tensors:,} tensors, {sound.pieces:,} pieces, {sound.bytes:,} bytes"
    click.echo(f"{checkpoint.folder}: sound: {counts}")


@cli.command()
@click.option("--from", "have", required=True, type=click.Choice([*NAMES]), help="What --load is.")
@click.option("--to", "want", required=True, type=click.Choice([*NAMES]), help="What --save will be.")
@click.option("--load", "--load-dir", required=True, type=PATH, help="Folder or file to read.")
@click.option("--save", "--save-dir", required=True, type=PATH, help="Folder to write.")
@click.option(
    "--dtype",
    type=click.Choice(["keep", "fp32", "bf16", "fp16"]),
    default="keep",
    show_default=True,
    help="Of the weights that are written.",
)
@TP
@PP
@click.option("--no-optim", is_flag=True, help="Leave the optimizer's state behind.")
@click.option("--true-vocab-size", type=DEGREE, help="Ids of the tokenizer, where --load has padded rows.")
@click.option("--tokenizer", type=PATH, help="Folder of a tokenizer, for a --load that has none.")
@click.option("--model-type", type=click.Choice(["GPT"]), default="GPT", hidden=True)
@click.option("--force", "--overwrite", is_flag=True, help="Replace what --save holds.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object instead of a line.")
def convert(
    have: str,
    want: str,
    load: Path,
    save: Path,
    dtype: str,
    tp: int,
    pp: int,
    no_optim: bool,
    true_vocab_size: int | None,
    tokenizer: Path | None,
    model_type: str,
    force: bool,
    as_json: bool,
) -> None:
    """Convert a checkpoint of one format to another: docs/howto/convert.md has a line for every pair."""
    from mega_ckpt.convert import convert as rewrite
    from mega_ckpt.formats import Reading, Target
    from mega_schema.errors import ConfigError
    from mega_schema.layout import Layout

    if have == want == "mega":
        hint = f"mega-ckpt reshard --load {load} --save {save}"
        raise ConfigError("--to", "is what --from is", found=want, wanted="the other", hint=hint)
    begun = time.monotonic()
    reading = Reading(true_vocab_size, tokenizer)
    target = Target(dtype, Layout(tp=tp, pp=pp), not no_optim, force)
    done = rewrite(load, save, have, want, reading=reading, target=target)
    seconds, written = time.monotonic() - begun, done.written
    if as_json:
        told = {**asdict(written), "folder": str(written.folder), "left": done.left, "seconds": seconds}
        click.echo(json.dumps(told))
        return
    click.echo(
        f"{written.folder}: {written.parameters:,} parameters, {written.bytes:,} bytes in "
        f"{seconds:.1f} s, {'with' if written.tokenizer else 'without'} a tokenizer"
    )
    if done.left:
        click.echo(f"left behind: {', '.join(done.left)}", err=True)


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


def main() -> NoReturn:
    command.run(cli)
