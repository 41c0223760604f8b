"""An alias list names every parameter once, and reads the same in both directions."""

from __future__ import annotations

import numpy as np
import pytest

from mega_ckpt.layouts import Alias, by_parameter, gather, huggingface, megatron, scatter
from mega_schema.arch import table
from mega_schema.spec import ModelSpec, gpt, llama

SMALL = {"layers": 2, "hidden": 8, "heads": 4, "vocab": 11, "context": 6}
SPECS: dict[str, ModelSpec] = {
    "gpt": gpt(**SMALL),
    "gpt untied": gpt(**SMALL, tied=False),
    "llama": llama(**SMALL, ffn=6),
    "llama grouped tied": llama(**SMALL, ffn=6, kv_heads=2, tied=True),
}


def _lists(spec: ModelSpec) -> list[list[Alias]]:
    return [
        huggingface.aliases(spec),
        list(megatron.aliases(spec)),
        list(megatron.aliases(spec, norm="norm")),
    ]


@pytest.mark.parametrize("name", SPECS)
def test_every_element_has_one_foreign_place(name: str) -> None:
    rows = {row.name: row for row in table(SPECS[name]) if row.tied_to is None}
    for known in _lists(SPECS[name]):
        assert len({alias.foreign for alias in known}) == len(known)
        parts = by_parameter(known)
        assert parts.keys() == rows.keys()
        for ours, aliases in parts.items():
            covered = np.zeros(rows[ours].shape, int)
            for alias in aliases:
                covered[alias.slab(rows[ours]).in_global] += 1
            assert (covered == 1).all(), ours


@pytest.mark.parametrize("name", SPECS)
def test_what_is_scattered_is_gathered_again(name: str) -> None:
    rng = np.random.default_rng(0)
    rows = {row.name: row for row in table(SPECS[name]) if row.tied_to is None}
    ours = {row.name: rng.integers(0, 1 << 30, row.shape) for row in rows.values()}
    for known in _lists(SPECS[name]):
        foreign = scatter(rows, known, lambda name, slab: ours[name][slab.in_global])
        for alias in known:
            assert foreign[alias.foreign].shape == alias.foreign_shape(rows[alias.ours])
        for row_name, aliases in by_parameter(known).items():
            back = gather(rows[row_name], aliases, foreign.__getitem__)
            assert np.array_equal(back, ours[row_name]), row_name


def test_megatrons_groups_are_query_heads_then_a_key_then_a_value() -> None:
    spec = llama(layers=1, hidden=8, heads=4, kv_heads=2, ffn=6, vocab=11, context=6)
    foreign = ["q0", "q0", "q1", "q1", "k0", "k0", "v0", "v0", "q2", "q2", "q3", "q3", "k1", "k1", "v1", "v1"]
    assert [foreign[row] for row in megatron.qkv_order(spec)] == [
        f"{part}{head}"
        for part, heads in (("q", 4), ("k", 2), ("v", 2))
        for head in range(heads)
        for _ in range(2)
    ]
