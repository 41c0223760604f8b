"""Build a model from its spec, and fill its weights from named values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from mega_model.decoder import Decoder
from mega_model.distributed.mesh import Mesh
from mega_model.encoder import Encoder
from mega_model.encoder_decoder import EncoderDecoder
from mega_model.kernels import REFERENCE, Kernels
from mega_model.runtime import Runtime
from mega_schema.params import Param
from mega_schema.sharding import Slab
from mega_schema.spec import ModelSpec


def build_model(rt: Runtime) -> Decoder:
    """Build this rank's pipeline stage of the model, with uninitialised weights."""
    if rt.spec.encoder_layers is not None:
        return EncoderDecoder(rt)
    return Decoder(rt) if rt.spec.causal else Encoder(rt)


def load_model(
    spec: ModelSpec,
    read: Callable[[str, Slab], np.ndarray | Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    kernels: Kernels = REFERENCE,
) -> Decoder:
    """Build the whole model on one device, set its weights and put it in evaluation mode.

    Args:
        read: as in `fill_weights`; a checkpoint's `model_slab`.
    """
    rt = replace(Runtime.single_process(spec, dtype=dtype, device=device), kernels=kernels)
    model = build_model(rt)
    fill_weights(model, read, rt)
    return model.eval()


def build_chunks(rt: Runtime, mesh: Mesh) -> tuple[Decoder, ...]:
    """Build the stages that this rank holds, one per round of an interleaved pipeline."""
    spec = rt.spec
    return tuple(build_model(rt.for_stage(mesh.stage(spec.layers, i))) for i in range(mesh.layout.vp))


def parameters(model: Decoder, rt: Runtime) -> Iterator[tuple[Param, nn.Parameter]]:
    """Yield every parameter of this rank with its table row; parameters tied on one stage come once."""
    for name, weight in model.named_parameters():
        yield rt.table[name], weight


@torch.no_grad()
def fill_weights(
    model: Decoder, read: Callable[[str, Slab], np.ndarray | Tensor], rt: Runtime | None = None
) -> None:
    """Set every weight from a source of boxes of the global tensors; padding rows become zero.

    Args:
        read: called with a name in the table and a box; a checkpoint's `model_slab`, or
            `init.initial_values`. A tied parameter reads the tensor it is tied to.
        rt: the runtime the model was built with; None for a model that one process holds whole.
    """
    rt = rt or Runtime.single_process(model.spec)
    for row, weight in parameters(model, rt):
        slabs = row.slabs(rt.tp.rank, rt.tp.size)
        if sum(math.prod(slab.shape) for slab in slabs) < weight.numel():
            weight.zero_()
        for slab in slabs:
            weight[slab.in_local] = torch.as_tensor(read(row.tied_to or row.name, slab))


def as_tensor(raw: np.ndarray, stored: str) -> Tensor:
    """Return numbers as stored in a checkpoint as a tensor that shares their memory.

    Args:
        stored: the checkpoint's name of their dtype; bfloat16, "BF16", is read as 16 bits.
    """
    values = torch.from_numpy(raw)
    return values.view(torch.bfloat16) if stored == "BF16" else values
