"""Read a checkpoint's weights in the dtype they are stored in."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mega_model.build import as_tensor
from mega_schema.checkpoint.reader import MODEL, Checkpoint
from mega_schema.sharding import Slab


def weight_reader(checkpoint: Checkpoint) -> Callable[[str, Slab], Tensor]:
    """Return the `read` of `fill_weights`.

    `Checkpoint.model_slab` makes float32 of bfloat16, two more passes over the weights.
    """

    def read(name: str, slab: Slab) -> Tensor:
        return as_tensor(checkpoint.read_raw(MODEL, name, slab), checkpoint.tensors[MODEL][name].dtype)

    return read
