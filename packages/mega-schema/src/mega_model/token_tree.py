"""Sequences that share prefixes, as a tree of tokens on one axis; integers without torch.

A node is a run of consecutive tokens of one or more sequences. Each node continues its parent, and every
sequence is a path from a root. The tokens of a prefix shared by all roots can be cached from earlier passes.

Legend: C nodes; T tokens of all nodes; P cached tokens; R tokens whose attention is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

IntArray = np.ndarray[Any, np.dtype[np.intp]]


@dataclass(frozen=True, slots=True)
class TokenTree:
    """The nodes in depth-first order, so that the descendants of a node directly follow it.

    Attributes:
        parent_C: number of each node's parent, which comes before it; -1: it follows the cached prefix.
        count_C: tokens of each node, at least 1.
        cached: P; the tokens of the roots follow at position P.
        first_C: index of each node's first token on the axis.
        start_C: position of each node's first token in its sequence.
        end_C: number of the node after the last descendant of each node.
    """

    parent_C: IntArray
    count_C: IntArray
    cached: int = 0
    first_C: IntArray = field(init=False, repr=False)
    start_C: IntArray = field(init=False, repr=False)
    end_C: IntArray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        assert len(self.count_C), "a tree without nodes"
        assert (self.count_C > 0).all(), "a node without tokens"
        nodes = len(self.parent_C)
        start_C = np.zeros(nodes, np.intp)
        end_C = np.arange(1, nodes + 1, dtype=np.intp)
        for node, parent in enumerate(self.parent_C.tolist()):
            assert parent < node, f"node {node} before its parent {parent}"
            start_C[node] = self.cached if parent < 0 else start_C[parent] + self.count_C[parent]
        for node in range(nodes - 1, -1, -1):
            parent = self.parent_C[node]
            if parent >= 0:
                end_C[parent] = max(end_C[parent], end_C[node])
        object.__setattr__(self, "first_C", np.cumsum(self.count_C) - self.count_C)
        object.__setattr__(self, "start_C", start_C)
        object.__setattr__(self, "end_C", end_C)

    @property
    def tokens(self) -> int:
        """T."""
        return int(self.count_C.sum())

    @property
    def position_T(self) -> IntArray:
        """The position of each token in its sequence."""
        return np.arange(self.tokens) - np.repeat(self.first_C - self.start_C, self.count_C)

    def row_bounds(self, row_R: IntArray) -> IntArray:
        """Return where each node's rows begin in sorted tokens `row_R`, (C + 1,); the last is R."""
        return np.searchsorted(row_R, np.append(self.first_C, self.tokens)).astype(np.intp)

    def path(self, token: int) -> IntArray:
        """Return the indices of a token and of all before it in its sequence, without the cached ones."""
        node = int(np.searchsorted(self.first_C, token, side="right")) - 1
        runs = [np.arange(self.first_C[node], token + 1, dtype=np.intp)]
        while (node := int(self.parent_C[node])) >= 0:
            runs.append(np.arange(self.first_C[node], self.first_C[node] + self.count_C[node], dtype=np.intp))
        return np.concatenate(runs[::-1])


def rows_of_lengths(lengths: list[int]) -> TokenTree:
    """Return the tree of sequences that share nothing."""
    return TokenTree(np.full(len(lengths), -1, np.intp), np.array(lengths, np.intp))


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Where `kernels.numba.page_attention` finds the keys and values of a tree.

    A sequence's keys are in pages of consecutive positions. A node has pages of its own from the page of its
    first token on; it shares the pages before with its parent, and begins with a copy of what its parent has
    in the page that both are in.

    Attributes:
        source_X: the key to write, an index into the cached tokens followed by the tree's.
        slot_X: page · page size + offset in it, where it is written.
        pages: page numbers of all nodes' sequences, end to end.
        table_C: index in `pages` of each node's first page.
        count: number of pages.
    """

    source_X: IntArray
    slot_X: IntArray
    pages: IntArray
    table_C: IntArray
    count: int

    @classmethod
    def from_tree(cls, tree: TokenTree, page_size: int) -> PageLayout:
        """Lay out the pages of a tree."""
        root_pages = np.arange(-(-tree.cached // page_size), dtype=np.intp)
        sources = [np.arange(tree.cached, dtype=np.intp)]
        slots = [np.arange(tree.cached, dtype=np.intp)]
        tables: list[IntArray] = []
        count = len(root_pages)
        for node, parent in enumerate(tree.parent_C.tolist()):
            start, tokens = int(tree.start_C[node]), int(tree.count_C[node])
            whole = start // page_size
            own = -(-(start + tokens) // page_size) - whole
            table = np.append(
                (root_pages if parent < 0 else tables[parent])[:whole], np.arange(count, count + own)
            )
            copied = np.arange(whole * page_size, start)
            new = np.arange(tokens) + (tree.cached + int(tree.first_C[node]))
            sources += [_find_sources(tree, parent, copied), new]
            position = np.arange(whole * page_size, start + tokens)
            slots.append(table[position // page_size] * page_size + position % page_size)
            tables.append(table.astype(np.intp))
            count += own
        lengths = np.array([len(table) for table in tables])
        return cls(
            np.concatenate(sources).astype(np.intp),
            np.concatenate(slots).astype(np.intp),
            np.concatenate(tables),
            (np.cumsum(lengths) - lengths).astype(np.intp),
            count,
        )

    def chunks(self, tree: TokenTree, row_R: IntArray) -> IntArray:
        """Return the chunks of `page_attention` for sorted tokens: runs of consecutive tokens of a node."""
        node_R = np.searchsorted(tree.first_C, row_R, side="right") - 1
        is_first = np.ones(len(row_R), np.bool_)
        is_first[1:] = (row_R[1:] != row_R[:-1] + 1) | (node_R[1:] != node_R[:-1])
        first_Q = np.flatnonzero(is_first)
        count_Q = np.diff(first_Q, append=len(row_R))
        node_Q = node_R[first_Q]
        start_Q = tree.start_C[node_Q] + row_R[first_Q] - tree.first_C[node_Q]
        return np.stack((first_Q, count_Q, start_Q, self.table_C[node_Q]), 1).astype(np.intp)


def _find_sources(tree: TokenTree, node: int, position_X: IntArray) -> IntArray:
    """Return the index of the key of each position before the end of a node; -1 is the cached prefix."""
    source_X = np.array(position_X)
    left = len(position_X)
    while node >= 0 and left:
        start = int(tree.start_C[node])
        inside = max(0, left - max(0, start - int(position_X[0])))
        shift = tree.cached + int(tree.first_C[node]) - start
        source_X[left - inside : left] += shift
        left -= inside
        node = int(tree.parent_C[node])
    return source_X
