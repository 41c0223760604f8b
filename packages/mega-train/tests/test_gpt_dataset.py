"""The sample order equals Megatron's arrays, and a slow reference for any corpus."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_schema.dataset.indexed_dataset import IndexedDataset, IndexedWriter
from mega_train.data.gpt_dataset import GPTDataset, SampleIndex, build_sample_index, plan_epochs


def _build_index(
    lengths: np.ndarray,
    sequences: np.ndarray,
    *,
    length: int,
    samples: int | None,
    seed: int = 1,
    extra: int = 1,
    keep_partial: bool = False,
) -> SampleIndex:
    tokens = int(lengths[sequences].sum())
    todo = plan_epochs(tokens, length=length, samples=samples, extra=extra, keep_partial=keep_partial)
    assert todo is not None
    return build_sample_index(lengths, sequences, todo, seed)


def _index(case: dict[str, Any], corpus: IndexedDataset) -> SampleIndex:
    return _build_index(
        corpus.lengths,
        np.arange(*case["document_range"], dtype=np.int32),
        length=case["sequence_length"],
        samples=case["num_samples"],
        seed=case["seed"],
        extra=int(case.get("add_extra_token_to_sequence", True)),
        keep_partial=not case.get("drop_last_partial_validation_sequence", True),
    )


def test_the_arrays_and_samples_are_megatron_cores(golden: Path, oracle: Callable[[str], Any]) -> None:
    cases = oracle("gpt_mcore/cases.json")
    assert len(cases) >= 9
    assert any(not case["drop_last_partial_validation_sequence"] for case in cases)
    for case in cases:
        name, corpus = case["case"], IndexedDataset(golden / "indexed" / case["prefix"])
        index = _index(case, corpus)
        arrays = {"document": index.document, "sample": index.sample, "shuffle": index.shuffle}
        for (array, ours), dtype in zip(arrays.items(), case["dtypes"], strict=True):
            theirs = np.load(golden / "gpt_mcore" / f"{name}_{array}_index.npy")
            assert ours.dtype == theirs.dtype == np.dtype(dtype), (name, array)
            np.testing.assert_array_equal(ours, theirs, f"{name} {array}")
        assert (len(index), index.epochs) == (case["len_dataset"], case["num_epochs"]), name
        samples = GPTDataset(corpus, index, extra=int(case["add_extra_token_to_sequence"]))
        for number, sample in enumerate(case["first_samples"]):
            assert samples[number].dtype == np.int64
            assert samples[number].tolist() == sample["text"], (name, number)


def test_the_arrays_and_samples_are_those_of_megatron_before_core(
    golden: Path, oracle: Callable[[str], Any]
) -> None:
    cases = oracle("gpt_legacy/cases.json")
    assert len(cases) >= 4
    for case in cases:
        name, corpus = case["case"], IndexedDataset(golden / "indexed" / case["prefix"])
        index = _index(case, corpus)
        arrays = {"doc": index.document, "sample": index.sample, "shuffle": index.shuffle}
        for array, ours in arrays.items():  # its sample array is int32, core's int64: the numbers are one
            theirs = np.load(golden / "gpt_legacy" / f"{name}_{array}_idx.npy")
            np.testing.assert_array_equal(ours, theirs, f"{name} {array}")
        samples = GPTDataset(corpus, index)
        for number, tokens in enumerate(case["first_samples"]):
            assert samples[number].tolist() == tokens, (name, number)


def _write_corpus(folder: Path, lengths: list[int]) -> IndexedDataset:
    """A corpus whose tokens are all different: 0, 1, 2, …"""
    prefix = folder / f"c{abs(hash(tuple(lengths)))}"
    first = 0
    with IndexedWriter(prefix, np.int32) as out:
        for length in lengths:
            out.add(np.arange(first, first + length))
            out.end_document()
            first += length
    return IndexedDataset(prefix)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(lambda x: sum(x) > 1),
    length=st.integers(1, 9),
    wanted=st.one_of(st.none(), st.integers(1, 40)),
    seed=st.integers(0, 1 << 31),
)
def test_every_token_of_the_stream_is_read_once_in_a_pass(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int, wanted: int | None, seed: int
) -> None:
    if wanted is None and (sum(lengths) - 1) // length < 1:
        return
    corpus = _write_corpus(tmp_path_factory.mktemp("c"), lengths)
    sequences = np.arange(len(lengths), dtype=np.int32)
    index = _build_index(corpus.lengths, sequences, length=length, samples=wanted, seed=seed)
    # the slow walker: the stream token by token, cut where a person would cut it
    stream = [int(token) for document in index.document for token in corpus[int(document)]]
    count = (len(stream) - 1) // length
    cut = [stream[i * length : (i + 1) * length + 1] for i in range(count)]
    assert sorted(index.shuffle.tolist()) == list(range(count))
    samples = GPTDataset(corpus, index)
    for place, number in enumerate(index.shuffle.tolist()):
        assert samples[place].tolist() == cut[number]
    assert count >= (wanted or 1)
    assert np.bincount(index.document, minlength=len(lengths)).tolist() == [index.epochs] * len(lengths)


@pytest.mark.parametrize("extra", [0, 1])
def test_the_samples_of_one_pass_hold_every_token_where_the_length_divides(
    tmp_path: Path, extra: int
) -> None:
    corpus = _write_corpus(tmp_path, [4, 0, 7, 1, 8])
    index = _build_index(
        corpus.lengths, np.arange(5, dtype=np.int32), length=5, samples=None, seed=1, extra=extra
    )
    samples = GPTDataset(corpus, index, extra=extra)
    read = [samples[i] for i in range(len(samples))]
    assert all(len(sample) == 5 + extra for sample in read)
    inputs = np.concatenate([sample[:5] for sample in read])
    assert len(set(inputs.tolist())) == len(inputs) == (20 - extra) // 5 * 5


def test_the_last_epoch_is_shuffled_by_itself_where_little_of_it_is_needed() -> None:
    lengths = np.full(50, 20, np.int32)
    numbers = np.arange(50, dtype=np.int32)
    # 99 samples a pass: under 79 of the second, which is int(0.8 · 99), and from there on
    little = _build_index(lengths, numbers, length=10, samples=99 + 78, seed=1)
    much = _build_index(lengths, numbers, length=10, samples=99 + 79, seed=1)
    assert little.epochs == much.epochs == 2
    assert sorted(little.document[:50].tolist()) == list(range(50)), (
        "the first epoch whole, before the second"
    )
    assert sorted(much.document[:50].tolist()) != list(range(50))
    assert little.shuffle[:99].max() < 99


def test_the_order_depends_on_the_number_of_passes_and_not_on_the_number_of_samples() -> None:
    lengths, numbers = np.full(50, 20, np.int32), np.arange(50, dtype=np.int32)
    fewer, more, repeat = (
        _build_index(lengths, numbers, length=10, samples=samples, seed=1) for samples in (50, 90, 190)
    )
    assert (fewer.epochs, more.epochs, repeat.epochs) == (1, 1, 2)
    np.testing.assert_array_equal(fewer.shuffle, more.shuffle)
    np.testing.assert_array_equal(fewer.document, more.document)
    assert fewer.shuffle[:50].tolist() != repeat.shuffle[:50].tolist()


@pytest.mark.parametrize(("tokens", "samples"), [(6, None), (1, 5), (0, 2), (8, None)])
def test_too_few_tokens_make_no_sample(tokens: int, samples: int | None) -> None:
    assert plan_epochs(tokens, length=8, samples=samples) is None
    assert plan_epochs(tokens + 9, length=8, samples=samples) is not None


def test_the_last_epoch_is_shuffled_with_the_others_where_most_of_it_is_needed() -> None:
    """BigScience's limit is higher: 99 samples a pass, of the second 80."""
    theirs, ours = (plan_epochs(991, length=10, samples=99 + 80, separate_below=b) for b in (0.95, 0.80))
    assert theirs is not None
    assert ours is not None
    assert (theirs.first, ours.first) == (99, None)


def test_a_file_that_is_read_gives_the_samples_of_a_file_that_is_mapped(tmp_path: Path) -> None:
    corpus = _write_corpus(tmp_path, [4, 0, 7, 1, 8])
    index = _build_index(corpus.lengths, np.arange(5, dtype=np.int32), length=5, samples=3)
    mapped, read = GPTDataset(corpus, index), GPTDataset(corpus, index, copy=True)
    assert [sample.tolist() for sample in mapped] == [sample.tolist() for sample in read]
