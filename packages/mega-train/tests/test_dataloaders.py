"""Data of a run from flags to tokens: blends, groups, and a layout change."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_model.distributed.mesh import Mesh, World
from mega_schema.app.config import load_config
from mega_schema.dataset.indexed_dataset import IndexedWriter
from mega_train.cli import main
from mega_train.config import RunConfig
from mega_train.data.blended_dataset import BlendedDataset
from mega_train.data.datasets import Datasets
from mega_train.engine.train import prepare
from mega_train.engine.trainer import Trainer
from mega_train.telemetry.event_log import read_events

SMALL = {
    "model.num_layers": 1,
    "model.hidden_size": 8,
    "model.num_attention_heads": 2,
    "model.vocab_size": 4000,
    "batch.seq_length": 8,
    "batch.micro_batch_size": 2,
    "batch.global_batch_size": 12,
    "train.train_iters": 6,
    "optimizer.lr": 0.01,
    "evaluation.eval_iters": 0,
}


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Words of --data-path: two corpora, whose tokens tell them apart."""
    folder, words = tmp_path_factory.mktemp("blend"), []
    for name, weight, first in (("a", "0.3", 0), ("b", "0.7", 2000)):
        with IndexedWriter(folder / name, np.uint16) as out:
            for document in range(60):
                out.add(np.arange(first + 30 * document, first + 30 * document + 5 + document % 20))
                out.end_document()
        words += [weight, str(folder / name)]
    return words


def _trainer(blend: list[str], **values: Any) -> Trainer:
    settings = {key.replace("__", "."): value for key, value in values.items()}
    sets = [f"{key}={str(v).lower() if isinstance(v, bool) else v}" for key, v in (SMALL | settings).items()]
    ready = prepare(load_config(RunConfig, None, {"data_path": tuple(blend)}, sets), "gpt", World())
    return Trainer(ready.config, Mesh(), ready.datasets, checkpoint=ready.checkpoint)


def _read(run: Trainer, steps: int, monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """The samples that each step reads, in no order."""
    seen: list[list[int]] = []
    read = BlendedDataset.__getitem__

    def record_sample(stream: BlendedDataset[np.ndarray], i: int) -> np.ndarray:
        sample = read(stream, i)
        seen.append(sample.tolist())
        return sample

    read_losses = []
    with monkeypatch.context() as patched:
        patched.setattr(BlendedDataset, "__getitem__", record_sample)
        for _ in range(steps):
            run.step(0.01)
            read_losses.append(sorted(seen))
            seen.clear()
    return read_losses


@pytest.mark.parametrize("order", ["single", "cyclic"])
def test_a_blend_goes_on_with_the_same_samples_on_another_micro_batch(
    order: str, blend: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # by size, a blend has the 72 samples that are asked for: a cyclic epoch is as long for every micro-batch
    words = blend if order == "single" else blend[1::2]
    values = {"data__dataloader_type": order, "data__data_sharding": order != "cyclic"}
    whole = _read(_trainer(words, **values), 6, monkeypatch)
    first = _trainer(words, **values, checkpoint__save=tmp_path)
    assert _read(first, 3, monkeypatch) == whole[:3]
    first.save()
    first.saver.finish()
    for micro in (1, 3, 4):
        resumed = _trainer(words, **values, batch__micro_batch_size=micro, checkpoint__load=tmp_path)
        assert _read(resumed, 3, monkeypatch) == whole[3:]
    from_b = np.mean([token >= 2000 for step in whole for sample in step for token in sample[:1]])
    assert abs(from_b - (0.7 if order == "single" else 0.5)) < 0.1


def _gpt(*argv: object, code: int = 0) -> str:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
        main(["gpt", *(f"--set={key}={value}" for key, value in SMALL.items()), *map(str, argv)])
    assert left.value.code == code, err.getvalue()
    return (err if code else out).getvalue()


def test_groups_are_validated_by_name_and_the_test_comes_last(blend: list[str], tmp_path: Path) -> None:
    a, b = blend[1], blend[3]
    shown = _gpt(
        *("--train-weighted-split-paths", f"TRAIN: 0.3 0:0.8 {a}, 0.7 0:0.8 {b}"),
        *("--valid-weighted-split-paths", f"A: 1 0.8:0.9 {a}", f"B: 1 0.8:0.9 {b}"),
        *("--test-weighted-split-paths", f"LAST: 1 0.9:1 {a}, 1 0.9:1 {b}"),
        *("--set", "evaluation.eval_iters=1", "--set", "evaluation.eval_interval=3"),
        *("--save", tmp_path / "run", "--data-cache-path", tmp_path / "cache"),
    )
    scored = [
        (e["iteration"], e["split"]) for e in read_events(tmp_path / "run") if e["event"] == "validation"
    ]
    assert scored == [(3, "A"), (3, "B"), (6, "A"), (6, "B"), (6, "LAST")]
    assert "LAST at iteration 6" in shown
    caches = sorted(path.name.partition("-")[0] for path in (tmp_path / "cache").glob("*-*"))
    assert caches == ["test", "training", "validation"], "A and B have documents as long, so one order"


def test_a_checkpoints_configuration_opens_the_same_blend(blend: list[str], tmp_path: Path) -> None:
    _gpt("--data-path", *blend, "--split", "90,10,0", "--save", tmp_path / "run")
    (run_toml,) = tmp_path.glob("run/iter_*/run.toml")
    reloaded = load_config(RunConfig, run_toml, {})
    assert reloaded.data.path == tuple(blend)
    assert Datasets.open(reloaded.data).spec.training.weights == (0.3, 0.7)


def test_a_mistake_in_what_is_read_is_one_line_before_anything_is_written(
    blend: list[str], tmp_path: Path
) -> None:
    line = _gpt("--data-path", *blend, "0.5", tmp_path / "gone", "--save", tmp_path / "run", code=2)
    assert line == f"error: {tmp_path / 'gone.idx'}: no such file\n"
    line = _gpt("--data-path", *blend, "--dataloader-type", "external", code=2)
    assert line.startswith("error: --dataloader-type: external hands over a Python iterator of your own")
    line = _gpt("--data-path", *blend, "--no-data-sharding", code=2)
    assert line == (
        "error: --no-data-sharding: only a cyclic order is sharded: wanted --dataloader-type cyclic\n"
    )
    assert list(tmp_path.iterdir()) == []
