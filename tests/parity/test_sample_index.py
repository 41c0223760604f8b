"""One rank builds the sample order, and all ranks map it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from mega_model.distributed.mesh import Mesh, World
from mega_schema.app.config import load_config
from mega_schema.dataset.indexed_dataset import IndexedWriter
from mega_train.config import RunConfig
from mega_train.data.dataloaders import build_data_splits
from mega_train.data.datasets import Datasets
from mega_train.data.sample_index import SampleIndexSpec
from mega_train.resolve import resolve
from tests.parity.ranks import on_ranks

MODEL = [
    "model.num_layers=1",
    "model.hidden_size=8",
    "model.num_attention_heads=2",
    "model.vocab_size=2000",
    "model.max_position_embeddings=8",
]
RUN = ["batch.global_batch_size=4", "train.train_iters=20", "optimizer.lr=0.1", "evaluation.eval_iters=0"]
RANKS = 2
Read = Callable[[str], list[tuple[list[str], list[list[int]]]]]  # of each rank: what it made, what it read


def _write_corpus(prefix: Path, documents: int) -> str:
    with IndexedWriter(prefix, np.uint16) as out:
        for begin in range(documents):
            out.add(np.arange(begin, begin + 3 + begin % 17))
            out.end_document()
    return str(prefix)


def _reads(cache: Callable[[Path, int], Path], world: World, meet: str, folder: Path) -> None:
    """Leave what this rank read, and what it made for that."""
    words = [
        "0.2",
        _write_corpus(folder / f"a{world.rank}", 50),
        "0.8",
        _write_corpus(folder / f"b{world.rank}", 70),
    ]
    data = [f"data.data_path={json.dumps(words)}", f"data.data_cache_path={cache(folder, world.rank)}"]
    run = load_config(RunConfig, None, {}, [*MODEL, *RUN, *data])
    plan = resolve(run, "gpt", world.size, corpus=None, loaded_spec=None, cuda=False)
    mesh = Mesh.join(plan.layout, world, init_method=meet)
    written_folders: list[str] = []
    write = SampleIndexSpec.write

    def write_and_note(recipe: SampleIndexSpec, to: Path) -> None:
        written_folders.append(to.parent.name)
        write(recipe, to)

    config = plan.data_splits_config(iteration=0, consumed_samples=0)
    with patch.object(SampleIndexSpec, "write", write_and_note):
        fed = build_data_splits(config, Datasets.open(run.data), mesh)
    read = [fed.training[i].tolist() for i in range(len(fed.training))]
    (folder / f"read-{world.rank}.json").write_text(json.dumps([written_folders, read]))
    mesh.barrier()
    mesh.destroy()


def _read_shared(world: World, meet: str, folder: Path) -> None:
    _reads(lambda folder, rank: folder / "cache", world, meet, folder)


def _read_separate(world: World, meet: str, folder: Path) -> None:
    _reads(lambda folder, rank: folder / f"cache{rank}", world, meet, folder)


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    folder = tmp_path_factory.mktemp("feed")
    failed = on_ranks(RANKS, {"shared": _read_shared, "apart": _read_separate}, folder)

    def read_case(case: str) -> list[tuple[list[str], list[list[int]]]]:
        assert not failed[case], failed[case]
        return [json.loads((folder / case / f"read-{rank}.json").read_text()) for rank in range(RANKS)]

    return read_case


def test_one_rank_makes_the_order_and_all_read_by_it(read: Read) -> None:
    (first, samples), (second, same) = read("shared")
    assert (first, second) == (["cache"], [])
    assert samples == same
    assert len(samples) == 17 + 65, "ceil(80 * 0.2 * 1.005) + ceil(80 * 0.8 * 1.005)"


def test_a_rank_that_does_not_see_the_firsts_files_makes_the_same_order(read: Read) -> None:
    (first, samples), (second, same) = read("apart")
    assert (first, second) == (["cache0"], ["cache1"])
    assert samples == same == read("shared")[0][1]
