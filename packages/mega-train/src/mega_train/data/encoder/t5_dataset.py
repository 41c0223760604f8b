"""Samples for T5: an encoder's text with spans replaced by sentinels, and the spans as a decoder's target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mega_schema.dataset.indexed_dataset import IndexedDataset, Piece
from mega_schema.errors import ConfigError
from mega_train.config.encoder_data import SampleRule
from mega_train.data.encoder.ngram_masker import MaskedTokens, NgramMasker

Ints = NDArray[np.int64]
Sample = dict[str, Ints]

SPECIAL_TOKENS = 2  # Megatron leaves room for a begin and an end
IGNORED = -1  # label of a token without a loss


@dataclass(frozen=True, slots=True)
class T5Rule:
    """The rule by which sentences become a sample of T5.

    Attributes:
        encoder_length, decoder_length: tokens of a sample with padding.
        seed: sample i draws from a generator of the seed `seed + i`.
        sample_rule: "mcore" gives masks of one row, as Megatron core 0.16; "legacy" gives the matrices of
            Megatron and of core through 0.9.
    """

    encoder_length: int
    decoder_length: int
    seed: int
    sample_rule: SampleRule = "mcore"


class T5Dataset:
    """Samples of a dataset by their mapping.

    Attributes:
        dataset: one sentence per sequence.
        mapping: (R, 3) first sentence, last + 1 and target length of each sample.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        mapping: NDArray[np.unsignedinteger],
        rule: T5Rule,
        masker: NgramMasker,
    ) -> None:
        self.dataset = dataset
        self.mapping = mapping
        self.rule = rule
        self.masker = masker

    def __len__(self) -> int:
        return len(self.mapping)

    def pieces(self, i: int) -> Sequence[Piece]:
        """Return the sentences of sample `i`."""
        first, stop, _ = self.mapping[i].tolist()
        return [(sentence, 0, None) for sentence in range(first, stop)]

    def __getitem__(self, i: int) -> Sample:
        """Return sample `i` in int64 arrays, with Megatron's names.

        `text_enc` is (encoder length,); `text_dec`, `labels` (-1 at padding) and `loss_mask` are (decoder
        length,); `truncated` is a scalar. `enc_mask` and `dec_mask` are 1 where a token is visible: a row
        each with the rule "mcore"; with "legacy" a matrix (query, key), and `enc_dec_mask` besides.

        Raises:
            ConfigError: the sample has more spans than sentinels, or does not fit the decoder.
            FormatError: a token is outside the tokenizer's vocabulary.
        """
        first, stop, target = self.mapping[i].tolist()
        seed = (self.rule.seed + i) % (1 << 32)
        tokens = np.concatenate([self.dataset[sentence] for sentence in range(first, stop)]).astype(np.int64)
        self.masker.vocabulary.check_tokens(tokens, self.dataset.prefix)
        masked = self.masker.mask(tokens[:target], target, np.random.RandomState(seed), seed)
        encoder, decoder, labels = self._replace_spans(masked, tokens, i)
        return {**self._pad(encoder, decoder, labels), "truncated": np.array(len(tokens) > target, np.int64)}

    def dataset_prefix(self, i: int) -> Path:
        """Return the prefix of the dataset."""
        return self.dataset.prefix

    def _replace_spans(self, masked: MaskedTokens, tokens: Ints, i: int) -> tuple[list[int], ...]:
        """Return the tokens of encoder and decoder, and the labels."""
        vocabulary = self.masker.vocabulary
        if len(masked.spans) > len(vocabulary.sentinels):
            raise ConfigError(
                "--vocab-extra-ids",
                f"too few sentinels for sample {i}",
                found=len(vocabulary.sentinels),
                wanted=f"{len(masked.spans)} or more",
                hint="a tokenizer with more, or a smaller --mask-prob",
            )
        encoder, target = list[int](), list[int]()
        begin = 0
        for span, sentinel in zip(masked.spans, vocabulary.sentinels, strict=False):
            encoder += [*masked.tokens[begin : span[0]].tolist(), sentinel]
            target += [sentinel, *tokens[span].tolist()]
            begin = span[-1] + 1
        encoder += masked.tokens[begin:].tolist()
        assert vocabulary.bos is not None, "the builder asks for both"
        assert vocabulary.eos is not None
        decoder, labels = [vocabulary.bos, *target], [*target, vocabulary.eos]
        if len(decoder) > self.rule.decoder_length:
            raise ConfigError(
                "--decoder-seq-length",
                f"too short for sample {i}",
                found=self.rule.decoder_length,
                wanted=f"{len(decoder)} or more",
                hint="a longer one, or a smaller --mask-prob",
            )
        return encoder, decoder, labels

    def _pad(self, encoder: list[int], decoder: list[int], labels: list[int]) -> Sample:
        pad = self.masker.vocabulary.pad
        text_enc = np.full(self.rule.encoder_length, pad, np.int64)
        text_dec, padded_labels, loss_mask = np.empty((3, self.rule.decoder_length), np.int64)
        text_enc[: len(encoder)] = encoder
        for padded, values, value in (
            (text_dec, decoder, pad),
            (padded_labels, labels, IGNORED),
            (loss_mask, [1] * len(decoder), 0),
        ):
            padded[: len(values)] = values
            padded[len(values) :] = value
        enc_mask, dec_mask = ((text != pad).astype(np.int64) for text in (text_enc, text_dec))
        masks = {"enc_mask": enc_mask, "dec_mask": dec_mask}
        if self.rule.sample_rule == "legacy":
            masks = {
                "enc_mask": np.outer(enc_mask, enc_mask),
                "dec_mask": np.tril(np.outer(dec_mask, dec_mask)),
                "enc_dec_mask": np.outer(dec_mask, enc_mask),
            }
        return {
            "text_enc": text_enc,
            "text_dec": text_dec,
            "labels": padded_labels,
            "loss_mask": loss_mask,
            **masks,
        }
