"""The command line of mega-ckpt."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NoReturn

import click

from mega_ckpt import __version__
from mega_ckpt.commands.common import DEGREE, MODEL_NAME, PATH, PP, SHARD, TP, TRUE_VOCAB, VP
from mega_ckpt.commands.inspect import diff, inspect, verify
from mega_ckpt.commands.maintenance import export_tokenizer, prune
from mega_ckpt.commands.reshard import average, reshard
from mega_ckpt.formats.registry import NAMES, WRITTEN
from mega_schema.app import cli_runner
from mega_schema.app.output_option import OUTPUT_FOLDER
from mega_schema.app.progress import progress_bar
from mega_schema.errors import escape_controls


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mega-ckpt")
def cli() -> None:
    """Convert, reshard and inspect checkpoints without a trainer or a GPU."""


@cli.command()
@click.option("--from", "have", required=True, type=click.Choice([*NAMES]), help="Format of --load.")
@click.option(
    "--to",
    "want",
    required=True,
    type=click.Choice([*NAMES]),  # read-only formats are listed too: they have their own error
    metavar=f"[{'|'.join(WRITTEN)}]",
    help="Format of --save.",
)
@click.option("--load", "--load-dir", required=True, type=PATH, help="Folder or file to read.")
@click.option("--save", "--save-dir", required=True, type=OUTPUT_FOLDER, help="Folder to write.")
@click.option(
    "--dtype",
    type=click.Choice(["keep", "fp32", "bf16", "fp16"]),
    default="keep",
    show_default=True,
    help="Dtype of the written weights.",
)
@TP
@PP
@VP
@SHARD
@click.option("--no-optim", is_flag=True, help="Drop the optimizer state.")
@TRUE_VOCAB
@click.option("--tokenizer", type=PATH, help="Tokenizer folder to use instead of the tokenizer of --load.")
@click.option("--no-tokenizer", is_flag=True, help="Drop the tokenizer of --load.")
@MODEL_NAME
@click.option(
    "--check-logits",
    "check",
    type=DEGREE,
    metavar="N",
    help="Run both checkpoints and compare their logits for N random tokens.  "
    "[default: 64 for a model below 10⁹ parameters that goes to hf, if torch is installed; else none]",
)
@click.option("--no-check-logits", "unchecked", is_flag=True, help="Do not compare logits.")
@click.option("--model-type", type=click.Choice(["GPT"]), default="GPT", hidden=True)
@click.option("--force", "--overwrite", is_flag=True, help="Replace the content of --save.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object instead of a line.")
@click.pass_context
def convert(
    context: click.Context,
    have: str,
    want: str,
    load: Path,
    save: Path,
    dtype: str,
    tp: int,
    pp: int,
    vp: int,
    shard: int,
    no_optim: bool,
    true_vocab_size: int | None,
    tokenizer: Path | None,
    no_tokenizer: bool,
    model: str | None,
    check: int | None,
    unchecked: bool,
    model_type: str,
    force: bool,
    as_json: bool,
) -> None:
    """Convert a checkpoint between formats: docs/howto/convert.md has a line for every pair."""
    from mega_ckpt.formats import user_overrides
    from mega_ckpt.formats.interface import ReadOptions, WriteOptions
    from mega_ckpt.operations.convert import convert as rewrite
    from mega_schema.errors import ConfigError
    from mega_schema.parallel_layout import Layout

    if have == want == "mega":
        hint = f"mega-ckpt reshard --load {load} --save {save}"
        raise ConfigError("--to", "is the same as --from", found=want, wanted="another format", hint=hint)
    if no_tokenizer and tokenizer is not None:
        hint = "leave one of them out"
        raise ConfigError("--no-tokenizer", "excludes --tokenizer", found=tokenizer, hint=hint)
    reading = ReadOptions(
        true_vocab_size, tokenizer, user_overrides.parse_model(model) if model else None, no_tokenizer
    )
    target = WriteOptions(
        dtype, Layout(tp=tp, pp=pp, vp=vp), not no_optim, force, shard, partial(progress_bar, "converting")
    )
    check = 0 if unchecked else check
    result = rewrite(load, save, have, want, reading=reading, target=target, check=check)
    seconds = result.seconds
    written = result.written
    logits = result.logits
    if as_json:
        report = {
            **asdict(written),
            "folder": str(written.folder),
            "left": result.dropped,
            "seconds": seconds,
        }
        compared = {**asdict(logits), "alike": logits.is_close} if logits else None
        click.echo(json.dumps({**report, "logits": compared}))
    else:
        click.echo(
            f"{written.folder}: {written.parameters:,} parameters, {written.bytes:,} bytes in "
            f"{seconds:.1f} s, {'with' if written.tokenizer else 'without'} a tokenizer"
        )
        if logits:
            click.echo(f"logits: {logits}")
        if result.dropped:
            click.echo(f"dropped: {escape_controls(', '.join(result.dropped))}", err=True)
    if logits and not logits.is_close:
        click.echo(f"error: {written.folder}: {logits.error_line}", err=True)
        context.exit(1)


for subcommand in (reshard, inspect, verify, diff, average, prune, export_tokenizer):
    cli.add_command(subcommand)


def main() -> NoReturn:
    cli_runner.run_command(cli)
