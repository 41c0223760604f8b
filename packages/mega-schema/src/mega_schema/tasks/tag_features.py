"""Make BERT's inputs of words with tags: the first token of each word has the label of its tag."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mega_schema.tasks.pair_features import IGNORED, LABEL, REAL, TOKEN, SpecialIds, check_length
from mega_schema.tasks.tag_examples import TagExample
from mega_schema.tokenizer.tokenizer import Tokenizer

Ints = NDArray[np.int64]


class EncodedTags:
    """The samples of sentences, (4, length) each: [CLS] tokens [SEP], cut at the end.

    Attributes:
        examples: what the samples are made of.
        rows: of a sample.
        positions: of each sentence, the position of the first token of each word that the sample has.
        words_cut: words that no sample has.
        token_counts: (N,) tokens of each sample, without padding.
    """

    rows = 1

    def __init__(
        self,
        examples: Sequence[TagExample],
        tokenizer: Tokenizer,
        special: SpecialIds,
        length: int,
        tags: Sequence[str],
    ) -> None:
        """Encode every word by itself.

        Raises:
            ConfigError: `length` has no place for a token between the special ones.
        """
        check_length(length)
        self.examples = examples
        self.length = length
        self._special = special
        self._tag_numbers = {tag: number for number, tag in enumerate(tags)}
        words = list(dict.fromkeys(word for example in examples for word in example.words))
        ids_of_word = dict(zip(words, tokenizer.encode_batch(words), strict=True))
        self.positions = list[list[int]]()
        self.words_cut = 0
        self._ids = list[NDArray[np.int32]]()
        for example in examples:
            ids, positions = [special.cls], list[int]()
            for word in example.words:
                if len(ids) >= length - 1:
                    break
                positions.append(len(ids))
                # a word of characters that the tokenizer removes still has a token, for its tag
                ids += ids_of_word[word] or [special.pad]
            self.words_cut += len(example.words) - len(positions)
            self.positions.append(positions)
            self._ids.append(np.array([*ids[: length - 1], special.sep], np.int32))
        self.token_counts: Ints = np.array([len(ids) for ids in self._ids])

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, i: int) -> Ints:
        """Return sample `i`: rows of ids, types, real tokens, and labels at the first tokens of words."""
        ids, positions, tags = self._ids[i], self.positions[i], self.examples[i].tags
        sample = np.zeros((4, self.length), np.int64)
        sample[TOKEN] = self._special.pad
        sample[TOKEN, : len(ids)] = ids
        sample[REAL, : len(ids)] = 1
        sample[LABEL] = IGNORED
        if tags is not None:
            sample[LABEL, positions] = [self._tag_numbers[tag] for tag in tags[: len(positions)]]
        return sample

    def filler(self) -> Ints:
        """Return a sample without labels, all of whose tokens are real."""
        sample = self[0]
        sample[LABEL] = IGNORED
        sample[REAL] = 1
        return sample
