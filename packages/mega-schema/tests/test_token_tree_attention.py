"""Attention over a tree of tokens equals attention over each of its sequences alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from mega_model.attention_backends import PackedAttention
from mega_model.attention_mask import PLAIN, AttentionMask
from mega_model.kernels.numba import load_kernels
from mega_model.token_tree import PageLayout, TokenTree
from mega_model.token_tree_attention import PagedTreeAttention, PrefixKeyValues, TokenTreeAttention

MASKS = {
    "plain": PLAIN,
    "window": AttentionMask(window=7),
    "alibi": AttentionMask(slopes=(0.5, 0.25, 0.1, 0.05)),
}


def random_tree(rng, cached=0):
    """Return a tree in depth-first order: a node's parent is on the path to the node before it."""
    parents, path = [], []
    for node in range(rng.randint(1, 9)):
        del path[rng.randint(0, len(path)) :]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return TokenTree(
        np.array(parents, np.intp), np.array([rng.randint(1, 40) for _ in parents], np.intp), cached
    )


def path_index(tree, node):
    """Return the cached tokens and the tree's tokens up to the end of a node, as indices into both."""
    if node < 0:
        return list(range(tree.cached))
    first = tree.cached + int(tree.first_C[node])
    return [*path_index(tree, int(tree.parent_C[node])), *range(first, first + int(tree.count_C[node]))]


def attend_alone(tree, q, k, v, mask):
    """Return attention of every sequence computed alone in float64; the first P tokens are cached."""
    out = torch.empty(tree.tokens, *q.shape[1:], dtype=torch.float64)
    for node in range(len(tree.count_C)):
        index = torch.tensor(path_index(tree, node))
        rows = PackedAttention(rows=1, length=len(index))(0, *(x[index].double() for x in (q, k, v)), mask)
        count, first = int(tree.count_C[node]), int(tree.first_C[node])
        out[first : first + count] = rows[-count:]
    return out


def build_backend(name, tree, row_R, prefix):
    if name == "pages":
        return PagedTreeAttention(load_kernels(), tree, row_R, prefix, stores=False)
    return TokenTreeAttention(tree, row_R, prefix, stores=False)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("cached", [0, 21, 32])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", ["torch", "pages"])
def test_a_tree_gives_each_sequence_its_own_attention(name, kind, cached, seed):
    rng = random.Random(seed)
    tree = random_tree(rng, cached)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(cached + tree.tokens, n, 16, generator=generator) for n in (4, 2, 2))
    prefix = PrefixKeyValues()
    if cached:
        prefix.store(0, 0, k[:5], v[:5])
        prefix.store(0, 5, k[5:cached], v[5:cached])
    row_R = np.array(sorted(rng.sample(range(tree.tokens), rng.randint(0, tree.tokens))), np.intp)
    attend = build_backend(name, tree, row_R, prefix)
    wanted = attend_alone(tree, q, k, v, MASKS[kind])
    new_q, new_k, new_v = (x[cached:] for x in (q, k, v))
    out = attend(0, new_q, new_k, new_v, MASKS[kind])
    torch.testing.assert_close(out.double(), wanted, atol=2e-6, rtol=1e-5)
    chosen = torch.from_numpy(row_R)
    rows = attend(0, new_q[chosen], new_k, new_v, MASKS[kind])
    torch.testing.assert_close(rows.double(), wanted[chosen], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(6))
def test_pages_give_the_same_bits_in_a_tree_and_alone(seed, dtype):
    rng = random.Random(seed)
    tree = random_tree(rng, cached=rng.choice([0, 9, 16, 40]))
    q, k, v = (torch.randn(tree.cached + tree.tokens, n, 24).to(dtype) for n in (4, 2, 2))
    prefix = PrefixKeyValues()
    prefix.store(0, 0, k[: tree.cached], v[: tree.cached])
    out = build_backend("pages", tree, np.arange(0), prefix)(0, *(x[tree.cached :] for x in (q, k, v)))
    for node in range(len(tree.count_C)):
        index = torch.tensor(path_index(tree, node))
        whole = TokenTree(np.array([-1]), np.array([len(index)]))
        alone = build_backend("pages", whole, np.arange(0), PrefixKeyValues())(
            0, *(x[index] for x in (q, k, v))
        )
        count, first = int(tree.count_C[node]), int(tree.first_C[node])
        assert torch.equal(out[first : first + count], alone[-count:])


@pytest.mark.parametrize("seed", range(20))
def test_a_page_has_one_key_at_each_position_of_every_sequence_that_reads_it(seed):
    rng = random.Random(seed)
    tree = random_tree(rng, cached=rng.randint(0, 40))
    layout = PageLayout.from_tree(tree, 16)
    assert len(set(layout.slot_X)) == len(layout.slot_X)
    key_at = dict(zip(layout.slot_X.tolist(), layout.source_X.tolist(), strict=True))
    for node in range(len(tree.count_C)):
        path = path_index(tree, node)
        table = layout.pages[layout.table_C[node] :]
        assert [key_at[int(table[p // 16]) * 16 + p % 16] for p in range(len(path))] == path
    assert max(layout.slot_X) < layout.count * 16
