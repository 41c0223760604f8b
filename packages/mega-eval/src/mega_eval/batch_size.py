"""Choose the tokens of a forward pass by the free memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from mega_model.decoder import Decoder
from mega_schema.errors import ConfigError
from mega_schema.spec import ModelSpec

Result = TypeVar("Result")

CPU_TOKENS = 2048  # products are no faster with more, and activations leave the caches
GPU_TOKENS = 1 << 16
_MEMORY_SHARE = 0.5  # of the free memory; the rest is for logits and for what the allocator keeps


def choose_max_tokens(decoder: Decoder) -> int:
    """Return how many tokens a forward pass may have, at least 1."""
    weight = next(decoder.parameters())
    limit = CPU_TOKENS if weight.device.type == "cpu" else GPU_TOKENS
    needed = estimate_token_bytes(decoder.spec, weight.dtype.itemsize)
    return max(1, min(limit, int(_MEMORY_SHARE * free_memory(weight.device)) // needed))


def estimate_token_bytes(spec: ModelSpec, width_bytes: int) -> int:
    """Return the bytes of a token's activations at the layer's widest point.

    Those are the stream before and after the norm, the projections of attention, once more in float32, and
    both sides of the activation function.
    """
    attention = (2 * spec.heads + 2 * spec.kv_heads) * spec.head_dim
    inner = (3 if spec.is_gated else 2) * spec.ffn
    return width_bytes * (4 * spec.hidden + attention + inner) + 4 * attention


def free_memory(device: torch.device) -> int:
    """Return the bytes that can be allocated on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    except OSError:  # not Linux: assume that the smallest batches fit
        return 1 << 30
    available = next((line for line in lines if line.startswith("MemAvailable:")), "MemAvailable: 1048576 kB")
    return int(available.split()[1]) * 1024


def call_within_memory(function: Callable[[], Result], device: torch.device) -> Result | None:
    """Return what a function computes; None: it does not fit in memory."""
    try:
        return function()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    # outside of the handler, whose traceback holds the tensors of the pass
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return None


def window_size_error(tokens: int) -> ConfigError:
    """Return the error of a window of this many tokens that does not fit in memory alone."""
    return ConfigError(
        "--load",
        f"a window of {tokens} tokens does not fit in memory",
        hint="--dtype bfloat16, or a device with more memory",
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be allocated, on a GPU or by torch or numpy on a CPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
