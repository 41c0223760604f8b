"""The command `mega-serve generate`: offline batches, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from mega_schema.app.cli_runner import TerminationError, raise_at_sigterm
from mega_schema.app.click_options import NonEmptyPath, NumberRange, add_options
from mega_schema.app.output_option import OUTPUT_FILE
from mega_schema.app.progress import progress_bar
from mega_schema.errors import ConfigError, MegaError
from mega_serve.commands.api_options import build_api_options
from mega_serve.commands.option_groups import GroupedCommand, option_group
from mega_serve.commands.output_checks import check_output_file

if TYPE_CHECKING:
    from mega_serve.client.offline.batch_run import Line, WorkItem
    from mega_serve.client.offline.openai_batch import BatchHandler
    from mega_serve.client.offline.resumable_lines import ResumableLines
    from mega_serve.engine.interfaces import EngineClient


@dataclass(frozen=True, slots=True)
class OfflineEngine:
    """An engine in this process or below it, ready for requests.

    Attributes:
        encode: returns the ids of a text.
        answer: answers the requests of a batch file.
    """

    client: EngineClient
    encode: Callable[[str], Sequence[int]]
    answer: BatchHandler


OpenEngine = Callable[[Mapping[str, Any]], AbstractAsyncContextManager[OfflineEngine]]
RequestT = TypeVar("RequestT")
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_RESUME: Final = "run the same command again to resume"
_INPUT: Final = NonEmptyPath(exists=True, dir_okay=False)
_batch = option_group("OpenAI batch file")
_samples = option_group("Samples")
_run = option_group("Run")


_OPTIONS: Final = (
    _batch("--input-file", type=_INPUT, metavar="FILE", help="Requests, JSON lines of OpenAI's batch API."),
    _batch("--output-file", type=OUTPUT_FILE, metavar="FILE", help="Answers, JSON lines."),
    *build_api_options(_batch),
    _samples(
        "--sample-input-file",
        type=_INPUT,
        metavar="FILE",
        help='Prompts: one a line, or JSON lines with "prompt" if the name ends in .jsonl.',
    ),
    _samples(
        "--sample-output-file",
        type=OUTPUT_FILE,
        metavar="FILE",
        help="Samples of --sample-input-file, JSON lines.  [default: the input's name and .out]",
    ),
    _samples(
        "--num-samples",
        type=click.IntRange(min=0),
        default=0,
        help="Unconditional samples to draw to --genfile.",
    ),
    _samples("--genfile", type=OUTPUT_FILE, metavar="FILE", help="Unconditional samples, JSON lines."),
    _samples(
        "--out-seq-length",
        type=click.IntRange(min=1),
        default=1024,
        show_default=True,
        help="Tokens to generate per sample, at most.",
    ),
    _samples(
        "--temperature",
        type=NumberRange(0, 100, min_open=True),
        default=1.0,
        show_default=True,
        help="Sampling temperature.",
    ),
    _samples(
        "--greedy", is_flag=True, help="Take the most probable token; the other filters have no effect."
    ),
    _samples(
        "--top_k", "--top-k", type=click.IntRange(min=0), default=0, help="Sample from K tokens; 0: all."
    ),
    _samples(
        "--top_p",
        "--top-p",
        type=NumberRange(0, 1),
        default=0.0,
        help="Sample from the most probable tokens up to this probability; 0: from all.",
    ),
    _samples("--seed", type=click.IntRange(min=0), default=1234, show_default=True, help="Seed."),
    _samples(
        "--recompute",
        is_flag=True,
        help="Accepted for old scripts; the engine always uses its key-value cache.",
    ),
    _run(
        "--max-concurrency",
        type=click.IntRange(min=1),
        default=256,
        show_default=True,
        help="Requests in the engine at a time.",
    ),
)


def build_generate_command(open_engine: OpenEngine, engine_options: Sequence[Decorator]) -> click.Command:
    """Return the command `generate`.

    Args:
        open_engine: loads the engine; receives the values of all options of the command by name.
        engine_options: click options of the engine, --load first.
    """

    def generate(**options: Any) -> None:
        """Generate text offline, from a batch file or as samples, without a server.

        A run that was interrupted resumes: the same command does only what its output lacks.
        """
        raise_at_sigterm(_RESUME)
        try:
            _generate(open_engine, options)
        except TerminationError:
            raise
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_RESUME) from None

    command: Any = add_options(generate, (*engine_options, *_OPTIONS))
    settings = {"help_option_names": ["-h", "--help"]}
    return click.command("generate", cls=GroupedCommand, context_settings=settings)(command)


def _generate(open_engine: OpenEngine, options: Mapping[str, Any]) -> None:
    """Check the options, then run the mode that they ask for."""
    modes = {
        "--input-file": options["input_file"] is not None,
        "--sample-input-file": options["sample_input_file"] is not None,
        "--num-samples": options["num_samples"] > 0,
    }
    chosen = [name for name, is_chosen in modes.items() if is_chosen]
    if len(chosen) != 1:
        raise ConfigError(
            ", ".join(chosen) or "generate",
            "exclude each other" if chosen else "has nothing to do",
            wanted=" | ".join(modes),
            hint="keep one of them" if chosen else "--input-file batch.jsonl --output-file answers.jsonl",
        )
    if options["input_file"] is not None:
        _require(options, "--output-file", "--input-file")
        _check_output("--output-file", options["output_file"], options["input_file"])
        asyncio.run(_run_batch(open_engine, options))
        return
    if options["sample_input_file"] is not None:
        source: Path = options["sample_input_file"]
        output = options["sample_output_file"] or source.with_name(f"{source.name}.out")
        _check_output("--sample-output-file", output, source)
        asyncio.run(_run_samples(open_engine, options, "--sample-output-file", output, source))
        return
    _require(options, "--genfile", "--num-samples")
    _check_output("--genfile", options["genfile"], None)
    asyncio.run(_run_samples(open_engine, options, "--genfile", options["genfile"], None))


def _require(options: Mapping[str, Any], flag: str, mode: str) -> None:
    if options[flag[2:].replace("-", "_")] is None:
        raise ConfigError(flag, f"missing: {mode} needs it", hint=f"{flag} out.jsonl")


def _check_output(flag: str, output: Path, source: Path | None) -> None:
    """Refuse an output before the input is read and the engine is loaded."""
    from mega_serve.client.offline.resumable_lines import begins_like_ours

    inputs = [source] if source is not None else []
    check_output_file(flag, output, inputs=inputs, is_ours=begins_like_ours)


async def _run_batch(open_engine: OpenEngine, options: Mapping[str, Any]) -> None:
    from mega_serve.client.offline.openai_batch import BatchFailures, BatchRequest, answer_item, read_batch

    items = read_batch(options["input_file"])
    failures = BatchFailures()

    def process(engine: OfflineEngine) -> Callable[[WorkItem[BatchRequest]], Awaitable[Line | None]]:
        return lambda item: answer_item(item, engine.answer, failures)

    lines = await _run_items(open_engine, options, "--output-file", options["output_file"], items, process)
    failures.raise_if_any()
    lines.raise_refusals()


async def _run_samples(
    open_engine: OpenEngine, options: Mapping[str, Any], flag: str, output: Path, source: Path | None
) -> None:
    from mega_serve.client.offline.samples import (
        Sample,
        SampleSettings,
        draw_sample,
        read_sample_prompts,
        sample_items,
        settings_difference,
    )

    settings = SampleSettings(
        out_seq_length=options["out_seq_length"],
        temperature=0.0 if options["greedy"] else options["temperature"],
        top_k=options["top_k"],
        top_p=options["top_p"],
        seed=options["seed"],
    )
    prompts = [None] * options["num_samples"] if source is None else read_sample_prompts(source)
    items = sample_items(prompts, settings)

    def process(engine: OfflineEngine) -> Callable[[WorkItem[Sample]], Awaitable[Line | None]]:
        return lambda item: draw_sample(item, engine.client, engine.encode, settings)

    def compare(line: Line) -> tuple[str, str] | None:
        return settings_difference(line, settings)

    lines = await _run_items(open_engine, options, flag, output, items, process, compare)
    lines.raise_refusals()


@contextmanager
def _engine_errors() -> Iterator[None]:
    """Convert the end of the engine to a one-line error."""
    from mega_serve.engine.interfaces import EngineDeadError, EngineUnavailableError

    try:
        yield
    except (EngineDeadError, EngineUnavailableError) as error:
        raise MegaError("generate", "the engine stopped", found=error, hint=_RESUME) from None


async def _run_items(
    open_engine: OpenEngine,
    options: Mapping[str, Any],
    flag: str,
    output: Path,
    items: Sequence[WorkItem[RequestT]],
    process: Callable[[OfflineEngine], Callable[[WorkItem[RequestT]], Awaitable[Line | None]]],
    compare: Callable[[Line], tuple[str, str] | None] = lambda line: None,
) -> ResumableLines:
    """Run the items that the output lacks; the engine is loaded only if there are any. Return the output.

    Args:
        compare: returns the options of a line and those of this run, where they differ.
    """
    from mega_serve.client.offline.batch_run import run_items
    from mega_serve.client.offline.resumable_lines import ResumableLines

    ids = {item.custom_id: item.id for item in items}
    with _engine_errors(), ResumableLines(flag, output, ids, compare) as lines:
        earlier = len(lines.finished)
        if earlier < len(items):
            async with open_engine(options) as engine:
                with progress_bar("generate", len(items), unit="requests") as bar:
                    bar(earlier)
                    await run_items(
                        items,
                        lines,
                        process(engine),
                        max_concurrency=options["max_concurrency"],
                        on_lines=bar,
                    )
        answered = len(lines.finished) - len(lines.refusals)
        refused = f", {len(lines.refusals):,} refused" if lines.refusals else ""
        resumed = f"; {earlier:,} of these lines by an earlier run" if earlier else ""
        click.echo(f"{output}: {answered:,} of {len(items):,} requests{refused}{resumed}", err=True)
    return lines
