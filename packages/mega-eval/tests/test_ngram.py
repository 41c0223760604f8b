import math
from collections import Counter

import numpy as np
import pytest

from mega_eval.ngram import KneserNey, Unigram
from mega_eval.windows import ids


def test_kneser_ney_equals_the_formula_worked_by_hand():
    # pairs of 0 1 0 1 0 2 1: (0,1) twice, (1,0) twice, (0,2) once, (2,1) once
    model = KneserNey(ids([0, 1, 0, 1, 0, 2, 1]), vocab=4)
    discount = 2 / (2 + 2 * 2)
    assert model.discount == discount == 1 / 3
    # four pairs; before 0: {1}, before 1: {0, 2}, before 2: {0}, before 3: nothing
    spread = discount * 3 / 4 / 4
    below = [(1 - discount) / 4 + spread, (2 - discount) / 4 + spread, (1 - discount) / 4 + spread, spread]
    assert sum(below) == pytest.approx(1)
    # 0 comes before three tokens, two of them different; 3 comes before none
    share = discount * 2 / 3
    wanted = [
        share * below[0],
        (2 - discount) / 3 + share * below[1],
        (1 - discount) / 3 + share * below[2],
        share * below[3],
        below[1],
    ]
    found = np.exp(model.score(ids([0, 0, 0, 0, 3]), ids([0, 1, 2, 3, 1])))
    assert found == pytest.approx(wanted)


def counted(stream, vocab, before, token):
    """P(token | before) by the formula, one count at a time."""
    pairs = Counter(zip(stream, stream[1:], strict=False))
    once, twice = (sum(count == n for count in pairs.values()) for n in (1, 2))
    discount = once / (once + 2 * twice) if once else 0.5
    preceders = Counter(after for _, after in pairs)
    below = max(preceders[token] - discount, 0) / len(pairs)
    below += discount * len(preceders) / len(pairs) / vocab
    total = sum(count for (first, _), count in pairs.items() if first == before)
    if not total:
        return below
    followers = sum(first == before for first, _ in pairs)
    return max(pairs[before, token] - discount, 0) / total + discount * followers / total * below


@pytest.mark.parametrize("seed", range(30))
def test_kneser_ney_equals_counting_one_by_one(seed):
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(2, 12))
    stream = rng.integers(0, vocab, int(rng.integers(2, 60)))
    asked = rng.integers(0, vocab, (2, 40))
    found = np.exp(KneserNey(ids(stream), vocab).score(*map(ids, asked)))
    wanted = [counted(stream.tolist(), vocab, *pair) for pair in asked.T.tolist()]
    assert found == pytest.approx(wanted)


@pytest.mark.parametrize("seed", range(30))
def test_every_distribution_sums_to_one(seed):
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(2, 30))
    stream = ids(rng.integers(0, vocab, int(rng.integers(2, 200))))
    every = ids(np.arange(vocab))
    assert np.exp(Unigram(stream, vocab).score(every)).sum() == pytest.approx(1)
    model = KneserNey(stream, vocab)
    for before in range(vocab):
        assert np.exp(model.score(np.full(vocab, before), every)).sum() == pytest.approx(1)


@pytest.mark.parametrize(
    "stream",
    [[0, 0], [0, 1, 0, 1, 0, 1, 0, 1], [0, 1, 2, 3]],
    ids=["one pair", "no pair seen once", "every pair seen once"],
)
def test_no_token_is_impossible_however_odd_the_counts(stream):
    model = KneserNey(ids(stream), vocab=5)
    every = ids(np.arange(5))
    for before in range(5):
        assert np.isfinite(model.score(np.full(5, before), every)).all()


def test_the_unigram_adds_one_to_every_count():
    found = Unigram(ids([2, 2, 1]), vocab=4).score(ids([0, 1, 2, 3]))
    assert found == pytest.approx([math.log(n / 7) for n in (1, 2, 3, 1)])


def test_a_bigram_model_beats_a_unigram_model_on_a_chain():
    rng = np.random.default_rng(7)
    chain = ids(np.cumsum(rng.integers(1, 3, 5000)) % 20)
    train, held_out = chain[:4000], chain[4000:]
    bigram = KneserNey(train, 20).score(held_out[:-1], held_out[1:]).mean()
    assert bigram > Unigram(train, 20).score(held_out[1:]).mean() + 1
    assert bigram == pytest.approx(-math.log(2), abs=0.02)
