"""From a corpus and a plan to the samples a run trains on and is validated on."""

from __future__ import annotations

import numpy as np

from mega_schema.indexed import IndexedDataset
from mega_train.data.samples import Samples, build_index
from mega_train.data.splits import split_ranges
from mega_train.resolve import Plan


def feed(
    plan: Plan, corpus: IndexedDataset, *, iteration: int, consumed: int
) -> tuple[Samples, Samples | None]:
    """Training and validation samples; None where nothing is to be validated on.

    Args:
        iteration, consumed: where the run stands.

    Raises:
        ConfigError: a split holds too few tokens for one sample.
    """
    train, valid, _ = split_ranges(plan.run.data.split, len(corpus), plan.run.data.split_rule)

    def samples(name: str, part: tuple[int, int], count: int) -> Samples:
        index = build_index(
            corpus.lengths,
            np.arange(*part, dtype=np.int32),
            length=plan.length,
            samples=count,
            seed=plan.run.train.seed,
            part=f"the {name} split",
        )
        return Samples(corpus, index)

    # more than --train-iters' worth where a run goes on with smaller batches than it began with
    end = plan.batches.after(consumed, max(0, plan.iterations - iteration))
    training = samples("training", train, max(plan.train_samples, end))
    if plan.run.evaluation.iterations == 0 or valid[0] == valid[1]:
        return training, None
    return training, samples("validation", valid, plan.valid_samples)
