"""Meta's tensor names of a Llama, which llama2.c follows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mega_ckpt.name_maps.alias import ForeignTensor, TensorAlias
from mega_schema.arch import table
from mega_schema.sharding import Split
from mega_schema.spec import ModelSpec


def aliases(spec: ModelSpec, *, tp: int = 1) -> Iterator[TensorAlias]:
    """Yield every tensor of the model under Meta's names; a tied head has no tensor.

    Args:
        tp: number of parts; `order` is the row order of one part.
    """
    queries, keys = (deinterleave_rows(rows // tp, spec.head_dim) for rows in (spec.q_rows, spec.kv_rows))
    yield TensorAlias("tok_embeddings.weight", "embed.weight")
    for i in range(spec.layers):
        prefix = f"layers.{i}."
        yield TensorAlias(prefix + "attention_norm.weight", prefix + "attn_norm.weight")
        for block, (part, order) in enumerate((("wq", queries), ("wk", keys), ("wv", None))):
            yield TensorAlias(prefix + f"attention.{part}.weight", prefix + "qkv.weight", block, order=order)
        yield TensorAlias(prefix + "attention.wo.weight", prefix + "out.weight")
        yield TensorAlias(prefix + "ffn_norm.weight", prefix + "ffn_norm.weight")
        for block, part in enumerate(("w1", "w3")):
            yield TensorAlias(prefix + f"feed_forward.{part}.weight", prefix + "gate_up.weight", block)
        yield TensorAlias(prefix + "feed_forward.w2.weight", prefix + "down.weight")
    yield TensorAlias("norm.weight", "final_norm.weight")
    if not spec.tied:
        yield TensorAlias("output.weight", "head.weight")


def deinterleave_rows(rows: int, width: int) -> tuple[int, ...]:
    """Return the row order that converts interleaved rotary pairs to pairs half a head apart.

    Queries and keys are permuted alike, so their products do not change.
    """
    head = [*range(0, width, 2), *range(1, width, 2)]
    return tuple(first + row for first in range(0, rows, width) for row in head)


def part_tensors(spec: ModelSpec, rank: int, tp: int, *, by_rows: bool) -> Iterator[ForeignTensor]:
    """Yield the tensors of `consolidated.{rank:02d}.pth`, one of `tp` parts; a tied head has one too.

    Args:
        by_rows: the embedding is split by rows, as since Llama 3; before that, by columns.

    Raises:
        LayoutError: the model cannot be split this way.
    """
    rows = {row.name: row for row in table(spec)}
    vocabulary = {
        "embed.weight": Split("tp", 0 if by_rows else 1),
        "head.weight": Split("tp", 0),
    }
    for alias in aliases(replace(spec, tied=False), tp=tp):
        row = rows[alias.ours]
        yield alias.rank_shard(replace(row, split=vocabulary.get(row.name, row.split)), rank, tp)
