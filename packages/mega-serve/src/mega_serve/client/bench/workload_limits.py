"""Refuse a workload that this client cannot hold, or that the model's context cannot."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from mega_schema.errors import ConfigError

if TYPE_CHECKING:
    from mega_serve.client.bench.benchmark import BenchmarkConfig

# all requests wait in memory: 1,000,000 take about 2 GB, and 2**26 token ids as much
MAX_PROMPTS: Final = 1_000_000
MAX_PROMPT_TOKENS: Final = 1 << 26
_MAX_ID: Final = (1 << 31) - 1


def check_sizes(config: BenchmarkConfig) -> None:
    """Refuse a workload that does not fit in the memory of this client.

    Raises:
        ConfigError: a number is too large.
    """
    limits = {
        "num_prompts": MAX_PROMPTS,
        "num_warmups": MAX_PROMPTS,
        "vocab_size": _MAX_ID,
        f"{config.dataset_name}_output_len": _MAX_ID,
    }
    for name, limit in limits.items():
        value = getattr(config, name)
        if value is not None and value > limit:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(flag, "too many", found=f"{value:,}", wanted=f"at most {limit:,}")
    lengths = _longest_request(config)
    total = config.num_prompts * lengths[0] if lengths is not None else 0
    if total > MAX_PROMPT_TOKENS:
        raise ConfigError(
            "--num-prompts",
            "too many tokens of prompts in all",
            found=f"{total:,}",
            wanted=f"at most {MAX_PROMPT_TOKENS:,}",
            hint="fewer or shorter prompts",
        )


def check_context(config: BenchmarkConfig, max_model_len: int | None) -> None:
    """Refuse random prompts of which some exceed the model's context: the server would.

    Args:
        max_model_len: tokens; None if the server does not tell.

    Raises:
        ConfigError: prompt and output together are longer.
    """
    lengths = _longest_request(config)
    if lengths is None or max_model_len is None or sum(lengths) <= max_model_len:
        return
    is_random = config.dataset_name == "random"
    flag = "--random-input-len" if is_random else "--prefix-repetition-suffix-len"
    half = max_model_len // 2
    has_prefix = not is_random or config.random_prefix_len
    raise ConfigError(
        flag,
        "prompt and output exceed the model's context",
        found=f"{lengths[0]:,} + {lengths[1]:,} tokens",
        wanted=f"at most {max_model_len:,}",
        hint="" if has_prefix else f"--random-input-len {half} --random-output-len {half}",
    )


def _longest_request(config: BenchmarkConfig) -> tuple[int, int] | None:
    """Return the tokens of the longest prompt and of the longest output; None if a file has the prompts."""
    match config.dataset_name:
        case "random":
            # as RandomLengths draws them
            prompt, output = (
                math.ceil(mean * (1 + config.random_range_ratio)) if config.random_range_ratio else mean
                for mean in (config.random_input_len, config.random_output_len)
            )
            return config.random_prefix_len + prompt, output
        case "prefix_repetition":
            prompt = config.prefix_repetition_prefix_len + config.prefix_repetition_suffix_len
            return prompt, config.prefix_repetition_output_len
    return None
