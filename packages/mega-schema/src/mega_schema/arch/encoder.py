"""The parameter table of an encoder: a decoder's layers, token types, and the heads of BERT or of a task.

In the original BERT a norm follows each sum. That is a model with `post_norm_residual`: the norm of the
embeddings is `layers.0.attn_norm`, that after the last feed-forward is `final_norm` (arXiv:1810.04805).
ModernBERT has no `layers.0.attn_norm`, and norms without a bias (arXiv:2412.13663).
"""

from __future__ import annotations

from collections.abc import Iterator

from mega_schema.arch import decoder
from mega_schema.params import Param
from mega_schema.spec import ModelSpec
from mega_schema.task_heads import HEAD, head_outputs


def rows(m: ModelSpec) -> Iterator[Param]:
    """Yield the row of every parameter, in the order of the forward pass."""
    yield from decoder.embeddings(m)
    if m.token_types is not None:
        yield decoder.matrix(m, "token_type.weight", (m.token_types, m.hidden), "first", None)
    yield from decoder.layers(m)
    if m.task_head != "none":
        if m.pooler:
            yield from _linear(m, "pooler", m.hidden)
        yield from _linear(m, HEAD, head_outputs(m))
        return
    if m.head_transform != "none":
        yield from _linear(m, "head.dense", m.hidden)
        yield from decoder.norm(m, "head.norm", "last")
    yield decoder.head(m)
    if m.head_bias:
        yield decoder.head_bias(m)
    if m.pooler:
        yield from _linear(m, "pooler", m.hidden)
    if m.binary_head:
        yield from _linear(m, "binary_head", 2)


def _linear(m: ModelSpec, name: str, outputs: int) -> Iterator[Param]:
    """Yield the rows of a linear layer of the last stage that every rank of tp holds whole."""
    yield decoder.matrix(m, name + ".weight", (outputs, m.hidden), "last", None)
    if m.bias:
        yield decoder.bias(name + ".bias", (outputs,), "last")
