"""Activation memory of one micro-batch between its forward and backward pass, as our layers save it.

n tokens inside the tensor-parallel regions of a rank and n' outside (n / t with sequence parallelism), e
bytes of an activation; h hidden, f feed-forward, q and k widths of a rank's query and key heads; t and c
ranks of tp and cp:

| part | keeps |
|---|---|
| LayerNorm | its input n'·h·e, and two float32 statistics of a token |
| LayerNorm | with parallel residual branches, the two norms of a layer share one input |
| RMSNorm | its input in float32 n'·h·4, the normalised input n'·h·e, and a statistic |
| a column-parallel linear | its input n'·h·e: with sequence parallelism it is gathered again |
| attention | q, k and v as one n·(q + 2k)·e; with cp whole rows of k and v too, n·c·2k·e |
| fused kernels | RMSNorm as LayerNorm; of SwiGLU gate and up alone; rotary positions nothing |
| rotary positions | rotated copies of attention's inputs: n·(q + k)·e, with cp n·q·e alone |
| attention | its output n·q·e, with cp twice, and a float32 per head and token |
| norms of heads | queries and keys, as LayerNorm and RMSNorm keep theirs |
| attention | the mask: with ALiBi S·s·a/t·w for all layers, with a window S·s |
| activation | its input n·f/t·e; SwiGLU gate and up, 2·n·f/t·e, and the gate's SiLU, n·f/t·e |
| a row-parallel linear | its input: attention's output is counted above, the activation's is n·f/t·e |
| --recompute-modules | layernorm: no input of column-parallel linears; mlp_act: no activation output |
| the loss | the gradients of its input n'·h·e and, on GPUs, its weight V/t·h·4; Megatron's: logits n·V/t·e |

For GPT with f = 4h this is s·b·h·(32 + ...), and its cut forms, of arXiv:2205.05198 table 2, which leaves the
statistics out; its other 2 are masks of dropout, which ours does not keep.
"""

from __future__ import annotations

from mega_schema.loss_chunking import max_chunk_tokens
from mega_schema.parallel_layout import Stage
from mega_train.planning.workload import Workload


def layers_bytes(workload: Workload, stage: Stage) -> float:
    """Return the bytes of the layers of a stage; of a recomputed group only its input."""
    entering = workload.outer_tokens * workload.spec.hidden * workload.precision.weight
    if workload.recompute.distribute_saved:
        entering //= workload.layout.tp
    groups = workload.recompute.groups(stage.layers)
    total = sum(
        entering if recomputed else len(layers) * layer_bytes(workload) for layers, recomputed in groups
    )
    if workload.implementation.frees_stage_inputs and stage.layers and not groups[0][1]:
        total -= workload.outer_tokens * workload.spec.hidden * workload.precision.weight
    return mask_bytes(workload) + total


def mask_bytes(workload: Workload) -> float:
    """Return the bytes of the attention masks that the layers share: ALiBi's biases, or a window's mask."""
    m = workload.spec
    pairs = workload.seq_length // workload.layout.cp * workload.seq_length
    if m.positions == "alibi":
        return (
            pairs
            * m.heads
            // workload.layout.tp
            * (workload.implementation.attention_width or workload.precision.weight)
        )
    return pairs if m.sliding_window else 0


def layer_bytes(workload: Workload) -> float:
    """Return the bytes of one layer that is not fully recomputed."""
    m = workload.spec
    e = workload.precision.weight
    t = workload.layout.tp
    norm = _norm_bytes(workload)
    masks = 2 * m.hidden if workload.implementation.keeps_masks else 0
    # each RMSNorm keeps its own float32 copy of the input
    lean = workload.implementation.fused or m.norm == "layernorm" or e == 4
    shared = m.hidden * e if m.parallel_residual and lean else 0
    normed = 0 if workload.recompute.recomputes("layernorm") else m.hidden * e
    outer = 2 * (norm + normed) + masks - shared
    widths = (3 if workload.implementation.fused else 4) if m.is_gated else 2
    if workload.recompute.recomputes("mlp_act"):
        widths -= 1
    inner = widths * m.ffn * e
    core = 0 if workload.recompute.recomputes("core_attn") else core_bytes(workload)
    return workload.outer_tokens * outer + workload.tokens * inner / t + _qkv_bytes(workload) + core


def _norm_bytes(workload: Workload) -> int:
    """Return the bytes of one norm of the residual stream, per token.

    The reference RMSNorm saves its input in float32 and the normalised input; every other norm saves its
    input and two statistics.
    """
    m = workload.spec
    e = workload.precision.weight
    return (
        m.hidden * (4 + e) + 4
        if m.norm == "rmsnorm" and not workload.implementation.fused
        else m.hidden * e + 8
    )


def _qkv_bytes(workload: Workload) -> float:
    """Return the bytes of queries, keys and values as attention reads them, and of its output."""
    e = workload.precision.weight
    sizes = workload.model.shares
    is_rotated = workload.spec.qk_norm or (workload.spec.rotary_dim and not workload.implementation.fused)
    qkv_width = sizes.queries + 2 * sizes.keys
    rotated = sizes.queries + sizes.keys if is_rotated else 0
    normed = 0.0
    if workload.spec.qk_norm:  # separate rows, with RMSNorm in float32 and scaled
        rows = sizes.queries + sizes.keys
        statistics = rows / workload.spec.head_dim
        normed = (
            rows * (4 + e) + 4 * statistics if workload.spec.norm == "rmsnorm" else rows * e + 8 * statistics
        )
    if not workload.recompute.recomputes("core_attn"):
        if _is_copied(workload):
            qkv_width = rotated = 0
        elif workload.layout.cp > 1 and is_rotated:
            qkv_width = 0
            rotated = sizes.queries
    return workload.tokens * ((qkv_width + rotated + sizes.queries) * e + normed)


def core_bytes(workload: Workload) -> float:
    """Return the bytes that attention itself saves.

    They are a statistic per head and token; copies in another dtype; with cp the gathered keys and values,
    and the outputs of two chunks; or the scores.
    """
    e = workload.precision.weight
    sizes = workload.model.shares
    cp = workload.layout.cp
    heads = workload.spec.heads // workload.layout.tp
    width = workload.implementation.attention_width or e
    if workload.implementation.attention != "scores":
        per_token = 4 * heads
    else:  # probabilities, and what dropout leaves of them
        per_token = (
            heads * workload.seq_length * ((e + 1 if workload.implementation.keeps_masks else 4) + width)
        )
    if _is_copied(workload):
        per_token += (2 * sizes.queries + cp * 2 * sizes.keys) * width
    elif cp > 1:
        per_token += (sizes.queries + cp * 2 * sizes.keys) * e
    return workload.tokens * per_token


def _recomputed_bytes(workload: Workload) -> float:
    """Return the bytes of the outputs that selective recomputation restores for one layer's backward pass."""
    m = workload.spec
    e = workload.precision.weight
    recompute = workload.recompute
    core = core_bytes(workload) if recompute.recomputes("core_attn") else 0
    normed = workload.outer_tokens * m.hidden * e if recompute.recomputes("layernorm") else 0
    activated = workload.tokens * m.ffn * e / workload.layout.tp if recompute.recomputes("mlp_act") else 0
    return max(core, normed, activated)


def _is_copied(workload: Workload) -> bool:
    return workload.implementation.attention_width not in (None, workload.precision.weight)


def embedding_bytes(workload: Workload) -> float:
    """Return the bytes of the embedding: token ids and positions, 8 bytes each, and its norm's input."""
    norm = _norm_bytes(workload) if workload.spec.embed_norm else 0
    return workload.tokens * (8 + 1) + workload.outer_tokens * (8 + norm)


def loss_bytes(workload: Workload) -> float:
    """Return the bytes of the last norm, and of the gradients of the head's input and weight or logits."""
    m = workload.spec
    e = workload.precision.weight
    rows, width = workload.model.shares.head
    norm = _norm_bytes(workload)
    loss = workload.tokens * (rows * e + 18) if workload.implementation.whole_logits else rows * width * 4
    return workload.outer_tokens * (norm + m.hidden * e) + loss


def working_bytes(workload: Workload, *, last: bool) -> float:
    """Return the bytes of the largest temporary buffers of a backward pass.

    They are one layer's activation gradients and the layers recomputed for them, or the logits' gradients or
    a chunk of logits if they are larger.
    """
    m = workload.spec
    e = workload.precision.weight
    t = workload.layout.tp
    inner = workload.tokens * ((3 if m.is_gated else 2) * m.ffn) * e / t
    outer = 2 * workload.outer_tokens * m.hidden * e + (
        workload.tokens * m.hidden * e if workload.sequence else 0
    )
    recomputed = {
        None: 0.0,
        "selective": _recomputed_bytes(workload),
        "full": layer_bytes(workload)
        * (workload.recompute.layers if workload.recompute.method == "uniform" else 1),
    }[workload.recompute.granularity]
    rows, width = workload.model.shares.head if last else (0, 0)
    tokens = (
        workload.tokens
        if workload.implementation.whole_logits
        else min(workload.tokens, max_chunk_tokens(width, e))
    )
    return max(inner + outer + recomputed, tokens * rows * e)
