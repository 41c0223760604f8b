"""Write Megatron core's `torch_dist` folders."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mega_ckpt.checkpoint.checkpoint_source import CheckpointSource
from mega_ckpt.checkpoint.writer import NamespacePlan, namespaces_to_write, rank_shares
from mega_ckpt.formats.interface import KEEP, WriteOptions, WriteResult
from mega_ckpt.formats.megatron import args as megatron_args
from mega_ckpt.formats.megatron.names import core_names
from mega_ckpt.formats.megatron.optimizer import FIRST
from mega_ckpt.formats.megatron.run_dir import (
    atomic_checkpoint_dir,
    check_run_dir,
    checkpoint_dir_name,
)
from mega_ckpt.formats.megatron.writer import (
    VERSION,
    MegatronWriter,
    check_trainer,
    fill_padding,
    grad_scaler_state,
    scheduler_state,
)
from mega_ckpt.formats.torch_dist import dcp_writer
from mega_ckpt.formats.torch_dist.names import (
    BACKENDS,
    COMMON,
    EXTRA_STATE,
    LAYER,
    STATE_KINDS,
    UNSHARDED_KIND,
    WRITTEN_BY,
    expected_tensors,
)
from mega_ckpt.name_maps.alias import ForeignTensor
from mega_ckpt.name_maps.boxes import select_box
from mega_ckpt.tensors.row_stream import RowChunk, rows_per_chunk
from mega_ckpt.torch_files import zip_writer
from mega_ckpt.torch_files.pickle_reader import Record
from mega_schema.arch import table
from mega_schema.atomic_io import write_text
from mega_schema.checkpoint.reader import MAIN, MODEL, OPTIMIZER
from mega_schema.errors import ConfigError
from mega_schema.params import count_params
from mega_schema.sharding import Shape

_RESHARDABLE = "fully_reshardable"
_CONTENT: Mapping[str, object] = MappingProxyType(
    {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "distrib_optim_sharding_type": _RESHARDABLE,
        "distrib_optim_fully_reshardable_mem_efficient": False,
    }
)
# modules of a layer for which Megatron stores an (empty) FP8 state
_FLOAT8 = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
# row chunks per buffer: malloc reuses blocks up to 16 MiB; larger ones are mapped afresh each time
_CHUNKS_PER_BOX = 4


def check_target(source: CheckpointSource, run: Path, target: WriteOptions) -> None:
    """Refuse a model that Megatron does not support, an optimizer other than Adam, or an existing run.

    Raises:
        ConfigError: one of these, or torch is not installed.
        LayoutError: the model cannot be split by the requested layout.
    """
    megatron_args.from_spec(source.spec, source.path, core=True)
    rank_shares(source.spec, target.layout, source.spaces[MODEL])
    foreign = [space for space in source.spaces if space not in (MODEL, *OPTIMIZER)]
    if foreign and target.optimizer:
        wanted = ", ".join(OPTIMIZER)
        hint = "--no-optim drops it"
        raise ConfigError(f"{source.path}: {foreign[0]}", "is not Adam's", wanted=wanted, hint=hint)
    kinds = set(source.spaces[MODEL].values())
    if target.dtype == KEEP and len(kinds) > 1:  # a stacked tensor has a single dtype
        raise ConfigError(
            "--dtype", "the weights have several dtypes", found=sorted(kinds), hint="--dtype fp32"
        )
    dcp_writer.check_torch()
    check_trainer(source)
    check_run_dir(run, source.iteration or None, force=target.force)


def write(source: CheckpointSource, run: Path, target: WriteOptions) -> WriteResult:
    """Write a checkpoint into the run's folder, as a release if there was no training."""
    spec = source.spec
    iteration = source.iteration or None
    dtype = None if target.dtype == KEEP else target.dtype
    spaces = namespaces_to_write(source.spaces, optimizer=target.optimizer, dtype=dtype)
    _, names = core_names(spec)
    writing = MegatronWriter(source, target.layout, names, spaces, core=True)
    chunks = list(chunks_to_write(source, spaces, writing.args(0, 0)["padded_vocab_size"]))
    size = sum(chunk.bytes for chunk in chunks)
    block = "decoder" if spec.causal else "encoder"
    empty_names = [
        f"{block}.layers.{module}{EXTRA_STATE}/shard_{layer}_{spec.layers}"
        for layer in range(spec.layers)
        for module in _FLOAT8
    ]
    if not spec.causal:  # a GPT leaves that of its output layer out
        empty_names.append(f"output_layer{EXTRA_STATE}/shard_0_1")
    with atomic_checkpoint_dir(run, iteration, force=target.force) as folder:
        with target.progress(size) as update:
            dcp_writer.write_dcp(
                folder, chunks, empty_names, update, second_names=dict(_second_names(chunks))
            )
        scale = grad_scaler_state(source.trainer)
        zip_writer.write(folder / COMMON, _common_tree(writing), lambda _: [scale[0]] if scale else [])
        write_text(folder / BACKENDS, json.dumps(dict(WRITTEN_BY)))
    return WriteResult(run / checkpoint_dir_name(iteration), count_params(table(spec)), size, tokenizer=False)


def _common_tree(writing: MegatronWriter) -> dict[str, Any]:
    """Build the content of common.pt, which is common to all ranks."""
    source = writing.source
    optimizer = FIRST in writing.spaces
    lacking = {"no_save_rng": True, "no_save_optim": not optimizer}  # otherwise Megatron would look for it
    tree: dict[str, Any] = {
        "args": Record("argparse.Namespace", (), writing.args(0, 0) | lacking),
        "checkpoint_version": VERSION,
        "iteration": source.iteration,
        "content_metadata": dict(_CONTENT),
    }
    if optimizer:
        groups = [writing.group(decay, ()) for decay in (True, False)]
        for group in groups:
            del group["params"]  # every rank has its own
        adam = {"state": {"common_step": writing.steps}, "param_groups": groups}
        # with float32 weights the optimizer is Adam itself; otherwise a wrapper contains it
        tree["optimizer"] = adam | {"optimizer": adam, "param_state_sharding_type": _RESHARDABLE}
        if scale := grad_scaler_state(source.trainer):
            tree["optimizer"]["grad_scaler"] = scale[1]
    return tree | scheduler_state(source.trainer)


def chunks_to_write(
    source: CheckpointSource, spaces: Mapping[str, NamespacePlan], padded: int
) -> Iterator[dcp_writer.DcpChunk]:
    """Yield every tensor of every namespace in chunks; layer tensors one by one.

    Args:
        padded: vocabulary rows, padding included.
    """
    spec = source.spec
    _, names = core_names(spec)
    foreign = list(expected_tensors(spec, names, padded))
    keys = {space: f"optimizer.state.{kind}." for kind, space in STATE_KINDS.items()} | {MODEL: ""}
    for space, plan in spaces.items():
        for tensor in foreign:
            layer = LAYER.search(tensor.name)
            kind = plan.dtypes[tensor.ours]
            key = keys[space] + LAYER.sub(".layers.", tensor.name, 1)
            layer_index: Shape = () if layer is None else (int(layer[1]),)
            whole = tensor.shape if layer is None else (spec.layers, *tensor.shape)
            step = _CHUNKS_PER_BOX * rows_per_chunk(tensor.shape, kind)
            for first in range(0, tensor.shape[0], step):
                start = (first, *(0,) * (len(tensor.shape) - 1))
                shape = (min(step, tensor.shape[0] - first), *tensor.shape[1:])
                part = select_box(tensor, start, shape)
                values = partial(_padded_values, source, plan.space, part, kind, space)
                box = (*layer_index, *start), (*(1 for _ in layer_index), *shape)
                yield dcp_writer.DcpChunk(key, kind, whole, *box, values)


def _second_names(chunks: Sequence[dcp_writer.DcpChunk]) -> Iterator[tuple[str, str]]:
    """Yield the second names that the distributed optimizer gives float32 weights."""
    keys = {chunk.key for chunk in chunks}
    state = {space: f"optimizer.state.{kind}." for kind, space in STATE_KINDS.items()}
    for key in keys:
        if state[FIRST] + key in keys:
            main = state[MAIN] + key
            yield f"optimizer.state.{UNSHARDED_KIND}.{key}", main if main in keys else key


def _padded_values(
    source: CheckpointSource, space: str, part: ForeignTensor, dtype: str, into: str
) -> np.ndarray:
    """Read part of a tensor and fill its padding."""
    out = source.assemble(space, part, dtype)
    fill_padding(source, space, part, dtype, into, RowChunk(0, out))
    return out
