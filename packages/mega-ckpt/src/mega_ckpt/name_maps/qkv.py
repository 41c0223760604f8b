"""Row orders of fused Q|K|V weights."""

from __future__ import annotations

from mega_schema.spec import ModelSpec


def qkv_order(spec: ModelSpec) -> tuple[int, ...]:
    """Return the row order that converts Megatron's fused QKV weight, by group, to all Q, all K, all V.

    A group has its query heads, one key head and one value head (since checkpoint version 2.0); with as many
    groups as heads, the order is q, k, v per head.
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
