"""Tiny training runs, one on a layout and one in a single process, and what must be equal between them."""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from mega_model.distributed.mesh import Mesh, World
from mega_schema.app.config import load_config
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.dataset.indexed_dataset import (
    DatasetInfo,
    IndexedDataset,
    IndexedWriter,
    sibling,
    smallest_dtype,
)
from mega_schema.params import Param
from mega_schema.spec import Family
from mega_schema.tasks.pair_tasks import TaskName
from mega_schema.tokenizer.identity import TokenizerIdentity
from mega_schema.tokenizer.tokenizer import open_tokenizer
from mega_train.config import RunConfig
from mega_train.data.dataloaders import RunDatasets
from mega_train.data.datasets import Datasets
from mega_train.data.encoder.sentence_datasets import SentenceDatasets
from mega_train.data.sft import PromptResponsePairs
from mega_train.data.span_corruption import SpanVocabulary
from mega_train.data.task_data import TaskData, TaskSamples
from mega_train.engine.trainer import Trainer
from mega_train.resolve import resolve
from mega_train.resolve.task import apply_task
from tests.encoder_fixture import write_corpus
from tests.squad_fixture import write_squad

STEPS = 3  # two of warm-up and the first after it
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}

# K's biases and the like have gradients that are zero but for rounding; with its usual eps Adam blows them up
# to whole steps, which no two orders of summation agree on. A larger eps leaves every real gradient its step.
COMMON = """
[batch]
seq_length = 16
global_batch_size = 8
[train]
train_iters = 100
seed = 7
[optimizer]
lr = 0.01
adam_eps = 1e-3
clip_grad = 0.5
lr_warmup_iters = 2
lr_decay_style = "cosine"
[evaluation]
eval_iters = 0
"""

MODELS: dict[str, tuple[Family, dict[str, Any]]] = {
    # vocabularies that do not divide, so that padding is in play on every layout
    "gpt": (
        "gpt",
        {
            "num_layers": 4,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "vocab_size": 101,
            "make_vocab_size_divisible_by": 8,
        },
    ),
    "bert": (
        "bert",
        {
            "num_layers": 4,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "vocab_size": 204,
            "make_vocab_size_divisible_by": 8,
        },
    ),
    "modernbert": (
        "bert",
        {
            "preset": "modernbert-base",
            "num_layers": 4,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "window_size": "3,3",
            "vocab_size": 204,
            "make_vocab_size_divisible_by": 8,
        },
    ),
    **dict.fromkeys(
        ("classify", "race", "squad", "tag"),
        (
            "bert",
            {
                "num_layers": 4,
                "hidden_size": 32,
                "num_attention_heads": 4,
                "vocab_size": 204,
                "make_vocab_size_divisible_by": 8,
            },
        ),
    ),
    "t5": (
        "t5",
        {
            "num_layers": 2,
            "decoder_num_layers": 3,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "vocab_size": 234,
            "make_vocab_size_divisible_by": 8,
        },
    ),
    "text2text": (
        "t5",
        {
            "num_layers": 2,
            "decoder_num_layers": 3,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "vocab_size": 234,
            "make_vocab_size_divisible_by": 8,
        },
    ),
    # heads of another width than hidden / heads; one table of relative positions for each side
    "t5 1.0": (
        "t5",
        {
            "preset": "t5-small",
            "num_layers": 2,
            "decoder_num_layers": 3,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "kv_channels": 16,
            "ffn_hidden_size": 48,
            "vocab_size": 234,
            "make_vocab_size_divisible_by": 8,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 12,
        },
    ),
    "umt5": (
        "t5",
        {
            "preset": "umt5-small",
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "kv_channels": 8,
            "ffn_hidden_size": 48,
            "vocab_size": 234,
            "make_vocab_size_divisible_by": 8,
        },
    ),
    "llama": (
        "llama",
        {
            "num_layers": 4,
            "hidden_size": 32,
            "num_attention_heads": 8,
            "num_query_groups": 4,
            "ffn_hidden_size": 48,
            "vocab_size": 101,
            "make_vocab_size_divisible_by": 8,
        },
    ),
}

# of models that learn a task: its name, and the end of its files' names
TASKS: dict[str, tuple[TaskName, str]] = {
    "classify": ("CLASSIFY", ".csv"),
    "race": ("RACE", ""),
    "squad": ("SQUAD", ".json"),
    "tag": ("TAG", ".conll"),
    "text2text": ("TEXT2TEXT", "-pairs.csv"),
}


def corpus(folder: Path, name: str | None = None) -> Path:
    """A corpus of 200 short documents over 101 ids; its prefix. Safe on every rank without a name."""
    prefix = folder / (name or f"corpus-{torch.randint(1 << 60, ()).item()}")
    tokenizer = open_tokenizer("NullTokenizer", vocab_size=100)
    rng = np.random.default_rng(3)
    with IndexedWriter(prefix, smallest_dtype(101), info=DatasetInfo(tokenizer=tokenizer.identity)) as out:
        for _ in range(200):
            begin, length = rng.integers(0, 100), rng.integers(3, 60)
            out.add([*((begin + 7 * np.arange(length)) % 100), 100])
            out.end_document()
    return prefix


def pairs(folder: Path) -> Path:
    """Prompts and answers of 120 examples; their prefix. Safe to call on every rank."""
    prefix = folder / f"pairs-{torch.randint(1 << 60, ()).item()}"
    info = DatasetInfo(tokenizer=open_tokenizer("NullTokenizer", vocab_size=100).identity)
    rng = np.random.default_rng(3)
    for key in ("prompt", "answer"):
        with IndexedWriter(sibling(prefix, f"_{key}_document"), smallest_dtype(101), info=info) as out:
            for _ in range(120):
                out.add(rng.integers(0, 100, rng.integers(1, 7)))
                out.end_document()
    return prefix


def sentences(folder: Path, sentinels: int = 0) -> Path:
    """Documents of sentences over 204 ids and sentinels; their prefix. Safe to call on every rank."""
    own = folder / f"sentences-{torch.randint(1 << 60, ()).item()}"
    own.mkdir()
    return write_corpus(own / "corpus", sentinels=sentinels)


def open_task(
    run: RunConfig, folder: Path, tokenizer: Path | None, world: int, model: str
) -> tuple[RunConfig, TaskData]:
    """Write and open examples of three classes, of four choices, of SQuAD 2.0, tags or texts: 13 epochs."""
    rng = np.random.default_rng(3)

    def words() -> str:
        return " ".join(f"w{word}" for word in rng.integers(10, 200, rng.integers(1, 20)))

    for name, count in (("train", 64), ("dev", 13)):
        rows = [f"{words()},{'abc'[rng.integers(3)]}" for _ in range(count)]
        (folder / f"{name}.csv").write_text("\n".join(["text,label", *rows]) + "\n", "utf-8")
        options = [[words() for _ in range(4)] for _ in range(count)]
        answers = ["ABCD"[rng.integers(4)] for _ in range(count)]
        passage = {"article": words(), "questions": ["_"] * count, "options": options, "answers": answers}
        pairs = [f"{words()},{words()}" for _ in range(count)]
        (folder / f"{name}-pairs.csv").write_text("\n".join(["input,target", *pairs]) + "\n", "utf-8")
        (folder / name).mkdir()
        (folder / name / "passage.txt").write_text(json.dumps(passage) + "\n", "utf-8")
        write_squad(folder / f"{name}.json", count, count, unanswerable=True)
        lines = [f"w{rng.integers(10, 200)} {'abc'[rng.integers(3)]}" for _ in range(9 * count)]
        sentences = ["\n".join(lines[9 * i : 9 * i + 3 + i % 7]) for i in range(count)]
        (folder / f"{name}.conll").write_text("\n\n".join(sentences) + "\n", "utf-8")
    task_name, suffix = TASKS[model]
    paths = {"train": (str(folder / f"train{suffix}"),), "valid": (str(folder / f"dev{suffix}"),)}
    task = replace(run.task, name=task_name, epochs=13, **paths)
    if model == "squad":
        task = replace(task, doc_stride=4, max_query_length=3)
    examples = TaskData.open(task).encode_windows(tokenizer, run.batch.length)
    train, data = replace(run.train, iterations=None), replace(run.data, path=())
    run = replace(run, task=task, train=train, data=data)
    return apply_task(run, examples, world, None)[0], examples


def _open(
    prefix: Path, run: RunConfig, family: Family
) -> tuple[RunDatasets | IndexedDataset, TokenizerIdentity]:
    if run.data.sft:
        pairs = PromptResponsePairs(prefix, run.data.sft_keys)
        return pairs, pairs.info.tokenizer
    dataset = IndexedDataset(prefix)
    assert dataset.info is not None
    identity = dataset.info.tokenizer
    if run.objective.noise_density is not None:
        vocabulary = SpanVocabulary(sentinels=tuple(range(90, 100)), separator=100)
        return replace(Datasets.from_dataset(dataset, run.data), span_vocabulary=vocabulary), identity
    if family not in ("bert", "t5"):
        return dataset, identity
    datasets = Datasets.from_dataset(dataset, run.data)
    sentences = SentenceDatasets.from_tokenizer(family, datasets, datasets.tokenizer, run.encoder_data)
    return sentences, identity


def trainer(
    model: str, world: World, meet: str, folder: Path, *, load_from: Path | None = None, **values: Any
) -> Trainer:
    """A trainer of a tiny model on these ranks; `values` are section__key=value."""
    family, shape = MODELS[model]
    tunes = bool(values.get("data__sft"))
    if family in ("bert", "t5"):
        data = sentences(folder, sentinels=30 if family == "t5" else 0)
    else:
        data = pairs(folder) if tunes else corpus(folder)
    values = {"model__" + name: value for name, value in shape.items()} | values
    values["data__data_path"] = str(data)
    if load_from is not None:
        values["checkpoint__load"] = str(load_from)
    sets = [f"{key.replace('__', '.')}={_toml(value)}" for key, value in values.items()]
    file = data.with_suffix(".toml")
    counted_in_samples = "train__train_samples" in values
    file.write_text(COMMON.replace("train_iters = 100\n", "") if counted_in_samples else COMMON)
    run = load_config(RunConfig, file, {}, sets)
    checkpoint = Checkpoint.open(load_from) if load_from else None
    opened, identity = _open(data, run, family)
    if model in TASKS:
        assert isinstance(opened, SentenceDatasets)
        run, examples = open_task(run, data.parent, opened.datasets.tokenizer, world.size, model)
    plan = resolve(
        run,
        family,
        world.size,
        corpus=identity,
        loaded_spec=checkpoint.spec if checkpoint else None,
        cuda=False,
    )
    if model in TASKS:
        assert isinstance(opened, SentenceDatasets)
        vocabulary = opened.datasets.tokenizer
        opened = TaskSamples.from_tokenizer(
            examples,
            vocabulary,
            plan.seq_length,
            run.encoder_data.decoder_length,
            plan.global_batch_size,
            run.train.seed,
        )
    mesh = Mesh.join(plan.layout, world, sequence=run.parallel.sequence, init_method=meet)
    return Trainer(plan, mesh, opened, checkpoint=checkpoint)


def _step(run: Trainer) -> tuple[float, ...]:
    """Loss, gradient norm and the terms of the loss of the next step."""
    loss, norm = run.step(run.config.lr_schedule.lr_at(run.state.consumed_samples))
    return loss, norm, *run.optimizer_step.loss_terms.values()


def steps(run: Trainer, count: int) -> list[float]:
    """Losses of the next steps."""
    return [run.step(run.config.lr_schedule.lr_at(run.state.consumed_samples))[0] for _ in range(count)]


@dataclass(frozen=True)
class RunResult:
    """What one process gives.

    Attributes:
        steps: loss, gradient norm and the terms of the loss of each step.
        gradients: after the first step and after the last, by name.
        weights: at the end, by name.
    """

    steps: list[tuple[float, ...]]
    gradients: dict[int, dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]


def one_process(model: str, count: int, settings: Mapping[str, Any]) -> RunResult:
    """Run `count` steps in one process."""
    with TemporaryDirectory() as folder:
        run = trainer(model, World(), "", Path(folder), **settings)

        def copy_tensors(gradients: bool) -> dict[str, torch.Tensor]:
            return {
                row.name: values.view(row.local_shape(1)).clone()
                for (row, _), values in zip(run.params, _rank_tensors(run, gradients), strict=True)
            }

        losses, gradients = [], {}
        for step in range(count):
            losses.append(_step(run))
            if step in (0, count - 1):
                gradients[step] = copy_tensors(True)
        return RunResult(losses, gradients, copy_tensors(False))


def reference(model: str, count: int, settings: Mapping[str, Any], world: World, folder: Path) -> RunResult:
    """Return the result of one process, which the first rank computes for all of them.

    It is a file beside the folders of all tests: many layouts are compared with the same one.
    """
    words = repr((model, count, sorted(settings.items())))
    file = folder.parents[1] / f"result-{hashlib.sha256(words.encode()).hexdigest()}.pt"
    if world.rank == 0 and not file.exists():
        begun = file.with_suffix(".begun")
        torch.save(vars(one_process(model, count, settings)), begun)
        begun.rename(file)
    while not file.exists():  # a rank that fails ends those that wait for it
        time.sleep(0.01)
    return RunResult(**torch.load(file))


def same_as_one_process(
    model: str, world: World, meet: str, folder: Path, *, count: int = STEPS, **values: Any
) -> None:
    """Losses, norms, the first and last step's gradients and the weights at the end equal one process's."""
    if values.get("parallel__tensor_model_parallel_size", 1) > 1 and "batch__global_batch_size" not in values:
        # tensor parallelism sends some sixty messages a micro-batch: four of two samples, not eight of one
        values.setdefault("batch__micro_batch_size", 2)
    expected = reference(
        model, count, {key: value for key, value in values.items() if _fits_one(key)}, world, folder
    )
    run = trainer(model, world, meet, folder, **values)
    for step in range(count):
        many = _step(run)
        torch.testing.assert_close(torch.tensor(many), torch.tensor(expected.steps[step]), **TOLERANCE)
        if step in expected.gradients:
            _same_shares(run, expected.gradients[step], gradients=True)
    run.sharding.wait_all_gather()
    _same_shares(run, expected.weights, gradients=False)
    run.mesh.destroy()


def resumes(
    model: str,
    before: dict[str, object],
    after: dict[str, object],
    exact: bool,
    world: World,
    meet: str,
    folder: Path,
) -> None:
    """Three steps, a checkpoint that every rank wrote its part of, and on from it with the settings `after`:
    as if the run had gone on."""
    larger = {"batch__micro_batch_size": 2}  # half as many passes as of single samples
    before, after = larger | before, larger | after
    run = trainer(model, world, meet + "a", folder, checkpoint__save=str(folder / "run"), **before)
    steps(run, 3)
    run.save()
    consumed, length = run.state.consumed_samples, run.state.seq_length
    on = steps(run, 2)  # while it is being written
    run.saver.finish()
    run.mesh.destroy()
    writers = {name.rpartition("-")[2] for name in Checkpoint.open(folder / "run").files}
    assert len(writers) == world.size, "every rank writes"
    second = trainer(model, world, meet + "b", folder, load_from=folder / "run", **after)
    assert second.state.iteration == 3
    assert (second.state.consumed_samples, second.state.seq_length) == (consumed, length)
    resumed = steps(second, 2)
    second.mesh.destroy()
    assert resumed == (on if exact else pytest.approx(on, abs=1e-5))


def _same_shares(run: Trainer, whole: dict[str, torch.Tensor], *, gradients: bool) -> None:
    """What this rank keeps of gradients or main weights, and what it computes with."""
    tp = run.mesh.tp

    def expected_share(row: Param) -> torch.Tensor:
        name = row.tied_to if row.name not in whole else row.name
        assert name is not None
        local = torch.zeros(row.local_shape(tp.size))
        for slab in row.slabs(tp.rank, tp.size):
            local[slab.in_local] = whole[name][slab.in_global]
        return local

    for stretch, values in zip(run.sharding.shard_ranges, _rank_tensors(run, gradients), strict=True):
        _close(values, expected_share(stretch.row).flatten()[stretch.begin : stretch.end], stretch.row.name)
    assert sum(stretch.size for stretch in run.sharding.shard_ranges)
    for row, weight in () if gradients else run.params:
        if not isinstance(weight, DTensor):
            _close(weight.detach(), expected_share(row), row.name)


def _close(actual: torch.Tensor, expected_share: torch.Tensor, name: str) -> None:
    torch.testing.assert_close(actual, expected_share, **TOLERANCE, msg=lambda text: f"{name}: {text}")


def _rank_tensors(run: Trainer, gradients: bool) -> Sequence[torch.Tensor]:
    return run.grad_sync.shards if gradients else run.sharding.main_params


def storages() -> dict[int, int]:
    """Bytes of every storage that a tensor of this process is in, by its address."""
    gc.collect()
    # not those that hold others, as DTensor, or nothing, as what torch.compile leaves behind
    tensors = (
        candidate for candidate in gc.get_objects() if type(candidate) in (torch.Tensor, torch.nn.Parameter)
    )
    plain = (candidate.untyped_storage() for candidate in tensors if candidate.numel())
    return {storage.data_ptr(): storage.nbytes() for storage in plain if storage.data_ptr()}


def _fits_one(key: str) -> bool:
    return not key.startswith(("parallel__", "recompute__"))


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(list(value) if isinstance(value, tuple) else value)
