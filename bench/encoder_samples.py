"""Time the sample mapping and the samples of BERT and T5, alternating with Megatron Core if it is installed.

    python bench/encoder_samples.py --json bench/results/DATE-encoder-samples.json

Prints processor seconds of a mapping of one epoch, whose reference is Megatron's C++ helper, and processor
microseconds of a sample, whose reference is Megatron's Python. Both sides give equal arrays.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mega_schema.dataset.indexed_dataset import IndexedDataset, IndexedWriter
from mega_train.config.encoder_data import EncoderFamily
from mega_train.data.encoder.bert_dataset import BertDataset, BertRule
from mega_train.data.encoder.ngram_masker import BERT_NGRAMS, T5_NGRAMS, NgramMasker
from mega_train.data.encoder.sentence_mapping import MappingRule, build_mapping
from mega_train.data.encoder.t5_dataset import T5Dataset, T5Rule
from mega_train.data.encoder.vocabulary import MaskingVocabulary

LENGTH = 512  # tokens of a sample
DECODER_LENGTH = 256
SEED = 1234
MASK_PROB = 0.15
SHORT_PROB = 0.1
VOCABULARY = 30_000
DOCUMENT = 25  # sentences on average
MAX_SAMPLES = 2**62

Work = Callable[[], object]


def time_in_turns(works: Mapping[str, Work], rounds: int) -> dict[str, float]:
    """Return the median processor seconds of each work, and the ratio of the first to the second."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            start = time.process_time()
            work()
            seconds[name].append(time.process_time() - start)
    result = {name: statistics.median(values) for name, values in seconds.items()}
    if len(works) == 2:
        ours, theirs = seconds.values()
        result["ratio"] = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return result


def time_mapping(sentences: int, rounds: int, *, has_peer: bool) -> dict[str, float]:
    """Time the mapping of one epoch of `sentences` sentences of 3 to 44 tokens."""
    rng = np.random.default_rng(7)
    lengths = rng.integers(3, 45, sentences).astype(np.int32)
    inner = np.sort(rng.choice(np.arange(1, sentences), sentences // DOCUMENT, replace=False))
    documents = np.concatenate([[0], inner, [sentences]]).astype(np.int64)
    rule = MappingRule(LENGTH - 3, 2, SHORT_PROB, SEED)
    works: dict[str, Work] = {"ours": lambda: build_mapping(documents, lengths, rule, None)}
    if has_peer:
        from megatron.core.datasets import helpers

        arguments = (1, MAX_SAMPLES, rule.target, SHORT_PROB, SEED, False, 2)
        works["megatron-core"] = lambda: helpers.build_mapping(documents, lengths, *arguments)
        np.testing.assert_array_equal(works["ours"](), works["megatron-core"]())
    return time_in_turns(works, rounds)


def toy_pieces() -> list[str]:
    """Return a vocabulary whose every third token continues a word, with 100 sentinels."""
    words = [f"##{i}" if i % 3 == 0 else f"w{i}" for i in range(5, VOCABULARY)]
    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
    return [*special, *words, "[BOS]", "[EOS]", *(f"<extra_id_{i}>" for i in range(100))]


def write_sentences(prefix: Path, documents: int) -> IndexedDataset:
    """Write documents of sentences of 3 to 44 tokens."""
    rng = np.random.default_rng(7)
    with IndexedWriter(prefix, np.uint16) as out:
        for _ in range(documents):
            for length in rng.integers(3, 45, DOCUMENT):
                out.add(rng.integers(5, VOCABULARY, length))
            out.end_document()
    return IndexedDataset(prefix)


def open_peer(family: EncoderFamily, prefix: Path, documents: int, folder: Path) -> Any:
    """Open the dataset of Megatron Core."""
    from megatron.core.datasets import bert_dataset, t5_dataset
    from megatron.core.datasets.indexed_dataset import IndexedDataset as PeerDataset
    from megatron.core.datasets.utils import Split

    pieces = toy_pieces()
    is_t5 = family == "t5"
    tokenizer = SimpleNamespace(
        cls=1,
        sep=2,
        mask=3,
        pad=0,
        bos=VOCABULARY,
        eos=VOCABULARY + 1,
        additional_special_tokens_ids=list(range(VOCABULARY + 2, len(pieces))),
        inv_vocab=dict(enumerate(pieces)),
        unique_identifiers={"pieces": len(pieces)},
    )
    values = {
        "random_seed": SEED,
        "sequence_length": LENGTH,
        "blend": ([str(prefix)], None),
        "split": "1,0,0",
        "path_to_cache": str(folder),
        "tokenizer": tokenizer,
        "masking_probability": MASK_PROB,
        "short_sequence_probability": SHORT_PROB,
        "masking_max_ngram": (T5_NGRAMS if is_t5 else BERT_NGRAMS["words"]).max_words,
        "masking_do_full_word": True,
        "masking_do_permutation": False,
        "masking_use_longer_ngrams": False,
        "masking_use_geometric_distribution": is_t5,
    }
    arguments = (PeerDataset(str(prefix)), str(prefix), np.arange(documents), 1, Split.train)
    if is_t5:
        config = t5_dataset.T5MaskedWordPieceDatasetConfig(**values, sequence_length_decoder=DECODER_LENGTH)
        return t5_dataset.T5MaskedWordPieceDataset(*arguments, config)
    bert_config = bert_dataset.BERTMaskedWordPieceDatasetConfig(**values, classification_head=True)
    return bert_dataset.BERTMaskedWordPieceDataset(*arguments, bert_config)


def open_samples(family: EncoderFamily, dataset: IndexedDataset) -> BertDataset | T5Dataset:
    """Open one epoch of samples."""
    vocabulary = MaskingVocabulary.from_pieces(toy_pieces(), "toy")
    is_t5 = family == "t5"
    special_tokens, sentences = (2, 1) if is_t5 else (3, 2)
    mapping_rule = MappingRule(LENGTH - special_tokens, sentences, SHORT_PROB, SEED)
    mapping = build_mapping(dataset.documents, dataset.lengths, mapping_rule, None)
    if is_t5:
        masker = NgramMasker(vocabulary, T5_NGRAMS, MASK_PROB, replaces=False)
        return T5Dataset(dataset, mapping, T5Rule(LENGTH, DECODER_LENGTH, SEED), masker)
    masker = NgramMasker(vocabulary, BERT_NGRAMS["words"], MASK_PROB, replaces=True)
    return BertDataset(dataset, mapping, BertRule(LENGTH, SEED), masker)


def time_samples(
    family: EncoderFamily, folder: Path, samples: int, rounds: int, *, has_peer: bool
) -> dict[str, float]:
    """Time the reading of samples; the ratio is in parts, the others are microseconds of one sample."""
    documents = samples
    dataset = write_sentences(folder / family, documents)
    ours = open_samples(family, dataset)

    def read(data: Any) -> Work:
        return lambda: [data[i] for i in range(samples)]

    works = {"ours": read(ours)}
    if has_peer:
        theirs = open_peer(family, dataset.prefix, documents, folder / "cache")
        for i in range(20):
            sample, expected = ours[i], theirs[i]
            for name in expected:
                np.testing.assert_array_equal(sample[name], expected[name], name)
        works["megatron-core"] = read(theirs)
    result = time_in_turns(works, rounds)
    return {name: value if name == "ratio" else 1e6 * value / samples for name, value in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sentences", type=int, default=10_000_000)
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    has_peer = bool(importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core"))
    if has_peer:
        import torch.distributed as dist

        warnings.simplefilter("ignore")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "sentences": args.sentences,
        "mapping_cpu_seconds": time_mapping(args.sentences, args.rounds, has_peer=has_peer),
    }
    with tempfile.TemporaryDirectory() as name:
        for family in ("bert", "t5"):
            results[f"{family}_sample_cpu_microseconds"] = time_samples(
                family, Path(name), args.samples, args.rounds, has_peer=has_peer
            )
    text = json.dumps(results, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
