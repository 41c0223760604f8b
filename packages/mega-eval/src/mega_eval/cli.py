"""The command line of mega-eval: parse the options, run a task, print its table and write its result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from mega_eval import __version__
from mega_schema.app import cli_runner
from mega_schema.app.output_option import OUTPUT_FILE
from mega_schema.app.progress import progress_bar

if TYPE_CHECKING:
    from mega_eval.result import TaskResult
    from mega_eval.scorer import Scorer
    from mega_schema.tokenizer.tokenizer import Tokenizer

PATH = click.Path(path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mega-eval")
def cli() -> None:
    """Evaluate a language model. Each command prints a table and writes a JSON result."""


def common_options(task: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the options of every task; `task` names the default output."""
    options = (
        click.option(
            "--load", required=True, type=PATH, help="Checkpoint directory, or run directory (its latest)."
        ),
        click.option(
            "--output",
            type=OUTPUT_FILE,
            default=Path(f"{task}.json"),
            show_default=True,
            help="Result file; an existing result is replaced.",
        ),
        click.option(
            "--micro-batch-size",
            type=click.IntRange(min=1),
            default=16,
            show_default=True,
            help="Windows in one forward pass. Changes memory and speed, not the result.",
        ),
        click.option(
            "--device",
            default="auto",
            show_default=True,
            help="cpu, cuda or cuda:N; auto is the first GPU, or the CPU.",
        ),
    )

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            function = option(function)
        return function

    return add


@cli.command()
@common_options("lambada")
@click.option("--data", required=True, type=PATH, help='Lines of {"text": "..."}, as lambada_test.jsonl.')
@click.option("--strict-lambada", is_flag=True, help="Predict the last word instead of the last token.")
def lambada(data: Path, strict_lambada: bool, **common: Any) -> None:
    """Compute the accuracy on the last word, or the last token, of LAMBADA passages."""
    from mega_eval.documents import read_json_lines
    from mega_eval.tasks.lambada import evaluate

    lines = [(f"{data}:{number}", text) for number, text in read_json_lines(data, "text")]
    _run_task(
        lambda scorer, tokenizer: evaluate(scorer, tokenizer, lines, strict=strict_lambada),
        [data],
        {"strict_lambada": strict_lambada},
        **common,
    )


@cli.command()
@common_options("wikitext103")
@click.option("--data", required=True, type=PATH, help="Tokenized file, as wiki.test.tokens.")
@click.option(
    "--overlapping-eval",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Stride of the windows in tokens; a window scores this number of tokens at its end.",
)
@click.option(
    "--seq-length", type=click.IntRange(min=1), help="Tokens of a window. Default: the model's context."
)
@click.option(
    "--detokenizer",
    type=click.Choice(["wikitext", "ptb", "none"]),
    help="Rules that join the words to text. Default: by the word ptb, wiki or lambada in the path.",
)
def wikitext103(
    data: Path, overlapping_eval: int, seq_length: int | None, detokenizer: str | None, **common: Any
) -> None:
    """Compute the perplexity and word-adjusted perplexity of WikiText-103, or of Penn Treebank."""
    from mega_eval.detokenize import choose_detokenizer
    from mega_eval.documents import read_text
    from mega_eval.tasks.wikitext import evaluate

    detokenizer = choose_detokenizer(data, detokenizer)
    text = read_text(data)
    _run_task(
        lambda scorer, tokenizer: evaluate(
            scorer,
            tokenizer,
            text,
            detokenizer=detokenizer,
            stride=overlapping_eval,
            seq_length=seq_length,
            where=data,
        ),
        [data],
        {"detokenizer": detokenizer, "overlapping_eval": overlapping_eval, "seq_length": seq_length},
        **common,
    )


@cli.command()
@common_options("perplexity")
@click.option("--data", required=True, type=PATH, help="JSON lines, or prefix of an indexed dataset.")
@click.option("--json-key", default="text", show_default=True, help="Key of the text in JSON lines.")
@click.option(
    "--baseline-data",
    type=PATH,
    help="Prefix of the training dataset; adds n-gram baselines.",
)
def perplexity(data: Path, json_key: str, baseline_data: Path | None, **common: Any) -> None:
    """Compute perplexity, bits per byte and last-word accuracy on your own documents."""
    from mega_eval.documents import list_data_files, list_dataset_files, read_documents, read_token_stream
    from mega_eval.tasks.perplexity import evaluate

    def run(scorer: Scorer, tokenizer: Tokenizer) -> TaskResult:
        baseline = None if baseline_data is None else read_token_stream(baseline_data, tokenizer.identity)
        documents = read_documents(data, json_key, tokenizer)
        return evaluate(scorer, tokenizer, documents, baseline=baseline, where=data)

    files = list_data_files(data) + (list_dataset_files(baseline_data) if baseline_data else [])
    _run_task(run, files, {"json_key": json_key}, **common)


def _run_task(
    task: Callable[[Scorer, Tokenizer], TaskResult],
    files: list[Path],
    options: dict[str, object],
    *,
    load: Path,
    output: Path,
    micro_batch_size: int,
    device: str,
) -> None:
    """Load the checkpoint, run the task, print the table and write the result."""
    import platform
    import time

    import torch

    from mega_eval import result
    from mega_eval.scorer import ModelScorer
    from mega_model.build import load_model
    from mega_model.devices import resolve_device
    from mega_schema.checkpoint.checkpoint_tokenizer import open_checkpoint_tokenizer
    from mega_schema.checkpoint.reader import Checkpoint

    result.check_writable(output, [*files, load])
    fingerprints = result.fingerprint_files(files)
    checkpoint = Checkpoint.open(load)
    tokenizer = open_checkpoint_tokenizer(checkpoint)
    model_device = resolve_device(device, where="--device")
    model = load_model(checkpoint.spec, checkpoint.model_slab, device=model_device)
    progress = partial(progress_bar, "scoring", unit="windows")
    scorer = ModelScorer(model, where=checkpoint.folder, batch_size=micro_batch_size, progress=progress)
    start = time.perf_counter()
    task_result = task(scorer, tokenizer)
    seconds = time.perf_counter() - start
    provenance = result.Provenance(
        checkpoint.folder,
        checkpoint.iteration,
        fingerprints,
        options | {"micro_batch_size": micro_batch_size},
        {"mega-eval": __version__, "torch": torch.__version__, "python": platform.python_version()},
        str(next(model.parameters()).device),
    )
    record = result.build_record(task_result, provenance, seconds)
    result.write_record(output, record)
    click.echo(f"{task_result.task}  {checkpoint.folder}  iteration {checkpoint.iteration}")
    click.echo(result.format_table(record))
    click.echo(f"written to {output}")


def main() -> NoReturn:
    """Run the program `mega-eval`."""
    cli_runner.run_command(cli)
