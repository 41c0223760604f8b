"""The options of the engine, which `serve` and `generate` share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mega_schema.app.click_options import NonEmptyPath, add_options
from mega_serve.commands.option_groups import option_group

if TYPE_CHECKING:  # --help answers without numpy
    from mega_schema.checkpoint.reader import Checkpoint

ENGINE_FACTORY = "mega_serve.execution.engine_factory:build_engine"
_COUNT = click.IntRange(min=1)
_DEGREE = click.IntRange(min=1, max=64)

_model = option_group("Model")
_engine = option_group("Engine")

# the values become `execution.engine_factory.EngineOptions`, field by field
_OPTIONS = (
    _model(
        "--load",
        required=True,
        type=NonEmptyPath(),
        metavar="DIR",
        help="Checkpoint directory, or run directory (its latest).",
    ),
    _model(
        "--device",
        default="auto",
        show_default=True,
        help="auto, cpu, cuda or cuda:N; auto is the first GPU, or the CPU.",
    ),
    _model(
        "--dtype",
        default="float32",
        show_default=True,
        type=click.Choice(["float32", "bfloat16", "int8"]),
        help="Dtype of the weights in memory; int8 is for CPUs.",
    ),
    _model("--tp", default=1, show_default=True, type=_DEGREE, help="Tensor-parallel ranks."),
    _model("--pp", default=1, show_default=True, type=_DEGREE, help="Pipeline stages."),
    _model("--max-model-len", type=_COUNT, help="Maximum tokens of a sequence.  [default: the model's]"),
    _model("--follow", is_flag=True, help="Swap in newer checkpoints of the run directory as they appear."),
    _model(
        "--verify/--no-verify",
        default=True,
        show_default=True,
        help="Compare the checksums of the weights while loading.",
    ),
    _engine(
        "--max-num-seqs",
        default=64,
        show_default=True,
        type=click.IntRange(min=1, max=4096),
        help="Maximum sequences of a batch.",
    ),
    _engine(
        "--max-num-batched-tokens",
        default=512,
        show_default=True,
        type=_COUNT,
        help="Maximum tokens of a step; prompts are computed in chunks of what generation leaves of it.",
    ),
    _engine(
        "--kv-cache-memory",
        type=_COUNT,
        help="Bytes of the KV cache, all used from the start.  [default: by free memory]",
    ),
    _engine(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        "prefix_caching",
        default=True,
        show_default=True,
        help="Keep the keys and values of prompts for later prompts that begin alike.",
    ),
    _engine(
        "--num-speculative-tokens",
        "speculative_tokens",
        default=0,
        show_default=True,
        type=click.IntRange(min=0, max=32),
        help="Tokens to guess per step from earlier text (prompt lookup); the output stays the same.",
    ),
    _engine(
        "--batch-invariant",
        is_flag=True,
        help="Serve the bits of mega-train --batch-invariant in any batch; on a CPU, with mega-serve[cpu].",
    ),
    _engine(
        "--attention",
        default="auto",
        show_default=True,
        type=click.Choice(["auto", "numba", "torch", "triton", "flash", "flex"]),
        help="Attention kernels: auto takes numba on a CPU and triton on a GPU, if they are installed; flash "
        "(flash-attn) and flex (FlexAttention) need a GPU.",
    ),
    _engine(
        "--enforce-eager",
        is_flag=True,
        help="Do not capture decode steps as CUDA graphs, as one GPU with triton or flash attention does.",
    ),
    _engine("--threads", type=_COUNT, help="Threads of a process on a CPU.  [default: all cores]"),
)
_NAMES = (
    "load", "device", "dtype", "tp", "pp", "max_model_len", "follow", "verify", "max_num_seqs",
    "max_num_batched_tokens", "kv_cache_memory", "prefix_caching", "speculative_tokens", "batch_invariant",
    "attention", "enforce_eager", "threads",
)  # fmt: skip


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of the model and the engine to a command."""
    return add_options(command, _OPTIONS)


def engine_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the engine process, as JSON values."""
    return {name: str(values[name]) if name == "load" else values[name] for name in _NAMES}


def open_checkpoint(values: Mapping[str, Any]) -> Checkpoint:
    """Open the checkpoint of --load and check the other options against it, before a process starts.

    Raises:
        ConfigError: an option is wrong, or does not fit the model, or the model is no decoder.
        LayoutError: --tp or --pp does not divide the model.
        FormatError: there is no checkpoint, or it is of another program.
    """
    from mega_schema.checkpoint.reader import Checkpoint
    from mega_schema.spec_checks import refuse_foreign_encoder, require_decoder
    from mega_serve.engine.option_checks import (
        check_context_length,
        check_device,
        check_follow,
        check_layout,
    )

    check_device(values["device"], values["dtype"])
    refuse_foreign_encoder(Path(values["load"]))
    checkpoint = Checkpoint.open(Path(values["load"]))
    require_decoder(checkpoint.spec, checkpoint.folder)
    check_layout(checkpoint.spec, values["tp"], values["pp"])
    check_follow(values["follow"], values["tp"] * values["pp"], Path(values["load"]))
    check_context_length(values["max_model_len"], checkpoint.spec.max_seq_len)
    return checkpoint
