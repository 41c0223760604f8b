"""Flags of Megatron's launch scripts that `mega-train` does not have, and what to do about each.

A key that ends with a hyphen stands for every flag that begins so. A flag that we come to have leaves these
tables; a test sees to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import click

from mega_schema.config import Wordy
from mega_schema.errors import ConfigError

_KERNELS = "the machine decides which kernels run"
_PROCESSES = "the device decides how processes meet, gloo on CPUs and NCCL on GPUs"
_TRAVELS = "messages between pipeline stages travel while ranks compute"
_TOKENIZER = "a corpus carries its tokenizer"
_SELF_TOLD = "a checkpoint says what it holds"

# a script runs as well without these
NEEDLESS: Mapping[str, str] = MappingProxyType(
    {
        "--use-flash-attn": _KERNELS,
        "--transformer-impl": _KERNELS,
        "--no-masked-softmax-fusion": _KERNELS,
        "--no-bias-swiglu-fusion": _KERNELS,
        "--no-bias-dropout-fusion": _KERNELS,
        "--no-rope-fusion": _KERNELS,
        "--no-gradient-accumulation-fusion": _KERNELS,
        "--no-persist-layer-norm": _KERNELS,
        "--cross-entropy-loss-fusion": _KERNELS,
        "--use-mcore-models": "there is one model of each family",
        "--use-legacy-models": "there is one model of each family",
        "--no-async-tensor-model-parallel-allreduce": _KERNELS,
        "--distributed-backend": _PROCESSES,
        "--lazy-mpu-init": _PROCESSES,
        "--overlap-p2p-communication": _TRAVELS,
        "--no-overlap-p2p-communication": _TRAVELS,
        "--local-rank": _PROCESSES,
        "--local_rank": _PROCESSES,
        "--use-cpu-initialization": "initial values never depend on the layout",
        "--accumulate-allreduce-grads-in-fp32": "gradients are summed in float32",
        "--no-contiguous-buffers-in-local-ddp": "gradients lie in buckets",
        "--zero-contigious-gradients": "gradients lie in buckets",
        "--zero-reduce-scatter": "--zero-stage 1 to 3 reduce and scatter",
        "--num-workers": "samples are read from a memory map, by the process that needs them",
        "--vocab-file": _TOKENIZER,
        "--merge-file": _TOKENIZER,
        "--tokenizer-type": _TOKENIZER,
        "--tokenizer-model": _TOKENIZER,
        "--use-checkpoint-args": _SELF_TOLD,
        "--ckpt-format": _SELF_TOLD,
        "--auto-detect-ckpt-format": _SELF_TOLD,
        "--use-dist-ckpt": _SELF_TOLD,
        "--log-throughput": "every line of the log has TFLOP/s and tokens/s",
        "--log-progress": "events.jsonl, under --save, says how far a run has come",
        "--log-learning-rate-to-tensorboard": "the learning rate is always there",
        "--log-loss-scale-to-tensorboard": "the loss scale is always there",
        "--no-barrier-with-level-1-timing": "ranks never wait for each other to be timed",
        "--config-logger-dir": "events.jsonl, under --save, holds the configuration",
        "--logging-level": "what a person should know is always told",
        "--log-level": "what a person should know is always told",
        "--log-level-replica": "the first rank speaks for all",
        "--enable-ft-package": "a watchdog tells of ranks that hang or are lost",
        "--one-logger-": "the numbers lie in events.jsonl, under --save",
        "--app-tag-run-": "the numbers lie in events.jsonl, under --save",
        "--check-for-nan-in-loss-and-grad": "always checked; --on-non-finite says what follows",
    }
)

# what says the same here
INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "--use-rotary-position-embeddings": "--position-embedding-type rope",
        "--no-position-embedding": "--position-embedding-type none, or rope",
        "--squared-relu": "--activation squared_relu",
        "--openai-gelu": "--activation gelu_tanh",
        "--group-query-attention": "--num-query-groups N says it",
        "--layernorm-epsilon": "--norm-epsilon",
        "--encoder-seq-length": "--seq-length",
        "--encoder-num-layers": "--num-layers",
        "--model-parallel-size": "--tensor-model-parallel-size",
        "--batch-size": "--micro-batch-size",
        "--checkpoint-num-layers": "--recompute-num-layers",
        "--distribute-checkpointed-activations": "--distribute-saved-activations",
        "--warmup": "--lr-warmup-fraction",
        "--zero-reduce-bucket-size": "--ddp-bucket-size",
        "--zero-allgather-bucket-size": "--ddp-bucket-size",
        "--no-log-learning-rate-to-tensorboard": "--no-log-learnig-rate-to-tensorboard",
        "--log-straggler": "--timing-log-level 1 --timing-log-option all",
        "--ckpt-step": "--load RUN/iter_NNNNNNN",
        "--persistent-save-interval": "--save-interval",
        "--save-retain-interval": "--keep-every",
    }
)

# what a run would need and cannot have, with the nearest there is
ABSENT: Mapping[str, str] = MappingProxyType(
    {
        "--num-experts": "",
        "--expert-model-parallel-size": "",
        "--moe-": "",
        "--deepspeed": "",
        "--fp8-": "--bf16",
        "--mock-data": "mega-data sample",
    }
)


class Familiar(Wordy):
    """A command that knows what a Megatron user meant."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does.

        Raises:
            ConfigError: a flag is Megatron's; the line says what to do, of all needless ones at once.
        """
        given: Sequence[str] = [word.partition("=")[0] for word in args]  # click empties the list as it reads
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if told := explained(error.option_name, given):
                raise told from error
            raise


def explained(flag: str, given: Sequence[str] = ()) -> ConfigError | None:
    """What to answer to a flag that we do not have, or None where it is not Megatron's.

    Args:
        given: the words of the command line; those in it that are needless too stand in the hint.
    """
    if instead := _find(INSTEAD, flag):
        return ConfigError(flag, "is said otherwise here", hint=instead)
    if why := _find(NEEDLESS, flag):
        others = [word for word in dict.fromkeys(given) if word != flag and _find(NEEDLESS, word)]
        too = f", and also {' '.join(others)}" if others else ""
        return ConfigError(flag, f"is not needed here: {why}", hint=f"leave it out{too}")
    nearest = _find(ABSENT, flag)
    return None if nearest is None else ConfigError(flag, "Megatron has it and we do not yet", hint=nearest)


def _find(table: Mapping[str, str], flag: str) -> str | None:
    if flag in table:
        return table[flag]
    return next((text for key, text in table.items() if key.endswith("-") and flag.startswith(key)), None)
