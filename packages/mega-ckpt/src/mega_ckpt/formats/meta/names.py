"""Meta's own names of a Llama, which llama2.c's files follow too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mega_ckpt.name_maps.alias import Alias, Foreign
from mega_schema.arch import table
from mega_schema.shard import Split
from mega_schema.spec import ModelSpec


def aliases(spec: ModelSpec, *, tp: int = 1) -> Iterator[Alias]:
    """Every tensor of the model in Meta's names; a tied head has none of its own.

    Args:
        tp: parts that share every layer; `order` is of the rows that one of them has.
    """
    queries, keys = (pairs_apart(rows // tp, spec.head_width) for rows in (spec.q_rows, spec.kv_rows))
    yield Alias("tok_embeddings.weight", "embed.weight")
    for i in range(spec.layers):
        at = f"layers.{i}."
        yield Alias(at + "attention_norm.weight", at + "attn_norm.weight")
        for block, (part, order) in enumerate((("wq", queries), ("wk", keys), ("wv", None))):
            yield Alias(at + f"attention.{part}.weight", at + "qkv.weight", block, order=order)
        yield Alias(at + "attention.wo.weight", at + "out.weight")
        yield Alias(at + "ffn_norm.weight", at + "ffn_norm.weight")
        for block, part in enumerate(("w1", "w3")):
            yield Alias(at + f"feed_forward.{part}.weight", at + "gate_up.weight", block)
        yield Alias(at + "feed_forward.w2.weight", at + "down.weight")
    yield Alias("norm.weight", "final_norm.weight")
    if not spec.tied:
        yield Alias("output.weight", "head.weight")


def pairs_apart(rows: int, width: int) -> tuple[int, ...]:
    """Rows of heads whose rotary pairs are neighbours, in the order that has a pair half a head apart.

    Queries and keys are moved alike, so no product of theirs changes.
    """
    head = [*range(0, width, 2), *range(1, width, 2)]
    return tuple(first + row for first in range(0, rows, width) for row in head)


def of_part(spec: ModelSpec, rank: int, tp: int, *, by_rows: bool) -> Iterator[Foreign]:
    """The tensors of `consolidated.{rank:02d}.pth`, one of `tp` parts; a tied head has one all the same.

    Args:
        by_rows: the embedding is cut between rows, as from Llama 3 on; before that, between columns.

    Raises:
        LayoutError: the model cannot be cut so.
    """
    rows = {row.name: row for row in table(spec)}
    vocabulary = {
        "embed.weight": Split("tp", 0 if by_rows else 1),
        "head.weight": Split("tp", 0),
    }
    for alias in aliases(replace(spec, tied=False), tp=tp):
        row = rows[alias.ours]
        yield alias.of_rank(replace(row, split=vocabulary.get(row.name, row.split)), rank, tp)
