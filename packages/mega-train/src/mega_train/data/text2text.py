"""Samples of T5 made of pairs of an input and a target text.

The encoder reads the input's tokens and an end token. The decoder predicts the target's tokens and an end
token; its input begins with a start token, which is the padding token in the published T5 models and [BOS] in
Megatron's. Longer texts are cut before the end token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mega_schema.errors import ConfigError
from mega_schema.tasks.pair_features import IGNORED
from mega_schema.tasks.text_pairs import TextPair
from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_train.data.encoder.t5_reader import LABEL, REAL, SOURCE, SOURCE_REAL, TOKEN

Ints = NDArray[np.int64]
_STARTS = ("[BOS]", "<BOS>")
_ENDS = ("[EOS]", "<EOS>", "</s>")


@dataclass(frozen=True, slots=True)
class SequenceIds:
    """Ids of the special tokens of T5's samples."""

    start: int
    end: int
    pad: int

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> Self:
        """Look up the tokens.

        Raises:
            ConfigError: the tokenizer has no padding or no end token.
        """
        identity = tokenizer.identity
        ids = {piece: i for i, piece in enumerate(tokenizer.pieces(range(identity.vocab_size))) if piece}
        pad = identity.pad
        end = next((ids[name] for name in _ENDS if name in ids), identity.eod)
        if pad is None or end is None:
            raise ConfigError(
                "--tokenizer-type",
                f"has no token for the {'padding' if pad is None else 'end'} of a text",
                found=identity.type,
                wanted="a tokenizer of T5, with <pad> and </s>, or of BERT",
            )
        return cls(next((ids[name] for name in _STARTS if name in ids), pad), end, pad)


class EncodedPairs:
    """The samples of pairs, (5, longer length) int64 each, with the rows of `t5_reader`.

    Attributes:
        tokenizer: of the texts.
        special: the ids of its special tokens.
        decoder_length: tokens of the decoder, which its end token is one of.
        target_counts: (N,) tokens of each target, with its end; 0 without a target.
    """

    def __init__(
        self,
        pairs: Sequence[TextPair],
        tokenizer: Tokenizer,
        special: SequenceIds,
        length: int,
        decoder_length: int,
    ) -> None:
        """Encode pairs, cut to `length` and `decoder_length` tokens."""
        self.tokenizer = tokenizer
        self.special = special
        self.decoder_length = decoder_length
        self._length = length
        has_targets = pairs[0].target is not None
        self._inputs = self._encode([pair.input for pair in pairs], length)
        targets = [pair.target or "" for pair in pairs]
        no_target = np.zeros(0, np.int32)
        self._targets = self._encode(targets, decoder_length) if has_targets else [no_target for _ in pairs]
        self.target_counts: Ints = np.array([len(ids) for ids in self._targets], np.int64)

    def _encode(self, texts: Sequence[str], length: int) -> list[NDArray[np.int32]]:
        end = self.special.end
        return [np.array([*ids[: length - 1], end], np.int32) for ids in self.tokenizer.encode_batch(texts)]

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, i: int) -> Ints:
        """Return sample `i`; without a target the decoder has the start token only, and no loss."""
        sample = np.zeros((5, max(self._length, self.decoder_length)), np.int64)
        sample[SOURCE] = sample[TOKEN] = self.special.pad
        sample[LABEL] = IGNORED
        source, target = self._inputs[i], self._targets[i]
        sample[SOURCE, : len(source)] = source
        sample[SOURCE_REAL, : len(source)] = 1
        sample[TOKEN, 0] = self.special.start
        sample[TOKEN, 1 : len(target)] = target[:-1]
        sample[LABEL, : len(target)] = target
        sample[REAL, : max(1, len(target))] = 1
        return sample

    def target(self, i: int) -> NDArray[np.int32]:
        """Return the tokens of a target with its end, of no token without a target."""
        return self._targets[i]

    def filler(self) -> Ints:
        """Return a sample without a loss."""
        sample = self[0]
        sample[LABEL] = IGNORED
        return sample
