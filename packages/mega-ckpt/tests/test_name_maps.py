"""An alias list names every parameter once, and reads the same in both directions."""

from __future__ import annotations

import numpy as np
import pytest

from mega_ckpt.formats.huggingface import names as hf_names
from mega_ckpt.formats.megatron import names as megatron_names
from mega_ckpt.name_maps.alias import TensorAlias, copy_values, split_rows, whole_slab
from mega_ckpt.name_maps.qkv import qkv_order
from mega_schema.arch import table
from mega_schema.errors import ConfigError
from mega_schema.parallel_layout import Layout
from mega_schema.spec import ModelSpec, gpt, llama

SMALL = {"layers": 2, "hidden": 8, "heads": 4, "vocab": 11, "max_seq_len": 6}
SPECS: dict[str, ModelSpec] = {
    "gpt": gpt(**SMALL),
    "gpt untied": gpt(**SMALL, tied=False),
    "llama": llama(**SMALL, ffn=6),
    "llama grouped tied": llama(**SMALL, ffn=6, kv_heads=2, tied=True),
}
# a share of every kind: groups of heads, gated halves, padding, a tied copy, a stage without it
CUTS = {
    "gpt": SPECS["gpt"],
    "llama grouped tied": llama(**{**SMALL, "layers": 4}, ffn=6, kv_heads=2, tied=True, vocab_multiple=4),
    "llama": llama(**{**SMALL, "layers": 4}, ffn=6, vocab_multiple=4),
}


def _lists(spec: ModelSpec) -> list[list[TensorAlias]]:
    return [
        hf_names.aliases(spec),
        list(megatron_names.aliases(spec)),
        list(megatron_names.aliases(spec, megatron_names.LEGACY_NORM)),
        list(megatron_names.aliases(spec, megatron_names.CORE)),
        list(megatron_names.aliases(spec, megatron_names.CORE_FUSED)),
    ]


@pytest.mark.parametrize("name", SPECS)
def test_every_element_has_one_foreign_place(name: str) -> None:
    rows = {row.name: row for row in table(SPECS[name]) if row.tied_to is None}
    for known in _lists(SPECS[name]):
        assert len({alias.foreign for alias in known}) == len(known)
        parts: dict[str, list[TensorAlias]] = {}
        for alias in known:
            parts.setdefault(alias.ours, []).append(alias)
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
            for foreign in (alias.unsharded_tensor(row) for alias in known if alias.ours == row.name):
                stored = foreign.assemble(ours.dtype, lambda slab, ours=ours: ours[slab.in_global])
                assert stored.shape == foreign.shape
                for box in foreign.boxes:
                    back[box.in_global] = foreign.select(stored, box.in_local)
            assert np.array_equal(back, ours), row.name


@pytest.mark.parametrize(("shape", "width"), [((3, 4), 1), ((5,), 1 << 26), ((7, 3), 1 << 24), ((0, 2), 4)])
def test_parts_of_a_box_are_its_rows_in_order(shape: tuple[int, ...], width: int) -> None:
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    parts = [whole[part.in_global] for part in split_rows(whole_slab(shape), width)]
    assert all(len(part) == 1 or part.size * width <= 1 << 26 for part in parts)
    assert np.array_equal(np.concatenate([*parts, whole[:0]]), whole)


@pytest.mark.parametrize("shape", [(200, 130), (64, 1), (1, 64), (65, 64), (0, 5)])
def test_a_transposed_part_is_copied_number_for_number(shape: tuple[int, int]) -> None:
    values = np.arange(shape[0] * shape[1], dtype=np.uint16).reshape(shape)
    for part in (values, values.T):
        out = np.full((part.shape[0] + 2, part.shape[1] + 3), 7, np.uint16)
        copy_values(out[1:-1, 2:-1], part)
        assert np.array_equal(out[1:-1, 2:-1], part)
        assert (np.delete(out, np.s_[1:-1], 0) == 7).all()


def test_megatrons_groups_are_query_heads_then_a_key_then_a_value() -> None:
    spec = llama(layers=1, hidden=8, heads=4, kv_heads=2, ffn=6, vocab=11, max_seq_len=6)
    foreign = ["q0", "q0", "q1", "q1", "k0", "k0", "v0", "v0", "q2", "q2", "q3", "q3", "k1", "k1", "v1", "v1"]
    assert [foreign[row] for row in qkv_order(spec)] == [
        f"{part}{head}"
        for part, heads in (("q", 4), ("k", 2), ("v", 2))
        for head in range(heads)
        for _ in range(2)
    ]


def test_every_era_is_told_from_every_other_by_its_names() -> None:
    spec = SPECS["gpt"]
    for names in megatron_names.NAMING_SCHEMES:
        assert (
            megatron_names.naming_scheme({alias.foreign for alias in megatron_names.aliases(spec, names)})
            is names
        )
    assert megatron_names.naming_scheme({alias.foreign for alias in hf_names.aliases(spec)}) is None


@pytest.mark.parametrize(("name", "tp", "pp", "vp"), [("gpt", 4, 2, 1), ("llama", 2, 2, 2)])
def test_every_element_is_on_some_rank(name: str, tp: int, pp: int, vp: int) -> None:
    spec, layout = CUTS[name], Layout(tp=tp, pp=pp, vp=vp)
    rows = {row.name: row for row in table(spec) if row.tied_to is None}
    covered = {ours: np.zeros(row.shape, int) for ours, row in rows.items()}
    for rank, stage, chunk in np.ndindex(tp, pp, vp):
        for foreign in megatron_names.chunk_tensors(
            spec, megatron_names.CORE, layout, tp=rank, pp=stage, chunk=chunk
        ):
            for box in foreign.boxes:
                covered[foreign.ours][box.in_global] += 1
    for ours, row in rows.items():
        copies = 2 if spec.tied and ours == "embed.weight" else 1
        assert (covered[ours] == (tp if row.split is None else copies)).all(), ours


@pytest.mark.parametrize("version", [0.0, 1.0, 2.0, 3.0])
def test_rows_of_q_k_and_v_are_mixed_as_the_version_says(version: float) -> None:
    """Against the views and transpositions that Megatron's loader does."""
    spec, tp = gpt(layers=1, hidden=24, heads=6, vocab=11, max_seq_len=6), 2
    heads, width = spec.heads // tp, spec.head_dim
    q_k_v = np.arange(3 * spec.hidden).reshape(3, spec.heads, width)
    for rank in range(tp):
        rank_rows = q_k_v[:, rank * heads : (rank + 1) * heads]
        stored = {0: rank_rows, 1: rank_rows.transpose(1, 2, 0), 2: rank_rows.transpose(1, 0, 2)}[
            min(int(version), 2)
        ].ravel()
        order = megatron_names.rank_order(spec, tp, version)
        assert np.array_equal(stored if order is None else stored[list(order)], rank_rows.ravel())


def test_a_group_of_heads_is_not_cut() -> None:
    with pytest.raises(
        ConfigError, match="--tp: Megatron splits between groups of heads: found 4, wanted a divisor"
    ):
        megatron_names.rank_order(CUTS["llama grouped tied"], 4, 3.0)


def test_a_part_that_an_era_has_no_name_for_is_named() -> None:
    with pytest.raises(ConfigError, match=r"layers\.0\.q_norm\.weight: has no name there"):
        list(megatron_names.aliases(llama(**SMALL, ffn=6, qk_norm=True)))
