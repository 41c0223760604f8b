"""Pretrain a T5 of 4 million parameters on real text, and compare its span loss with baselines.

    python -m bench.t5_proof CORPUS.jsonl.zst --folder FOLDER [--json RESULT.json]

Corpus, held-out documents and tokenizer are those of encoder_proof.py, with 100 sentinels. `mega-train t5`
trains on the rest with two data-parallel processes. What FOLDER already has is not made again.

Printed is the mean loss, in nats, of the decoder's targets of the held-out samples, and of those that are
text, which are neither a sentinel nor the end, for the model and for two baselines: the unigram, and the
bigram of the decoder's token before, with Witten-Bell smoothing. Both count the training text and the
decoder's sequences of one epoch of training samples, so they know where sentinels are probable too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.encoder_proof import (
    BATCH,
    LENGTH,
    SEED,
    Floats,
    Ints,
    prepare_text,
    pretrain,
    smooth_bigrams,
    write_corpus,
)
from mega_eval.models.stored_weights import weight_reader
from mega_model.attention_backends import PackedAttention, PaddedCrossAttention
from mega_model.build import load_model
from mega_model.encoder_decoder import EncoderDecoder, EncoderInput
from mega_schema.arch import table
from mega_schema.checkpoint.checkpoint_tokenizer import open_checkpoint_tokenizer
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.params import count_params
from mega_train.data.encoder.ngram_masker import T5_NGRAMS, NgramMasker
from mega_train.data.encoder.sentence_mapping import MappingRule, build_mapping
from mega_train.data.encoder.t5_dataset import SPECIAL_TOKENS, T5Dataset, T5Rule
from mega_train.data.encoder.vocabulary import MaskingVocabulary

DECODER_LENGTH = 48
PRETRAINING = (
    "--num-layers 2 --decoder-num-layers 1 --hidden-size 256 --num-attention-heads 4 "
    "--position-embedding-type relative "
    "--train-data-path t5_train_text_sentence --valid-data-path t5_valid_text_sentence "
    f"--seq-length {LENGTH} --decoder-seq-length {DECODER_LENGTH} --micro-batch-size 8 "
    "--global-batch-size 16 --optimizer muon --lr 2e-3 --min-lr 1e-5 --lr-decay-style linear "
    "--lr-warmup-iters 30 --weight-decay 0.01 --eval-interval 200 --eval-iters 16 --save-interval 200"
)


def open_samples(dataset: IndexedDataset, vocabulary: MaskingVocabulary) -> T5Dataset:
    """Open one epoch of samples, as `mega-train t5` draws them."""
    rule = MappingRule(LENGTH - SPECIAL_TOKENS, 1, 0.1, SEED)
    mapping = build_mapping(dataset.documents, dataset.lengths, rule, None)
    masker = NgramMasker(vocabulary, T5_NGRAMS, 0.15, replaces=False)
    return T5Dataset(dataset, mapping, T5Rule(LENGTH, DECODER_LENGTH, SEED), masker)


class DecoderBaselines:
    """A unigram and a bigram of the training text and of the decoder's sequences."""

    def __init__(self, dataset: IndexedDataset, vocabulary: MaskingVocabulary) -> None:
        size = len(vocabulary.is_continuation)
        counts = np.zeros((size, size), np.float32)
        unigram = np.ones(size)
        for tokens in self._sequences(dataset, vocabulary):
            np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
            np.add.at(unigram, tokens[1:], 1)
        self.unigram = unigram / unigram.sum()
        self.next = smooth_bigrams(counts, self.unigram)

    def _sequences(self, dataset: IndexedDataset, vocabulary: MaskingVocabulary) -> Iterator[Ints]:
        for begin, end in zip(dataset.documents[:-1], dataset.documents[1:], strict=True):
            if begin < end:
                yield np.concatenate([dataset[i] for i in range(begin, end)]).astype(np.int64)
        samples = open_samples(dataset, vocabulary)
        for i in range(len(samples)):
            sample = samples[i]
            has_loss = sample["loss_mask"] == 1
            yield np.concatenate([sample["text_dec"][:1], sample["labels"][has_loss]])

    def losses(self, inputs_M: Ints, labels_M: Ints) -> Floats:
        """Return the losses (M, 2) of the unigram and of the bigram, in nats."""
        return -np.log(np.stack([self.unigram[labels_M], self.next[inputs_M, labels_M]], 1))


@torch.no_grad()
def predict(model: EncoderDecoder, batch: dict[str, Ints]) -> Floats:
    """Return the losses of the targets, in order."""
    tensors = {name: torch.from_numpy(values) for name, values in batch.items()}
    rows = len(tensors["text_enc"])
    source_position, position = (torch.arange(size).repeat(rows) for size in (LENGTH, DECODER_LENGTH))
    real_BS = tensors["enc_mask"]
    source = EncoderInput(
        tensors["text_enc"].flatten(),
        source_position,
        PackedAttention(rows, LENGTH, real_BS, causal=False),
        PaddedCrossAttention(rows, real_BS == 1),
    )
    attend = PackedAttention(rows, DECODER_LENGTH)
    x_TD: Tensor = model.hidden_states(tensors["text_dec"].flatten(), position, attend, source=source)
    has_loss = tensors["loss_mask"].flatten() == 1
    losses: Floats = model.head.token_losses(x_TD[has_loss], tensors["labels"].flatten()[has_loss]).numpy()
    return losses.astype(np.float64)


def evaluate(folder: Path) -> dict[str, Any]:
    """Measure the model and the baselines on the held-out samples."""
    checkpoint = Checkpoint.open(folder / "t5")
    model = load_model(checkpoint.spec, weight_reader(checkpoint), dtype=torch.float32)
    assert isinstance(model, EncoderDecoder)
    vocabulary = MaskingVocabulary.from_tokenizer(open_checkpoint_tokenizer(checkpoint))
    baselines = DecoderBaselines(IndexedDataset(folder / "t5_train_text_sentence"), vocabulary)
    samples = open_samples(IndexedDataset(folder / "t5_valid_text_sentence"), vocabulary)
    losses, labels = [], []
    for begin in range(0, len(samples), BATCH):
        rows = [samples[i] for i in range(begin, min(begin + BATCH, len(samples)))]
        batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        has_loss = batch["loss_mask"] == 1
        label_M = batch["labels"][has_loss]
        model_M1 = predict(model, batch)[:, None]
        losses.append(np.concatenate([model_M1, baselines.losses(batch["text_dec"][has_loss], label_M)], 1))
        labels.append(label_M)
    losses_M3, labels_M = np.concatenate(losses), np.concatenate(labels)
    is_text_M = ~np.isin(labels_M, [*vocabulary.sentinels, vocabulary.eos])
    names = "model", "unigram", "bigram"
    return {
        "parameters": count_params(table(checkpoint.spec)),
        "samples": len(samples),
        "targets": len(losses_M3),
        "loss": dict(zip(names, losses_M3.mean(0).round(4).tolist(), strict=True)),
        "text_targets": int(is_text_M.sum()),
        "loss_of_text": dict(zip(names, losses_M3[is_text_M].mean(0).round(4).tolist(), strict=True)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--iterations", type=int, default=1500)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    write_corpus(options.corpus, options.folder)
    prepare_text(options.folder, "t5_", "--vocab-extra-ids 100")
    report: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load_before": round(os.getloadavg()[0], 1),
        "torch": version("torch"),
        "pretraining": pretrain(options.folder, "t5", PRETRAINING, options.iterations),
        "held_out": evaluate(options.folder),
    }
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    losses = report["held_out"]["loss"]
    return 0 if losses["model"] < min(losses["unigram"], losses["bigram"]) else 1


if __name__ == "__main__":
    sys.exit(main())
