"""Parse the options of `mega-serve bench`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mega_schema.errors import ConfigError
from mega_serve.client.bench.arrivals import RampUp
from mega_serve.client.bench.benchmark import BenchmarkConfig
from mega_serve.client.bench.latency_metrics import GOODPUT_METRICS, METRICS
from mega_serve.client.bench.workload_limits import check_sizes
from mega_serve.commands.sampling_options import request_fields

_SAMPLING: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
# fields of the configuration that are parsed from other options
_PARSED: Final = frozenset({"ramp_up", "fields", "metrics", "percentiles", "goodput"})


def parse_config(options: Mapping[str, Any]) -> BenchmarkConfig:
    """Return the settings of the run.

    Raises:
        ConfigError: two options disagree, or a list has a wrong word.
    """
    names = {field.name for field in dataclasses.fields(BenchmarkConfig)} - _PARSED
    values = {name: options[name] for name in names}
    values["backend"] = "openai" if options["backend"] == "vllm" else options["backend"]
    if options["input_len"] is not None:
        values["random_input_len"] = options["input_len"]
    if options["output_len"] is not None:
        for name in ("random", "prefix_repetition", "custom", "sharegpt"):
            values[f"{name}_output_len"] = options["output_len"]
    needs_file = options["dataset_name"] in ("custom", "sharegpt")
    if needs_file and options["dataset_path"] is None:
        raise ConfigError(
            f"--dataset-name {options['dataset_name']}",
            "needs --dataset-path",
            hint="--dataset-path prompts.jsonl",
        )
    if not needs_file and options["dataset_path"] is not None:
        raise ConfigError(
            "--dataset-path",
            f"is not read by --dataset-name {options['dataset_name']}",
            hint="--dataset-name custom",
        )
    config = BenchmarkConfig(
        **values,
        ramp_up=_parse_ramp_up(options),
        fields=_parse_fields(options),
        metrics=_parse_metrics(options["percentile_metrics"]),
        percentiles=_parse_percentiles(options["metric_percentiles"]),
        goodput=_parse_goodput(options["goodput"]),
    )
    check_sizes(config)
    return config


def _parse_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    api = "megatron" if options["backend"] == "megatron" else "openai"
    fields = request_fields(api, {name: options[name] for name in _SAMPLING})
    if options["logprobs"] is not None:
        if options["backend"] == "openai-chat":
            fields |= {"logprobs": True, "top_logprobs": options["logprobs"]}
        else:
            fields["logprobs"] = True if api == "megatron" else options["logprobs"]
    if options["extra_body"] is not None:
        try:
            extra = json.loads(options["extra_body"])
        except (ValueError, RecursionError):
            extra = None
        if not isinstance(extra, dict):
            raise ConfigError(
                "--extra-body", "is not a JSON object", found=options["extra_body"], hint="'{\"seed\": 1}'"
            )
        fields |= extra
    return fields


def _parse_ramp_up(options: Mapping[str, Any]) -> RampUp | None:
    strategy, start, end = (options[f"ramp_up_{name}"] for name in ("strategy", "start_rps", "end_rps"))
    if strategy is None:
        if start is not None or end is not None:
            hint = "--ramp-up-strategy linear"
            raise ConfigError("--ramp-up-start-rps, --ramp-up-end-rps", "need --ramp-up-strategy", hint=hint)
        return None
    if start is None or end is None:
        raise ConfigError("--ramp-up-strategy", "needs --ramp-up-start-rps and --ramp-up-end-rps")
    if math.isinf(end) or start > end:
        raise ConfigError("--ramp-up-end-rps", "out of range", found=end, wanted=f"{start} or more, finite")
    if math.isfinite(options["request_rate"]):
        raise ConfigError("--request-rate", "is replaced by --ramp-up-strategy", hint="give one of the two")
    return RampUp(strategy, start, end)


def _parse_metrics(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in METRICS:
            raise ConfigError(
                "--percentile-metrics", "no such metric", found=name, wanted=" | ".join(METRICS)
            )
    return names


def _parse_percentiles(text: str) -> tuple[float, ...]:
    values = []
    for word in text.split(","):
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not 0 <= value <= 100:
            raise ConfigError("--metric-percentiles", "is not a percentile", found=word, wanted="0 to 100")
        values.append(value)
    return tuple(values)


def _parse_goodput(words: Sequence[str]) -> dict[str, float]:
    bounds = {}
    for word in words:
        name, _, text = word.partition(":")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if name not in GOODPUT_METRICS or not value >= 0:
            wanted = "METRIC:MILLISECONDS with ttft, tpot or e2el"
            raise ConfigError("--goodput", "is not a bound", found=word, wanted=wanted, hint="ttft:200")
        bounds[name] = value
    return bounds
