"""How much, how long, in which arithmetic, and how weights move."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mega_schema.app.config import Words, option, words
from mega_train.schedules.lr import AnnealStyle, DecayStyle, IncreaseStyle

Kernels = Literal["auto", "reference", "compile", "triton", "liger", "apex", "flash-attn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """How much is read at once."""

    micro: int = option("--micro-batch-size", 1, "samples in one forward pass of one rank")
    global_samples: int | None = option(
        "--global-batch-size", None, "samples per optimizer step, all ranks together; micro x dp if not given"
    )
    accumulation: int | None = option(
        "--update-freq",
        None,
        "the same, as micro-batches of one rank per step (fairseq's)",
    )
    rampup: tuple[int, int, int] | None = option(
        "--rampup-batch-size",
        None,
        "size to begin with, increment, and samples until the size of a step has grown to the whole",
    )
    decrease: bool = option(
        "--decrease-batch-size-if-needed",
        False,
        "round a step's size down to what the replicas can share, rather than to refuse it",
    )
    length: int | None = option("--seq-length", None, "tokens in a sample; the model's context if not given")


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumConfig:
    """Shorter samples first (arXiv:2108.06084); DeepSpeed's fixed_linear and fixed_root."""

    start: int | None = option(
        "--curriculum-start-length", None, "tokens of a sample to begin with; the whole of it if not given"
    )
    steps: int | None = option("--curriculum-steps", None, "optimizer steps until samples are read whole")
    multiple: int = option(
        "--curriculum-length-multiple", 8, "lengths on the way differ by a multiple of this"
    )
    root: float = option(
        "--curriculum-root", 1.0, "1 lets the length grow evenly; 2 as a square root, faster at first"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How long, from which seed, in which arithmetic, on what."""

    iterations: int | None = option("--train-iters", None, "optimizer steps in all")
    samples: int | None = option("--train-samples", None, "the same, as samples")
    skip: bool = option("--skip-train", False, "validate the loaded model, and leave")
    evaluation_only: bool = option("--eval-only", False, "the same as --skip-train")
    passed_over: Words = words(
        "--skip-train-iteration-range",
        "FIRST-LAST, or several: the samples of these steps are passed over, as where the loss goes up",
    )
    exit_interval: int | None = option(
        "--exit-interval", None, "save and leave after an iteration that this divides"
    )
    exit_minutes: float | None = option(
        "--exit-duration-in-mins", None, "save and leave after the step that ends later than this"
    )
    kill_switch: Path | None = option(
        "--kill-switch-path", None, "save and leave when there is such a file; with it nothing begins"
    )
    per_token_loss: bool = option(
        "--calculate-per-token-loss",
        False,
        "a step's loss is the mean over its tokens that count, not over micro-batches; always so with --sft",
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
    fp8: Literal["e4m3", "hybrid"] | None = option(
        "--fp8-format",
        None,
        "beside --bf16: the layers' products in FP8, scaled by what each tensor holds now; hybrid makes "
        "gradients e5m2",
    )
    fp8_no_weight_gradients: bool = option(
        "--no-fp8-wgrad", False, "of FP8: weight gradients from bfloat16 factors"
    )
    rounded_weight_gradients: bool = option(
        "--no-gradient-accumulation-fusion",
        False,
        "each micro-batch's weight gradients are rounded to the weights' precision before they are added to "
        "the float32 sum: quicker on a CPU",
    )
    loss_scale: float | None = option("--loss-scale", None, "a scale that stays; it moves if not given")
    initial_loss_scale: float = option("--initial-loss-scale", 2.0**32, "the scale to begin with")
    min_loss_scale: float = option("--min-loss-scale", 1.0, "the scale falls no lower")
    loss_scale_window: int = option(
        "--loss-scale-window", 1000, "steps without an overflow after which the scale doubles"
    )
    hysteresis: int = option("--hysteresis", 2, "overflows before the scale halves")
    deterministic: bool = option(
        "--deterministic-mode", False, "only arithmetic that repeats bit for bit, on GPUs too; slower there"
    )
    kernels: Kernels = option(
        "--kernels",
        "auto",
        "whose fused kernels: auto takes the fastest the machine has, and mega-train doctor says which; "
        "compile is torch.compile of the definitions",
    )
    on_non_finite: Literal["stop", "skip"] = option(
        "--on-non-finite",
        "stop",
        "after a loss or gradient that is no number; float16 gradients that overflow are skipped always",
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "--device", "auto", "where to compute; auto takes CUDA when there is one"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Which, clipping, and the courses of learning rate and weight decay."""

    name: Literal["adam", "sgd", "muon"] = option(
        "--optimizer",
        "adam",
        "AdamW (arXiv:1711.05101); SGD with momentum; Muon for the layers' matrices, AdamW for the rest",
    )
    lr: float | None = option("--lr", None, "peak learning rate")
    min_lr: float = option("--min-lr", 0.0, "the rate after the decay")
    ends_lr: float | None = option(
        "--decoupled-lr", None, "peak learning rate of embedding and output weights; --lr if not given"
    )
    ends_min_lr: float | None = option(
        "--decoupled-min-lr", None, "their rate after the decay; --min-lr if not given"
    )
    decay_style: DecayStyle = option("--lr-decay-style", "linear", "the course after the warm-up")
    decay_iterations: int | None = option(
        "--lr-decay-iters", None, "the rate reaches its minimum here; --train-iters if not given"
    )
    decay_samples: int | None = option(
        "--lr-decay-samples", None, "the same in samples; --train-samples if not given"
    )
    warmup_iterations: int = option("--lr-warmup-iters", 0, "steps of linear warm-up")
    warmup_samples: int = option("--lr-warmup-samples", 0, "the same in samples")
    warmup_fraction: float | None = option(
        "--lr-warmup-fraction", None, "the warm-up as a share of the decay steps"
    )
    warmup_initial: float = option("--lr-warmup-init", 0.0, "the rate the warm-up begins with")
    wsd_iterations: int | None = option(
        "--lr-wsd-decay-iters", None, "of WSD, the last steps of --lr-decay-iters: its decay"
    )
    wsd_samples: int | None = option("--lr-wsd-decay-samples", None, "the same in samples")
    wsd_style: AnnealStyle = option("--lr-wsd-decay-style", "exponential", "of WSD, the course of its decay")
    weight_decay: float = option(
        "--weight-decay", 0.01, "decoupled decay of matrices; norms and biases have none"
    )
    start_weight_decay: float | None = option(
        "--start-weight-decay", None, "the decay to begin with, where --weight-decay-incr-style changes it"
    )
    end_weight_decay: float | None = option(
        "--end-weight-decay", None, "the decay to end with, at the end of training"
    )
    weight_decay_style: IncreaseStyle = option(
        "--weight-decay-incr-style", "constant", "the course of the weight decay"
    )
    override_schedule: bool = option(
        "--override-opt_param-scheduler", False, "a resumed run takes these courses, not the checkpoint's"
    )
    checkpoint_schedule: bool = option(
        "--use-checkpoint-opt_param-scheduler", False, "a resumed run takes the checkpoint's courses"
    )
    beta1: float = option("--adam-beta1", 0.9, "decay of the first moment")
    beta2: float = option("--adam-beta2", 0.999, "decay of the second moment")
    eps: float = option("--adam-eps", 1e-8, "added to the root of the second moment")
    sgd_momentum: float = option("--sgd-momentum", 0.9, "of --optimizer sgd")
    muon_momentum: float = option("--muon-momentum", 0.95, "of --optimizer muon, Nesterov's")
    clip: float = option("--clip-grad", 1.0, "largest global norm of the gradient; 0 does not clip")
