"""Row orders of fused Q|K|V weights."""

from __future__ import annotations

from mega_schema.spec import ModelSpec


def qkv_order(spec: ModelSpec) -> tuple[int, ...]:
    """Rows of a fused weight of Megatron's that make ours: its groups taken apart into all Q, all K, all V.

    A group there is its query heads, one key head and one value head (checkpoint version 2.0 on); with as
    many groups as heads that is q, k, v per head.
    """
    width = spec.head_dim
    queries = spec.heads // spec.kv_heads
    group = (queries + 2) * width

    def rows(group_number: int, first: int, count: int) -> range:
        return range(group_number * group + first, group_number * group + first + count)

    groups = range(spec.kv_heads)
    q = [r for g in groups for r in rows(g, 0, queries * width)]
    k = [r for g in groups for r in rows(g, queries * width, width)]
    v = [r for g in groups for r in rows(g, (queries + 1) * width, width)]
    return (*q, *k, *v)
