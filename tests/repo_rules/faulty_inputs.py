"""Create the inputs of the error-message tests: a corpus, a checkpoint, and damaged copies of both."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from mega_data.preprocess import Options, preprocess
from mega_schema.arch import table
from mega_schema.checkpoint.checkpoint_dir import LATEST
from mega_schema.checkpoint.reader import MODEL, OPTIMIZER, boxes_to_write
from mega_schema.checkpoint.writer import CheckpointWriter
from mega_schema.dataset.indexed_dataset import IndexedWriter, sibling
from mega_schema.parallel_layout import WHOLE
from mega_schema.spec import ModelSpec, bert, gpt
from mega_schema.tokenizer.tokenizer import open_tokenizer

SPEC = gpt(layers=2, hidden=8, heads=2, vocab=101, max_seq_len=16)
ENCODER = bert(layers=2, hidden=8, heads=2, vocab=101, max_seq_len=16)


def make(folder: Path) -> None:
    """Fill the folder. Everything in it is the same every time, so messages can be compared word by word."""
    _corpus(folder)
    _checkpoints(folder)
    (folder / "misspelt.toml").write_text(
        "[parallel]\ntensor_model_parallel_size = 2\n[optimizer]\nweight_decai = 0.1\n"
    )
    (folder / "wrong-type.toml").write_text('[batch]\nmicro_batch_size = "four"\n')
    (folder / "not.toml").write_text("[parallel\ntensor_model_parallel_size = 2\n")
    _sentences(folder / "bert")
    (folder / "keys.txt").write_text("alice:short\n")
    (folder / "cut.jinja").write_text("{% for message in")
    (folder / "empty.jinja").write_text("")
    (folder / "hf").mkdir()
    (folder / "hf/config.json").write_text(json.dumps({"model_type": "mamba", "hidden_size": 8}))
    (folder / "hf-encoder").mkdir()
    (folder / "hf-encoder/config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 8}))


def _corpus(folder: Path) -> None:
    text = "".join(json.dumps({"text": " ".join(map(str, range(n, n + 40)))}) + "\n" for n in range(9))
    (folder / "text.jsonl").write_text(text)
    (folder / "broken.jsonl").write_text('{"text": "1 2 3"}\n{"text": "1 2\n')
    (folder / "other-key.jsonl").write_text('{"content": "1 2 3"}\n')
    for name, size in (("corpus", 100), ("other", 50)):
        tokenizer = open_tokenizer("NullTokenizer", vocab_size=size)
        preprocess([folder / "text.jsonl"], folder / name, tokenizer, Options(append_eod=True))
    for suffix in (".bin", ".idx"):
        whole = sibling(folder / "corpus_text_document", suffix)
        shutil.copy(whole, sibling(folder / "cut", suffix))
        shutil.copy(whole, sibling(folder / "foreign", suffix))
    with sibling(folder / "cut", ".idx").open("r+b") as index:
        index.truncate(100)
    with sibling(folder / "foreign", ".idx").open("r+b") as index:
        index.write(b"PK\3\4")


def _sentences(folder: Path) -> None:
    """Write a dataset of sentences, and a vocabulary of BERT."""
    folder.mkdir()
    words = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *(f"w{number}" for number in range(50))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    with IndexedWriter(folder / "sentences", np.uint16) as out:
        for _ in range(9):
            for _ in range(4):
                out.add(range(5, 15))
            out.end_document()


def _checkpoints(folder: Path) -> None:
    runs, tokenizer = folder / "runs", folder / "corpus_text_document.tokenizer"
    _checkpoint(runs / "small", (MODEL, *OPTIMIZER[1:]), tokenizer)
    _checkpoint(runs / "weights", (MODEL,), None)
    _checkpoint(runs / "encoder", (MODEL,), tokenizer, ENCODER)
    for name in ("torn", "flipped"):
        shutil.copytree(runs / "small", runs / name)
        weights = runs / name / "iter_0000010/model-00000.safetensors"
        data = weights.read_bytes()
        weights.write_bytes(data[:1000] if name == "torn" else data[:-1] + b"\1")
    shutil.copytree(runs / "small", runs / "untold")
    (runs / "untold" / LATEST).write_bytes(b"")
    (runs / "begun/.iter_0000005.partial").mkdir(parents=True)
    (runs / "empty").mkdir()


def _checkpoint(
    run: Path, namespaces: tuple[str, ...], tokenizer: Path | None, spec: ModelSpec = SPEC
) -> None:
    """Iteration 10 of a run, all values zero."""
    rows = [row for row in table(spec) if row.tied_to is None]
    save = CheckpointWriter(run, 10)
    save.begin()
    for space in namespaces:
        boxes_of_model = [
            box for row in rows for box in boxes_to_write(row.name, row.shape, row.slabs(0, 1), "F32")
        ]
        save.write(space, 0, boxes_of_model, lambda box: np.zeros(box.slab.shape, np.float32))
    trainer = {"iteration": 10, "consumed_samples": 80, "optimizer_steps": 10}
    save.commit(spec, layout=WHOLE, trainer=trainer, tokenizer=tokenizer, run_config="")
