"""Bytes that one micro-batch leaves between its forward and its backward pass, as our layers keep them.

n tokens inside the tensor-parallel regions of a rank and n' outside (n / t with sequence parallelism), e
bytes of an activation; h hidden, f feed-forward, q and k widths of all query and key heads; t and c ranks of
tp and cp:

| part | keeps |
|---|---|
| LayerNorm | its input n'·h·e, and two float32 statistics of a token |
| RMSNorm | its input in float32 n'·h·4, what it scales n'·h·e, and a statistic |
| a column-cut linear | its input n'·h·e: with sequence parallelism it is gathered again |
| attention | q, k and v as one n·(q + 2k)/t·e; with cp whole rows of k and v too, n·c·2k/t·e |
| rotary positions | turned copies of what attention sees: n·(q + k)/t·e, with cp n·q/t·e alone |
| attention | its output n·q/t·e, with cp twice, and a float32 per head and token |
| activation | its input n·f/t·e; SwiGLU gate and up, 2·n·f/t·e, and the gate's SiLU, n·f/t·e |
| a row-cut linear | its input: attention's output is there already, the activation's is n·f/t·e |
| the loss | logits n·V/t·e |

For GPT with f = 4h this is s·b·h·(32 + ...), and its cut forms, of arXiv:2205.05198 table 2, which leaves the
statistics out; its other 2 are masks of dropout, which ours does not keep.
"""

from __future__ import annotations

from mega_train.planning.job import Job


def layer_bytes(job: Job) -> float:
    """Of one layer, by what is recomputed of it."""
    if job.recompute == "full":
        return job.outer_tokens * job.spec.hidden * job.precision.weight
    return whole_layer_bytes(job) - (core_bytes(job) if job.recompute == "selective" else 0)


def whole_layer_bytes(job: Job) -> float:
    """Of one layer of which nothing is recomputed."""
    m, e, t = job.spec, job.precision.weight, job.layout.tp
    norm = m.hidden * (4 + e) + 4 if m.norm == "rmsnorm" else m.hidden * e + 8
    masks = 2 * m.hidden if job.software.keeps_masks else 0
    outer = 2 * (norm + m.hidden * e) + masks
    inner = (4 if m.gated else 2) * m.ffn * e
    return job.outer_tokens * outer + job.tokens * inner / t + _around_core(job) + core_bytes(job)


def _around_core(job: Job) -> float:
    """Queries, keys, values and what attention makes of them."""
    m, e, cp = job.spec, job.precision.weight, job.layout.cp
    width = job.software.attention_width or e
    q, kv = m.q_rows, 2 * m.kv_rows
    if width != e:  # copies are computed with, and the joint q, k and v is let go
        kept = (q + cp * kv + q) * width + q * e
    elif cp == 1:
        kept = (q + kv + (q + m.kv_rows if m.turning else 0) + q) * e
    else:
        kept = ((q if m.turning else q + kv) + cp * kv + 2 * q) * e
    return job.tokens * kept / job.layout.tp


def core_bytes(job: Job) -> float:
    """What attention keeps beside them: a sum per head and token, or the scores themselves."""
    heads = job.tokens * job.spec.heads / job.layout.tp
    if job.software.attention == "flash":
        return heads * 4
    return heads * job.length * (2 * job.precision.weight + (1 if job.software.keeps_masks else 0))


def embedding_bytes(job: Job) -> float:
    """Of the embedding: where tokens and places are found, 8 bytes each."""
    return job.tokens * (8 + 1) + job.outer_tokens * 8


def loss_bytes(job: Job) -> float:
    """Of the last norm, the head's input, the logits and a few numbers per token."""
    m, e = job.spec, job.precision.weight
    norm = m.hidden * (4 + e) + 4 if m.norm == "rmsnorm" else m.hidden * e + 8
    return job.outer_tokens * (norm + m.hidden * e) + job.tokens * (job.cut.shares.head[0] * e + 18)


def working_bytes(job: Job, *, last: bool) -> float:
    """Of the gradients on their way through one layer, and of a layer that was recomputed for them; or of the
    logits' gradients, where they are more.
    """
    m, e, t = job.spec, job.precision.weight, job.layout.tp
    inner = job.tokens * ((3 if m.gated else 2) * m.ffn) * e / t
    outer = 2 * job.outer_tokens * m.hidden * e + (job.tokens * m.hidden * e if job.sequence else 0)
    again = {"none": 0.0, "selective": core_bytes(job), "full": whole_layer_bytes(job)}[job.recompute]
    logits = job.tokens * job.cut.shares.head[0] * e if last else 0
    return max(inner + outer + again, logits)
