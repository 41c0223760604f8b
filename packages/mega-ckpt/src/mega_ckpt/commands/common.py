"""Options that the commands share."""

from __future__ import annotations

import re

import click

from mega_schema.app.click_options import LocalPath
from mega_schema.errors import ConfigError

PATH = LocalPath()
DEGREE = click.IntRange(min=1)
TP = click.option(
    "--tp",
    "--tensor-model-parallel-size",
    "--target-tensor-parallel-size",
    "tp",
    type=DEGREE,
    default=1,
    show_default=True,
    help="Tensor-parallel ranks.",
)
PP = click.option(
    "--pp",
    "--pipeline-model-parallel-size",
    "--target-pipeline-parallel-size",
    "pp",
    type=DEGREE,
    default=1,
    show_default=True,
    help="Pipeline stages.",
)
VP = click.option(
    "--vp",
    "--num-virtual-stages-per-pipeline-rank",
    "vp",
    type=DEGREE,
    default=1,
    show_default=True,
    help="Virtual pipeline stages of each rank.",
)
TRUE_VOCAB = click.option(
    "--true-vocab-size",
    type=DEGREE,
    help="Vocabulary size of the tokenizer, if the source pads its embedding.",
)
MODEL_NAME = click.option(
    "--model",
    help="Model preset, or JSON file with its fields, for a source that does not describe its model.",
)
SHARD = click.option(
    "--max-shard-size",
    "shard",
    default="5GB",
    show_default=True,
    callback=lambda context, option, text: parse_size(text),
    help="Largest size of one weight file: KB, MB or GB, in powers of 1000.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print a JSON object instead of text.")
FORCE = click.option("--force", "--overwrite", "force", is_flag=True, help="Replace the content of --save.")


def parse_size(text: str) -> int:
    """Parse a number of bytes with a unit.

    Raises:
        ConfigError: it is not one.
    """
    match = re.fullmatch(r"(\d+)([KMG]?)B", text.upper())
    number = int(match[1]) * 1000 ** " KMG".index(match[2] or " ") if match else 0
    if not number:
        raise ConfigError(
            "--max-shard-size",
            "not a size",
            found=text,
            wanted="an integer and KB, MB or GB",
            hint="--max-shard-size 5GB",
        )
    return number
