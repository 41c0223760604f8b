"""Options that every task has. Imports neither torch nor numpy, for `--help`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mega_eval.commands.source_options import DEFAULT_CONCURRENCY, check_source
from mega_schema.app.click_options import LocalPath, add_options
from mega_schema.app.output_option import OUTPUT_FILE, OUTPUT_FOLDER

if TYPE_CHECKING:
    from mega_model.distributed.mesh import World

PATH = LocalPath()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """The values of the options that every task has, by the names of their flags.

    Attributes:
        world: this process among those that torchrun started; None without torchrun.
    """

    load: Path | None
    url: str | None
    output: Path | None
    overwrite: bool
    report: bool
    limit: int | None
    dtype: str
    micro_batch_size: int | None
    batch_invariant: bool
    device: str
    cache: Path | None
    no_cache: bool
    model: str | None
    api_key_env: str | None
    tokenizer: Path | None
    max_model_len: int | None
    concurrency: int
    allow_noise: bool
    tp: int
    pp: int
    dp: int | None
    world: World | None = None


RESULT_OPTIONS = (
    click.option(
        "--output",
        type=OUTPUT_FILE,
        help="Result file, NAME.json; examples go to NAME.samples.jsonl.  [default: "
        "TASK-CONVENTION-HASH-DTYPE.json]",
    ),
    click.option("--overwrite", is_flag=True, help="Replace an existing result, and its page."),
    click.option("--report", is_flag=True, help="Also write the HTML page of the result, beside it."),
)
DTYPE_OPTION = click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Dtype of weights and activations; auto is that of the stored weights.",
)
DEVICE_OPTION = click.option(
    "--device",
    default="auto",
    show_default=True,
    help="cpu, cuda or cuda:N; auto is the first GPU, or the CPU.",
)
_OPTIONS = (
    click.option(
        "--load",
        type=PATH,
        help="Checkpoint directory, run directory (its latest), or Hugging Face directory (config.json, "
        "safetensors, tokenizer.json; needs transformers).",
    ),
    click.option("--url", metavar="URL", help="Instead of --load: an OpenAI-compatible server."),
    *RESULT_OPTIONS,
    click.option(
        "--limit",
        type=click.IntRange(min=1),
        help="Evaluate only the first examples, as many as this; if any is left out, the result is marked as "
        "not publishable.",
    ),
    DTYPE_OPTION,
    click.option(
        "--micro-batch-size",
        type=click.IntRange(min=1),
        help="Most windows in one forward pass.  [default: as many as fit in memory]",
    ),
    click.option(
        "--batch-invariant",
        is_flag=True,
        help="Give ln P the bits of a training forward pass, in any batch. Slower; needs a CPU and numba.",
    ),
    DEVICE_OPTION,
    click.option(
        "--tp",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="Tensor-parallel processes that share every layer of the model.",
    ),
    click.option(
        "--pp",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="Pipeline stages: processes that each hold some layers of the model.",
    ),
    click.option(
        "--dp",
        type=click.IntRange(min=1),
        help="Copies of the model that share the examples.  [default: 1; under torchrun, as many as fit]",
    ),
    click.option(
        "--cache",
        type=OUTPUT_FOLDER,
        help="Keep the model's answers in this folder, for this and other runs.  [default: .mega-eval-cache "
        "beside the result, until it is written; a run that was interrupted resumes from it]",
    ),
    click.option("--no-cache", is_flag=True, help="Keep no answers: an interrupted run starts again."),
    click.option(
        "--model", metavar="NAME", help="With --url: the server's name of the model.  [default: its only one]"
    ),
    click.option(
        "--api-key-env", metavar="VARIABLE", help="With --url: environment variable that holds the API key."
    ),
    click.option(
        "--tokenizer",
        type=PATH,
        help="With --url: checkpoint or Hugging Face folder with the tokenizer.  [default: ask the server]",
    ),
    click.option(
        "--max-model-len",
        type=click.IntRange(min=4),
        help="With --url or a Hugging Face directory: the model's context in tokens.  [default: ask the "
        "server; that of config.json]",
    ),
    click.option(
        "--concurrency",
        type=click.IntRange(min=1),
        default=DEFAULT_CONCURRENCY,
        show_default=True,
        help="With --url: number of requests at a time.",
    ),
    click.option(
        "--allow-noise",
        is_flag=True,
        help="With --url: accept a server whose ln P changes by more than 0.001 with its other requests.",
    ),
)


def read_world() -> World | None:
    """Return this process among those that torchrun started; None without torchrun."""
    if "WORLD_SIZE" not in os.environ:
        return None
    from mega_model.distributed.mesh import World

    return World.from_env()


def task_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of every task; the command gets them as the keywords of `TaskOptions`.

    Those that do not fit the model's source are refused before the command reads anything. Under torchrun
    only rank 0 runs the command. The other ranks compute what it asks for.
    """

    @functools.wraps(function)
    def run(**keywords: Any) -> None:
        keywords["world"] = world = read_world()
        options = TaskOptions(**{field.name: keywords[field.name] for field in fields(TaskOptions)})
        check_source(options)
        if world is not None and world.rank:
            from mega_eval.commands.model_source import run_other_rank

            run_other_rank(options, world)
            return
        function(**keywords)

    return add_options(run, _OPTIONS)
