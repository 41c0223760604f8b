"""Bytes that one micro-batch leaves between its forward and its backward pass, as our layers keep them.

n tokens inside the tensor-parallel regions of a rank and n' outside (n / t with sequence parallelism), e
bytes of an activation; h hidden, f feed-forward, q and k widths of all query and key heads, t ranks of tp:

| part | keeps |
|---|---|
| a norm | its input n'·h·e, and float32 statistics; RMSNorm also what it scales, n'·h·e |
| a column-cut linear | its input n'·h·e: with sequence parallelism it is gathered again |
| attention | q, k, v: n·(q + 2k)/t·e; its output n·q/t·e; a float32 per head |
| rotary positions | turned copies of q and k: n·(q + k)/t·e |
| activation | its input n·f/t·e; SwiGLU gate and up, 2·n·f/t·e, and the gate's SiLU, n·f/t·e |
| a row-cut linear | its input: attention's output is there already, the activation's is n·f/t·e |
| dropout | a byte per element: 2·n'·h, and with scores in memory one per score |
| the loss | logits n·V/t·e and their float32 exponentials n·V/t·4 |

For GPT with f = 4h this is s·b·h·(34 + 5·a·s/h), and its cut forms, of arXiv:2205.05198 table 2, which
leaves the statistics out.
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
    rms = m.norm == "rmsnorm"
    outer = m.hidden * e * (6 if rms else 4) + (2 * m.hidden if job.dropout else 0) + 8 * (1 if rms else 2)
    turned = m.q_rows + m.kv_rows if m.turning else 0
    inner = (2 * m.q_rows + 2 * m.kv_rows + turned + (4 if m.gated else 2) * m.ffn) * e
    return job.outer_tokens * outer + job.tokens * inner / t + core_bytes(job)


def core_bytes(job: Job) -> float:
    """What attention keeps beside q, k, v and its output: a sum per head and token, or the scores themselves,
    normed and dropped out.
    """
    heads = job.tokens * job.spec.heads / job.layout.tp
    if job.software.attention == "flash":
        return heads * 4
    e = job.precision.weight
    return heads * job.length * (2 * e + 1 if job.dropout else e)


def embedding_bytes(job: Job) -> float:
    """Of the embedding: where tokens and places are found, 8 bytes each."""
    return job.tokens * (8 + 1) + job.outer_tokens * 8


def loss_bytes(job: Job) -> float:
    """Of the last norm, the head's input, logits and the loss."""
    norms = job.outer_tokens * (
        job.spec.hidden * job.precision.weight * (3 if job.spec.norm == "rmsnorm" else 2)
    )
    return norms + job.tokens * job.cut.shares.head[0] * (job.precision.weight + 4)


def working_bytes(job: Job) -> float:
    """Of the gradients on their way through one layer, and of a layer that was recomputed for them."""
    m, e, t = job.spec, job.precision.weight, job.layout.tp
    inner = job.tokens * ((3 if m.gated else 2) * m.ffn) * e / t
    outer = 2 * job.outer_tokens * m.hidden * e + (job.tokens * m.hidden * e if job.sequence else 0)
    again = {"none": 0.0, "selective": core_bytes(job), "full": whole_layer_bytes(job)}[job.recompute]
    return inner + outer + again
