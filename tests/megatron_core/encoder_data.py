"""Megatron Core's samples of BERT and T5 for generated cases."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.encoder_fixture import toy_pieces, write_sentences

Case = dict[str, Any]
SENTENCE_LENGTHS = (1, 2, 5, 9, 17, 30, 61)


def draw_cases(folder: Path, seed: int = 17) -> list[Case]:
    """Write datasets of sentences, and draw settings for each kind of sample."""
    rng = random.Random(seed)
    prefixes = list[str]()
    for number in range(3):
        documents = [
            [rng.choice(SENTENCE_LENGTHS) for _ in range(rng.choice((0, 1, 2, 3, 8)))] for _ in range(40)
        ]
        # every token of a BERT segment can be truncated away only if there is one
        documents = [_draw_document(rng) for _ in range(40)]
        write_sentences(folder / f"sentences-{number}", documents, seed=number)
        prefixes.append(f"sentences-{number}")
    return [_draw_case(rng, number, prefixes) for number in range(60)]


def _draw_document(rng: random.Random) -> list[int]:
    return [rng.choice(SENTENCE_LENGTHS) for _ in range(rng.choice((0, 1, 2, 3, 8)))]


def _draw_case(rng: random.Random, number: int, prefixes: list[str]) -> Case:
    is_t5 = number % 3 == 0
    is_geometric = is_t5 or rng.random() < 0.2
    return {
        "family": "t5" if is_t5 else "bert",
        "prefix": rng.choice(prefixes),
        "length": rng.choice((16, 40, 64, 128)),
        "decoder_length": 160,
        "seed": rng.choice((0, 7, 1234)),
        "samples": rng.choice((1, 5, 100)),  # theirs cannot be without a number
        "range": rng.choice(([0, 40], [5, 31])),
        "mask_prob": rng.choice((0.05, 0.15, 0.3, 0.8)),
        "short_seq_prob": rng.choice((0.0, 0.1, 0.5)),
        "has_pairs": rng.random() < 0.6,
        "max_words": 10 if is_geometric else rng.choice((1, 3, 4)),
        "is_whole_word": is_t5 or rng.random() < 0.7,
        "favors_long": not is_geometric and rng.random() < 0.3,
        "is_geometric": is_geometric,
        "has_permutation": not is_geometric and rng.random() < 0.3,
        "first_samples": 12,
    }


def answer(folder: Path) -> None:
    """Write the mapping and the first samples of every case of `cases.json`."""
    arrays = dict[str, np.ndarray]()
    for number, case in enumerate(json.loads((folder / "cases.json").read_text())):
        dataset = _open_dataset(folder, case)
        arrays[f"{number}/mapping"] = np.array(dataset.sample_index)
        for i in range(min(case["first_samples"], len(dataset))):
            # the permutation draws from the global generator
            np.random.seed((case["seed"] + i) % 2**32)
            for name, values in dataset[i].items():
                arrays[f"{number}/{i}/{name}"] = np.asarray(values)
    np.savez(folder / "answers.npz", **arrays)


def _tokenizer() -> Any:
    pieces = toy_pieces()
    return SimpleNamespace(
        cls=1,
        sep=2,
        mask=3,
        pad=0,
        bos=202,
        eos=203,
        additional_special_tokens_ids=list(range(204, len(pieces))),
        inv_vocab=dict(enumerate(pieces)),
        vocab_size=len(pieces),
        unique_identifiers={"pieces": len(pieces)},
    )


def _open_dataset(folder: Path, case: Case) -> Any:
    from megatron.core.datasets.bert_dataset import (
        BERTMaskedWordPieceDataset,
        BERTMaskedWordPieceDatasetConfig,
    )
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
    from megatron.core.datasets.utils import Split

    is_t5 = case["family"] == "t5"
    prefix = str(folder / case["prefix"])
    values = {
        "random_seed": case["seed"],
        "sequence_length": case["length"],
        "blend": ([prefix], None),
        "split": "1,0,0",
        "path_to_cache": str(folder / "cache"),
        "tokenizer": _tokenizer(),
        "masking_probability": case["mask_prob"],
        "short_sequence_probability": case["short_seq_prob"],
        "masking_max_ngram": case["max_words"],
        "masking_do_full_word": case["is_whole_word"],
        "masking_do_permutation": case["has_permutation"],
        "masking_use_longer_ngrams": case["favors_long"],
        "masking_use_geometric_distribution": case["is_geometric"],
    }
    numbers = np.arange(*case["range"])
    arguments = (IndexedDataset(prefix), prefix, numbers, case["samples"], Split.train)
    if is_t5:
        config = T5MaskedWordPieceDatasetConfig(**values, sequence_length_decoder=case["decoder_length"])
        return T5MaskedWordPieceDataset(*arguments, config)
    config = BERTMaskedWordPieceDatasetConfig(**values, classification_head=case["has_pairs"])
    return BERTMaskedWordPieceDataset(*arguments, config)
