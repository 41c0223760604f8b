"""Write folders of torch.distributed.checkpoint with torch's writer. This module needs torch.

The writer requests one box at a time and writes it before it requests the next.
"""

from __future__ import annotations

import importlib.util
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from mega_ckpt.tensors.parallel_map import UpdateProgress
from mega_schema.app.install_hint import install_hint
from mega_schema.checkpoint.reader import DTYPES
from mega_schema.errors import ConfigError, MegaError
from mega_schema.sharding import Shape

if TYPE_CHECKING:
    import torch

_TORCH: Mapping[str, str] = MappingProxyType({"F32": "float32", "BF16": "bfloat16", "F16": "float16"})


@dataclass(frozen=True, slots=True)
class DcpChunk:
    """A box of a tensor to write.

    Attributes:
        key: name of the tensor.
        dtype: safetensors' name.
        whole: shape of the tensor.
        start, shape: of the box.
        values: returns the values in `shape`; bfloat16 as uint16 bits.
    """

    key: str
    dtype: str
    whole: Shape
    start: Shape
    shape: Shape
    values: Callable[[], np.ndarray]

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.dtype].itemsize


def check_torch() -> None:
    """Check that torch is installed.

    Raises:
        ConfigError: torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "--to torch_dist",
            "is written by torch, which is not installed",
            hint=install_hint("mega-ckpt", "torch"),
        )


def write_dcp(
    folder: Path,
    chunks: Sequence[DcpChunk],
    empty_names: Sequence[str],
    update: UpdateProgress,
    second_names: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write .metadata and one .distcp file and flush them to disk.

    Args:
        empty_names: names of empty entries, such as Megatron writes for layers without FP8.
        update: called with the bytes of each box.
        second_names: second name -> tensor; the values are written once.

    Raises:
        MegaError: raised by `values` of a chunk.
        OSError: the disk refused the write.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.checkpoint.storage import WriteResult

    class Writer(FileSystemWriter):
        """A writer that does not record information about the machine."""

        def storage_meta(self) -> StorageMeta:
            return StorageMeta()

        def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
            written = [result for group in results for result in group]
            for second, key in second_names.items():
                metadata.state_dict_metadata[second] = metadata.state_dict_metadata[key]
                metadata.mcore_data[second] = {}  # type: ignore[attr-defined]
                of_key = [result for result in written if result.index.fqn == key]
                results.append(
                    [replace(result, index=replace(result.index, fqn=second)) for result in of_key]
                )
            super().finish(metadata, results)

    # no prefetched copies: they would use memory
    writer = Writer(folder, thread_count=1, per_thread_copy_ahead=0)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save({}, storage_writer=writer, planner=_planner(chunks, empty_names, update), no_dist=True)
    except CheckpointException as failed:
        error, _ = next(iter(failed.failures.values()))
        if isinstance(error, RuntimeError) and "inline_container" in str(
            error
        ):  # torch's writer of zip files
            hint = "free disk space, or write to another disk"
            raise MegaError(folder, "not written", found=str(error).split("\n")[0], hint=hint) from error
        raise error from None


def _planner(chunks: Sequence[DcpChunk], empty_names: Sequence[str], update: UpdateProgress) -> Any:
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    wanted: dict[tuple[str, torch.Size], DcpChunk] = {}
    items = []
    for chunk in chunks:
        start, shape, whole = (torch.Size(n) for n in (chunk.start, chunk.shape, chunk.whole))
        dtype = getattr(torch, _TORCH[chunk.dtype])
        wanted[chunk.key, start] = chunk
        data = TensorWriteData(ChunkStorageMetadata(start, shape), TensorProperties(dtype=dtype), whole)
        items.append(WriteItem(MetadataIndex(chunk.key, start), WriteItemType.SHARD, tensor_data=data))
    items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in empty_names]
    names = {item.index.fqn: (item.index.fqn,) for item in items}

    class Planner(DefaultSavePlanner):
        """A save plan whose values are read only when they are written."""

        def create_local_plan(self) -> SavePlan:
            self.plan = SavePlan(items, planner_data=names)
            return self.plan

        def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
            plans, metadata = super().create_global_plan(all_plans)
            # Megatron looks here for reshaped tensors: there are none
            metadata.mcore_data = {key: {} for key, _ in wanted}  # type: ignore[attr-defined]
            return plans, metadata

        def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
            index = write_item.index
            if index.offset is None:
                buffer = io.BytesIO()
                torch.save([None], buffer)
                return buffer
            chunk = wanted[index.fqn, index.offset]
            tensor = _tensor(chunk)
            update(chunk.bytes)
            return tensor

    return Planner()


def _tensor(chunk: DcpChunk) -> torch.Tensor:
    import torch

    values = np.ascontiguousarray(chunk.values()).reshape(chunk.shape)
    if chunk.dtype == "BF16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
