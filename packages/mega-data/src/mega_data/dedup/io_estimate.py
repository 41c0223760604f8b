"""Estimate the bytes that each stage of a deduplication reads and writes; `bench/dedup_scale.py` prints them.

For presets without a Jaccard check. Every document is assumed to have shingles. Task results, file metadata
and pairs that are passed on from block to block are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mega_data.dedup.candidates import BYTES_PER_DOCUMENT
from mega_data.dedup.components import BYTES_PER_DOCUMENT as BYTES_PER_NODE
from mega_data.dedup.edge_files import ROW_BYTES
from mega_data.dedup.pipeline import count_ranges, group_shards
from mega_data.dedup.presets import Preset
from mega_data.dedup.sorted_runs import count_cells
from mega_data.dedup.star_groups import ROUNDS


@dataclass(frozen=True, slots=True)
class StageIO:
    """The input and output of a stage over all its tasks.

    Attributes:
        files: files that it leaves in the work folder or the output.
    """

    name: str
    tasks: int
    files: int
    read_bytes: int
    written_bytes: int


def estimate_io(
    shard_bytes: Sequence[int],
    documents: int,
    preset: Preset,
    memory: int,
    *,
    pairs: int,
    dropped: int,
    output_bytes: int,
    edges: Sequence[int] = (),
    residual: int = 0,
) -> list[StageIO]:
    """Return the stages in their order.

    Args:
        shard_bytes: of the inputs on disk, compressed or not.
        documents: spread over the shards by their bytes.
        memory: --memory in bytes.
        pairs: of all bands together.
        dropped: documents that duplicate an earlier one.
        output_bytes: of the kept lines on disk.
        edges: rows that each contraction to stars writes; by default each dropped document has one edge.
        residual: edges of groups that are no stars after that.
    """
    shards, text = len(shard_bytes), sum(shard_bytes)
    has_checks = preset.unit == "text"
    bands, columns = preset.bands, preset.bands + has_checks
    groups, ranges = group_shards(shard_bytes), count_ranges(text)
    limit = max(1, memory // BYTES_PER_DOCUMENT)
    run_sizes = list[int]()
    for group in groups:
        size = round(documents * sum(shard_bytes[shard] for shard in group) / max(1, text))
        run_sizes += [min(limit, size - start) for start in range(0, size, limit)]
    keys = 8 * columns * documents
    entries = (20 if has_checks else 12) * bands * documents
    index = sum(4 * bands * (count_cells(size, ranges) + 2) for size in run_sizes)
    pair_bytes = 16 * pairs
    roots = 8 * documents
    # with several blocks, pairs are distributed, and roots and links (of two numbers, there and back) stored
    spilled = pair_bytes + roots + 2 * 16 * dropped if documents > memory // BYTES_PER_NODE else 0
    pair_tasks = bands * ranges
    if ranges == 1:
        grouping = [StageIO("groups", 1, 1, pair_bytes + spilled, roots + spilled)]
        pair_files = pair_tasks + 1
    else:
        grouping = _star_stages(len(groups), pairs, dropped, edges, residual, roots)
        pair_files = 2 * pair_tasks + 1
    return [
        StageIO("keys", shards, shards, text, keys),
        StageIO("sort", len(groups), len(run_sizes) + 2 * len(groups), keys, entries + index),
        StageIO("pairs", pair_tasks, pair_files, entries + index, pair_bytes),
        *grouping,
        StageIO("filter", shards, shards, text + roots, output_bytes),
    ]


def _star_stages(
    tasks: int, pairs: int, dropped: int, edges: Sequence[int], residual: int, roots: int
) -> list[StageIO]:
    """Return the stages of `star_groups`; the index of each file is not counted."""
    rows = [pairs, *(edges or [dropped * (2 if number % 2 else 1) for number in range(1, ROUNDS + 1)])]
    size = [ROW_BYTES * count for count in rows]
    remaining, links = ROW_BYTES * residual, ROW_BYTES * dropped
    return [
        *(
            StageIO(f"stars-{number}", tasks, 2 * tasks, 2 * size[number - 1], size[number])
            for number in range(1, ROUNDS + 1)
        ),
        StageIO("settle", tasks, tasks, 2 * size[ROUNDS], remaining),
        StageIO("groups", 1, 2, remaining, remaining),
        StageIO("labels", tasks, 2 * tasks, size[ROUNDS] + remaining, links),
        StageIO("roots", tasks, 1, links + remaining, roots),
    ]
