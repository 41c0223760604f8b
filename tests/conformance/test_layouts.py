"""Every layout reads checkpoints of every layout, bitwise."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_ckpt.checkpoint.verify import verify
from mega_ckpt.name_maps.alias import whole_slab
from mega_ckpt.operations.reshard import reshard
from mega_ckpt.tensors import row_stream
from mega_schema.arch import table
from mega_schema.checkpoint.flat_ranges import fragments
from mega_schema.checkpoint.reader import MODEL, BoxToWrite, Checkpoint
from mega_schema.checkpoint.writer import CheckpointWriter
from mega_schema.parallel_layout import Layout
from mega_schema.sharding import Slab
from mega_schema.spec import ModelSpec, gpt, llama

TP, PP = st.sampled_from((1, 2, 4)), st.sampled_from((1, 2, 3))
CHUNK_SIZES = st.sampled_from((1, 100, 1 << 22))  # bytes in memory of a tensor
LAYOUTS = st.builds(lambda tp, pp: Layout(tp=tp, pp=pp), TP, PP)


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    """Any small model that every layout of TP x PP can cut."""
    heads = 4 * draw(st.integers(1, 2))
    shape: dict[str, Any] = {
        "layers": draw(st.integers(3, 4)),
        "heads": heads,
        "hidden": heads * 2 * draw(st.integers(1, 2)),
        "kv_heads": draw(st.sampled_from([kv for kv in (4, 8) if heads % kv == 0])),
        "ffn": 4 * draw(st.integers(1, 5)),
        "vocab": draw(st.integers(1, 50)),
        "max_seq_len": draw(st.integers(1, 9)),
        "vocab_multiple": draw(st.integers(1, 16)),
        "tied": draw(st.booleans()),
    }
    if draw(st.booleans()):
        return llama(**shape)
    return gpt(**shape, bias=draw(st.booleans()), activation=draw(st.sampled_from(("gelu_tanh", "swiglu"))))


def _stored_bits(checkpoint: Checkpoint) -> dict[tuple[str, str], tuple[str, bytes]]:
    """Every tensor's stored bits, read as one box."""
    bits = {}
    for space, entries in checkpoint.tensors.items():
        for name, tensor in entries.items():
            zero = (0,) * len(tensor.shape)
            raw = checkpoint.read_raw(space, name, Slab(zero, tensor.shape, zero))
            bits[space, name] = (tensor.dtype, raw.tobytes())
    return bits


@settings(max_examples=12, deadline=None)
@given(specs(), LAYOUTS, LAYOUTS, st.sampled_from(("F32", "BF16", "F16")), st.booleans(), CHUNK_SIZES)
def test_resharding_there_and_back_changes_no_bit(
    random_whole: Any,
    save_whole: Any,
    spec: ModelSpec,
    a: Layout,
    b: Layout,
    dtype: str,
    optimizer: bool,
    chunk_bytes: int,
) -> None:
    whole = random_whole(spec, dtype, optimizer=optimizer)
    with tempfile.TemporaryDirectory() as scratch, patch.object(row_stream, "CHUNK_BYTES", chunk_bytes):
        step_one, two, three = (Path(scratch, name) for name in ("one", "two", "three"))
        first = Checkpoint(save_whole(step_one, spec, whole, dtype=dtype, layout=a, iteration=7))
        second = Checkpoint(reshard(first, two, b))
        third = Checkpoint(reshard(second, three, a))
        verify(third)
        wanted = {(s, n): values.tobytes() for s, tensors in whole.items() for n, values in tensors.items()}
        for checkpoint in (first, second, third):
            assert {key: bits for key, (_, bits) in _stored_bits(checkpoint).items()} == wanted
        assert second.written_by == {"tp": b.tp, "pp": b.pp, "cp": 1, "dp": 1}
        assert second.trainer == first.trainer
        for file in first.files:
            assert (third.folder / file).read_bytes() == (first.folder / file).read_bytes()


@settings(max_examples=12, deadline=None)
@given(specs(), LAYOUTS, st.integers(1, 9), CHUNK_SIZES)
def test_what_ranks_wrote_that_share_the_optimizer_becomes_any_layout(
    random_whole: Any, spec: ModelSpec, layout: Layout, ranks: int, chunk_bytes: int
) -> None:
    """Pieces of ranges of flattened tensors begin and end within rows, as those of the zero stages do."""
    whole = random_whole(spec)[MODEL]
    with tempfile.TemporaryDirectory() as scratch, patch.object(row_stream, "CHUNK_BYTES", chunk_bytes):
        save = CheckpointWriter(Path(scratch, "one"), 1)
        save.begin()
        for rank in range(ranks):
            shares = [
                BoxToWrite(name, values.shape, part.slab, "F32")
                for name, values in whole.items()
                for part in fragments(
                    [whole_slab(values.shape)],
                    values.shape,
                    values.size * rank // ranks,
                    values.size * (rank + 1) // ranks,
                )
            ]
            save.write(MODEL, rank, shares, lambda box: whole[box.name][box.slab.in_global])
        first = Checkpoint(save.commit(spec, layout=Layout(), trainer={"iteration": 1}))
        second = Checkpoint(reshard(first, Path(scratch, "two"), layout))
        verify(second)
        assert {name: bits for (_, name), (_, bits) in _stored_bits(second).items()} == {
            name: values.tobytes() for name, values in whole.items()
        }


@settings(max_examples=25, deadline=None)
@given(specs(), LAYOUTS, LAYOUTS)
def test_a_rank_of_any_layout_reads_its_share_of_what_any_layout_wrote(
    random_whole: Any, save_whole: Any, spec: ModelSpec, wrote: Layout, reads: Layout
) -> None:
    whole = random_whole(spec)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Checkpoint(save_whole(Path(scratch), spec, whole, layout=wrote))
        for row in table(spec):
            if row.tied_to is not None:
                continue
            back = np.zeros(row.shape, np.float32)
            for rank in range(reads.tp):
                local = np.zeros(row.local_shape(reads.tp), np.float32)
                for slab in row.slabs(rank, reads.tp):
                    local[slab.in_local] = checkpoint.read_raw(MODEL, row.name, slab)
                    back[slab.in_global] = local[slab.in_local]
            assert back.tobytes() == whole[MODEL][row.name].tobytes()
