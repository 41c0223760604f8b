"""Samples of BERT equal Megatron's, and their masking has the documented shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.errors import ConfigError
from mega_train.config.encoder_data import MaskType, SampleRule
from mega_train.data.encoder.bert_dataset import BertDataset, BertRule
from mega_train.data.encoder.ngram_masker import BERT_NGRAMS, NgramMasker
from mega_train.data.encoder.vocabulary import MaskingVocabulary
from tests.encoder_fixture import FIRST_WORD, toy_pieces, toy_vocabulary, write_sentences

MASK = 3


def _masker(mask_type: MaskType = "words", probability: float = 0.15) -> NgramMasker:
    return NgramMasker(toy_vocabulary(), BERT_NGRAMS[mask_type], probability, replaces=True)


@pytest.mark.parametrize("sample_rule", ["mcore", "legacy"])
def test_samples_are_megatrons(golden: Path, oracle: Callable[[str], Any], sample_rule: SampleRule) -> None:
    dataset = IndexedDataset(golden / "indexed" / "sent_uint16_text_sentence")
    compared = 0
    for case in oracle("bert_t5/cases.json")["samples"]:
        rule = BertRule(
            case["sequence_length"], case["seed"], case["extra"]["classification_head"], sample_rule
        )
        samples = BertDataset(dataset, np.array(case["sample_index"], np.uint32), rule, _masker())
        for number, expected in enumerate(case["samples"]):
            sample = samples[number]
            assert sample.keys() == expected.keys()
            for name, values in expected.items():
                assert sample[name].dtype == np.int64
                np.testing.assert_array_equal(sample[name], values, f"{case['case']} {number} {name}")
            compared += 1
    assert compared == 24


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    return write_sentences(tmp_path_factory.mktemp("sentences") / "toy", [[12, 9, 14, 11, 8, 10]] * 20)


def _samples(dataset: IndexedDataset, masker: NgramMasker, **changes: Any) -> list[Mapping[str, np.ndarray]]:
    mapping = np.array([[6 * i, 6 * i + 6, 64] for i in range(20)] * 40, np.uint32)
    rule = replace(BertRule(80, 7), **changes)
    samples = BertDataset(dataset, mapping, rule, masker)
    return [samples[i] for i in range(len(samples))]


def test_a_tenth_of_the_masked_tokens_is_kept_and_a_tenth_is_random(dataset: IndexedDataset) -> None:
    samples = _samples(dataset, _masker())
    masked = np.concatenate([sample["text"][sample["loss_mask"] == 1] for sample in samples])
    labels = np.concatenate([sample["labels"][sample["loss_mask"] == 1] for sample in samples])
    assert len(labels) > 7000
    assert np.mean(masked == MASK) == pytest.approx(0.8, abs=0.02)
    assert np.mean(masked == labels) == pytest.approx(0.1, abs=0.015)
    assert all((sample["labels"][sample["loss_mask"] == 0] == -1).all() for sample in samples)


def test_half_of_the_samples_have_swapped_segments_that_restore_the_text(dataset: IndexedDataset) -> None:
    samples = _samples(dataset, _masker(), length=80)
    assert np.mean([sample["is_random"] for sample in samples]) == pytest.approx(0.5, abs=0.06)
    for number, sample in enumerate(samples[:40]):
        text = np.where(sample["labels"] >= 0, sample["labels"], sample["text"])
        assert (text != 2).sum() + 2 == len(text)
        first, second = (text[(sample["types"] == kind) & (text >= FIRST_WORD)] for kind in (0, 1))
        if sample["is_random"]:
            first, second = second, first
        words = np.concatenate([dataset[6 * (number % 20) + i] for i in range(6)])
        assert len(first) + len(second) == words.size == 64
        np.testing.assert_array_equal(np.concatenate([first, second]), words)


def test_words_are_masked_whole_and_pieces_by_themselves(dataset: IndexedDataset) -> None:
    is_continuation = toy_vocabulary().is_continuation

    def split_words(mask_type: MaskType) -> int:
        """Count masked pieces whose neighbour of the same word is not masked."""
        count = 0
        for sample in _samples(dataset, _masker(mask_type), has_pairs=False):
            text = np.where(sample["labels"] >= 0, sample["labels"], sample["text"])
            joins = is_continuation[text[2:]] & (text[1:-1] >= FIRST_WORD)
            count += int((joins & (np.diff(sample["loss_mask"][1:]) != 0)).sum())
        return count

    assert split_words("words") == 0
    assert split_words("pieces") > 100


def test_single_tokens_are_masked_with_the_given_probability() -> None:
    masked = _masker("tokens", 0.3).mask(np.arange(5, 105), 100, np.random.RandomState(3), 3)
    assert [len(span) for span in masked.spans] == [1] * 30
    assert masked.positions.tolist() == sorted(position for span in masked.spans for position in span)


def test_permuted_tokens_have_a_loss_and_stay_in_the_sample(dataset: IndexedDataset) -> None:
    word_samples = _samples(dataset, _masker("words"))
    permuted_samples = _samples(dataset, _masker("permutation"))
    repeated_samples = _samples(dataset, _masker("permutation"))
    for plain, sample, repeat in zip(word_samples, permuted_samples, repeated_samples, strict=True):
        assert all(np.array_equal(sample[name], repeat[name]) for name in sample)
        extra = (sample["loss_mask"] == 1) & (plain["loss_mask"] == 0)
        assert extra.any()
        assert (
            sorted(sample["text"][extra]) == sorted(sample["labels"][extra]) == sorted(plain["text"][extra])
        )


def test_a_random_padding_token_is_hidden_by_the_rule_of_megatron_core_only(dataset: IndexedDataset) -> None:
    pairs = zip(
        _samples(dataset, _masker(probability=0.9)),
        _samples(dataset, _masker(probability=0.9), sample_rule="legacy"),
        strict=True,
    )
    hidden = 0
    for core, legacy in pairs:
        np.testing.assert_array_equal(core["text"], legacy["text"])
        assert legacy["padding_mask"].sum() == 67
        hidden += int(67 - core["padding_mask"].sum())
    assert hidden > 0


@pytest.mark.parametrize("word", ["CLS", "SEP", "MASK", "PAD"])
def test_a_tokenizer_without_a_special_token_is_refused(word: str) -> None:
    pieces = [piece for piece in toy_pieces() if piece != f"[{word}]"]
    with pytest.raises(ConfigError) as caught:
        MaskingVocabulary.from_pieces(pieces, "GPT2BPETokenizer")
    assert str(caught.value) == (
        f"--tokenizer-type: has no [{word}]: found GPT2BPETokenizer, wanted a tokenizer of BERT; "
        "hint: --tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt"
    )
