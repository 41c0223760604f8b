"""What one micro-batch costs one rank: floating-point operations, bytes moved, and the seconds of both.

A matrix product of (m, k) by (k, n) takes 2mnk / (gemm · peak) seconds for its arithmetic and its operands'
bytes / (stream · bandwidth) for moving them, one after the other: the one curve of efficiency here. It bends
at the machine's own balance of FLOP/s to bytes/s, so a product that tensor parallelism cut thin is slow
without a constant that says so. Everything elementwise is bytes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mega_train.planning.hardware import Hardware
from mega_train.planning.workload import Job


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one pass, forward or backward, of a part of the model.

    Attributes:
        gemm: matrix products of weights.
        attention: between the qkv and the out products.
        stream: norms, activations, residuals, loss.
        tp, cp: transfers that nothing hides.
    """

    gemm: float = 0.0
    attention: float = 0.0
    stream: float = 0.0
    tp: float = 0.0
    cp: float = 0.0

    @property
    def seconds(self) -> float:
        return self.gemm + self.attention + self.stream + self.tp + self.cp

    def __add__(self, other: Pass) -> Pass:
        return Pass(
            self.gemm + other.gemm,
            self.attention + other.attention,
            self.stream + other.stream,
            self.tp + other.tp,
            self.cp + other.cp,
        )

    def __mul__(self, times: int) -> Pass:
        return Pass(
            times * self.gemm,
            times * self.attention,
            times * self.stream,
            times * self.tp,
            times * self.cp,
        )


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of one micro-batch's parts on one rank: a layer, the embedding, the head with the loss.

    Attributes:
        layer_again: what is computed again of a layer that is.
        layer_weights: of a layer's backward pass, the products that are gradients of weights.
    """

    layer: Pass
    layer_back: Pass
    layer_again: Pass
    layer_weights: float
    embedding: Pass
    embedding_back: Pass
    head: Pass
    head_back: Pass

    @classmethod
    def of(cls, job: Job, hardware: Hardware) -> Work:
        forward, core = _layer(job, hardware)
        halves = transfers(job)
        half = half_bytes(job) / hardware.reach(job.layout.tp, 1)
        width, columns = job.tokens * job.spec.hidden, job.tokens * job.cut.shares.head[0]
        moved = job.precision.weight / (hardware.stream * hardware.bandwidth)
        loss = columns * job.software.loss_traffic / (hardware.stream * hardware.bandwidth)
        product = _Products(job, hardware)
        head, wide = (job.cut.shares.head,), job.precision.weight
        return cls(
            layer=forward,
            layer_back=_layer_back(job, hardware),
            layer_again=_selected(job, core, moved) if job.recompute.granularity == "selective" else forward,
            layer_weights=product.of_weights(job.cut.shares.matrices),
            embedding=Pass(stream=5 * width * moved, tp=halves.embedding * half),
            embedding_back=Pass(stream=5 * width * moved, tp=halves.embedding_back * half),
            head=Pass(gemm=product.forward(head, wide), stream=loss / 2, tp=halves.head * half),
            head_back=Pass(gemm=product.backward(head, wide), stream=loss / 2, tp=halves.head_back * half),
        )


def _selected(job: Job, core: Pass, byte_seconds: float) -> Pass:
    """The forward pass of the modules of one layer that selective recomputation runs again.

    Args:
        core: attention's.
        byte_seconds: to move an element of an activation to or from memory.
    """
    again, elements = job.recompute, 0.0
    if again.recomputes("layernorm"):  # two norms, each reads and writes the stream
        elements += 4 * job.outer_tokens * job.spec.hidden
    if again.recomputes("mlp_act"):
        elements += (3 if job.spec.gated else 2) * job.tokens * job.spec.ffn / job.layout.tp
    made = core if again.recomputes("core_attn") else Pass()
    return replace(made, stream=made.stream + elements * byte_seconds)


@dataclass(frozen=True, slots=True)
class Transfers:
    """How many gathers or reduce-scatters over tp a part needs; an all-reduce is two.

    arXiv:1909.08053 §3 and, with sequence parallelism, arXiv:2205.05198 §4.2.2: as many bytes, as gathers and
    reduce-scatters, and those more that bring back inputs of which a rank kept its share only.
    """

    layer: int
    layer_back: int
    embedding: int
    embedding_back: int
    head: int
    head_back: int


def transfers(job: Job) -> Transfers:
    """Of one micro-batch; recomputation not counted."""
    if not job.sequence:
        return Transfers(4, 4, 2, 0, 0, 2)
    again = 1 if job.software.regathers else 0
    return Transfers(4, 4 + 2 * again, 1, 1, 1, 1 + again * job.software.whole_logits)


def half_bytes(job: Job) -> float:
    """Bytes that one rank sends in one gather or reduce-scatter of a micro-batch over tp."""
    t = job.layout.tp
    return (t - 1) / t * job.tokens * job.spec.hidden * job.precision.weight


def key_bytes(job: Job) -> float:
    """Bytes that one rank sends in one gather of a layer's keys and values over cp."""
    return (job.layout.cp - 1) * job.tokens * 2 * job.cut.shares.keys * job.precision.weight


Weights = Sequence[tuple[int, int]]  # (rows, columns) of matrices


@dataclass(frozen=True, slots=True)
class _Products:
    """Seconds of matrix products of one micro-batch with weights of these (rows, columns)."""

    job: Job
    hardware: Hardware

    def forward(self, weights: Weights, factor: int | None = None) -> float:
        """
        Args:
            factor: bytes of an element of the factors; None: those of the layers' linears.
        """
        job, e = self.job, factor or self.job.precision.factor
        return sum(
            self.seconds(job.tokens, n, k, job.precision.weight, e) + self._quantization(job.tokens * k, e)
            for n, k in weights
        )

    def backward(self, weights: Weights, factor: int | None = None) -> float:
        """The gradient of the input, and that of the weight, which is added to what others left."""
        job, e = self.job, factor or self.job.precision.factor
        inputs = sum(
            self.seconds(job.tokens, n, k, job.precision.weight, e) + self._quantization(job.tokens * n, e)
            for n, k in weights
        )
        return inputs + self.of_weights(weights, factor)

    def of_weights(self, weights: Weights, factor: int | None = None) -> float:
        job, e = self.job, factor or self.job.precision.factor
        return sum(self.seconds(n, k, job.tokens, job.software.gradient_traffic, e) for n, k in weights)

    def seconds(self, m: int, n: int, k: int, out: int, factor: int) -> float:
        hardware = self.hardware
        moved = factor * (m * k + k * n) + out * m * n
        return 2 * m * n * k / (hardware.gemm * hardware.product_peak(factor)) + self._streamed(moved)

    def _quantization(self, elements: int, factor: int) -> float:
        """Seconds to cast a 16-bit factor to FP8, and to write its transposed copy.

        Hopper's tensor cores need that copy for the gradient of the weight.
        """
        return self._streamed(elements * (self.job.precision.weight + 2 * factor)) if factor == 1 else 0.0

    def _streamed(self, moved: float) -> float:
        return moved / (self.hardware.stream * self.hardware.bandwidth)


def attention_flops(job: Job) -> float:
    """Of one layer and micro-batch on one rank, forward, nothing left out as masked."""
    return 4.0 * job.tokens * job.length * job.cut.shares.queries


def _core(job: Job, hardware: Hardware, *, back: bool) -> float:
    """Seconds of attention between qkv and out. Fused, it skips what is masked and goes back with 2.5 times
    the products (arXiv:2205.14135); else scores are written, normed and dropped out in memory.
    """
    if job.software.attention != "scores":
        share = hardware.flash_attention_2 if job.software.attention == "flash-2" else hardware.attention
        done = attention_flops(job) / 2
        return (2.5 if back else 1.0) * done / (share * hardware.product_peak(job.precision.weight))
    heads = job.micro * job.spec.heads // job.layout.tp
    rows, width, e = job.length // job.layout.cp, job.spec.head_width, job.precision.weight
    product = _Products(job, hardware)
    pair = product.seconds(rows, job.length, width, e, e) + product.seconds(rows, width, job.length, e, e)
    # softmax reads and writes, dropout reads and writes and writes its mask of a byte
    per_score = 5 * e + 1 if back else 4 * e + 1
    scores = heads * rows * job.length
    moved = scores * per_score / (hardware.stream * hardware.bandwidth)
    return heads * pair * (2 if back else 1) + moved


def _stream(job: Job, hardware: Hardware, *, back: bool) -> float:
    """Seconds of a layer's elementwise work: two norms and two residual sums outside the tensor-parallel
    regions; activation, rotary turning and, going back, the joining of dq, dk and dv inside.
    """
    m, t = job.spec, job.layout.tp
    outer = job.outer_tokens * m.hidden * (6 + 2 * _norm_moves(job, back=back))
    act = (5 if back else 3) if m.gated else (3 if back else 2)
    if m.gated and job.software.eager:
        act = 13 if back else 5  # its SiLU and product apart, and, going back, both halves joined
    queries, keys = job.cut.shares.queries, job.cut.shares.keys
    turned = 2 * (queries + keys) if m.rotary_dim else 0
    if job.software.eager:
        turned *= 5  # four products, two sums and the halves joined
    joined = 2 * (queries + 2 * keys) if back else 0
    inner = job.tokens * (act * m.ffn / t + turned + joined)
    return (outer + inner) * job.precision.weight / (hardware.stream * hardware.bandwidth)


def _norm_moves(job: Job, *, back: bool) -> float:
    """Elements' reads and writes of one norm, in units of an activation.

    Eager RMSNorm forward: a float32 copy, its square, the mean, the scaled copy, its cast and the product
    with the weight. Backward: the gradients of that product, cast up, of the scaled copy, of the mean and of
    the square, their sum, cast down. In float32 there is nothing to cast.
    """
    if not job.software.eager or job.spec.norm != "rmsnorm":
        return 3 if back else 2
    e = job.precision.weight
    casts = 2 * (e + 4) if e < 4 else 0
    return (casts + (6 * e + 60 if back else 2 * e + 20)) / e


def _layer(job: Job, hardware: Hardware) -> tuple[Pass, Pass]:
    """A layer's forward pass, and the part of it that selective recomputation repeats."""
    layout = job.layout
    half = half_bytes(job) / hardware.reach(layout.tp, 1)
    sent, gemm = transfers(job).layer * half, _Products(job, hardware).forward(job.cut.shares.matrices)
    if job.software.overlaps_tp == "both":
        # in t pieces, of which the first has nothing to hide behind
        sent = sent / layout.tp + max(0.0, sent * (1 - 1 / layout.tp) - gemm)
    core = Pass(
        attention=_core(job, hardware, back=False), cp=key_bytes(job) / hardware.reach(layout.cp, layout.tp)
    )
    return core + Pass(gemm=gemm, stream=_stream(job, hardware, back=False), tp=sent), core


def _layer_back(job: Job, hardware: Hardware) -> Pass:
    layout = job.layout
    half = half_bytes(job) / hardware.reach(layout.tp, 1)
    sent, gemm = transfers(job).layer_back * half, _Products(job, hardware).backward(job.cut.shares.matrices)
    # a zero-bubble pipeline puts off the products that such transfers would hide behind
    if job.software.overlaps_tp != "none" and job.schedule != "zero-bubble":
        # the gradient of a column-cut linear's input is summed while that of its weight is computed, and an
        # input is gathered while a gradient passes; with sequence parallelism two gathers stand alone
        alone = 2 * half if job.sequence else 0.0
        if job.software.overlaps_tp == "both":
            alone /= layout.tp
        sent = alone + max(0.0, sent - alone - gemm)
    return Pass(
        gemm=gemm,
        attention=_core(job, hardware, back=True),
        stream=_stream(job, hardware, back=True),
        tp=sent,
        cp=key_bytes(job) / hardware.reach(layout.cp, layout.tp),
    )
