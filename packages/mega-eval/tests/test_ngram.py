import math
from collections import Counter

import numpy as np
import pytest

from mega_eval.ngram import KneserNey, Unigram
from mega_eval.windows import as_tokens


def test_kneser_ney_equals_the_formula_worked_by_hand():
    # pairs of 0 1 0 1 0 2 1: (0,1) twice, (1,0) twice, (0,2) once, (2,1) once
    model = KneserNey(as_tokens([0, 1, 0, 1, 0, 2, 1]), vocab_size=4)
    discount = 2 / (2 + 2 * 2)
    assert model.discount == discount == 1 / 3
    # four pairs; before 0: {1}, before 1: {0, 2}, before 2: {0}, before 3: nothing
    spread = discount * 3 / 4 / 4
    below = [(1 - discount) / 4 + spread, (2 - discount) / 4 + spread, (1 - discount) / 4 + spread, spread]
    assert sum(below) == pytest.approx(1)
    # 0 comes before three tokens, two of them distinct; 3 comes before none
    backoff = discount * 2 / 3
    expected = [
        backoff * below[0],
        (2 - discount) / 3 + backoff * below[1],
        (1 - discount) / 3 + backoff * below[2],
        backoff * below[3],
        below[1],
    ]
    probabilities = np.exp(model.score(as_tokens([0, 0, 0, 0, 3]), as_tokens([0, 1, 2, 3, 1])))
    assert probabilities == pytest.approx(expected)


def count_probability(stream, vocab, before, token):
    """Compute P(token | before) by the formula, one count at a time."""
    pairs = Counter(zip(stream, stream[1:], strict=False))
    singletons, doubletons = (sum(count == n for count in pairs.values()) for n in (1, 2))
    discount = singletons / (singletons + 2 * doubletons) if singletons else 0.5
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
    pairs = rng.integers(0, vocab, (2, 40))
    probabilities = np.exp(KneserNey(as_tokens(stream), vocab).score(*map(as_tokens, pairs)))
    expected = [count_probability(stream.tolist(), vocab, *pair) for pair in pairs.T.tolist()]
    assert probabilities == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(30))
def test_every_distribution_sums_to_one(seed):
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(2, 30))
    stream = as_tokens(rng.integers(0, vocab, int(rng.integers(2, 200))))
    vocabulary = as_tokens(np.arange(vocab))
    assert np.exp(Unigram(stream, vocab).score(vocabulary)).sum() == pytest.approx(1)
    model = KneserNey(stream, vocab)
    for before in range(vocab):
        assert np.exp(model.score(np.full(vocab, before), vocabulary)).sum() == pytest.approx(1)


@pytest.mark.parametrize(
    "stream",
    [[0, 0], [0, 1, 0, 1, 0, 1, 0, 1], [0, 1, 2, 3]],
    ids=["one pair", "no pair seen once", "every pair seen once"],
)
def test_no_token_is_impossible_however_odd_the_counts(stream):
    model = KneserNey(as_tokens(stream), vocab_size=5)
    vocabulary = as_tokens(np.arange(5))
    for before in range(5):
        assert np.isfinite(model.score(np.full(5, before), vocabulary)).all()


def test_the_unigram_adds_one_to_every_count():
    logprobs = Unigram(as_tokens([2, 2, 1]), vocab_size=4).score(as_tokens([0, 1, 2, 3]))
    assert logprobs == pytest.approx([math.log(n / 7) for n in (1, 2, 3, 1)])


def test_a_bigram_model_beats_a_unigram_model_on_a_chain():
    rng = np.random.default_rng(7)
    chain = as_tokens(np.cumsum(rng.integers(1, 3, 5000)) % 20)
    train = chain[:4000]
    held_out = chain[4000:]
    bigram = KneserNey(train, 20).score(held_out[:-1], held_out[1:]).mean()
    assert bigram > Unigram(train, 20).score(held_out[1:]).mean() + 1
    assert bigram == pytest.approx(-math.log(2), abs=0.02)
