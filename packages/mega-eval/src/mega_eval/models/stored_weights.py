"""Read a checkpoint's weights in the dtype they are stored in."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mega_schema.checkpoint.reader import MODEL, Checkpoint
from mega_schema.sharding import Slab


def weight_reader(checkpoint: Checkpoint) -> Callable[[str, Slab], Tensor]:
    """Return the `read` of `fill_weights`.

    `Checkpoint.model_slab` makes float32 of bfloat16, two more passes over the weights.
    """

    def read(name: str, slab: Slab) -> Tensor:
        values = checkpoint.read_raw(MODEL, name, slab)
        if checkpoint.tensors[MODEL][name].dtype == "BF16":
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(values)

    return read
