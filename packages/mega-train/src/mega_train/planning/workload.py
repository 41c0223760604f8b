"""The workload to estimate: a model, its layout and its implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mega_schema.errors import ConfigError, LayoutError
from mega_schema.parallel_layout import Layout, Stage
from mega_schema.recompute_policy import KEEP_ALL, RecomputePolicy
from mega_schema.spec import ModelSpec
from mega_train.config.parallel import ScheduleName
from mega_train.distributed.bucket_layout import DEFAULT_BUCKET_ELEMENTS
from mega_train.planning.sharded_sizes import ShardedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Bytes per parameter, by kind.

    Attributes:
        weight: of weights and activations.
        gradient: of the gradient in which micro-batches are accumulated.
        main: of the optimizer's float32 copies: of the weight where that is not float32, and of the gradient
            where that is not.
        moments: of the optimizer's state apart from the weights: both moments of Adam.
        gemm_factor: of the factors of the layers' linears, where it differs from `weight`: 1 in FP8. The head
            and attention use `weight`.
    """

    name: str
    weight: int
    gradient: int
    main: int
    moments: float = 8
    gemm_factor: int | None = None

    @property
    def factor_bytes(self) -> int:
        """Bytes per element of the factors of a layer's matrix products."""
        return self.gemm_factor or self.weight

    def bytes_per_param(self, zero: int, ranks: int) -> tuple[float, float, float]:
        """Return the bytes per parameter on each of `ranks` replicas: weight, gradient, optimizer state.

        ZeRO stage 1 shards the optimizer's state, 2 also the gradients, 3 also the weights (arXiv:1910.02054
        §5). At stage 3 the weights are the main weights, gathered as they are needed.
        """
        state = self.main + self.moments
        fraction = 1 / ranks
        if zero == 3:
            return 4 * fraction, self.gradient * fraction, self.moments * fraction
        return self.weight, self.gradient * (fraction if zero == 2 else 1), state * (fraction if zero else 1)


FLOAT32 = Precision(name="fp32", weight=4, gradient=4, main=0)
BF16 = Precision(name="bf16", weight=2, gradient=4, main=4)
FLOAT16 = Precision(name="fp16", weight=2, gradient=4, main=4)
FP8 = Precision(name="fp8", weight=2, gradient=4, main=4, gemm_factor=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """Properties in which training programs differ; the defaults are those of `mega-train`.

    Attributes:
        attention: "flash" and "flash-2" never store the scores; "scores" does, before and after dropout. On
            Hopper "flash-2" is FlashAttention 2, written for Ampere, "flash" a kernel written for Hopper.
        attention_width: bytes of the numbers that attention computes with; None: those of the activations.
        keeps_masks: dropout keeps a byte per element and softmax its 16-bit result, as Megatron's kernels do;
            ours recomputes the mask, and keeps probabilities in float32.
        fused: norms keep their input and two statistics of a row, gated activations their input alone, and
            rotary positions are applied in place, as our Triton kernels do; the reference kernels keep more.
        eager: RMSNorm, gated activations and rotary positions run one operation after another, each of which
            reads and writes memory, as our reference kernels do.
        whole_logits: a micro-batch's logits are kept for its backward pass; ours exist one chunk at a time
            and are replaced by gradients.
        regathers: with sequence parallelism a linear layer saves its shard of the input and gathers it again.
        sliced_p2p: a stage sends 1/tp of its output, which the next one gathers over NVLink.
        duplex_p2p: a stage sends to its neighbour and receives from it at the same time.
        frees_stage_inputs: a stage's input is not kept: its first norm computes its backward from its output,
            which the next linear keeps anyway (apex's norms with memory_efficient=True).
        gradient_traffic: bytes per element moved to accumulate a micro-batch's weight gradient.
        loss_traffic: bytes moved per logit for the cross-entropy, forward and backward.
        overlaps_tp: which passes hide the tensor-parallel transfers behind matrix products.
        overlaps_pp: an interleaved pipeline hides transfers between stages behind other micro-batches. A
            pipeline that is not interleaved has no other micro-batch.
        overlaps_pp_fill: it also hides them while the pipeline fills and drains, as ours does by receiving
            early; Megatron needs `--overlap-p2p-communication-warmup-flush`.
        overlaps_reduce: gradients are summed over the replicas while the backward pass runs.
        overlaps_gather: sharded weights are gathered while the next forward pass runs.
        reduces_by_round: at ZeRO stage 2 an interleaved pipeline reduces the gradients of a stage once for
            every `pp` micro-batches; ours after each.
    """

    attention: Literal["flash", "flash-2", "scores"] = "flash"
    attention_width: int | None = None
    keeps_masks: bool = False
    fused: bool = False
    eager: bool = False
    whole_logits: bool = False
    regathers: bool = True
    sliced_p2p: bool = False
    duplex_p2p: bool = True
    frees_stage_inputs: bool = False
    gradient_traffic: int = 8
    loss_traffic: int = 40
    overlaps_tp: Literal["none", "backward", "both"] = "backward"
    overlaps_pp: bool = True
    overlaps_pp_fill: bool = True
    overlaps_reduce: bool = False
    overlaps_gather: bool = False
    reduces_by_round: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One optimizer step of a model on a layout.

    Attributes:
        seq_length: tokens of a sample.
        micro_batch_size: samples in one forward pass of one rank.
        global_batch_size: samples per optimizer step.
        sequence: sequence parallelism on the tp axis.
        zero: ZeRO stage, 0 to 3.
        bucket_elements: elements of gradients that are reduced at once.
    """

    model: ShardedModel
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    precision: Precision = BF16
    sequence: bool = False
    recompute: RecomputePolicy = KEEP_ALL
    zero: int = 0
    schedule: ScheduleName = "1f1b"
    bucket_elements: int = DEFAULT_BUCKET_ELEMENTS
    implementation: Implementation = Implementation()

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def layout(self) -> Layout:
        return self.model.layout

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one step."""
        return self.global_batch_size // (self.micro_batch_size * self.layout.dp)

    @property
    def reductions(self) -> int:
        """Reductions of each gradient over the replicas in a step."""
        if self.zero < 2:
            return 1
        by_round = self.zero == 2 and self.layout.vp > 1 and self.implementation.reduces_by_round
        return max(1, self.num_micro_batches // self.layout.pp) if by_round else self.num_micro_batches

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch inside the tensor-parallel regions of one rank."""
        return self.micro_batch_size * self.seq_length // self.layout.cp

    @property
    def outer_tokens(self) -> int:
        """Tokens of a micro-batch that one rank holds outside the tensor-parallel regions."""
        return self.tokens // self.layout.tp if self.sequence else self.tokens

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights, over which ZeRO shards."""
        return self.layout.dp * self.layout.cp

    def recomputed_layers(self, stages: Sequence[Stage]) -> int:
        """Count the layers of these stages that are recomputed, wholly or in part."""
        if self.recompute.granularity == "selective":
            return sum(len(stage.layers) for stage in stages)
        groups = (group for stage in stages for group in self.recompute.groups(stage.layers))
        return sum(len(layers) for layers, recomputed in groups if recomputed)


def check_batch(workload: Workload) -> None:
    """Check that the batch divides over the ranks and micro-batches.

    Raises:
        ConfigError, LayoutError: the batch cannot be split this way.
    """
    layout = workload.layout
    if (
        workload.micro_batch_size < 1
        or workload.global_batch_size < 1
        or workload.global_batch_size % (workload.micro_batch_size * layout.dp)
    ):
        raise ConfigError(
            "--global-batch-size",
            "is not a multiple of micro-batch size x data-parallel size",
            found=workload.global_batch_size,
            wanted=f"a multiple of {workload.micro_batch_size} x {layout.dp} = "
            f"{workload.micro_batch_size * layout.dp}",
        )
    if layout.cp > 1 and workload.seq_length % (2 * layout.cp):
        raise LayoutError(
            "--context-parallel-size",
            "the tokens of a sample cannot be split evenly",
            found=f"{workload.seq_length} tokens over cp={layout.cp}",
            wanted=f"a sequence length that is a multiple of {2 * layout.cp}",
        )
    if workload.sequence and workload.tokens % layout.tp:
        raise LayoutError(
            "--sequence-parallel",
            "the tokens of a micro-batch cannot be split evenly",
            found=f"{workload.tokens} tokens over tp={layout.tp}",
            wanted=f"micro-batch size x sequence length a multiple of {layout.tp}",
        )
    if layout.vp > 1 and layout.pp == 1:
        raise LayoutError(
            "--num-layers-per-virtual-pipeline-stage",
            "there is no pipeline to interleave",
            found=f"vp={layout.vp}, pp=1",
            wanted="pp of 2 or more",
        )
