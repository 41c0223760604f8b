"""Groups that tasks find by contraction to stars are those of union-find in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mega_data.dedup import star_groups
from mega_data.dedup.edge_files import DocumentBlocks, open_edges, read_edges
from mega_data.dedup.presets import Preset
from mega_data.dedup.star_groups import StarGroups
from mega_data.dedup.union_find import find_roots, union
from mega_data.dedup.work_files import WorkFiles
from mega_data.output_formats import open_output
from tests.selection import every_nth

BANDS = Preset("words", 5, bands=3, rows=8)
Pairs = NDArray[np.uint64]


def as_pairs(rows: Any) -> Pairs:
    return np.array(rows, np.uint64).reshape(-1, 2)


def chain(numbers: Any) -> Pairs:
    documents = np.array(numbers, np.uint64)
    return np.sort(np.stack([documents[:-1], documents[1:]], axis=1), axis=1)


def star_roots(
    folder: Path, pairs: list[Pairs], total: int, tasks: int, memory: int
) -> tuple[list[int], dict[str, int]]:
    """Run the stages; return the root of each document, and the edges of each stage that counts them."""
    files = WorkFiles(folder, BANDS, 1, 2)
    with open_output(files.firsts) as out:
        out.write(np.array([0, total], "<u8").tobytes())
    stars = StarGroups(files, tasks, len(pairs), memory)
    for task, part in reversed([*enumerate(pairs)]):
        stars.write_pairs(task, [part], total)
    edges = dict[str, int]()
    for name, count, work in stars.stages():
        results = [work(task) for task in reversed(range(count))]
        edges[name] = sum(result.get("edges", 0) for result in results)
        assert work(0) == results[-1], "a task that is repeated gives the same"
    roots: list[int] = np.fromfile(files.roots, "<u8").tolist() if total else []
    return roots, edges


def union_roots(pairs: list[Pairs], total: int) -> list[int]:
    parents = np.arange(total, dtype=np.uint64)
    for part in pairs:
        union(parents, part)
    roots: list[int] = find_roots(parents, np.arange(total)).tolist()
    return roots


@pytest.mark.parametrize("seed", every_nth(6, range(12)))
def test_the_roots_are_those_of_union_find_for_any_tasks_and_memory(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    total = int(rng.integers(1, 400))
    pairs = [
        as_pairs(np.sort(rng.integers(0, total, (int(rng.integers(0, 90)), 2)), axis=1))
        for _ in range(int(rng.integers(1, 6)))
    ]
    pairs = [part[part[:, 0] != part[:, 1]] for part in pairs]
    pairs.append(chain(rng.permutation(total)[: int(rng.integers(1, 1 + total))]))
    pairs.append(as_pairs([(int(rng.integers(total)), document) for document in range(0, total, 7)]))
    pairs[-1] = np.sort(pairs[-1][pairs[-1][:, 0] != pairs[-1][:, 1]], axis=1)
    wanted = union_roots(pairs, total)
    for number, (tasks, memory) in enumerate([(1, 1 << 20), (3, 48 * 13), (7, 48 * 64)]):
        roots, _ = star_roots(tmp_path / str(number), pairs, total, tasks, memory)
        assert roots == wanted, (tasks, memory)


@pytest.mark.parametrize("memory", [48 * 50, 1 << 20])  # the remaining edges do not fit, and fit
def test_long_chains_are_joined_in_one_process(tmp_path: Path, memory: int) -> None:
    total = 600
    pairs = [chain(range(total))[::2], chain(range(total))[1::2]]
    roots, edges = star_roots(tmp_path / "ordered", pairs, total, 2, memory)
    assert roots == [0] * total
    assert edges["groups"] > 100
    order = np.random.default_rng(0).permutation(total)
    assert star_roots(tmp_path / "mixed", [chain(order)], total, 2, memory)[0] == [0] * total


def test_small_groups_leave_nothing_to_the_one_process(tmp_path: Path) -> None:
    groups = [[3 * number, 3 * number + 1, 3 * number + 2] for number in range(100)]
    pairs = [as_pairs([(a, c) for a, _, c in groups]), as_pairs([(b, c) for _, b, c in groups])]
    roots, edges = star_roots(tmp_path, pairs, 300, 3, 48 * 32)
    assert roots == [3 * (document // 3) for document in range(300)]
    assert edges["groups"] == 0
    assert edges["stars-1"] == 2 * 200, "in both directions"


def test_no_documents_and_no_pairs_have_no_groups(tmp_path: Path) -> None:
    empty = as_pairs([])
    assert star_roots(tmp_path / "none", [empty], 0, 3, 1 << 20)[0] == []
    assert star_roots(tmp_path / "alone", [empty, empty], 7, 3, 1 << 20)[0] == [*range(7)]


def test_the_rows_of_a_block_are_read_once_in_bounded_memory(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    blocks = DocumentBlocks(1000, 130)
    rows = rng.integers(0, 1000, (4000, 2)).astype(np.uint64)
    with open_edges(tmp_path / "edges", blocks, 128 * 500) as add:
        for part in np.split(rows, 16):
            add(part)
    wanted = {tuple(row) for row in rows.tolist()}
    seen = set[tuple[int, ...]]()
    for block in range(blocks.count):
        for part in read_edges([tmp_path / "edges"], block, blocks, 128 * 70):
            assert 0 < len(part) <= 70
            assert set((part[:, 0] // np.uint64(blocks.size)).tolist()) == {block}
            seen |= {tuple(row) for row in part.tolist()}
    assert seen == wanted
    assert star_groups.ROUNDS % 2 == 1, "the last operation is a small star: it writes both directions"
