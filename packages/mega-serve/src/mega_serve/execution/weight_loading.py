"""Load a checkpoint's weights into the form they compute in, one parameter at a time.

The model is built without memory. Each parameter's box is read as it is stored, for this rank's part of the
tensor, and becomes its packed form or a parameter of the model's dtype while a thread reads the next one.
Memory at any moment is the finished weights and two tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mega_model.build import as_tensor, build_model
from mega_model.decoder import Decoder
from mega_model.kernels.batch_invariant import build_kernels
from mega_model.kernels.numba import NumbaKernels
from mega_model.kernels.row_functions import with_row_functions
from mega_model.runtime import Runtime
from mega_schema.checkpoint.checksums import verify_namespace
from mega_schema.checkpoint.reader import MODEL, Checkpoint
from mega_schema.params import Param
from mega_schema.row_segments import check_segments
from mega_schema.sharding import Slab
from mega_serve.execution.packed_weights import (
    WeightDtype,
    choose_packing,
    linear_layers,
    pack_layer,
)

_RATIO_BYTES = 100_000_000  # below, building the model takes longer than reading its weights
ReadRaw = Callable[[str, Slab], Tensor]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The size and time of a load.

    Attributes:
        bytes: read from the checkpoint.
        read_seconds: of reading them.
        seconds: of the load, reading included, verifying not.
        verify_seconds: of verifying the checksums; None: they were not verified.
    """

    bytes: int
    read_seconds: float
    seconds: float
    verify_seconds: float | None = None

    def __str__(self) -> str:
        megabytes = self.bytes / 1e6
        line = f"{megabytes:,.{0 if megabytes >= 10 else 1}f} MB of weights ready in {self.seconds:.2f} s"
        if self.bytes >= _RATIO_BYTES:
            ratio = self.seconds / self.read_seconds if self.read_seconds else 1.0
            line += f", {ratio:.2f} times the {self.read_seconds:.2f} s of reading them"
        if self.verify_seconds is None:
            return line
        return f"{line}; checksums verified in {self.verify_seconds:.2f} s"


def compute_dtype(dtype: WeightDtype) -> torch.dtype:
    """Return the dtype of activations: bfloat16 for int8 weights."""
    return torch.float32 if dtype == "float32" else torch.bfloat16


def load_weights(
    checkpoint: Checkpoint,
    rt: Runtime,
    *,
    dtype: WeightDtype,
    kernels: NumbaKernels | None = None,
    batch_invariant: bool = False,
    verify: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Decoder, LoadReport]:
    """Build this rank's stage of the model and load its weights, packed on a CPU.

    Args:
        rt: the rank's runtime; its dtype is `compute_dtype(dtype)`.
        kernels, batch_invariant: see `fill_model`.
        verify: compare the checksums of all weights first, those of other ranks included.

    Raises:
        FormatError: the checkpoint lacks a weight, a piece does not cover its box, or values are damaged.
        MegaError: batch-invariant products do not run here, or tp does not divide their segments.
    """
    assert rt.dtype == compute_dtype(dtype), f"a runtime of {rt.dtype} for weights of {dtype}"
    begin_verify = clock()
    if verify:
        verify_namespace(checkpoint, MODEL)
    start = clock()
    bytes_read = 0
    read_seconds = 0.0

    def read(name: str, slab: Slab) -> Tensor:
        nonlocal bytes_read, read_seconds
        begin = clock()
        values = as_tensor(checkpoint.read_raw(MODEL, name, slab), checkpoint.tensors[MODEL][name].dtype)
        read_seconds += clock() - begin
        bytes_read += values.nbytes
        return values

    model = fill_model(rt, read, dtype=dtype, kernels=kernels, batch_invariant=batch_invariant)
    verify_seconds = start - begin_verify if verify else None
    return model, LoadReport(bytes_read, read_seconds, clock() - start, verify_seconds)


def fill_model(
    rt: Runtime,
    read: ReadRaw,
    *,
    dtype: WeightDtype,
    kernels: NumbaKernels | None = None,
    batch_invariant: bool = False,
) -> Decoder:
    """Build this rank's stage of the model with weights from a source of boxes, in evaluation mode.

    A tied embedding keeps its rows for the lookup, beside the packed head.

    Args:
        read: returns a box of a tensor in any dtype, as a tensor of its own.
        kernels: for products of a few rows, with `batch_invariant` for all; see `packed_weights`.
        batch_invariant: compute with `mega_model.kernels.batch_invariant`.
    """
    pack = None
    if rt.device.type == "cpu" or batch_invariant:
        pack = choose_packing(dtype, kernels, batch_invariant=batch_invariant)
    if batch_invariant and kernels is not None:
        check_segments(rt.spec, rt.tp.size)
        rt = replace(rt, kernels=build_kernels(rt.kernels, kernels))
    elif pack is not None and kernels is not None:
        rt = replace(rt, kernels=with_row_functions(rt.kernels, kernels))
    model = build_model(replace(rt, device=torch.device("meta")))
    layers = linear_layers(model)
    is_tied = rt.spec.tied and rt.stage.is_first and rt.stage.is_last
    with torch.no_grad():
        for name, value in _read_parameters(list(model.named_parameters()), rt, read):
            layer = layers.get(name)
            if is_tied and name == "embed.weight":
                layer = model.head
                _set_parameter(model, name, value)
                _set_parameter(model, "head.weight", value)
            elif pack is None or layer is None:
                _set_parameter(model, name, value)
            if pack is not None and layer is not None:
                pack_layer(layer, pack(value))
    return model.eval()


def _read_parameters(
    parameters: Sequence[tuple[str, nn.Parameter]], rt: Runtime, read: ReadRaw
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and this rank's part of each parameter; a thread reads the one after it meanwhile."""

    def read_boxes(number: int) -> list[Tensor]:
        row = rt.table[parameters[number][0]]
        return [read(row.tied_to or row.name, slab) for slab in row.slabs(rt.tp.rank, rt.tp.size)]

    with ThreadPoolExecutor(1, "read weights") as reader:
        boxes = reader.submit(read_boxes, 0)
        for number, (name, parameter) in enumerate(parameters):
            values = boxes.result()
            if number + 1 < len(parameters):
                boxes = reader.submit(read_boxes, number + 1)
            yield name, _join_boxes(rt.table[name], values, parameter, rt)


def _join_boxes(row: Param, boxes: Sequence[Tensor], parameter: nn.Parameter, rt: Runtime) -> Tensor:
    """Return a parameter in the model's dtype; padding rows are zero."""
    slabs = row.slabs(rt.tp.rank, rt.tp.size)
    if len(slabs) == 1 and slabs[0].shape == tuple(parameter.shape):
        return boxes[0].to(rt.device, parameter.dtype)
    values = torch.zeros(parameter.shape, dtype=parameter.dtype, device=rt.device)
    for slab, box in zip(slabs, boxes, strict=True):
        values[slab.in_local] = box.to(rt.device, parameter.dtype)
    return values


def _set_parameter(model: Decoder, name: str, value: Tensor) -> None:
    module, _, field = name.rpartition(".")
    setattr(model.get_submodule(module), field, nn.Parameter(value, requires_grad=False))
