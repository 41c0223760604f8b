"""Samples of BERT and T5 equal Megatron Core's for random settings."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_train.data.encoder import bert_dataset, t5_dataset
from mega_train.data.encoder.bert_dataset import BertDataset, BertRule
from mega_train.data.encoder.ngram_masker import NgramMasker, NgramRule
from mega_train.data.encoder.sentence_mapping import MappingRule, build_mapping
from mega_train.data.encoder.t5_dataset import T5Dataset, T5Rule
from tests.encoder_fixture import toy_vocabulary
from tests.megatron_core import reference_process
from tests.megatron_core.encoder_data import draw_cases


def _open_samples(folder: Path, case: dict[str, Any]) -> BertDataset | T5Dataset:
    dataset = IndexedDataset(folder / case["prefix"])
    is_t5 = case["family"] == "t5"
    special_tokens = (t5_dataset if is_t5 else bert_dataset).SPECIAL_TOKENS
    min_sentences = 2 if case["has_pairs"] and not is_t5 else 1
    mapping_rule = MappingRule(
        case["length"] - special_tokens, min_sentences, case["short_seq_prob"], case["seed"]
    )
    first, stop = case["range"]
    mapping = build_mapping(
        dataset.documents[first : stop + 1], dataset.lengths, mapping_rule, case["samples"]
    )
    names = ("max_words", "is_whole_word", "favors_long", "is_geometric", "has_permutation")
    rule = NgramRule(**{name: case[name] for name in names})
    masker = NgramMasker(toy_vocabulary(), rule, case["mask_prob"], replaces=not is_t5)
    if is_t5:
        return T5Dataset(
            dataset, mapping, T5Rule(case["length"], case["decoder_length"], case["seed"]), masker
        )
    return BertDataset(dataset, mapping, BertRule(case["length"], case["seed"], case["has_pairs"]), masker)


def test_samples_of_bert_and_t5_are_theirs(tmp_path: Path) -> None:
    cases = draw_cases(tmp_path)
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    reference_process.run("tests.megatron_core.encoder_data:answer", tmp_path)
    compared = Counter[str]()
    with np.load(tmp_path / "answers.npz") as answers:
        for number, case in enumerate(cases):
            samples = _open_samples(tmp_path, case)
            mapping = answers[f"{number}/mapping"]
            assert samples.mapping.dtype == mapping.dtype
            np.testing.assert_array_equal(samples.mapping, mapping, str(case))
            for i in range(min(case["first_samples"], len(samples))):
                names = {name for name in answers.files if name.startswith(f"{number}/{i}/")}
                sample = samples[i]
                assert names == {f"{number}/{i}/{name}" for name in sample}
                for name, values in sample.items():
                    theirs = answers[f"{number}/{i}/{name}"]
                    np.testing.assert_array_equal(values, theirs, f"{name} of sample {i} of {case}")
                compared[case["family"]] += 1
    assert min(compared["bert"], compared["t5"]) > 150, compared
