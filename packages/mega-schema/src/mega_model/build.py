"""From a spec to a model, and from named values to its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from mega_model.decoder import Decoder
from mega_model.distributed.mesh import Mesh
from mega_model.gpt import GPT
from mega_model.llama import Llama
from mega_model.runtime import Runtime
from mega_schema.params import Param
from mega_schema.sharding import Slab
from mega_schema.spec import ModelSpec


def build_model(spec: ModelSpec, rt: Runtime) -> Decoder:
    """The stage of the model that the runtime's rank holds, its values not yet set."""
    return {"gpt": GPT, "llama": Llama}[spec.family](rt)


def load_model(
    spec: ModelSpec,
    read: Callable[[str, Slab], np.ndarray | Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Decoder:
    """Build the whole model on one device, set its weights and put it in evaluation mode.

    Args:
        read: as in `fill`; a checkpoint's `model_slab`.
    """
    rt = Runtime.single_process(spec, dtype=dtype, device=device)
    model = build_model(spec, rt)
    fill_weights(model, read, rt)
    return model.eval()


def build_chunks(rt: Runtime, mesh: Mesh) -> tuple[Decoder, ...]:
    """The stages that the runtime's rank holds, one for each round of the pipeline over the ranks."""
    spec = rt.spec
    return tuple(build_model(spec, rt.for_stage(mesh.stage(spec.layers, i))) for i in range(mesh.layout.vp))


def parameters(model: Decoder, rt: Runtime) -> Iterator[tuple[Param, nn.Parameter]]:
    """Every parameter this rank holds, with its row; one tied to another on the same stage comes once."""
    for name, weight in model.named_parameters():
        yield rt.table[name], weight


@torch.no_grad()
def fill_weights(
    model: Decoder, read: Callable[[str, Slab], np.ndarray | Tensor], rt: Runtime | None = None
) -> None:
    """Set every weight from a source of boxes of the global tensors; padding becomes zero.

    Args:
        read: called with a name in the table and the box that is wanted; a checkpoint's `model_slab`, or
            `init.initial_values`. A tied parameter asks for the one it is tied to.
        rt: the runtime the model was built with; None for a model that one process holds whole.
    """
    rt = rt or Runtime.single_process(model.spec)
    for row, weight in parameters(model, rt):
        values = torch.zeros(weight.shape, dtype=weight.dtype)
        for slab in row.slabs(rt.tp.rank, rt.tp.size):
            box = read(row.tied_to or row.name, slab)
            values[slab.in_local] = torch.as_tensor(box).to(weight.dtype)
        weight.copy_(values)
