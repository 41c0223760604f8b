"""Options of batch, curriculum, training and optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mega_schema.app.config import WordList, multi_option, option
from mega_schema.fp8_recipe import Fp8Format
from mega_train.schedules.lr import AnnealStyle, DecayStyle, IncreaseStyle

# mega_model.kernels.dispatch has the same names, but it imports torch, which --help does without
KernelsName = Literal["auto", "reference", "compile", "triton", "liger", "apex", "flash-attn"]
DeviceName = Literal["auto", "cpu", "cuda"]
OptimizerName = Literal["adam", "sgd", "muon"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Options of batch sizes and sample length."""

    micro: int = option("--micro-batch-size", 1, "samples in one forward pass of one rank")
    global_samples: int | None = option(
        "--global-batch-size", None, "samples per optimizer step, all ranks together; micro x dp if not given"
    )
    accumulation: int | None = option(
        "--update-freq",
        None,
        "micro-batches of one rank per step (fairseq), instead of --global-batch-size",
    )
    rampup: tuple[int, int, int] | None = option(
        "--rampup-batch-size",
        None,
        "START INCREMENT SAMPLES: first batch size, its increment, and the samples of the ramp-up",
    )
    decrease: bool = option(
        "--decrease-batch-size-if-needed",
        False,
        "round a batch size down to a multiple of micro x dp instead of refusing it",
    )
    length: int | None = option("--seq-length", None, "tokens per sample; the model's context if not given")


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumConfig:
    """Sequence-length curriculum (arXiv:2108.06084); DeepSpeed's fixed_linear and fixed_root."""

    start: int | None = option(
        "--curriculum-start-length", None, "tokens per sample in the first step; --seq-length if not given"
    )
    steps: int | None = option("--curriculum-steps", None, "optimizer steps until samples have full length")
    multiple: int = option("--curriculum-length-multiple", 8, "lengths in between are multiples of this")
    root: float = option(
        "--curriculum-root", 1.0, "1 grows the length linearly; 2 as a square root, faster at first"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Duration, seed, precision, dropout, kernels and device."""

    iterations: int | None = option("--train-iters", None, "number of optimizer steps")
    samples: int | None = option(
        "--train-samples", None, "number of samples to train on, instead of --train-iters"
    )
    skip: bool = option("--skip-train", False, "validate the loaded model and exit")
    evaluation_only: bool = option("--eval-only", False, "same as --skip-train")
    skipped_iterations: WordList = multi_option(
        "--skip-train-iteration-range",
        "FIRST-LAST, or several: skip the samples of these steps, for example at a loss spike",
    )
    exit_interval: int | None = option(
        "--exit-interval", None, "save and exit after an iteration that is a multiple of this"
    )
    exit_minutes: float | None = option(
        "--exit-duration-in-mins",
        None,
        "save and exit after the first step that ends later than this many minutes",
    )
    kill_switch: Path | None = option(
        "--kill-switch-path",
        None,
        "save and exit when this file exists; a run does not start while it exists",
    )
    per_token_loss: bool = option(
        "--calculate-per-token-loss",
        False,
        "average the loss over the tokens of a step, not over its micro-batches; always with --sft",
    )
    seed: int = option("--seed", 1234, "seed of initial weights, data order and dropout")
    hidden_dropout: float = option(
        "--hidden-dropout",
        0.0,
        "dropout probability of the embedding and of every branch; Megatron's default is 0.1",
    )
    attention_dropout: float = option(
        "--attention-dropout",
        0.0,
        "dropout probability of attention weights, which disables fused kernels; Megatron's default is 0.1",
    )
    bf16: bool = option(
        "--bf16", False, "weights and activations in bfloat16, main weights and gradients in float32"
    )
    fp16: bool = option("--fp16", False, "weights and activations in float16, with loss scaling")
    fp8: Fp8Format | None = option(
        "--fp8-format",
        None,
        "with --bf16, run linear layers in FP8 (current scaling); hybrid: e4m3 forward, e5m2 gradients",
    )
    fp8_weight_gradients: bool = option(
        "--no-fp8-wgrad", True, "with FP8, compute weight gradients in bfloat16"
    )
    fused_weight_gradients: bool = option(
        "--no-gradient-accumulation-fusion",
        True,
        "round each micro-batch's weight gradients to the weights' dtype before adding them to the float32 "
        "sum; faster on a CPU",
    )
    loss_scale: float | None = option("--loss-scale", None, "constant loss scale; dynamic if not given")
    initial_loss_scale: float = option(
        "--initial-loss-scale", 2.0**32, "first value of the dynamic loss scale"
    )
    min_loss_scale: float = option("--min-loss-scale", 1.0, "lower bound of the dynamic loss scale")
    loss_scale_window: int = option(
        "--loss-scale-window", 1000, "steps without an overflow after which the scale doubles"
    )
    hysteresis: int = option("--hysteresis", 2, "overflows before the scale halves")
    deterministic: bool = option(
        "--deterministic-mode", False, "use only deterministic algorithms; slower on GPUs"
    )
    kernels: KernelsName = option(
        "--kernels",
        "auto",
        "fused kernels: auto takes the fastest available, which mega-train doctor shows; compile is "
        "torch.compile of the reference",
    )
    batch_invariant: bool = option(
        "--batch-invariant",
        False,
        "a forward pass gives a token the same bits in any batch and over any tp, those of mega-serve "
        "--batch-invariant; on CPUs, with mega-train[cpu]",
    )
    on_non_finite: Literal["stop", "skip"] = option(
        "--on-non-finite",
        "stop",
        "on a non-finite loss or gradient, stop or skip the step; float16 overflows are always skipped",
    )
    device: DeviceName = option("--device", "auto", "device; auto uses CUDA if available")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Optimizer, clipping, and the learning-rate and weight-decay schedules."""

    name: OptimizerName = option(
        "--optimizer",
        "adam",
        "AdamW (arXiv:1711.05101); SGD with momentum; Muon for the layers' matrices, AdamW for the rest",
    )
    lr: float | None = option("--lr", None, "peak learning rate")
    min_lr: float = option("--min-lr", 0.0, "learning rate after the decay")
    decoupled_lr: float | None = option(
        "--decoupled-lr", None, "peak learning rate of embedding and output weights; --lr if not given"
    )
    decoupled_min_lr: float | None = option(
        "--decoupled-min-lr",
        None,
        "learning rate of embedding and output weights after the decay; --min-lr if not given",
    )
    decay_style: DecayStyle = option("--lr-decay-style", "linear", "learning-rate decay after the warm-up")
    decay_iterations: int | None = option(
        "--lr-decay-iters",
        None,
        "step at which the learning rate reaches --min-lr; --train-iters if not given",
    )
    decay_samples: int | None = option(
        "--lr-decay-samples", None, "the same, in samples; --train-samples if not given"
    )
    warmup_iterations: int = option("--lr-warmup-iters", 0, "steps of linear warm-up")
    warmup_samples: int = option("--lr-warmup-samples", 0, "samples of linear warm-up")
    warmup_fraction: float | None = option(
        "--lr-warmup-fraction", None, "warm-up as a fraction of the decay steps"
    )
    warmup_initial: float = option("--lr-warmup-init", 0.0, "learning rate at the start of the warm-up")
    wsd_iterations: int | None = option(
        "--lr-wsd-decay-iters", None, "for WSD, steps of the final decay, at the end of --lr-decay-iters"
    )
    wsd_samples: int | None = option("--lr-wsd-decay-samples", None, "for WSD, samples of the final decay")
    wsd_style: AnnealStyle = option(
        "--lr-wsd-decay-style", "exponential", "for WSD, shape of the final decay"
    )
    weight_decay: float = option(
        "--weight-decay", 0.01, "decoupled decay of matrices; norms and biases have none"
    )
    start_weight_decay: float | None = option(
        "--start-weight-decay", None, "weight decay at the start, if --weight-decay-incr-style changes it"
    )
    end_weight_decay: float | None = option("--end-weight-decay", None, "weight decay at the end of training")
    weight_decay_style: IncreaseStyle = option(
        "--weight-decay-incr-style", "constant", "growth of the weight decay from start to end"
    )
    override_schedule: bool = option(
        "--override-opt_param-scheduler",
        False,
        "a resumed run uses the schedules of these flags, not the checkpoint's",
    )
    checkpoint_schedule: bool = option(
        "--use-checkpoint-opt_param-scheduler", False, "a resumed run uses the checkpoint's schedules"
    )
    beta1: float = option("--adam-beta1", 0.9, "decay of the first moment")
    beta2: float = option("--adam-beta2", 0.999, "decay of the second moment")
    eps: float = option("--adam-eps", 1e-8, "added to the square root of the second moment")
    sgd_momentum: float = option("--sgd-momentum", 0.9, "momentum of --optimizer sgd")
    muon_momentum: float = option("--muon-momentum", 0.95, "Nesterov momentum of --optimizer muon")
    clip: float = option("--clip-grad", 1.0, "maximum global gradient norm; 0 disables clipping")
