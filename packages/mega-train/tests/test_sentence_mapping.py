"""The mapping from samples to sentences equals Megatron's, and a loop over sentences for any corpus."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_train.data.encoder.mt19937_64 import MersenneTwister64, shuffle_order
from mega_train.data.encoder.sentence_mapping import LONG_SENTENCE, MappingRule, build_mapping

SENTENCES = "sent_uint16_text_sentence"


def test_the_mappings_are_megatrons(golden: Path, oracle: Callable[[str], Any]) -> None:
    dataset = IndexedDataset(golden / "indexed" / SENTENCES)
    cases = [case for case in oracle("bert_t5/cases.json")["mappings"] if case["case"].startswith("map_")]
    assert len(cases) == 4
    for case in cases:
        rule = MappingRule(
            case["max_seq_length_arg"], case["min_num_sent"], case["short_seq_prob"], case["seed"]
        )
        samples = None if case["num_epochs"] == 1 else case["max_num_samples"]
        mapping = build_mapping(dataset.documents, dataset.lengths, rule, samples)
        expected = np.load(golden / "bert_t5" / f"{case['case']}.npy")
        assert mapping.dtype == expected.dtype == np.uint32
        np.testing.assert_array_equal(mapping, expected, case["case"])


def _map_sentence_by_sentence(
    documents: list[int], lengths: list[int], rule: MappingRule, samples: int | None
) -> list[list[int]]:
    """Apply Megatron's rule to one sentence after another."""
    rng = np.random.RandomState(rule.seed)
    ratio = int(1 / rule.short_probability + 0.5) if rule.short_probability else 0

    def draw_target() -> int:
        if not ratio:
            return rule.target
        number = int(rng.randint(0, 1 << 32, dtype=np.uint32))
        return 2 + number % (rule.target - 1) if number % ratio == 0 else rule.target

    rows = list[list[int]]()
    while samples is None or len(rows) < samples:
        for begin, end in zip(documents[:-1], documents[1:], strict=True):
            has_long = end - begin > 1 and max(lengths[begin:end], default=0) > LONG_SENTENCE
            if end - begin < max(1, rule.min_sentences) or has_long:
                continue
            first, target = begin, draw_target()
            for stop in range(begin + 1, end + 1):
                is_full = sum(lengths[first:stop]) >= target and stop - first >= rule.min_sentences
                if stop == end or (is_full and end - stop > 1):
                    rows.append([first, stop, target])
                    first, target = stop, draw_target()
        if samples is None:
            break
    numbers = MersenneTwister64(rule.seed + 1).read(max(0, len(rows) - 1)).tolist()
    for last, number in zip(range(len(rows) - 1, 0, -1), numbers, strict=True):
        partner = number % (last + 1)
        rows[last], rows[partner] = rows[partner], rows[last]
    return rows


@given(
    documents=st.lists(
        st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 13, 40, 512, 513]), max_size=9), min_size=1, max_size=8
    ),
    target=st.sampled_from([2, 3, 9, 20, 33, 60]),
    min_sentences=st.sampled_from([1, 2]),
    short=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    seed=st.sampled_from([0, 1, 7, 42, 1234, 2**31 - 2]),
    samples=st.sampled_from([None, 1, 17]),
    leading=st.sampled_from([0, 3]),
)
def test_the_mapping_is_that_of_a_loop_over_sentences(
    documents: list[list[int]],
    target: int,
    min_sentences: int,
    short: float,
    seed: int,
    samples: int | None,
    leading: int,
) -> None:
    lengths = [7] * leading + [length for document in documents for length in document]
    bounds = np.cumsum([leading, *map(len, documents)])
    rule = MappingRule(target, min_sentences, short, seed)
    has_rows = build_mapping(bounds, np.array(lengths, np.int32), rule, None).size > 0
    mapping = build_mapping(bounds, np.array(lengths, np.int32), rule, samples)
    wanted = samples if has_rows else None
    assert mapping.tolist() == _map_sentence_by_sentence(bounds.tolist(), lengths, rule, wanted)


def test_a_twister_gives_the_numbers_of_the_cpp_standard() -> None:
    """Its clause on predefined generators states the 10,000th number of the default seed."""
    whole = MersenneTwister64(5489).read(10_000)
    assert whole[-1] == 9981545732273789042
    twister = MersenneTwister64(5489)
    pieces = [twister.read(count) for count in (0, 1, 311, 312, 313, 9063)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


@pytest.mark.parametrize("count", [0, 1, 2, 70_000])
def test_an_order_is_a_permutation(count: int) -> None:
    assert sorted(shuffle_order(count, 3).tolist()) == list(range(count))
