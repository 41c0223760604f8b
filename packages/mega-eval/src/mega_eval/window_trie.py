"""Windows as a trie: tokens with which several windows begin are one node. Integers without torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from mega_eval.windows import Tokens, Window

MIN_SHARED = 8  # tokens that windows must share to be worth a node


@dataclass(slots=True)
class TrieNode:
    """A run of tokens at one place in one or more windows.

    Attributes:
        start, end: positions of its tokens.
        window: number of a window that has these tokens.
        children: nodes that continue it.
        windows: numbers of the windows whose inputs end with it.
        tokens, count: tokens and windows of the node and all its descendants.
        needed: windows of them that need a score.
        longest: end of its longest descendant.
        targets: (window, first position, end) of the predictions that its tokens make.
    """

    start: int
    end: int
    window: int
    children: list[TrieNode] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)
    tokens: int = 0
    count: int = 0
    needed: int = 0
    longest: int = 0
    targets: list[tuple[int, int, int]] = field(default_factory=list)


def build_trie(
    windows: Sequence[Window], *, share_prefixes: bool = True, answered: Collection[int] = ()
) -> TrieNode:
    """Return the root, without tokens, of the trie of the inputs of windows.

    Args:
        share_prefixes: False: every window is a child of the root.
        answered: numbers of windows that need no score.
    """
    inputs = [window.tokens[:-1] for window in windows]
    # big-endian bytes have the order of the numbers
    order = sorted(range(len(windows)), key=lambda number: inputs[number].astype(">i8").tobytes())
    root = TrieNode(0, 0, -1)
    path = [root]
    previous: Tokens = np.zeros(0, np.int64)
    for number in order:
        tokens = inputs[number]
        shared = count_shared(previous, tokens) if share_prefixes else 0
        is_shared = shared >= MIN_SHARED or shared == len(tokens)
        _enter_prefix(path, shared if is_shared else 0)
        if len(tokens) > path[-1].end:
            node = TrieNode(path[-1].end, len(tokens), number)
            path[-1].children.append(node)
            path.append(node)
        path[-1].windows.append(number)
        for node in path:
            first = max(node.start, len(tokens) - windows[number].target_length)
            if first < node.end:
                node.targets.append((number, first, node.end))
        previous = tokens
    _sum_descendants(root, answered)
    return root


def count_shared(a: Tokens, b: Tokens) -> int:
    """Return how many tokens two sequences share at their beginning."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def _enter_prefix(path: list[TrieNode], shared: int) -> None:
    """Cut the path at position `shared`; a node across it is split in two."""
    while path[-1].end > shared:
        node = path.pop()
        if path[-1].end < shared:
            _split_node(node, shared)
            path.append(node)
            return


def _split_node(node: TrieNode, position: int) -> None:
    """Make a node end at a position; a child of it gets its other tokens and all it had."""
    child = TrieNode(position, node.end, node.window, node.children, node.windows)
    child.targets = [
        (number, max(first, position), end) for number, first, end in node.targets if end > position
    ]
    node.targets = [(number, first, position) for number, first, _ in node.targets if first < position]
    node.end = position
    node.children = [child]
    node.windows = []


def _sum_descendants(root: TrieNode, answered: Collection[int]) -> None:
    """Set `tokens`, `count`, `needed` and `longest` of all nodes."""
    for node in reversed(list_nodes([root])):
        node.tokens = node.end - node.start + sum(child.tokens for child in node.children)
        node.count = len(node.windows) + sum(child.count for child in node.children)
        needed = sum(number not in answered for number in node.windows)
        node.needed = needed + sum(child.needed for child in node.children)
        node.longest = max([node.end, *(child.longest for child in node.children)])


def list_nodes(roots: Sequence[TrieNode]) -> list[TrieNode]:
    """Return the nodes of subtrees in depth-first order."""
    nodes = []
    stack = list(reversed(roots))
    while stack:
        node = stack.pop()
        nodes.append(node)
        stack += reversed(node.children)
    return nodes
