"""A benchmark run: build the workload, send it, report and save the figures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from mega_schema.app.progress import ProgressBar
from mega_serve.client.bench.arrivals import RampUp, sample_arrivals
from mega_serve.client.bench.latency_metrics import RequestResult, summarize
from mega_serve.client.bench.load import ENDPOINTS, Backend, LoadRun, RequestSettings, run_load, send_request
from mega_serve.client.bench.remote_tokenizer import open_remote_tokenizer
from mega_serve.client.bench.workload import (
    Prompt,
    PromptWriter,
    RandomLengths,
    prefix_repetition_prompts,
    random_prompts,
    read_custom_prompts,
    read_sharegpt_prompts,
    repeat_prompts,
)
from mega_serve.client.bench.workload_limits import check_context
from mega_serve.client.generation import context_length, find_model
from mega_serve.client.http import ServerClient, ServerError

DatasetName = Literal["random", "prefix_repetition", "custom", "sharegpt"]
MODEL_OF_MEGATRON: Final = "megatron"  # PUT /api has no name of a model


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkConfig:
    """The options of `mega-serve bench` that decide what is sent; named as there.

    Attributes:
        fields: of every request's body, sampling and extra ones.
        goodput: upper bounds in milliseconds, by metric.
    """

    backend: Backend = "openai"
    endpoint: str | None = None
    model: str | None = None
    dataset_name: DatasetName = "random"
    dataset_path: Path | None = None
    num_prompts: int = 1000
    seed: int = 0
    disable_shuffle: bool = False
    no_oversample: bool = False
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128
    custom_output_len: int = 256
    sharegpt_output_len: int | None = None
    vocab_size: int | None = None
    request_rate: float = math.inf
    burstiness: float = 1.0
    ramp_up: RampUp | None = None
    max_concurrency: int | None = None
    num_warmups: int = 0
    ready_check_timeout_sec: int = 0
    ignore_eos: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[str] = ("ttft", "tpot", "itl", "e2el")
    percentiles: Sequence[float] = (99.0,)
    goodput: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Benchmark:
    """A finished run.

    Attributes:
        summary: the figures under vLLM's keys, and ours beside them (client_cpu_share, prompt_form).
    """

    summary: dict[str, Any]
    results: list[RequestResult]

    @property
    def first_error(self) -> str:
        """Return the first error message; "" if all requests succeeded."""
        return next((result.error for result in self.results if result.error), "")


async def run_benchmark(
    client: ServerClient, config: BenchmarkConfig, show_progress: Callable[[str, int], Any]
) -> Benchmark:
    """Run a benchmark.

    Args:
        show_progress: returns a context manager that yields a progress bar, for a label and a total.

    Raises:
        ServerError: the server is not reached, or a warm-up request failed.
        MegaError: the workload cannot be built.
    """
    if config.ready_check_timeout_sec:
        await client.wait_until_ready(config.ready_check_timeout_sec)
    model, max_model_len = await _resolve_model(client, config)
    check_context(config, max_model_len)
    generator = np.random.default_rng(config.seed)
    prompts, form = await _build_prompts(client, config, model, generator)
    arrivals = sample_arrivals(
        len(prompts),
        rate=config.request_rate,
        burstiness=config.burstiness,
        ramp_up=config.ramp_up,
        generator=generator,
    )
    settings = _request_settings(config, model)
    for result in await _warm_up(client, settings, prompts[0], config):
        if result.error:
            raise ServerError("--num-warmups", f"a warm-up request failed: {result.error}")

    async def send(prompt: Prompt) -> RequestResult:
        return await send_request(client, settings, prompt)

    with show_progress("bench", len(prompts)) as bar:
        run = await run_load(
            prompts,
            arrivals,
            send,
            max_concurrency=config.max_concurrency,
            on_result=lambda result: _count(bar, result),
            now=client.now,
        )
    return Benchmark(_summarize(config, model, form, run), run.results)


def _count(bar: ProgressBar, result: RequestResult) -> None:
    bar(1)


async def _resolve_model(client: ServerClient, config: BenchmarkConfig) -> tuple[str, int | None]:
    """Return the model's name, and the tokens of its context if the server tells."""
    if config.backend == "megatron":
        return config.model or MODEL_OF_MEGATRON, None
    model = await find_model(client, config.model)
    return str(model["id"]), context_length(model)


def _request_settings(config: BenchmarkConfig, model: str) -> RequestSettings:
    fields = dict(config.fields)
    if config.backend != "megatron":
        # as in vLLM, random prompts are answered to the asked length: what they are answered means nothing
        ignores_eos = config.ignore_eos or config.dataset_name == "random"
        fields = {"model": model, **({"ignore_eos": True} if ignores_eos else {}), **fields}
    return RequestSettings(config.backend, config.endpoint or ENDPOINTS[config.backend], fields)


async def _build_prompts(
    client: ServerClient, config: BenchmarkConfig, model: str, generator: np.random.Generator
) -> tuple[list[Prompt], str]:
    """Return the prompts, and what they are made of."""
    tokenizer = None
    if config.dataset_name != "custom":
        name = None if config.backend == "megatron" else model
        tokenizer = await open_remote_tokenizer(client, name, config.vocab_size)
    writer = PromptWriter(tokenizer, config.backend == "openai", generator)
    match config.dataset_name:
        case "random":
            lengths = RandomLengths(
                config.random_input_len, config.random_output_len, config.random_range_ratio
            )
            source = random_prompts(writer, config.num_prompts, lengths, config.random_prefix_len)
            return [prompt async for prompt in source], writer.form
        case "prefix_repetition":
            prompts = await prefix_repetition_prompts(
                writer,
                config.num_prompts,
                prefix_tokens=config.prefix_repetition_prefix_len,
                suffix_tokens=config.prefix_repetition_suffix_len,
                prefixes=config.prefix_repetition_num_prefixes,
                output_tokens=config.prefix_repetition_output_len,
            )
            return prompts, writer.form
        case "custom":
            assert config.dataset_path is not None
            prompts = read_custom_prompts(config.dataset_path, config.custom_output_len)
        case "sharegpt":
            assert config.dataset_path is not None
            prompts = await read_sharegpt_prompts(
                config.dataset_path,
                config.num_prompts,
                config.sharegpt_output_len,
                tokenizer,
                range if config.disable_shuffle else lambda n: [int(i) for i in generator.permutation(n)],
            )
    shuffles = config.dataset_name == "custom" and not config.disable_shuffle
    oversamples = not config.no_oversample
    return repeat_prompts(
        prompts, config.num_prompts, generator, shuffle=shuffles, oversample=oversamples
    ), "file"


async def _warm_up(
    client: ServerClient, settings: RequestSettings, prompt: Prompt, config: BenchmarkConfig
) -> list[RequestResult]:
    """Send the first prompt several times; the results are not counted."""

    async def send(prompt: Prompt) -> RequestResult:
        return await send_request(client, settings, prompt)

    prompts = [prompt] * config.num_warmups
    run = await run_load(prompts, [0.0] * len(prompts), send, max_concurrency=config.max_concurrency)
    return run.results


def _summarize(config: BenchmarkConfig, model: str, form: str, run: LoadRun) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "endpoint_type": config.backend,
        "backend": config.backend,
        "model_id": model,
        "dataset_name": config.dataset_name,
        "num_prompts": len(run.results),
        "seed": config.seed,
        "prompt_form": form,
        "ignore_eos": config.ignore_eos or config.dataset_name == "random",
        "request_rate": config.request_rate if math.isfinite(config.request_rate) else "inf",
        "burstiness": config.burstiness if math.isfinite(config.burstiness) else "inf",
        "max_concurrency": config.max_concurrency,
    }
    if config.ramp_up is not None:
        values = dataclasses.asdict(config.ramp_up)
        summary |= {f"ramp_up_{name}": value for name, value in values.items()}
    metrics = list(config.metrics)
    if config.max_concurrency is not None and "client_queue_time" not in metrics:
        metrics.append("client_queue_time")
    summary |= summarize(
        run.results, run.duration, metrics=metrics, percentiles=config.percentiles, goodput=config.goodput
    )
    summary |= {
        "client_cpu_seconds": run.client_cpu_seconds,
        "client_cpu_share": run.client_cpu_seconds / run.duration,
        "client_max_send_lag_ms": run.max_send_lag * 1000,
    }
    return summary
