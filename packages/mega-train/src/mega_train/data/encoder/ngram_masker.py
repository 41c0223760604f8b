"""Choose the masked tokens of a sample, with every random draw in Megatron's order.

The candidates are the words of a sample. They are visited in a shuffled order; at each, a number of words is
drawn, and that many words from there on are masked, or fewer if they exceed the budget. A draw is spent also
where a word is masked already. Facts of the algorithm: BERT (arXiv:1810.04805, 3.1), n-grams (ALBERT,
arXiv:1909.11942, 3.1), geometric lengths (SpanBERT, arXiv:1907.10529, 3.1).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mega_train.config.encoder_data import MaskType
from mega_train.data.encoder.vocabulary import MaskingVocabulary

Ints = NDArray[np.int64]

_GEOMETRIC_P: Final = 0.2
_MASK_SHARE: Final = 0.8  # of the chosen tokens; half of the others keep their token, half get a random one
_RANDOM_FROM: Final = 0.5


@dataclass(frozen=True, slots=True)
class NgramRule:
    """How many consecutive words are masked together, and what counts as a word.

    Attributes:
        max_words: the most words; n of them have probability proportional to 1/n.
        is_whole_word: a piece that continues a word belongs to its word; else each piece is a word.
        favors_long: give the probabilities in reverse order.
        is_geometric: draw n from the geometric distribution with p = 0.2, cut off at `max_words`.
        has_permutation: also permute as many other tokens among themselves, which get a loss too.
    """

    max_words: int
    is_whole_word: bool = True
    favors_long: bool = False
    is_geometric: bool = False
    has_permutation: bool = False


BERT_NGRAMS: Mapping[MaskType, NgramRule] = MappingProxyType(
    {
        "words": NgramRule(3),
        "pieces": NgramRule(3, is_whole_word=False),
        "tokens": NgramRule(1, is_whole_word=False),
        "long-words": NgramRule(3, favors_long=True),
        "geometric": NgramRule(10, is_geometric=True),
        "permutation": NgramRule(3, has_permutation=True),
    }
)
T5_NGRAMS: Final = NgramRule(10, is_geometric=True)


@dataclass(frozen=True, slots=True)
class MaskedTokens:
    """A sample after masking.

    Attributes:
        tokens: (T,) with the replacements.
        positions: (M,) of the tokens that get a loss, ascending.
        labels: (M,) the original tokens there.
        spans: positions of each n-gram that was masked together, in the order of the text.
    """

    tokens: Ints
    positions: Ints
    labels: Ints
    spans: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a sample.

    Attributes:
        positions: of all tokens that belong to words, ascending.
        begins: index into `positions` at which each word begins, and the number of positions.
    """

    positions: Sequence[int]
    begins: Sequence[int]

    def __len__(self) -> int:
        return len(self.begins) - 1

    def ngram(self, word: int, length: int) -> Sequence[int]:
        """Return the positions of `length` words from `word` on, or of those until the last."""
        return self.positions[self.begins[word] : self.begins[min(word + length, len(self))]]


class NgramMasker:
    """Masks n-grams of words of a sample."""

    def __init__(
        self, vocabulary: MaskingVocabulary, rule: NgramRule, probability: float, *, replaces: bool
    ) -> None:
        """Set the rule.

        Args:
            probability: share of the tokens to mask.
            replaces: 10 % of the chosen tokens get a random token and 10 % keep theirs, as in BERT; else all
                get the mask token.
        """
        self.vocabulary = vocabulary
        self.rule = rule
        self.probability = probability
        self.replaces = replaces
        shares = 1.0 / np.arange(1, rule.max_words + 1)
        shares /= shares.sum()
        if rule.favors_long:
            shares = shares[::-1]
        cumulative = (shares / shares.sum()).cumsum()
        self._thresholds: list[float] = (cumulative / cumulative[-1]).tolist()

    def mask(self, tokens: Ints, target: int, rng: np.random.RandomState, seed: int) -> MaskedTokens:
        """Mask a sample.

        Args:
            tokens: (T,) with special tokens, which are never masked.
            target: the length drawn for the sample; at most `probability * target` tokens are masked.
            seed: of the lengths of permuted n-grams. Megatron draws these from numpy's global generator, so
                its sample depends on the samples read before; ours depends on its number only.
        """
        words = self._find_words(tokens)
        budget = min(self.probability * target, max(1, round(len(tokens) * self.probability)))
        order = np.arange(len(words))
        rng.shuffle(order)
        original = tokens.tolist()
        masked = list(original)
        is_used = bytearray(len(original))
        spans = list[Sequence[int]]()
        for span in _choose_ngrams(words, order, budget, is_used, self._length_drawer(rng)):
            # these draws come before that of the next n-gram's length
            for position in span:
                masked[position] = self._draw_token(original[position], rng)
            spans.append(span)
        label_by_position = {position: original[position] for span in spans for position in span}
        if self.rule.has_permutation:
            rng.shuffle(order)
            draw_length = self._length_drawer(np.random.RandomState(seed))
            permuted = sorted(
                position
                for span in _choose_ngrams(words, order, budget, is_used, draw_length)
                for position in span
            )
            sources = list(permuted)
            rng.shuffle(sources)
            for position, source in zip(permuted, sources, strict=True):
                label_by_position[position] = original[position]
                masked[position] = original[source]
        positions = sorted(label_by_position)
        return MaskedTokens(
            np.array(masked, np.int64),
            np.array(positions, np.int64),
            np.array([label_by_position[position] for position in positions], np.int64),
            sorted(spans, key=lambda span: span[0]),
        )

    def _find_words(self, tokens: Ints) -> Words:
        """Find the words of a sample; a piece after a special token continues the word before it."""
        vocabulary = self.vocabulary
        positions = np.flatnonzero((tokens != vocabulary.cls) & (tokens != vocabulary.sep))
        begins_word = np.ones(len(positions), np.bool_)
        if self.rule.is_whole_word:
            begins_word[1:] = ~vocabulary.is_continuation[tokens[positions[1:]]]
        return Words(positions.tolist(), [*np.flatnonzero(begins_word).tolist(), len(positions)])

    def _length_drawer(self, rng: np.random.RandomState) -> Callable[[], int]:
        """Return a function that draws a number of words."""
        largest = self.rule.max_words
        if self.rule.is_geometric:
            return lambda: min(int(rng.geometric(_GEOMETRIC_P)), largest)
        # what rng.choice(p=...) does, at a fraction of its time
        draw, thresholds = rng.random_sample, self._thresholds
        return lambda: 1 + bisect_right(thresholds, draw())

    def _draw_token(self, token: int, rng: np.random.RandomState) -> int:
        """Draw what replaces a chosen token."""
        if not self.replaces or rng.random_sample() < _MASK_SHARE:
            return self.vocabulary.mask
        if rng.random_sample() < _RANDOM_FROM:
            return token
        ids = self.vocabulary.ids
        return int(ids[rng.randint(0, len(ids))])


def _choose_ngrams(
    words: Words, order: Ints, budget: float, is_used: bytearray, draw_length: Callable[[], int]
) -> Iterator[Sequence[int]]:
    """Yield the positions of n-grams that fit the budget and do not overlap.

    Args:
        order: in which the first words of n-grams are visited.
        budget: most positions in all.
        is_used: (T,) 1 at positions that cannot be chosen; updated.
    """
    count = 0
    for word in order.tolist():
        if count >= budget:
            return
        length = draw_length()
        while count + len(span := words.ngram(word, length)) > budget and length > 1:
            length -= 1
        if count + len(span) > budget or any(is_used[position] for position in span):
            continue
        for position in span:
            is_used[position] = 1
        count += len(span)
        yield span
