"""Options of parallelism and activation recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mega_schema.app.config import WordList, multi_option, option
from mega_schema.recompute_policy import Granularity, Method
from mega_train.distributed.bucket_layout import DEFAULT_BUCKET_ELEMENTS

ScheduleName = Literal["gpipe", "1f1b", "zero-bubble"]  # interleaved where the layout has virtual stages


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Sizes of the parallel dimensions. Data parallelism takes the remaining ranks."""

    tp: int = option("--tensor-model-parallel-size", 1, "tensor-parallel size: ranks that share each layer")
    pp: int = option(
        "--pipeline-model-parallel-size", 1, "pipeline-parallel size: ranks that share the layers"
    )
    split_rank: int | None = option(
        "--pipeline-model-parallel-split-rank",
        None,
        "of T5, the first pipeline rank of the decoder; if not given, layers are split evenly over all ranks",
    )
    layers_per_virtual: int | None = option(
        "--num-layers-per-virtual-pipeline-stage",
        None,
        "interleave: layers of each virtual stage",
    )
    virtual: int | None = option(
        "--num-virtual-stages-per-pipeline-rank", None, "interleave: virtual stages per pipeline rank"
    )
    schedule: ScheduleName = option(
        "--pipeline-schedule",
        "1f1b",
        "pipeline schedule; 1f1b is interleaved with virtual stages; zero-bubble defers weight gradients",
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
        "--context-parallel-size",
        1,
        "context-parallel size: ranks that share each sequence, with an early and a late chunk each",
    )
    sequence: bool = option(
        "--sequence-parallel",
        False,
        "shard tokens over the tensor-parallel ranks outside the tensor-parallel regions",
    )
    tp_overlap: bool = option(
        "--tp-comm-overlap",
        False,
        "on GPUs, overlap tensor-parallel communication with matrix products",
    )
    ddp_impl: Literal["local", "torch"] = option(
        "--DDP-impl", "local", "accepted without effect: gradients are reduced in float32 buckets either way"
    )
    distributed_optimizer: bool = option(
        "--use-distributed-optimizer", False, "same as --zero-stage 1, unless a higher stage is given"
    )
    zero_stage: int | None = option(
        "--zero-stage",
        None,
        "ZeRO stage, which shards over the replicas: 0 nothing, 1 optimizer state, 2 also gradients, "
        "3 also weights (FSDP2); 0 if not given",
    )
    overlap_reduce: bool = option(
        "--overlap-grad-reduce", False, "reduce gradients over the replicas during the backward pass"
    )
    overlap_gather: bool = option(
        "--overlap-param-gather", False, "gather updated weights during the next forward pass"
    )
    reduce_bf16: bool = option(
        "--grad-reduce-in-bf16",
        False,
        "reduce gradients over the replicas in bfloat16; accumulation on a rank stays float32",
    )
    bucket: int | None = option(
        "--ddp-bucket-size",
        None,
        f"elements of a gradient bucket; the larger of {DEFAULT_BUCKET_ELEMENTS:,} and 1,000,000 x replicas "
        "if not given",
    )
    timeout_minutes: float = option(
        "--distributed-timeout-minutes", 10.0, "minutes without progress after which a run is ended"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeConfig:
    """Options of activation recomputation (arXiv:2205.05198)."""

    selective: bool = option("--recompute-activations", False, "same as --recompute-granularity selective")
    full: bool = option("--checkpoint-activations", False, "same as --recompute-granularity full")
    granularity: Granularity | None = option(
        "--recompute-granularity", None, "selective recomputes --recompute-modules, full whole layers"
    )
    modules: WordList = multi_option(
        "--recompute-modules",
        "for selective: core_attn (attention), layernorm, mlp_act (the feed-forward's activation); "
        "core_attn if not given",
    )
    method: Method | None = option(
        "--recompute-method",
        None,
        "for full: uniform, all layers in groups, or block, a stage's first layers; uniform if not given",
    )
    layers: int | None = option(
        "--recompute-num-layers",
        None,
        "for full: layers of a group, or recomputed layers of a block; 1 if not given",
    )
    distribute_saved: bool = option(
        "--distribute-saved-activations",
        False,
        "for full: shard the saved inputs over the tensor-parallel ranks",
    )
