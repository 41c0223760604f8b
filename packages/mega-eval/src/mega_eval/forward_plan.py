"""Plan the forward passes that score windows: which tokens each computes, and which predictions it scores.

A pass computes whole subtrees of the trie of windows, up to a number of tokens. A subtree that does not fit
is cut: a pass of its own computes the tokens of its root, whose keys and values later passes read. The cached
tokens are at any time those of one path, so that they are never more than a context.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mega_eval.window_trie import TrieNode, build_trie, list_nodes
from mega_eval.windows import Tokens, Window
from mega_model.token_tree import IntArray, TokenTree


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One forward pass over the tokens of a tree, and the predictions that are scored.

    Legend: T tokens; R tokens that make a scored prediction; K scored predictions.

    Attributes:
        tree: the tokens' order, with the number of cached tokens before them.
        token_T: the ids.
        row_R: sorted; windows with one input share a row.
        target_K: the predicted ids.
        target_row_K: for each, an index into `row_R`.
        window_K, index_K: for each, the window and the number of the target in it.
        stores: whether the pass appends its tokens, one node, to the cache.
    """

    tree: TokenTree
    token_T: Tokens
    row_R: IntArray
    target_K: Tokens
    target_row_K: IntArray
    window_K: IntArray
    index_K: IntArray
    stores: bool

    @property
    def sequences(self) -> int:
        """Number of nodes that no other node continues."""
        return int((self.tree.end_C == np.arange(1, len(self.tree.end_C) + 1)).sum())


def plan_passes(
    windows: Sequence[Window],
    *,
    max_tokens: int,
    max_windows: int | None = None,
    share_prefixes: bool = True,
    answered: Collection[int] = (),
) -> Iterator[ForwardPass]:
    """Yield forward passes that together score every target of every window once.

    They must run in this order, because some read what others append to the cache. The longest windows come
    first: a pass that does not fit in memory fails at the start, and the time left is not underestimated.

    Args:
        max_tokens: of a pass; a window longer than that has a pass of its own.
        max_windows: of a pass.
        share_prefixes: compute tokens with which several windows begin once.
        answered: numbers of windows that need no score; a pass of which no other needs anything is left out.
    """
    root = build_trie(windows, share_prefixes=share_prefixes, answered=answered)
    stack = [root]
    while stack:
        node = stack.pop()
        if not node.needed:
            continue
        if node is not root:
            yield _build_pass(windows, [node], cached=node.start, stores=True)
        children = sorted(node.children, key=lambda child: (-child.longest, child.window))
        groups, large = _pack_subtrees(children, max_tokens, max_windows)
        for group in groups:
            if not any(child.needed for child in group):
                continue
            yield _build_pass(windows, group, cached=node.end, stores=False)
        stack += reversed(large)


def _pack_subtrees(
    nodes: Sequence[TrieNode], max_tokens: int, max_windows: int | None
) -> tuple[list[list[TrieNode]], list[TrieNode]]:
    """Return groups of subtrees within the limits, and the subtrees that must be cut."""
    groups: list[list[TrieNode]] = []
    large: list[TrieNode] = []
    tokens = count = 0
    limit = max_windows or len(nodes) + sum(node.count for node in nodes)
    for node in nodes:
        if node.children and (node.tokens > max_tokens or node.count > limit):
            large.append(node)
            continue
        if not groups or tokens + node.tokens > max_tokens or count + node.count > limit:
            groups.append([])
            tokens = count = 0
        groups[-1].append(node)
        tokens += node.tokens
        count += node.count
    return groups, large


def _build_pass(
    windows: Sequence[Window], roots: Sequence[TrieNode], *, cached: int, stores: bool
) -> ForwardPass:
    """Build a pass over whole subtrees, or with `stores` over the tokens of one node alone."""
    nodes = list(roots) if stores else list_nodes(roots)
    number = {id(node): index for index, node in enumerate(nodes)}
    parent_C = np.full(len(nodes), -1, np.intp)
    for index, node in enumerate(nodes if not stores else []):
        for child in node.children:
            parent_C[number[id(child)]] = index
    count_C = np.array([node.end - node.start for node in nodes], np.intp)
    tree = TokenTree(parent_C, count_C, cached)
    token_T = np.concatenate([windows[node.window].tokens[node.start : node.end] for node in nodes])
    rows: list[IntArray] = [np.zeros(0, np.intp)]
    columns: dict[str, list[np.ndarray[Any, Any]]] = {"target": [], "window": [], "index": []}
    for index, node in enumerate(nodes):
        shift = int(tree.first_C[index]) - node.start
        for window_number, first, end in node.targets:
            window = windows[window_number]
            position = np.arange(first, end)
            rows.append(position + shift)
            columns["target"].append(window.tokens[first + 1 : end + 1])
            columns["window"].append(np.full(end - first, window_number))
            columns["index"].append(position - (window.input_length - window.target_length))
    row_R, target_row_K = np.unique(np.concatenate(rows), return_inverse=True)
    target_K, window_K, index_K = (
        np.concatenate([np.zeros(0, np.int64), *parts]) for parts in columns.values()
    )
    return ForwardPass(
        tree,
        token_T,
        row_R.astype(np.intp),
        target_K,
        target_row_K.astype(np.intp),
        window_K.astype(np.intp),
        index_K.astype(np.intp),
        stores,
    )
