"""Compute the cost of one micro-batch on one rank: FLOPs, bytes moved, and their seconds.

A matrix product of (m, k) by (k, n) takes 2mnk / (gemm · peak) seconds for its arithmetic plus its operands'
bytes / (stream · bandwidth) to move them: the only efficiency curve. It bends at the machine's own ratio
of FLOP/s to bytes/s, so a small product under tensor parallelism is slow without a further constant.
Elementwise work counts bytes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mega_train.planning.hardware import Hardware
from mega_train.planning.workload import Workload


@dataclass(frozen=True, slots=True)
class PassCost:
    """Seconds of one pass, forward or backward, of a part of the model.

    Attributes:
        gemm: matrix products of weights.
        attention: between the qkv and the out products.
        stream: norms, activations, residuals, loss.
        tp, cp: exposed transfers.
    """

    gemm: float = 0.0
    attention: float = 0.0
    stream: float = 0.0
    tp: float = 0.0
    cp: float = 0.0

    @property
    def seconds(self) -> float:
        return self.gemm + self.attention + self.stream + self.tp + self.cp

    def __add__(self, other: PassCost) -> PassCost:
        return PassCost(
            self.gemm + other.gemm,
            self.attention + other.attention,
            self.stream + other.stream,
            self.tp + other.tp,
            self.cp + other.cp,
        )

    def __mul__(self, times: int) -> PassCost:
        return PassCost(
            times * self.gemm,
            times * self.attention,
            times * self.stream,
            times * self.tp,
            times * self.cp,
        )


@dataclass(frozen=True, slots=True)
class MicroBatchCost:
    """Seconds of one micro-batch's parts on one rank: a layer, the embedding, the head with the loss.

    Attributes:
        layer_recompute: the recomputed part of a layer.
        layer_weights: of a layer's backward pass, the weight gradients.
    """

    layer: PassCost
    layer_back: PassCost
    layer_recompute: PassCost
    layer_weights: float
    embedding: PassCost
    embedding_back: PassCost
    head: PassCost
    head_back: PassCost

    @classmethod
    def from_workload(cls, workload: Workload, hardware: Hardware) -> MicroBatchCost:
        forward, attention = _layer_forward(workload, hardware)
        collectives = tp_collectives(workload)
        collective_seconds = collective_bytes(workload) / hardware.link_bandwidth(workload.layout.tp, 1)
        width, columns = (
            workload.tokens * workload.spec.hidden,
            workload.tokens * workload.model.shares.head[0],
        )
        element_seconds = workload.precision.weight / (hardware.stream * hardware.bandwidth)
        loss = columns * workload.implementation.loss_traffic / (hardware.stream * hardware.bandwidth)
        gemm = _GemmCost(workload, hardware)
        head = (workload.model.shares.head,)
        factor_bytes = workload.precision.weight
        return cls(
            layer=forward,
            layer_back=_layer_backward(workload, hardware),
            layer_recompute=_selective_recompute(workload, attention, element_seconds)
            if workload.recompute.granularity == "selective"
            else forward,
            layer_weights=gemm.weight_gradients(workload.model.shares.matrices),
            embedding=PassCost(
                stream=5 * width * element_seconds, tp=collectives.embedding * collective_seconds
            ),
            embedding_back=PassCost(
                stream=5 * width * element_seconds, tp=collectives.embedding_back * collective_seconds
            ),
            head=PassCost(
                gemm=gemm.forward(head, factor_bytes),
                stream=loss / 2,
                tp=collectives.head * collective_seconds,
            ),
            head_back=PassCost(
                gemm=gemm.backward(head, factor_bytes),
                stream=loss / 2,
                tp=collectives.head_back * collective_seconds,
            ),
        )


def _selective_recompute(workload: Workload, attention: PassCost, byte_seconds: float) -> PassCost:
    """Return the cost of the modules of one layer that selective recomputation runs again.

    Args:
        attention: the cost of attention.
        byte_seconds: to move an element of an activation to or from memory.
    """
    recompute = workload.recompute
    elements = 0.0
    if recompute.recomputes("layernorm"):  # two norms, each reads and writes the stream
        elements += 4 * workload.outer_tokens * workload.spec.hidden
    if recompute.recomputes("mlp_act"):
        elements += (
            (3 if workload.spec.is_gated else 2) * workload.tokens * workload.spec.ffn / workload.layout.tp
        )
    recomputed = attention if recompute.recomputes("core_attn") else PassCost()
    return replace(recomputed, stream=recomputed.stream + elements * byte_seconds)


@dataclass(frozen=True, slots=True)
class TpCollectives:
    """All-gathers and reduce-scatters over tp of each part of the model; an all-reduce is two.

    arXiv:1909.08053 §3 and, with sequence parallelism, arXiv:2205.05198 §4.2.2: the same bytes as all-gathers
    and reduce-scatters, and further gathers of inputs that are saved as shards.
    """

    layer: int
    layer_back: int
    embedding: int
    embedding_back: int
    head: int
    head_back: int


def tp_collectives(workload: Workload) -> TpCollectives:
    """Count the collectives of one micro-batch without recomputation."""
    if not workload.sequence:
        return TpCollectives(4, 4, 2, 0, 0, 2)
    regather = 1 if workload.implementation.regathers else 0
    return TpCollectives(4, 4 + 2 * regather, 1, 1, 1, 1 + regather * workload.implementation.whole_logits)


def collective_bytes(workload: Workload) -> float:
    """Return the bytes that one rank sends in one all-gather or reduce-scatter of a micro-batch over tp."""
    t = workload.layout.tp
    return (t - 1) / t * workload.tokens * workload.spec.hidden * workload.precision.weight


def kv_gather_bytes(workload: Workload) -> float:
    """Return the bytes that one rank sends in one all-gather of a layer's keys and values over cp."""
    return (
        (workload.layout.cp - 1)
        * workload.tokens
        * 2
        * workload.model.shares.keys
        * workload.precision.weight
    )


MatrixShapes = Sequence[tuple[int, int]]  # (rows, columns) of matrices


@dataclass(frozen=True, slots=True)
class _GemmCost:
    """Seconds of the matrix products of one micro-batch with weights of given (rows, columns)."""

    workload: Workload
    hardware: Hardware

    def forward(self, weights: MatrixShapes, factor: int | None = None) -> float:
        """Return the seconds of the forward products.

        Args:
            factor: bytes of an element of the factors; None: those of the layers' linears.
        """
        workload = self.workload
        e = factor or self.workload.precision.factor_bytes
        return sum(
            self.seconds(workload.tokens, n, k, workload.precision.weight, e)
            + self._quantization(workload.tokens * k, e)
            for n, k in weights
        )

    def backward(self, weights: MatrixShapes, factor: int | None = None) -> float:
        """Return the seconds of the input gradient, and of the weight gradient with its accumulation."""
        workload = self.workload
        e = factor or self.workload.precision.factor_bytes
        inputs = sum(
            self.seconds(workload.tokens, n, k, workload.precision.weight, e)
            + self._quantization(workload.tokens * n, e)
            for n, k in weights
        )
        return inputs + self.weight_gradients(weights, factor)

    def weight_gradients(self, weights: MatrixShapes, factor: int | None = None) -> float:
        workload = self.workload
        e = factor or self.workload.precision.factor_bytes
        return sum(
            self.seconds(n, k, workload.tokens, workload.implementation.gradient_traffic, e)
            for n, k in weights
        )

    def seconds(self, m: int, n: int, k: int, out: int, factor: int) -> float:
        hardware = self.hardware
        moved_bytes = factor * (m * k + k * n) + out * m * n
        return 2 * m * n * k / (hardware.gemm * hardware.gemm_peak(factor)) + self._transfer_seconds(
            moved_bytes
        )

    def _quantization(self, elements: int, factor: int) -> float:
        """Return the seconds to cast a 16-bit factor to FP8, and to write its transposed copy.

        Hopper's tensor cores need that copy for the gradient of the weight.
        """
        return (
            self._transfer_seconds(elements * (self.workload.precision.weight + 2 * factor))
            if factor == 1
            else 0.0
        )

    def _transfer_seconds(self, moved_bytes: float) -> float:
        return moved_bytes / (self.hardware.stream * self.hardware.bandwidth)


def attention_flops(workload: Workload) -> float:
    """Return the forward FLOPs of one layer's attention for one micro-batch on one rank, without masking."""
    return 4.0 * workload.tokens * workload.seq_length * workload.model.shares.queries


def _attention_seconds(workload: Workload, hardware: Hardware, *, is_backward: bool) -> float:
    """Return the seconds of attention between the qkv and the output products.

    Fused kernels skip the scores of later tokens and need 2.5 times the FLOPs in backward (arXiv:2205.14135);
    otherwise softmax and dropout read and write the scores in memory.
    """
    if workload.implementation.attention != "scores":
        efficiency = (
            hardware.flash_attention_2
            if workload.implementation.attention == "flash-2"
            else hardware.attention
        )
        flops = attention_flops(workload) / (2 if workload.spec.causal else 1)
        return (
            (2.5 if is_backward else 1.0)
            * flops
            / (efficiency * hardware.gemm_peak(workload.precision.weight))
        )
    heads = workload.micro_batch_size * workload.spec.heads // workload.layout.tp
    rows = workload.seq_length // workload.layout.cp
    width = workload.spec.head_dim
    e = workload.precision.weight
    gemm = _GemmCost(workload, hardware)
    pair = gemm.seconds(rows, workload.seq_length, width, e, e) + gemm.seconds(
        rows, width, workload.seq_length, e, e
    )
    # softmax reads and writes; dropout reads, writes, and writes its one-byte mask
    per_score = 5 * e + 1 if is_backward else 4 * e + 1
    scores = heads * rows * workload.seq_length
    score_seconds = scores * per_score / (hardware.stream * hardware.bandwidth)
    return heads * pair * (2 if is_backward else 1) + score_seconds


def _elementwise_seconds(workload: Workload, hardware: Hardware, *, is_backward: bool) -> float:
    """Return the seconds of a layer's elementwise work.

    It is two norms and two residual sums outside the tensor-parallel regions; activation, rotary embedding
    and, in backward, the concatenation of dq, dk and dv inside.
    """
    spec = workload.spec
    t = workload.layout.tp
    outer = workload.outer_tokens * spec.hidden * (6 + 2 * _norm_accesses(workload, back=is_backward))
    activation_accesses = (5 if is_backward else 3) if spec.is_gated else (3 if is_backward else 2)
    if spec.is_gated and workload.implementation.eager:
        activation_accesses = (
            13 if is_backward else 5
        )  # SiLU and product separately; in backward both halves are concatenated
    queries, keys = workload.model.shares.queries, workload.model.shares.keys
    rotated = 2 * (queries + keys) if spec.rotary_dim else 0
    if workload.implementation.eager:
        rotated *= 5  # four products, two sums and the concatenated halves
    joined = 2 * (queries + 2 * keys) if is_backward else 0
    inner = workload.tokens * (activation_accesses * spec.ffn / t + rotated + joined)
    return (outer + inner) * workload.precision.weight / (hardware.stream * hardware.bandwidth)


def _norm_accesses(workload: Workload, *, back: bool) -> float:
    """Count the element reads and writes of one norm, in units of an activation.

    Eager RMSNorm forward: a float32 copy, its square, the mean, the scaled copy, its cast and the product
    with the weight. Backward: the gradients of that product, cast up, of the scaled copy, of the mean and of
    the square, their sum, cast down. In float32 there are no casts.
    """
    if not workload.implementation.eager or workload.spec.norm != "rmsnorm":
        return 3 if back else 2
    e = workload.precision.weight
    casts = 2 * (e + 4) if e < 4 else 0
    return (casts + (6 * e + 60 if back else 2 * e + 20)) / e


def _layer_forward(workload: Workload, hardware: Hardware) -> tuple[PassCost, PassCost]:
    """Return the cost of a layer's forward pass, and of its attention alone."""
    layout = workload.layout
    collective_seconds = collective_bytes(workload) / hardware.link_bandwidth(layout.tp, 1)
    tp_seconds = tp_collectives(workload).layer * collective_seconds
    gemm_seconds = _GemmCost(workload, hardware).forward(workload.model.shares.matrices)
    if workload.implementation.overlaps_tp == "both":
        # in tp pieces, of which the first is exposed
        tp_seconds = tp_seconds / layout.tp + max(0.0, tp_seconds * (1 - 1 / layout.tp) - gemm_seconds)
    attention = PassCost(
        attention=_attention_seconds(workload, hardware, is_backward=False),
        cp=kv_gather_bytes(workload) / hardware.link_bandwidth(layout.cp, layout.tp),
    )
    return attention + PassCost(
        gemm=gemm_seconds, stream=_elementwise_seconds(workload, hardware, is_backward=False), tp=tp_seconds
    ), attention


def _layer_backward(workload: Workload, hardware: Hardware) -> PassCost:
    layout = workload.layout
    collective_seconds = collective_bytes(workload) / hardware.link_bandwidth(layout.tp, 1)
    tp_seconds = tp_collectives(workload).layer_back * collective_seconds
    gemm_seconds = _GemmCost(workload, hardware).backward(workload.model.shares.matrices)
    # a zero-bubble pipeline defers the products that would hide these transfers
    if workload.implementation.overlaps_tp != "none" and workload.schedule != "zero-bubble":
        # the input gradient of a column-parallel linear is reduced during its weight gradient, and an input
        # is gathered during an input gradient; with sequence parallelism two gathers are exposed
        exposed = 2 * collective_seconds if workload.sequence else 0.0
        if workload.implementation.overlaps_tp == "both":
            exposed /= layout.tp
        tp_seconds = exposed + max(0.0, tp_seconds - exposed - gemm_seconds)
    return PassCost(
        gemm=gemm_seconds,
        attention=_attention_seconds(workload, hardware, is_backward=True),
        stream=_elementwise_seconds(workload, hardware, is_backward=True),
        tp=tp_seconds,
        cp=kv_gather_bytes(workload) / hardware.link_bandwidth(layout.cp, layout.tp),
    )
