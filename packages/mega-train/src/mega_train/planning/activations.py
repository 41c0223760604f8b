"""Bytes that one micro-batch leaves between its forward and its backward pass, as our layers keep them.

n tokens inside the tensor-parallel regions of a rank and n' outside (n / t with sequence parallelism), e
bytes of an activation; h hidden, f feed-forward, q and k widths of a rank's query and key heads; t and c
ranks of tp and cp:

| part | keeps |
|---|---|
| LayerNorm | its input n'·h·e, and two float32 statistics of a token |
| LayerNorm | with two branches beside each other (parallel residual) the two of a layer keep one input |
| RMSNorm | its input in float32 n'·h·4, what it scales n'·h·e, and a statistic |
| a column-cut linear | its input n'·h·e: with sequence parallelism it is gathered again |
| attention | q, k and v as one n·(q + 2k)·e; with cp whole rows of k and v too, n·c·2k·e |
| fused kernels | RMSNorm as LayerNorm; of SwiGLU gate and up alone; rotary positions nothing |
| rotary positions | turned copies of what attention sees: n·(q + k)·e, with cp n·q·e alone |
| attention | its output n·q·e, with cp twice, and a float32 per head and token |
| norms of heads | queries and keys, as LayerNorm and RMSNorm keep theirs |
| attention | with ALiBi S·s·a/t·w for all layers, with a window S·s: what a mask is |
| activation | its input n·f/t·e; SwiGLU gate and up, 2·n·f/t·e, and the gate's SiLU, n·f/t·e |
| a row-cut linear | its input: attention's output is there already, the activation's is n·f/t·e |
| --recompute-modules | layernorm: no input of a column-cut linear; mlp_act: no output of the activation |
| the loss | the gradients of its input n'·h·e and, on GPUs, its weight V/t·h·4; Megatron's: logits n·V/t·e |

For GPT with f = 4h this is s·b·h·(32 + ...), and its cut forms, of arXiv:2205.05198 table 2, which leaves the
statistics out; its other 2 are masks of dropout, which ours does not keep.
"""

from __future__ import annotations

from mega_schema.loss_chunking import max_chunk_tokens
from mega_schema.parallel_layout import Stage
from mega_train.planning.workload import Job


def layers_bytes(job: Job, stage: Stage) -> float:
    """Of the layers of a stage; of a group of them that is computed again only what enters it."""
    entering = job.outer_tokens * job.spec.hidden * job.precision.weight
    if job.recompute.distribute_saved:
        entering //= job.layout.tp
    groups = job.recompute.groups(stage.layers)
    kept = sum(entering if again else len(layers) * layer_bytes(job) for layers, again in groups)
    if job.software.frees_stage_inputs and stage.layers and not groups[0][1]:
        kept -= job.outer_tokens * job.spec.hidden * job.precision.weight
    return mask_bytes(job) + kept


def mask_bytes(job: Job) -> float:
    """Of what the layers' attention shares, whatever is computed again: what ALiBi adds to the scores of each
    head, or the switches of a window.
    """
    m, pairs = job.spec, job.length // job.layout.cp * job.length
    if m.positions == "alibi":
        return pairs * m.heads // job.layout.tp * (job.software.attention_width or job.precision.weight)
    return pairs if m.window else 0


def layer_bytes(job: Job) -> float:
    """Of one layer that is not computed again as a whole."""
    m, e, t = job.spec, job.precision.weight, job.layout.tp
    norm = _norm_bytes(job)
    masks = 2 * m.hidden if job.software.keeps_masks else 0
    # a float32 copy of the input is each RMSNorm's own
    lean = job.software.fused or m.norm == "layernorm" or e == 4
    shared = m.hidden * e if m.parallel_residual and lean else 0
    normed = 0 if job.recompute.recomputes("layernorm") else m.hidden * e
    outer = 2 * (norm + normed) + masks - shared
    widths = (3 if job.software.fused else 4) if m.gated else 2
    if job.recompute.recomputes("mlp_act"):
        widths -= 1
    inner = widths * m.ffn * e
    core = 0 if job.recompute.recomputes("core_attn") else core_bytes(job)
    return job.outer_tokens * outer + job.tokens * inner / t + _around_core(job) + core


def _norm_bytes(job: Job) -> int:
    """Of one norm of the residual stream, per token. The reference RMSNorm keeps its input in float32 and the
    normalised input; every other norm keeps its input and two statistics.
    """
    m, e = job.spec, job.precision.weight
    return m.hidden * (4 + e) + 4 if m.norm == "rmsnorm" and not job.software.fused else m.hidden * e + 8


def _around_core(job: Job) -> float:
    """Queries, keys and values as attention is given them, and its output."""
    e, shares = job.precision.weight, job.cut.shares
    turns = job.spec.qk_norm or (job.spec.rotary_dim and not job.software.fused)
    joint, turned = shares.queries + 2 * shares.keys, shares.queries + shares.keys if turns else 0
    normed = 0.0
    if job.spec.qk_norm:  # in rows of their own, and with RMSNorm in float32 and scaled
        rows = shares.queries + shares.keys
        statistics = rows / job.spec.head_width
        normed = rows * (4 + e) + 4 * statistics if job.spec.norm == "rmsnorm" else rows * e + 8 * statistics
    if not job.recompute.recomputes("core_attn"):
        if _copied(job):
            joint = turned = 0
        elif job.layout.cp > 1 and turns:
            joint, turned = 0, shares.queries
    return job.tokens * ((joint + turned + shares.queries) * e + normed)


def core_bytes(job: Job) -> float:
    """What attention keeps of its own: a sum per head and token; copies of another width; with cp whole rows
    of keys and values, and the outputs of two chunks; or the scores.
    """
    e, shares, cp = job.precision.weight, job.cut.shares, job.layout.cp
    heads = job.spec.heads // job.layout.tp
    width = job.software.attention_width or e
    if job.software.attention != "scores":
        own = 4 * heads
    else:  # probabilities, and what dropout leaves of them
        own = heads * job.length * ((e + 1 if job.software.keeps_masks else 4) + width)
    if _copied(job):
        own += (2 * shares.queries + cp * 2 * shares.keys) * width
    elif cp > 1:
        own += (shares.queries + cp * 2 * shares.keys) * e
    return job.tokens * own


def _again_bytes(job: Job) -> float:
    """Of the outputs that selective recomputation makes anew while one layer's backward pass needs them."""
    m, e, again = job.spec, job.precision.weight, job.recompute
    core = core_bytes(job) if again.recomputes("core_attn") else 0
    normed = job.outer_tokens * m.hidden * e if again.recomputes("layernorm") else 0
    activated = job.tokens * m.ffn * e / job.layout.tp if again.recomputes("mlp_act") else 0
    return max(core, normed, activated)


def _copied(job: Job) -> bool:
    return job.software.attention_width not in (None, job.precision.weight)


def embedding_bytes(job: Job) -> float:
    """Of the embedding: where tokens and places are found, 8 bytes each."""
    return job.tokens * (8 + 1) + job.outer_tokens * 8


def loss_bytes(job: Job) -> float:
    """Of the last norm, and of the gradients of the head's input and of its weight; or of the logits."""
    m, e, (rows, width) = job.spec, job.precision.weight, job.cut.shares.head
    norm = _norm_bytes(job)
    loss = job.tokens * (rows * e + 18) if job.software.whole_logits else rows * width * 4
    return job.outer_tokens * (norm + m.hidden * e) + loss


def working_bytes(job: Job, *, last: bool) -> float:
    """Of the gradients on their way through one layer, and of the layers computed again for them; or of the
    logits' gradients or a chunk of logits, where they are more.
    """
    m, e, t = job.spec, job.precision.weight, job.layout.tp
    inner = job.tokens * ((3 if m.gated else 2) * m.ffn) * e / t
    outer = 2 * job.outer_tokens * m.hidden * e + (job.tokens * m.hidden * e if job.sequence else 0)
    again = {
        None: 0.0,
        "selective": _again_bytes(job),
        "full": layer_bytes(job) * (job.recompute.layers if job.recompute.method == "uniform" else 1),
    }[job.recompute.granularity]
    rows, width = job.cut.shares.head if last else (0, 0)
    at_once = job.tokens if job.software.whole_logits else min(job.tokens, max_chunk_tokens(width, e))
    return max(inner + outer + again, at_once * rows * e)
