"""The command `mega-serve bench`: measure latency and throughput of a server under load."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

import click

from mega_schema.app.click_options import NonEmptyPath, NumberRange
from mega_schema.app.output_option import OUTPUT_FILE, OUTPUT_FOLDER
from mega_schema.app.progress import ProgressBar, progress_bar
from mega_serve.commands.connection_options import connection_options, open_client, parse_pairs
from mega_serve.commands.option_groups import GroupedCommand, option_group
from mega_serve.commands.sampling_options import sampling_options

if TYPE_CHECKING:
    from mega_serve.client.bench.benchmark import Benchmark

_METRICS: Final = ("ttft", "tpot", "itl", "e2el", "client_queue_time")

_server = option_group("Server")
_dataset = option_group("Workload")
_traffic = option_group("Traffic")
_result = option_group("Results")
_COUNT: Final = click.IntRange(min=1)
_SIZE: Final = click.IntRange(min=0)
_POSITIVE: Final = NumberRange(min=0, min_open=True)


@click.command(
    cls=GroupedCommand, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@_server(
    "--backend",
    type=click.Choice(["openai", "openai-chat", "megatron", "vllm"]),
    default="openai",
    help="openai: /v1/completions; openai-chat: /v1/chat/completions; megatron: PUT /api, which has no "
    "stream; vllm: the same as openai.",
)
@_server("--base-url", metavar="URL", help="Address of the server.  [default: --host and --port]")
@_server("--host", default="127.0.0.1", help="Host of the server.")
@_server("--port", type=click.IntRange(1, 65535), default=5000, help="Port of the server.")
@_server("--endpoint", metavar="PATH", help="Path of the API.  [default: the backend's]")
@_server("--model", help="Name of the model.  [default: the server's first]")
@_server(
    "--ready-check-timeout-sec",
    type=_SIZE,
    default=0,
    metavar="SECONDS",
    help="Wait this long for the server to be ready; 0 does not wait.",
)
@_dataset(
    "--dataset-name",
    type=click.Choice(["random", "prefix_repetition", "custom", "sharegpt"]),
    default="random",
    help="random: random tokens; prefix_repetition: random tokens after shared prefixes; custom: JSON lines "
    'with {"prompt": ...}; sharegpt: conversations.',
)
@_dataset(
    "--dataset-path",
    type=NonEmptyPath(exists=True, dir_okay=False),
    metavar="FILE",
    help="File of a custom or a sharegpt workload.",
)
@_dataset("--num-prompts", type=_COUNT, default=1000, help="Number of requests.")
@_dataset("--seed", type=_SIZE, default=0, help="Seed of prompts, lengths and arrival times.")
@_dataset("--input-len", type=_COUNT, help="The same as --random-input-len.")
@_dataset("--output-len", type=_COUNT, help="Output tokens of any workload.")
@_dataset("--random-input-len", type=_COUNT, default=1024, help="Tokens of a random prompt, on average.")
@_dataset("--random-output-len", type=_COUNT, default=128, help="Output tokens, on average.")
@_dataset(
    "--random-range-ratio",
    type=NumberRange(0, 1, max_open=True),
    default=0.0,
    help="Draw lengths from mean x (1 - ratio) to mean x (1 + ratio).",
)
@_dataset(
    "--random-prefix-len", type=_SIZE, default=0, help="Tokens at the front that all random prompts share."
)
@_dataset("--prefix-repetition-prefix-len", type=_COUNT, default=256, help="Tokens of a shared prefix.")
@_dataset("--prefix-repetition-suffix-len", type=_COUNT, default=256, help="Tokens after the prefix.")
@_dataset("--prefix-repetition-num-prefixes", type=_COUNT, default=10, help="Number of shared prefixes.")
@_dataset("--prefix-repetition-output-len", type=_COUNT, default=128, help="Output tokens.")
@_dataset("--custom-output-len", type=_COUNT, default=256, help="Output tokens of lines that name none.")
@_dataset(
    "--sharegpt-output-len",
    type=_COUNT,
    help="Output tokens.  [default: those of the answer in the conversation]",
)
@_dataset(
    "--vocab-size",
    type=_COUNT,
    help="Upper bound of the token ids in random prompts.  [default: the server's]",
)
@_dataset("--disable-shuffle", is_flag=True, help="Read a file in its order.")
@_dataset("--no-oversample", is_flag=True, help="Do not repeat prompts of a file that has too few.")
@_traffic(
    "--request-rate",
    type=_POSITIVE,
    default=math.inf,
    metavar="RPS",
    help="Requests per second; inf starts all at once.",
)
@_traffic(
    "--burstiness",
    type=_POSITIVE,
    default=1.0,
    help="Shape of the gamma-distributed intervals: 1 is a Poisson process, less is burstier, inf is "
    "constant.",
)
@_traffic("--max-concurrency", type=_COUNT, help="Requests that run at a time; others wait in the client.")
@_traffic(
    "--ramp-up-strategy",
    type=click.Choice(["linear", "exponential"]),
    help="Change the rate during the run; replaces --request-rate.",
)
@_traffic("--ramp-up-start-rps", type=_POSITIVE, help="Rate at the start.")
@_traffic("--ramp-up-end-rps", type=_POSITIVE, help="Rate at the end.")
@_traffic("--num-warmups", type=_SIZE, default=0, help="Requests before the run that are not counted.")
@_traffic(
    "--ignore-eos",
    is_flag=True,
    help="Generate all output tokens, whatever the model says. Always so for random prompts.",
)
@sampling_options
@option_group("Sampling")("--logprobs", type=_SIZE, help="Ask for this many alternatives per token.")
@option_group("Sampling")("--extra-body", metavar="JSON", help="Object with more fields of every request.")
@_result(
    "--percentile-metrics",
    default="ttft,tpot,itl,e2el",
    metavar="LIST",
    help=f"Metrics to report, separated by commas, of {', '.join(_METRICS)}.",
)
@_result("--metric-percentiles", default="99", metavar="LIST", help="Percentiles, separated by commas.")
@_result(
    "--goodput",
    multi=True,
    metavar="METRIC:MS ...",
    help="Count the requests within all of these bounds, in milliseconds, of ttft, tpot and e2el.",
)
@_result("--save-result", is_flag=True, help="Write the figures to a JSON file.")
@_result("--save-detailed", is_flag=True, help="Write the values of every request too.")
@_result("--append-result", is_flag=True, help="Append a line to the file instead.")
@_result(
    "--result-filename",
    type=OUTPUT_FILE,
    metavar="FILE",
    help="Name of the file.  [default: LABEL-RATEqps-MODEL-DATE.json]",
)
@_result("--result-dir", type=OUTPUT_FOLDER, metavar="DIR", help="Folder of the file.")
@_result("--label", help="Name of the run.  [default: the backend]")
@_result("--metadata", multi=True, metavar="KEY=VALUE ...", help="Pairs to write to the file.")
@_result("--plot", type=OUTPUT_FILE, metavar="FILE.png", help="Draw latencies and throughput.")
@_result("--disable-tqdm", is_flag=True, help="Show no progress.")
@connection_options
def bench(**options: Any) -> None:
    """Measure the latency and the throughput of a server under load.

    Flags and result keys are those of `vllm bench serve`; the server may be any that speaks OpenAI's API.
    """
    from mega_serve.client.bench.benchmark import run_benchmark
    from mega_serve.client.bench.report import format_report
    from mega_serve.commands.bench_config import parse_config
    from mega_serve.commands.bench_outputs import check_outputs, write_outputs

    config = parse_config(options)
    outputs = check_outputs(options)
    address = options["base_url"] or f"{options['host']}:{options['port']}"
    client = open_client(
        address,
        "--base-url" if options["base_url"] else "--host",
        api_key_file=options["api_key_file"],
        headers=options["headers"],
        timeout=options["timeout"],
        insecure=options["insecure"],
        megatron_option="--backend megatron",
    )

    def show_progress(label: str, total: int) -> AbstractContextManager[ProgressBar]:
        if options["disable_tqdm"]:
            return _SilentBar(label, total)
        return progress_bar(label, total, unit="requests")

    async def measure() -> Benchmark:
        async with client:
            return await run_benchmark(client, config, show_progress)

    benchmark = asyncio.run(measure())
    benchmark.summary |= {"label": options["label"], "base_url": str(client.address)}
    benchmark.summary |= parse_pairs("--metadata", options["metadata"])
    if benchmark.summary["completed"]:
        for line in format_report(benchmark.summary, metrics=config.metrics, percentiles=config.percentiles):
            click.echo(line)
    write_outputs(outputs, benchmark, options, time.strftime("%Y%m%d-%H%M%S"))
    _report_problems(benchmark)


class _SilentBar(AbstractContextManager[ProgressBar]):
    """A progress bar that shows nothing."""

    def __init__(self, label: str, total: int) -> None:
        self._bar = ProgressBar(label, total, unit="requests", show=lambda bar: None)

    def __enter__(self) -> ProgressBar:
        return self._bar

    def __exit__(self, *error: object) -> None:
        """End the display."""


def _report_problems(benchmark: Benchmark) -> None:
    """Warn of failed requests and of a busy client.

    Raises:
        ServerError: no request succeeded.
    """
    from mega_serve.client.bench.report import BUSY_CLIENT_SHARE
    from mega_serve.client.http import ServerError

    summary = benchmark.summary
    if summary["failed"]:
        if not summary["completed"]:
            what = f"all {summary['failed']} requests failed: {benchmark.first_error}"
            raise ServerError("bench", what)
        click.echo(
            f"warning: {summary['failed']} requests failed; the first: {benchmark.first_error}", err=True
        )
    if summary["client_cpu_share"] > BUSY_CLIENT_SHARE:
        share = f"{summary['client_cpu_share']:.0%} of a core"
        click.echo(f"warning: this client used {share}: its own work is part of the latencies", err=True)
