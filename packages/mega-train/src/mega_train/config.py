"""What a person can say of a training run: sections, keys, flags (Megatron's names), defaults.

Nothing is derived and nothing is cross-checked here; `resolve` does both, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mega_schema.config import option
from mega_schema.spec import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model. With --load and none of these, the checkpoint says what it is."""

    preset: str | None = option("--preset", None, "a named model, such as gpt2-124m or llama3-8b")
    layers: int | None = option("--num-layers", None, "transformer layers")
    hidden: int | None = option("--hidden-size", None, "width of the residual stream")
    heads: int | None = option("--num-attention-heads", None, "query heads")
    kv_heads: int | None = option(
        "--num-query-groups", None, "key and value heads; as many as query heads if not given"
    )
    head_width: int | None = option(
        "--kv-channels", None, "components of a head; hidden / heads if not given"
    )
    ffn: int | None = option(
        "--ffn-hidden-size",
        None,
        "feed-forward width; 4 x hidden, or 8/3 x hidden to a multiple of 64 with SwiGLU",
    )
    context: int | None = option(
        "--max-position-embeddings", None, "longest sequence in tokens; --seq-length if not given"
    )
    vocab: int | None = option(
        "--vocab-size", None, "vocabulary without padding; that of the data's tokenizer if not given"
    )
    vocab_multiple: int | None = option(
        "--make-vocab-size-divisible-by",
        None,
        "pad a rank's share of the vocabulary in memory to a multiple of this; 128 if not given",
    )
    norm: Literal["LayerNorm", "RMSNorm"] | None = option("--normalization", None, "which norm")
    norm_eps: float | None = option("--norm-epsilon", None, "epsilon of the norms; 1e-5 if not given")
    activation: Activation | None = option("--activation", None, "feed-forward activation")
    swiglu: bool = option("--swiglu", False, "gated SiLU feed-forward, as --activation swiglu")
    positions: Literal["learned_absolute", "rope", "none"] | None = option(
        "--position-embedding-type", None, "how a token's place enters"
    )
    rope_base: float | None = option("--rotary-base", None, "base of the rotary angles; 10000 if not given")
    untied: bool = option("--untie-embeddings-and-output-weights", False, "an output weight of its own")
    no_bias: bool = option("--disable-bias-linear", False, "linears without biases")
    init_std: float | None = option(
        "--init-method-std", None, "standard deviation of initial weights; 0.02 if not given"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """How the model is cut. Data parallel takes the ranks that remain."""

    tp: int = option("--tensor-model-parallel-size", 1, "ranks that share every layer")
    pp: int = option("--pipeline-model-parallel-size", 1, "stages that the layers are dealt to")
    layers_per_virtual: int | None = option(
        "--num-layers-per-virtual-pipeline-stage",
        None,
        "interleave: each pipeline rank holds several stages, of this many layers",
    )
    virtual: int | None = option(
        "--num-virtual-stages-per-pipeline-rank", None, "the same, as the number of stages of a rank"
    )
    schedule: Literal["gpipe", "1f1b", "zero-bubble"] = option(
        "--pipeline-schedule",
        "1f1b",
        "order of passes; 1f1b is interleaved over virtual stages; zero-bubble puts weight gradients off",
    )
    first_layers: int | None = option(
        "--decoder-first-pipeline-num-layers",
        None,
        "layers of the first pipeline rank; an even share if not given",
    )
    last_layers: int | None = option(
        "--decoder-last-pipeline-num-layers",
        None,
        "layers of the last pipeline rank; an even share if not given",
    )
    count_embedding: bool = option(
        "--account-for-embedding-in-pipeline-split",
        False,
        "count the embedding as a layer of the first stage",
    )
    count_head: bool = option(
        "--account-for-loss-in-pipeline-split", False, "count head and loss as a layer of the last stage"
    )
    cp: int = option(
        "--context-parallel-size", 1, "ranks that share every sequence, an early and a late chunk of it each"
    )
    sequence: bool = option(
        "--sequence-parallel", False, "share the tokens between the tensor-parallel regions"
    )
    tp_overlap: bool = option(
        "--tp-comm-overlap",
        False,
        "on GPUs, exchange tokens piece by piece beside the products that need them",
    )
    ddp_impl: Literal["local", "torch"] = option(
        "--DDP-impl", "local", "Megatron's; either way gradients add up in our own float32 buckets"
    )
    distributed_optimizer: bool = option(
        "--use-distributed-optimizer", False, "the same as --zero-stage 1, or a higher one given"
    )
    zero_stage: int | None = option(
        "--zero-stage",
        None,
        "what the replicas of the model share: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too "
        "(FSDP2); 0 if not given",
    )
    overlap_reduce: bool = option(
        "--overlap-grad-reduce", False, "add gradients up over the replicas while the backward pass runs"
    )
    overlap_gather: bool = option(
        "--overlap-param-gather", False, "gather updated weights while the next forward pass runs"
    )
    bucket: int | None = option(
        "--ddp-bucket-size",
        None,
        "elements of a bucket of gradients; 40,000,000, or 1,000,000 x replicas, if not given",
    )
    timeout_minutes: float = option(
        "--distributed-timeout-minutes", 10.0, "end a run whose ranks wait for each other for this long"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """What backward computes again, to keep less in memory (arXiv:2205.05198)."""

    selective: bool = option(
        "--recompute-activations", False, "attention again, as --recompute-granularity selective"
    )
    full: bool = option(
        "--checkpoint-activations", False, "every layer again, as --recompute-granularity full"
    )
    granularity: Literal["full", "selective"] | None = option(
        "--recompute-granularity", None, "selective computes attention again, full whole layers"
    )
    method: Literal["uniform", "block"] | None = option(
        "--recompute-method",
        None,
        "of full: uniform, all layers in groups, or block, the first layers of a stage; uniform if not given",
    )
    layers: int | None = option(
        "--recompute-num-layers",
        None,
        "layers of a group, or that block computes again; 1 if not given",
    )
    cut: bool = option(
        "--distribute-saved-activations",
        False,
        "of full: each tensor-parallel rank keeps a share of what enters a group",
    )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What is read."""

    path: Path | None = option("--data-path", None, "prefix of an indexed dataset: the path without .bin")
    split: str = option("--split", "969, 30, 1", "shares of the sequences for training, validation and test")
    split_rule: Literal["mcore", "legacy"] = option(
        "--split-rule", "mcore", "whose rounding: Megatron core's, or that of before October 2023"
    )
    reset_positions: bool = option(
        "--reset-position-ids", False, "count places from the document's first token"
    )
    reset_attention: bool = option("--reset-attention-mask", False, "a token sees its own document only")
    eod_mask_loss: bool = option("--eod-mask-loss", False, "no loss where the input is the end of a document")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Validation during training."""

    iterations: int = option("--eval-iters", 100, "batches of a validation; 0 for none")
    interval: int = option("--eval-interval", 1000, "optimizer steps between validations")


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Where checkpoints go and come from."""

    save: Path | None = option("--save", None, "folder of the run's checkpoints and of its record")
    load: Path | None = option("--load", None, "checkpoint to go on from: a run's folder, or one iteration's")
    interval: int | None = option(
        "--save-interval", None, "optimizer steps between checkpoints; the last step is always saved"
    )
    finetune: bool = option(
        "--finetune", False, "take the weights alone: iteration, optimizer and data begin anew"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What is shown."""

    interval: int = option("--log-interval", 100, "optimizer steps between lines of the log")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run."""

    model: Model = Model()
    parallel: Parallel = Parallel()
    recompute: Recomputation = Recomputation()
    batch: Batch = Batch()
    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    data: Data = Data()
    evaluation: Evaluation = Evaluation()
    checkpoint: Save = Save()
    log: Log = Log()
