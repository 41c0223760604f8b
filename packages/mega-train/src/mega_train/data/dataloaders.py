"""From corpora and a plan to the samples a run trains on, is validated on and is tested on."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from mega_model.distributed.mesh import Mesh
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.errors import ConfigError
from mega_train.data.array_cache import kept
from mega_train.data.blend import MOST
from mega_train.data.blend_spec import SPLIT, USES, Source
from mega_train.data.datasets import Corpora
from mega_train.data.sample_index import Recipe, Stream
from mega_train.data.sampler import Cursor, Cyclic, Single
from mega_train.data.sft import Packs, Pairs
from mega_train.data.splits import split_ranges
from mega_train.resolve import Plan

FOLDER = "index-cache"

log = logging.getLogger("mega.train")


class Reading(Protocol):
    """Samples, by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> np.ndarray:
        """(length + 1,) tokens, or (4, length + 1) of `data.answers`."""

    def corpus(self, i: int) -> Path:
        """Prefix of the dataset that sample `i` is from."""


@dataclass(frozen=True, slots=True)
class Feed:
    """What a rank reads.

    Attributes:
        validation, test: by the name of the group, none where nothing is to be scored.
    """

    training: Reading
    validation: Mapping[str, Reading]
    test: Mapping[str, Reading]

    def __iter__(self) -> Iterator[Reading]:
        yield from (self.training, *self.validation.values(), *self.test.values())


def feed(
    plan: Plan, corpora: Corpora | IndexedDataset | Pairs, mesh: Mesh, *, iteration: int, consumed: int
) -> Feed:
    """The samples of a run. Their order is made by its first rank, once, and kept for later runs.

    Ranks that do not see that rank's files make their own, one of each machine.

    Args:
        corpora: or one dataset that is open already.
        iteration, consumed: where the run stands.

    Raises:
        ConfigError: a part holds too few tokens for one sample.
        MegaError: the order cannot be kept anywhere.
    """
    # more than --train-iters' worth where a run goes on with smaller batches than it began with
    end = plan.batches.after(consumed, max(0, plan.iterations - iteration))
    samples = max(plan.train_samples, end)
    if isinstance(corpora, Pairs):
        return _packs(plan, corpora, samples, tell=mesh.rank == 0)
    if isinstance(corpora, IndexedDataset):
        corpora = Corpora.alone(corpora, plan.run.data)
    said, scored = corpora.sources, plan.run.evaluation.iterations > 0
    training = _recipe(plan, corpora, said.training, samples)
    validation, test = (
        {s.name: _recipe(plan, corpora, s, count) for s in several if scored and _any(s, corpora)}
        for several, count in ((said.validation, plan.valid_samples), (said.test, plan.test_samples))
    )
    folders = cache_folders(plan, corpora)

    def stream(name: str, recipe: Recipe) -> Stream:
        arrays = kept(folders, f"{name}-samples", recipe.values(), recipe.write)
        return recipe.opened(arrays, copy=plan.run.data.no_mmap)

    if mesh.rank:
        mesh.barrier()  # the first rank makes what there is not yet
    made = Feed(
        stream("training", training),
        {name: stream("validation", recipe) for name, recipe in validation.items()},
        {name: stream("test", recipe) for name, recipe in test.items()},
    )
    if not mesh.rank:
        mesh.barrier()
    return made


def _packs(plan: Plan, pairs: Pairs, samples: int, *, tell: bool) -> Feed:
    """Every rank packs by itself: it takes the lengths alone, and a moment."""
    data = plan.run.data
    parts = split_ranges(data.split or SPLIT, len(pairs), data.split_rule)

    def packs(use: int, rows: int) -> Packs:
        name = f"the {USES[use]} split"
        made = Packs(pairs, parts[use], length=plan.length, rows=rows, seed=plan.run.train.seed, name=name)
        if made.left_out and tell:
            left, of = made.left_out, parts[use][1] - parts[use][0]
            log.warning("%s: %d of %d examples are longer than a sample and left out", name, left, of)
        return made

    def scored(use: int, rows: int) -> Mapping[str, Packs]:
        some = plan.run.evaluation.iterations > 0 and parts[use][0] < parts[use][1]
        return {USES[use]: packs(use, rows)} if some else {}

    return Feed(packs(0, samples), scored(1, plan.valid_samples), scored(2, plan.test_samples))


def cursor(plan: Plan, mesh: Mesh, samples: Reading) -> Cursor:
    """The order in which this rank reads them.

    Raises:
        ConfigError: a cyclic order has too few of them.
    """
    data, whole = plan.run.data, (len(samples), plan.micro, mesh.dp.size, mesh.dp.rank)
    return Cyclic(*whole, sharded=not data.no_sharding) if data.order == "cyclic" else Single(*whole)


def cache_folders(plan: Plan, corpora: Corpora) -> Sequence[Path]:
    """Where the order of samples is looked for, and kept in the first that can be written to."""
    said, save = plan.run.data.cache, plan.run.checkpoint.save
    if said is not None:
        return [said]
    ours = Path(tempfile.gettempdir()) / f"mega-{FOLDER}-{os.getuid()}"
    folders = [] if plan.run.data.mock else [next(iter(corpora.opened)).parent / FOLDER]
    if save is not None:
        folders.append(save / FOLDER)
    if not ours.exists() or ours.stat().st_uid == os.getuid():  # anyone may make a folder there
        folders.append(ours)
    return folders


def _any(source: Source, corpora: Corpora) -> bool:
    """Whether any of its parts has a sequence."""
    return any(len(range(*part.cut.of(len(corpora.opened[part.prefix])))) for part in source.parts)


def _recipe(plan: Plan, corpora: Corpora, source: Source, samples: int) -> Recipe:
    if len(source.parts) > MOST:
        raise ConfigError(source.flag, "too many datasets", found=len(source.parts), wanted=f"at most {MOST}")
    return Recipe.of(
        source,
        corpora,
        length=plan.length,
        samples=samples,
        seed=plan.run.train.seed,
        renormalize=plan.run.data.renormalize,
    )
