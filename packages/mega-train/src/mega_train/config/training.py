"""How much, how long, in which arithmetic, and how weights move."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mega_schema.config import option


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """How much is read at once."""

    micro: int = option("--micro-batch-size", 1, "samples in one forward pass of one rank")
    global_samples: int | None = option(
        "--global-batch-size", None, "samples per optimizer step, all ranks together; micro x dp if not given"
    )
    length: int | None = option("--seq-length", None, "tokens in a sample; the model's context if not given")


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """How long, from which seed, in which arithmetic, on what."""

    iterations: int | None = option("--train-iters", None, "optimizer steps in all")
    exit_interval: int | None = option(
        "--exit-interval", None, "save and leave after an iteration that this divides"
    )
    exit_minutes: float | None = option(
        "--exit-duration-in-mins", None, "save and leave after the step that ends later than this"
    )
    kill_switch: Path | None = option(
        "--kill-switch-path", None, "save and leave when there is such a file; with it nothing begins"
    )
    seed: int = option("--seed", 1234, "seed of initial values and of the data's order")
    hidden_dropout: float = option(
        "--hidden-dropout",
        0.0,
        "probability of dropping what the embedding and every branch adds; Megatron's default is 0.1",
    )
    attention_dropout: float = option(
        "--attention-dropout",
        0.0,
        "probability of dropping a weight of attention, without fused kernels; Megatron's default is 0.1",
    )
    bf16: bool = option(
        "--bf16", False, "weights and activations in bfloat16, main weights and gradients in float32"
    )
    fp16: bool = option("--fp16", False, "the same in float16, with the loss scaled")
    loss_scale: float | None = option("--loss-scale", None, "a scale that stays; it moves if not given")
    initial_loss_scale: float = option("--initial-loss-scale", 2.0**32, "the scale to begin with")
    min_loss_scale: float = option("--min-loss-scale", 1.0, "the scale falls no lower")
    loss_scale_window: int = option(
        "--loss-scale-window", 1000, "steps without an overflow after which the scale doubles"
    )
    hysteresis: int = option("--hysteresis", 2, "overflows before the scale halves")
    on_non_finite: Literal["stop", "skip"] = option(
        "--on-non-finite",
        "stop",
        "after a loss or gradient that is no number; float16 gradients that overflow are skipped always",
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "--device", "auto", "where to compute; auto takes CUDA when there is one"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """AdamW (arXiv:1711.05101), clipping, and the learning rate's course."""

    lr: float | None = option("--lr", None, "peak learning rate")
    min_lr: float = option("--min-lr", 0.0, "the rate after the decay")
    decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = option(
        "--lr-decay-style", "linear", "the course after the warm-up"
    )
    decay_iterations: int | None = option(
        "--lr-decay-iters", None, "the rate reaches its minimum here; --train-iters if not given"
    )
    warmup_iterations: int = option("--lr-warmup-iters", 0, "steps of linear warm-up")
    warmup_fraction: float | None = option(
        "--lr-warmup-fraction", None, "the warm-up as a share of the decay steps"
    )
    weight_decay: float = option(
        "--weight-decay", 0.01, "decoupled decay of matrices; norms and biases have none"
    )
    beta1: float = option("--adam-beta1", 0.9, "decay of the first moment")
    beta2: float = option("--adam-beta2", 0.999, "decay of the second moment")
    eps: float = option("--adam-eps", 1e-8, "added to the root of the second moment")
    clip: float = option("--clip-grad", 1.0, "largest global norm of the gradient; 0 does not clip")
