"""Pretrain a BERT of 4 million parameters on real text, and measure it on held-out text and on a task.

    python bench/encoder_proof.py CORPUS.jsonl.zst NLI.jsonl.gz --folder FOLDER [--json RESULT.json]

CORPUS has records of `text` and `src`, NLI records of `sentence1`, `sentence2` and `gold_label`. Every
document is cut to its first 500 characters, back to the end of a sentence if one ends there; each twentieth
document is held out. `mega-data train-tokenizer`
and `mega-data preprocess --split-sentences` prepare the text; `mega-train bert` trains on the rest with two
data-parallel processes. What FOLDER already has is not made again.

Printed is the mean loss, in nats, of the masked tokens of the held-out samples for the model and for three
baselines with Witten-Bell smoothing that see the same masked text: the unigram; the bigram of the left
neighbour; and the bigrams of both neighbours, P(t | left) P(right | t), normalized over the vocabulary. A
neighbour that is masked or a special token tells a baseline nothing. A chosen token that is not replaced by
[MASK] has for all baselines a probability of 1/2 to be itself. No sentence is cut, because that would reveal
the order of the segments; the accuracy of sentence order is printed for all samples and for each source. CPU
seconds are those of all training processes: they count where the machine had other work.

`mega-train finetune` then trains the pretrained model and one with new weights on as many pairs of entailment
as of contradiction, on all and on the first few of them (`--examples`) in more epochs, and predicts the
other half, which shares no first sentence with it. The learning rate with the highest accuracy counts,
for each start its own. The interval of the difference is of a paired bootstrap over these examples, for the
mean of the seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mega_eval.compressed_file import open_file
from mega_eval.models.stored_weights import weight_reader
from mega_eval.paired_statistics import bootstrap_ratios, percentile_interval
from mega_model.attention_backends import PackedAttention
from mega_model.build import load_model
from mega_model.encoder import Encoder
from mega_schema.checkpoint.checkpoint_tokenizer import open_checkpoint_tokenizer
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_train.data.encoder.bert_dataset import IGNORED, BertDataset, BertRule
from mega_train.data.encoder.ngram_masker import BERT_NGRAMS, NgramMasker
from mega_train.data.encoder.sentence_mapping import MappingRule, build_mapping
from mega_train.data.encoder.vocabulary import MaskingVocabulary
from mega_train.telemetry.event_log import read_events

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

CHARACTERS = 500  # of a document
HELD_OUT = 20  # each such document
LENGTH = 128  # tokens of a sample
VOCABULARY = 6000
SEED = 1234
LOG_INTERVAL = 50  # iterations; those of a proof are a multiple
RESAMPLES = 10_000
BATCH = 64  # samples of a forward pass, and masked tokens of a baseline's
MODEL = "--num-layers 3 --hidden-size 256 --num-attention-heads 4 --position-embedding-type rope"
PRETRAINING = (
    f"{MODEL} --train-data-path train_text_sentence --valid-data-path valid_text_sentence "
    f"--seq-length {LENGTH} --micro-batch-size 8 --global-batch-size 16 --optimizer muon --lr 2e-3 "
    "--min-lr 1e-5 --lr-decay-style linear --lr-warmup-iters 30 --weight-decay 0.01 "
    "--eval-interval 200 --eval-iters 16 --unpad-samples --save-interval 200"
)
TOKENIZER = "--tokenizer-type BertWordPieceLowerCase --vocab-file tok/vocab.txt"
FINETUNING = (
    "--task CLASSIFY --text-keys sentence1 sentence2 --label-key gold_label --valid-data nli_valid.jsonl "
    "--seq-length 64 --micro-batch-size 16 --global-batch-size 16 "
    "--lr-warmup-fraction 0.1 --lr-decay-style linear --weight-decay 0.01"
)


def run(folder: Path, words: str) -> None:
    """Run a Python module in a folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", *words.split()], check=True, cwd=folder, env=environment)


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Read JSON lines."""
    with open_file(path) as file:
        yield from map(json.loads, file)


def write_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")


def cut_text(text: str) -> str:
    """Cut a text to some characters, at the last end of a sentence; the empty text if none ends there."""
    if len(text) <= CHARACTERS:
        return text
    ends = [match.end() for match in re.finditer(r"""[.!?]["')\]]*(?=\s)|\n(?=\n)""", text[: CHARACTERS + 1])]
    return text[: max(ends, default=0)]


def write_corpus(corpus: Path, folder: Path) -> list[str]:
    """Write the documents; return the source of every held-out one, as OWNER/REPOSITORY."""
    parts: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    sources = []
    for number, record in enumerate(read_records(corpus)):
        is_held_out = number % HELD_OUT == HELD_OUT - 1
        text = cut_text(record["text"])
        if text:
            parts[is_held_out].append({"text": text})
        if text and is_held_out:
            sources.append("/".join(record["src"].split("/")[:2]))
    for name, records in zip(("train", "valid"), parts, strict=True):
        write_records(folder / f"{name}.jsonl", records)
    return sources


def prepare_text(folder: Path, prefix: str = "", flags: str = "") -> None:
    """Train the tokenizer, and encode both parts.

    Args:
        prefix: of the datasets' names.
        flags: of `mega-data preprocess`.
    """
    if not (folder / "tok").exists():
        words = f"train-tokenizer --input train.jsonl --type wordpiece --vocab-size {VOCABULARY} --lowercase"
        run(folder, f"mega_data {words} --output tok")
    for name in ("train", "valid"):
        output = f"{prefix}{name}"
        if not (folder / f"{output}_text_sentence.idx").exists():
            words = f"preprocess --input {name}.jsonl --output-prefix {output} --split-sentences {TOKENIZER}"
            run(folder, f"mega_data {words} {flags}")


def pretrain(folder: Path, family: str, flags: str, iterations: int) -> dict[str, Any]:
    """Pretrain a model to the folder of its family's name, and return how long it took."""
    times = folder / f"{family}-times.json"
    if times.exists():
        report: dict[str, Any] = json.loads(times.read_text())
        return report
    torchrun = "torch.distributed.run --nproc-per-node 2 --master-port 29713"
    words = f"{torchrun} -m mega_train {family} {flags} --log-interval {LOG_INTERVAL}"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(folder, f"{words} --save {family} --load {family} --train-iters {iterations}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    steps = [event for event in read_events(folder / family) if event["event"] == "train_log"]
    report = {
        "iterations": iterations,
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "seconds_of_steps": round(sum(step["iteration_seconds"] * LOG_INTERVAL for step in steps), 1),
        "last_losses": steps[-1]["loss_terms"] or {"loss": steps[-1]["loss"]},
    }
    times.write_text(json.dumps(report))
    return report


def open_samples(dataset: IndexedDataset, vocabulary: MaskingVocabulary) -> BertDataset:
    """Open one epoch of samples, as `mega-train bert` draws them."""
    rule = MappingRule(LENGTH - 3, 2, 0.1, SEED)
    mapping = build_mapping(dataset.documents, dataset.lengths, rule, None)
    masker = NgramMasker(vocabulary, BERT_NGRAMS["words"], 0.15, replaces=True)
    return BertDataset(dataset, mapping, BertRule(LENGTH, SEED), masker)


def smooth_bigrams(counts: NDArray[np.float32], unigram: Floats) -> NDArray[np.float32]:
    """Turn counts of bigrams (V, V) in place into P(second | first), by Witten-Bell smoothing."""
    kinds = np.maximum((counts > 0).sum(1), 1)
    total = counts.sum(1) + kinds
    counts += np.outer(kinds, unigram).astype(np.float32)
    counts /= total[:, None]
    return counts


class NeighbourBaselines:
    """A unigram and bigrams of the training text, and what they predict for masked tokens."""

    def __init__(self, dataset: IndexedDataset, vocabulary: MaskingVocabulary) -> None:
        size = len(vocabulary.is_continuation)
        counts = np.zeros((size, size), np.float32)
        unigram = np.ones(size)
        for begin, end in zip(dataset.documents[:-1], dataset.documents[1:], strict=True):
            if begin == end:
                continue
            tokens = np.concatenate([dataset[i] for i in range(begin, end)]).astype(np.int64)
            np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
            np.add.at(unigram, tokens, 1)
        self.mask = vocabulary.mask
        self.special = np.array([vocabulary.cls, vocabulary.sep, vocabulary.mask, vocabulary.pad])
        self.unigram = unigram / unigram.sum()
        self.next = smooth_bigrams(counts, self.unigram)

    def losses(self, text_L: Ints, positions_M: Ints, labels_M: Ints) -> Floats:
        """Return the losses (M, 3) of the unigram, of the left neighbour and of both, in nats."""
        left_M, right_M = text_L[positions_M - 1], text_L[positions_M + 1]
        uniform = np.ones(len(self.unigram))
        rows = []
        for seen, left, right, label in zip(text_L[positions_M], left_M, right_M, labels_M, strict=True):
            from_left = self.unigram if left in self.special else self.next[left]
            to_right = uniform if right in self.special else self.next[:, right]
            both = from_left * to_right
            row = np.array([self.unigram[label], from_left[label], both[label] / both.sum()], np.float64)
            rows.append(row if seen == self.mask else (row + (seen == label)) / 2)
        return -np.log(np.array(rows))


def estimate(correct_S: Floats) -> dict[str, Any]:
    """Return the accuracy of samples with its interval of 95 %."""
    weights = np.ones((len(correct_S), 1))
    draws = bootstrap_ratios(correct_S[:, None], weights, resamples=RESAMPLES, seed=SEED)
    interval = [round(bound, 4) for bound in percentile_interval(draws[:, 0])]
    return {"accuracy": round(float(correct_S.mean()), 4), "interval_95": interval, "samples": len(weights)}


def evaluate(folder: Path, sources: Sequence[str]) -> dict[str, Any]:
    """Measure the model and the baselines on the held-out samples."""
    checkpoint = Checkpoint.open(folder / "bert")
    model = load_model(checkpoint.spec, weight_reader(checkpoint), dtype=torch.float32)
    assert isinstance(model, Encoder)
    vocabulary = MaskingVocabulary.from_tokenizer(open_checkpoint_tokenizer(checkpoint))
    baselines = NeighbourBaselines(IndexedDataset(folder / "train_text_sentence"), vocabulary)
    dataset = IndexedDataset(folder / "valid_text_sentence")
    samples = open_samples(dataset, vocabulary)
    losses, correct, neighbour_losses = [], [], []
    for begin in range(0, len(samples), BATCH):
        batch = [samples[i] for i in range(begin, min(begin + BATCH, len(samples)))]
        text, types, labels, real = (
            np.stack([sample[name] for sample in batch])
            for name in ("text", "types", "labels", "padding_mask")
        )
        loss_M, order_B = predict(model, text, types, labels, real)
        losses.append(loss_M)
        correct.append(order_B == np.array([sample["is_random"] for sample in batch]))
        for text_L, label_L in zip(text, labels, strict=True):
            positions = np.flatnonzero(label_L != IGNORED)
            if len(positions):
                neighbour_losses.append(baselines.losses(text_L, positions, label_L[positions]))
    correct_S = np.concatenate(correct).astype(np.float64)
    document_S = np.searchsorted(dataset.documents, samples.mapping[:, 0], side="right") - 1
    source_S = np.array(sources)[document_S]
    unigram, left, both = np.concatenate(neighbour_losses).mean(0)
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "samples": len(samples),
        "masked_tokens": sum(map(len, losses)),
        "lm_loss": {
            "model": round(float(np.concatenate(losses).mean()), 4),
            "unigram": round(float(unigram), 4),
            "bigram_left": round(float(left), 4),
            "bigram_both": round(float(both), 4),
        },
        "sop": estimate(correct_S),
        "sop_by_source": {
            str(source): estimate(correct_S[source_S == source]) for source in np.unique(source_S)
        },
    }


@torch.no_grad()
def predict(model: Encoder, text: Ints, types: Ints, labels: Ints, real: Ints) -> tuple[Floats, Ints]:
    """Return the losses of the masked tokens, in order, and the predicted order of every row."""
    rows, length = text.shape
    token_T, type_T, label_T, real_BL = (torch.from_numpy(x) for x in (text, types, labels, real))
    attend = PackedAttention(rows, length, real_BL, causal=False)
    position_T = torch.arange(length).repeat(rows)
    x_TD: Tensor = model.hidden_states(token_T.flatten(), position_T, attend, token_type_T=type_T.flatten())
    masked_M = torch.nonzero(label_T.flatten() != IGNORED)[:, 0]
    loss_M = model.head.token_losses(x_TD[masked_M], label_T.flatten()[masked_M])
    order_B = model.binary_logits(x_TD, torch.arange(rows) * length).argmax(-1)
    return loss_M.double().numpy(), order_B.numpy()


def write_pairs(nli: Path, folder: Path) -> None:
    """Write as many pairs of entailment as of contradiction; half of the first sentences are held out."""
    records = list(read_records(nli))
    generator = random.Random(SEED)
    sentences = sorted({record["sentence1"] for record in records})
    generator.shuffle(sentences)
    train_sentences = set(sentences[: len(sentences) // 2])
    for name, is_train in (("nli_train", True), ("nli_valid", False)):
        part = [record for record in records if (record["sentence1"] in train_sentences) == is_train]
        groups = [
            [record for record in part if record["gold_label"] == label]
            for label in ("entailment", "contradiction")
        ]
        size = min(map(len, groups))
        pairs = [record for group in groups for record in generator.sample(group, size)]
        generator.shuffle(pairs)
        write_records(folder / f"{name}.jsonl", pairs)


def finetune(
    folder: Path, size: int, lr: float, name: str, start: str, options: argparse.Namespace
) -> Floats:
    """Fine-tune with every seed; return (examples, seeds) whether the last predictions are right."""
    records = list(read_records(folder / "nli_train.jsonl"))
    write_records(folder / f"nli_train-{size}.jsonl", records[:size])
    epochs = round(options.epochs * (len(records) / size) ** 0.5)
    columns = []
    for seed in range(options.seeds):
        save = f"nli-{size}-{lr:g}-{name}-{seed}"
        if not (folder / save).exists():
            words = f"{FINETUNING} --train-data nli_train-{size}.jsonl"
            words += f" --epochs {epochs} --lr {lr} --seed {seed} --save {save}"
            run(folder, f"mega_train finetune {start} {words}")
        last = max((folder / save / "predictions").glob("nli_valid-*.jsonl"))
        columns.append([record["prediction"] == record["label"] for record in read_records(last)])
    return np.array(columns, np.float64).T


def compare_starts(folder: Path, size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Fine-tune from the pretrained model and from new weights, and compare the accuracies."""
    starts = {"pretrained": "--pretrained-checkpoint bert", "random": f"{MODEL} {TOKENIZER}"}
    accuracy_by_lr = dict[str, dict[str, float]]()
    best = dict[str, Floats]()
    for name, start in starts.items():
        correct = {lr: finetune(folder, size, lr, name, start, options) for lr in options.finetune_lrs}
        best[name] = max(correct.values(), key=np.mean)
        accuracy_by_lr[name] = {f"{lr:g}": round(float(values.mean()), 4) for lr, values in correct.items()}
    means = np.stack([correct_NS.mean(1) for correct_NS in best.values()], axis=1)
    draws = bootstrap_ratios(means, np.ones_like(means), resamples=RESAMPLES, seed=SEED)
    return {
        "training_examples": size,
        "examples": len(means),
        "accuracy_by_lr": accuracy_by_lr,
        "accuracy_by_seed": {name: values.mean(0).round(4).tolist() for name, values in best.items()},
        "accuracy": dict(zip(best, means.mean(0).round(4).tolist(), strict=True)),
        "difference": round(float(means[:, 0].mean() - means[:, 1].mean()), 4),
        "difference_interval_95": [
            round(bound, 4) for bound in percentile_interval(draws[:, 0] - draws[:, 1])
        ],
    }


def find_misses(report: dict[str, Any]) -> list[str]:
    """Name the goals that the figures do not reach."""
    text = report["held_out"]
    losses = text["lm_loss"]
    goals = {
        f"lm loss below the {name} baseline's": losses["model"] < loss
        for name, loss in losses.items()
        if name != "model"
    }
    goals["sentence-order accuracy above 0.7"] = text["sop"]["accuracy"] > 0.7
    for task in report["finetuning"]:
        goal = f"interval of the difference above 0 with {task['training_examples']} examples"
        goals[goal] = task["difference_interval_95"][0] > 0
    return [goal for goal, is_reached in goals.items() if not is_reached]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path)
    parser.add_argument("nli", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--iterations", type=int, default=1500)
    parser.add_argument("--examples", type=int, nargs="+", default=[300], help="And all.")
    parser.add_argument("--epochs", type=int, default=4, help="Over all examples.")
    parser.add_argument("--finetune-lrs", type=float, nargs="+", default=[3e-4, 1e-3])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    sources = write_corpus(options.corpus, folder)
    prepare_text(folder)
    report: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load_before": os.getloadavg()[0],
        "torch": version("torch"),
        "pretraining": pretrain(folder, "bert", PRETRAINING, options.iterations),
        "held_out": evaluate(folder, sources),
    }
    print(json.dumps(report, indent=1), flush=True)
    write_pairs(options.nli, folder)
    sizes = [*options.examples, sum(1 for _ in read_records(folder / "nli_train.jsonl"))]
    report["finetuning"] = [compare_starts(folder, size, options) for size in sizes]
    report["missed"] = find_misses(report)
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
