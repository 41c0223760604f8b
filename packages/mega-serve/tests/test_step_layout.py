"""The token axis of a step against its definition, token by token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mega_serve.engine.interfaces import Chunk
from mega_serve.execution.step_layout import StepLayout

PAGE_SIZE = 4
NUM_PAGES = 50


@st.composite
def chunks_of_a_step(draw: st.DrawFn) -> list[Chunk]:
    counts = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5) | st.lists(st.just(1), min_size=1))
    chunks = []
    for count in counts:
        start = draw(st.integers(0, 9))
        used = -(-(start + count) // PAGE_SIZE)
        tables = st.lists(st.integers(0, NUM_PAGES - 1), min_size=used, max_size=6)
        chunks.append(Chunk((1,) * count, start, tuple(draw(tables)), count))
    return chunks


@given(chunks_of_a_step())
def test_positions_and_slots_follow_the_block_tables(chunks: list[Chunk]) -> None:
    layout = StepLayout.from_chunks(chunks, page_size=PAGE_SIZE, num_pages=NUM_PAGES)
    tokens = [(chunk, chunk.start + i) for chunk in chunks for i in range(len(chunk.token_ids))]
    assert layout.position_T.tolist() == [position for _, position in tokens]
    slots = [chunk.pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for chunk, p in tokens]
    assert layout.slot_T.tolist() == slots
    assert layout.position_T.flags.c_contiguous, "kernels are compiled for contiguous positions"
    for c, chunk in enumerate(chunks):
        used = -(-(chunk.start + len(chunk.token_ids)) // PAGE_SIZE)
        assert layout.block_table(c).tolist() == list(chunk.pages[:used])
