"""Mega checkpoints built from whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mega_ckpt.checkpoint.writer import rank_shares
from mega_schema.checkpoint.reader import MODEL, BoxToWrite
from mega_schema.checkpoint.writer import CheckpointWriter
from mega_schema.parallel_layout import WHOLE, Layout
from mega_schema.spec import ModelSpec

Whole = dict[str, dict[str, np.ndarray]]  # by namespace and name, as they are stored


def save_whole(
    run: Path,
    spec: ModelSpec,
    whole: Whole,
    *,
    dtype: str = "F32",
    layout: Layout = WHOLE,
    iteration: int = 1,
    tokenizer: Path | None = None,
    trainer: Mapping[str, Any] | None = None,
    run_config: str = "# a run\n",
) -> Path:
    """Save them as the ranks of a layout would.

    Args:
        dtype: of the weights; the optimizer's state is float32.
        trainer: what trainer.json says beside the iteration and its samples, eight each.
    """
    save = CheckpointWriter(run, iteration)
    save.begin()
    for space, tensors in whole.items():
        kinds = dict.fromkeys(tensors, dtype if space == MODEL else "F32")

        def values(box: BoxToWrite, tensors: dict[str, np.ndarray] = tensors) -> np.ndarray:
            return tensors[box.name][box.slab.in_global]

        for share in rank_shares(spec, layout, kinds):
            save.write(space, share.rank, share.boxes, values)
    trainer_state = {"iteration": iteration, "consumed_samples": 8 * iteration, **(trainer or {})}
    return save.commit(spec, layout=layout, trainer=trainer_state, tokenizer=tokenizer, run_config=run_config)
