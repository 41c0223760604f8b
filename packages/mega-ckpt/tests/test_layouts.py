"""An alias list names every parameter once, and reads the same in both directions."""

from __future__ import annotations

import numpy as np
import pytest

from mega_ckpt.layouts import Alias, by_parameter, huggingface, in_parts, megatron, whole_slab
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
def test_what_is_assembled_is_gathered_again(name: str) -> None:
    rng = np.random.default_rng(0)
    for row in (row for row in table(SPECS[name]) if row.tied_to is None):
        ours = rng.integers(0, 1 << 30, row.shape)
        for known in _lists(SPECS[name]):
            back = np.zeros_like(ours)
            for foreign in (alias.whole(row) for alias in by_parameter(known)[row.name]):
                stored = foreign.assembled(ours.dtype, lambda slab, ours=ours: ours[slab.in_global])
                assert stored.shape == foreign.shape
                for box in foreign.boxes:
                    back[box.in_global] = foreign.part(stored, box.in_local)
            assert np.array_equal(back, ours), row.name


@pytest.mark.parametrize(("shape", "width"), [((3, 4), 1), ((5,), 1 << 26), ((7, 3), 1 << 24), ((0, 2), 4)])
def test_parts_of_a_box_are_its_rows_in_order(shape: tuple[int, ...], width: int) -> None:
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    parts = [whole[part.in_global] for part in in_parts(whole_slab(shape), width)]
    assert all(len(part) == 1 or part.size * width <= 1 << 26 for part in parts)
    assert np.array_equal(np.concatenate([*parts, whole[:0]]), whole)


def test_megatrons_groups_are_query_heads_then_a_key_then_a_value() -> None:
    spec = llama(layers=1, hidden=8, heads=4, kv_heads=2, ffn=6, vocab=11, context=6)
    foreign = ["q0", "q0", "q1", "q1", "k0", "k0", "v0", "v0", "q2", "q2", "q3", "q3", "k1", "k1", "v1", "v1"]
    assert [foreign[row] for row in megatron.qkv_order(spec)] == [
        f"{part}{head}"
        for part, heads in (("q", 4), ("k", 2), ("v", 2))
        for head in range(heads)
        for _ in range(2)
    ]
