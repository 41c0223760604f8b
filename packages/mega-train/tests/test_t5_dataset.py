"""Samples of T5 restore the text, and too few sentinels or a short decoder are refused."""

from __future__ import annotations

import numpy as np
import pytest

from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.errors import ConfigError
from mega_train.config.encoder_data import SampleRule
from mega_train.data.encoder.ngram_masker import T5_NGRAMS, NgramMasker
from mega_train.data.encoder.t5_dataset import T5Dataset, T5Rule
from tests.encoder_fixture import toy_vocabulary, write_sentences

BOS, EOS, FIRST_SENTINEL = 202, 203, 204
SAMPLES = 60


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    return write_sentences(tmp_path_factory.mktemp("sentences") / "toy", [[12, 9, 14, 11]] * SAMPLES)


def _open(
    dataset: IndexedDataset,
    *,
    sentinels: int = 100,
    decoder_length: int = 32,
    sample_rule: SampleRule = "mcore",
) -> T5Dataset:
    mapping = np.array([[4 * i, 4 * i + 4, 40 if i % 2 else 64] for i in range(SAMPLES)], np.uint32)
    masker = NgramMasker(toy_vocabulary(sentinels), T5_NGRAMS, 0.15, replaces=False)
    return T5Dataset(dataset, mapping, T5Rule(66, decoder_length, 11, sample_rule), masker)


def test_the_decoder_has_the_spans_that_the_encoder_lacks(dataset: IndexedDataset) -> None:
    samples = _open(dataset)
    assert len(samples) == SAMPLES
    longest_span = 0
    for number in range(SAMPLES):
        sample = samples[number]
        decoder = sample["text_dec"][sample["loss_mask"] == 1]
        labels = sample["labels"][sample["loss_mask"] == 1]
        np.testing.assert_array_equal(decoder[1:], labels[:-1])
        assert (decoder[0], labels[-1]) == (BOS, EOS)
        starts = np.flatnonzero(labels >= FIRST_SENTINEL)
        spans = np.split(labels[:-1], starts)[1:]
        assert [span[0] for span in spans] == [FIRST_SENTINEL + i for i in range(len(spans))]
        text = list[int]()
        for token in sample["text_enc"][sample["enc_mask"] == 1]:
            text += spans[token - FIRST_SENTINEL][1:].tolist() if token >= FIRST_SENTINEL else [int(token)]
        words = np.concatenate([dataset[4 * number + i] for i in range(4)])
        np.testing.assert_array_equal(text, words[: 40 if number % 2 else 64])
        assert sample["truncated"] == number % 2
        longest_span = max(longest_span, *(len(span) - 1 for span in spans))
    assert longest_span > 3


def test_legacy_masks_are_the_matrices_of_the_rows(dataset: IndexedDataset) -> None:
    core, legacy = _open(dataset)[0], _open(dataset, sample_rule="legacy")[0]
    enc, dec = core["enc_mask"], core["dec_mask"]
    assert (enc.shape, dec.shape) == ((66,), (32,))
    np.testing.assert_array_equal(legacy["enc_mask"], enc[:, None] * enc)
    np.testing.assert_array_equal(legacy["enc_dec_mask"], dec[:, None] * enc)
    causal = np.arange(32)[:, None] >= np.arange(32)
    np.testing.assert_array_equal(legacy["dec_mask"], dec[:, None] * dec * causal)
    assert core.keys() == legacy.keys() - {"enc_dec_mask"}


def _first_error(samples: T5Dataset) -> str:
    with pytest.raises(ConfigError) as caught:
        samples[0]
    return str(caught.value)


def test_too_few_sentinels_and_a_short_decoder_are_refused(dataset: IndexedDataset) -> None:
    assert _first_error(_open(dataset, sentinels=1)) == (
        "--vocab-extra-ids: too few sentinels for sample 0: found 1, wanted 3 or more; "
        "hint: a tokenizer with more, or a smaller --mask-prob"
    )
    assert _first_error(_open(dataset, decoder_length=8)) == (
        "--decoder-seq-length: too short for sample 0: found 8, wanted 11 or more; "
        "hint: a longer one, or a smaller --mask-prob"
    )
