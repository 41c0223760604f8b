"""How a model is cut, and what is computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mega_schema.app.config import Words, option, words


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
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
    reduce_bf16: bool = option(
        "--grad-reduce-in-bf16",
        False,
        "replicas exchange gradients in bfloat16, half the bytes; a rank's own sum stays float32",
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
class RecomputeConfig:
    """What backward computes again, to keep less in memory (arXiv:2205.05198)."""

    selective: bool = option(
        "--recompute-activations", False, "attention again, as --recompute-granularity selective"
    )
    full: bool = option(
        "--checkpoint-activations", False, "every layer again, as --recompute-granularity full"
    )
    granularity: Literal["full", "selective"] | None = option(
        "--recompute-granularity", None, "selective recomputes --recompute-modules, full whole layers"
    )
    modules: Words = words(
        "--recompute-modules",
        "of selective: core_attn (attention), layernorm, mlp_act (the feed-forward's activation); "
        "core_attn if not given",
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
