"""Samples of BERT and T5 are split by documents, blended and cached; wrong data and options are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from mega_model.distributed.mesh import Mesh
from mega_schema.errors import ConfigError, FormatError
from mega_schema.tokenizer.tokenizer import open_tokenizer
from mega_train.config import DataConfig
from mega_train.config.encoder_data import EncoderDataConfig, EncoderFamily, MaskType
from mega_train.data.cache_folders import CACHE_FOLDER
from mega_train.data.datasets import Datasets
from mega_train.data.encoder import encoder_splits
from mega_train.data.encoder.encoder_splits import EncoderSplits, build_encoder_splits
from mega_train.data.encoder.sentence_mapping import MappingRule, build_mapping
from mega_train.data.encoder.vocabulary import MaskingVocabulary
from mega_train.data.splits_config import DataSplitsConfig
from tests.encoder_fixture import toy_pieces, toy_vocabulary, write_sentences


def _build(
    words: tuple[str, ...],
    family: EncoderFamily = "bert",
    *,
    split: str = "80,20,0",
    vocabulary: MaskingVocabulary | None = None,
    options: EncoderDataConfig | None = None,
    **changes: Any,
) -> EncoderSplits:
    data = DataConfig(path=words, split=split)
    config = DataSplitsConfig(
        options=data, seq_length=64, seed=7, train_samples=90, valid_samples=10, test_samples=10
    )
    return build_encoder_splits(
        family,
        options or EncoderDataConfig(),
        replace(config, **changes),
        Datasets.open(data),
        vocabulary or toy_vocabulary(),
        Mesh(),
    )


@pytest.fixture
def prefixes(tmp_path: Path) -> tuple[str, str]:
    first, second = tmp_path / "first", tmp_path / "second"
    write_sentences(first, [[9, 12, 20, 15, 7]] * 30, seed=1)
    write_sentences(second, [[5, 8, 31]] * 10, seed=2)
    return str(first), str(second)


def _assert_equal(sample: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert sample.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(sample[name], values, name)


@pytest.mark.parametrize(("family", "target", "sentences"), [("bert", 61, 2), ("t5", 62, 1)])
def test_splits_are_ranges_of_documents(
    prefixes: tuple[str, str], family: EncoderFamily, target: int, sentences: int
) -> None:
    splits = _build(prefixes[:1], family)
    assert (list(splits.validation), splits.test) == (["validation"], {})
    dataset = Datasets.open(DataConfig(path=prefixes[:1])).by_prefix[Path(prefixes[0])]
    rule = MappingRule(target, sentences, 0.1, 7)
    for split, documents, samples in (
        (splits.training, dataset.documents[:25], 90),
        (splits.validation["validation"], dataset.documents[24:], 10),
    ):
        mapping = build_mapping(documents, dataset.lengths, rule, samples)
        assert len(split) == len(mapping) >= samples
        np.testing.assert_array_equal(split.parts[0].mapping, mapping)
    assert splits.training.dataset_prefix(0) == Path(prefixes[0])


def test_a_blend_takes_its_samples_from_each_part_by_weight(prefixes: tuple[str, str]) -> None:
    first, second = prefixes
    training = _build(("0.75", first, "0.25", second)).training
    parts = [_build((prefix,), train_samples=count).training for prefix, count in ((first, 68), (second, 23))]
    assert len(training) == 68 + 23
    counts = [0, 0]
    for i in range(len(training)):
        part = (first, second).index(str(training.dataset_prefix(i)))
        _assert_equal(training[i], parts[part][counts[part]])
        counts[part] += 1
    assert counts == [68, 23]


def test_a_blend_without_weights_has_one_epoch_of_each_part(prefixes: tuple[str, str]) -> None:
    training = _build(prefixes, train_samples=10**6).training
    assert len(training) == sum(map(len, training.parts))


def test_mappings_are_cached_beside_the_data(
    prefixes: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("0.5", prefixes[0], "0.5", prefixes[1])
    splits = _build(words)
    folder = Path(prefixes[0]).parent / CACHE_FOLDER
    names = sorted(path.name.rpartition("-")[0] for path in folder.glob("*-*"))
    assert names == ["bert-samples"] * 4 + ["blend"] * 2
    monkeypatch.setattr(encoder_splits, "build_mapping", None)
    _assert_equal(_build(words).training[3], splits.training[3])
    with pytest.raises(TypeError, match="not callable"):
        _build(words, seed=8)


def test_every_mask_type_builds_samples(prefixes: tuple[str, str]) -> None:
    def texts(**options: Any) -> list[list[int]]:
        training = _build(prefixes[:1], options=EncoderDataConfig(**options)).training
        return [training[i]["text"].tolist() for i in range(len(training))]

    kinds = [texts(mask_type=kind) for kind in get_args(MaskType)]
    assert all(kinds.count(kind) == 1 for kind in kinds)
    assert texts(no_binary_head=True) not in kinds


def test_a_dataset_that_is_not_split_into_sentences_is_refused(tmp_path: Path) -> None:
    write_sentences(tmp_path / "whole", [[90], [], [40]])
    expected = (
        f"{tmp_path / 'whole'}: is not split into sentences: found 3 documents with at most one sequence, "
        "wanted a sequence for each sentence; hint: mega-data preprocess --split-sentences"
    )
    for family in ("bert", "t5"):
        with pytest.raises(FormatError) as caught:
            _build((str(tmp_path / "whole"),), family, split="1,0,0")
        assert str(caught.value) == expected
    write_sentences(tmp_path / "short", [[9], [20]])
    assert len(_build((str(tmp_path / "short"),), "t5", split="1,0,0").training) == 90


def test_documents_that_give_no_sample_are_refused(tmp_path: Path) -> None:
    write_sentences(tmp_path / "long", [[600, 9], [5], [5, 5]])
    with pytest.raises(ConfigError) as caught:
        _build((str(tmp_path / "long"),), split="2,1,0")
    assert str(caught.value) == (
        "--data-path: the training split contains no document that gives a sample: found 2 documents, wanted "
        "2 sentences or more, each of at most 512 tokens; hint: another --split or more data; for validation "
        "also --eval-iters 0"
    )


@pytest.mark.parametrize(
    ("family", "changes", "line"),
    [
        (
            "bert",
            {"seq_length": 4},
            "--seq-length: too short for 3 special tokens and text: found 4, wanted 5 or more",
        ),
        (
            "t5",
            {"seq_length": 3},
            "--seq-length: too short for 2 special tokens and text: found 3, wanted 4 or more",
        ),
        (
            "bert",
            {"options": EncoderDataConfig(mask_prob=0.0)},
            "--mask-prob: out of range: found 0.0, wanted between 0 and 1",
        ),
        (
            "t5",
            {"options": EncoderDataConfig(short_seq_prob=1.5)},
            "--short-seq-prob: out of range: found 1.5, wanted 0 to 1",
        ),
        (
            "t5",
            {"vocabulary": toy_vocabulary(0)},
            "--vocab-extra-ids: the tokenizer has no sentinels for T5: found 0, wanted [BOS], [EOS], "
            "<extra_id_0> and so on; hint: mega-data preprocess --vocab-extra-ids 100",
        ),
    ],
)
def test_options_out_of_range_are_refused(
    prefixes: tuple[str, str], family: EncoderFamily, changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        _build(prefixes[:1], family, **changes)
    assert str(caught.value) == line


def test_a_vocabulary_is_read_from_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(toy_pieces()[:202]) + "\n")
    tokenizer = open_tokenizer("BertWordPieceLowerCase", vocab_file=path, vocab_extra_ids=100)
    vocabulary, expected = MaskingVocabulary.from_tokenizer(tokenizer), toy_vocabulary()
    np.testing.assert_array_equal(vocabulary.ids, expected.ids)
    np.testing.assert_array_equal(vocabulary.is_continuation, expected.is_continuation)
    names = ("cls", "sep", "mask", "pad", "bos", "eos", "sentinels")
    assert [getattr(vocabulary, name) for name in names] == [getattr(expected, name) for name in names]
    line = r"^--tokenizer-type: has no \[CLS\] and no \[SEP\] and no .*: found NullTokenizer"
    with pytest.raises(ConfigError, match=line):
        MaskingVocabulary.from_tokenizer(open_tokenizer("NullTokenizer", vocab_size=9))
