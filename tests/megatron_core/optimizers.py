"""Load optimizer state into Megatron Core's optimizers and save it, as its training does."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.megatron_core.checkpoints import padded_vocab, rank_folder
from tests.megatron_core.models import begin, build_chunks

STATE = ("exp_avg", "exp_avg_sq")


def load_and_save(folder: Path, wanted: Sequence[tuple[Sequence[int], Mapping[str, Any]]]) -> None:
    """Load every case, leave what every parameter's state is, and save it.

    Args:
        folder: with CASE-dist of ours.
        wanted: sizes of tp, pp and vp; and by the name of the case, arguments of Megatron's, of its
            optimizer, and `sharding`, how a distributed one saves its state.
    """
    _without_apex()
    for sizes, cases in wanted:
        begin(*sizes)
        for case, flags in cases.items():
            sys.stdout.write(f"{case} {sizes}\n")  # seen where it fails
            _case(folder, case, "".join(map(str, sizes)), **flags)


def _without_apex() -> None:
    """torch's Adam counts its steps in the state of every parameter, where Megatron Core looks for none."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    put = DistributedOptimizer._set_main_param_and_optimizer_states

    def put_beside_step(self: Any, weight: Any, tensors: dict[str, Any]) -> None:
        step = self._get_main_param_and_optimizer_states(weight)["step"].clone()
        put(self, weight, {"step": step, **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = put_beside_step


def _case(
    folder: Path,
    case: str,
    layout: str,
    flags: dict[str, Any],
    optimizer: dict[str, Any],
    sharding: str | None,
) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ranks

    path = str(folder / f"{case}-dist" / "iter_0000005")
    common = dist_checkpointing.load_common_state_dict(path)
    assert common["args"].no_save_rng
    common["args"].is_bert = flags.get("is_bert", False)
    chunks, taught = _build_with_optimizer(common["args"], optimizer)
    state = dist_checkpointing.load(
        _state(chunks, taught, common["content_metadata"], is_loading=True), path, strict="raise_unexpected"
    )
    _load_state(chunks, taught, state)
    _save_state(folder / f"{case}-ours-{layout}-{dist.get_rank()}.pt", chunks, taught)
    run = folder / f"{case}-theirs-{layout}"
    content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    content |= {"distrib_optim_sharding_type": sharding} if sharding else {}
    if dist.get_rank() == 0:
        (run / "iter_0000005").mkdir(parents=True)
        (run / "latest_checkpointed_iteration.txt").write_text("5", "utf-8")
    dist.barrier()
    tp = ranks.get_tensor_model_parallel_world_size()
    args = Namespace(**flags, padded_vocab_size=padded_vocab(flags, tp), consumed_train_samples=40)
    args.tensor_model_parallel_size = tp
    args.data_parallel_size = ranks.get_data_parallel_world_size()
    args.pipeline_model_parallel_size = ranks.get_pipeline_model_parallel_world_size()
    saved = {"args": args, "checkpoint_version": 3.0, "iteration": 5}
    sharded = _state(chunks, taught, content, is_loading=False)
    dist_checkpointing.save(saved | sharded, str(run / "iter_0000005"), content_metadata=content)
    _save_classic(folder / f"{case}-theirs-core-{layout}", chunks, taught, saved)


def _save_classic(run: Path, chunks: Sequence[Any], optimizer: Any, saved: dict[str, Any]) -> None:
    """A file per rank of tp and pp, and beside it that of a distributed optimizer, which all of dp write."""
    from megatron.core import parallel_state as ranks

    folder = rank_folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    if optimizer.config.use_distributed_optimizer:
        optimizer.save_parameter_state(str(folder / "distrib_optim.pt"))
    if ranks.get_data_parallel_rank() == 0:
        models = {
            name: _inner(chunk).state_dict_for_save_checkpoint()
            for name, chunk in zip(_names(chunks), chunks, strict=True)
        }
        torch.save(saved | models | {"optimizer": optimizer.state_dict()}, folder / "model_optim_rng.pt")
    (run / "latest_checkpointed_iteration.txt").write_text("5", "utf-8")
    dist.barrier()


def _build_with_optimizer(args: Namespace, flags: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Chunks of the model, and their optimizer."""
    from megatron.core import parallel_state as ranks
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    args.padded_vocab_size = padded_vocab(vars(args), ranks.get_tensor_model_parallel_world_size())
    shards = bool(flags.get("use_distributed_optimizer"))
    reduced = DistributedDataParallelConfig(use_distributed_optimizer=shards, bucket_size=flags.get("bucket"))
    options = {name: value for name, value in flags.items() if name != "bucket"}
    chunks = []
    for chunk in build_chunks(args):
        inner = Float16Module(chunk.config, chunk) if flags.get("bf16") else chunk
        chunks.append(DistributedDataParallel(chunk.config, reduced, inner))
    config = OptimizerConfig(
        lr=1e-3, weight_decay=0.1, clip_grad=0.0, params_dtype=args.params_dtype, **options
    )
    taught = get_megatron_optimizer(config, chunks)
    if shards:  # over torch's Adam, which has no state before its first step
        taught.chained_optimizers[0]._init_optimizer_states_with_dummy_values()
    return chunks, taught


def _names(chunks: Sequence[Any]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]


def _inner(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _state(
    chunks: Sequence[Any], optimizer: Any, content: dict[str, Any], *, is_loading: bool
) -> dict[str, Any]:
    from megatron.core import parallel_state as ranks

    metadata = content | {"dp_cp_group": ranks.get_data_parallel_group(with_context_parallel=True)}
    state = {
        name: _inner(chunk).sharded_state_dict(metadata=metadata)
        for name, chunk in zip(_names(chunks), chunks, strict=True)
    }
    return state | {
        "optimizer": optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    }


def _load_state(chunks: Sequence[Any], optimizer: Any, state: Mapping[str, Any]) -> None:
    for name, chunk in zip(_names(chunks), chunks, strict=True):
        _inner(chunk).load_state_dict(state[name], strict=True)
    optimizer.load_state_dict(state["optimizer"])


def _save_state(file: Path, chunks: Sequence[Any], optimizer: Any) -> None:
    """For every parameter here the numbers of its state that are here, flat; and the hyperparameters."""
    (only,) = optimizer.chained_optimizers
    numbers: dict[str, Any] = {}
    for number, chunk in enumerate(chunks):
        for name, weight in _inner(chunk).named_parameters():
            if only.config.use_distributed_optimizer:
                if weight not in only.model_param_group_index_map:
                    continue
                state = only._get_main_param_and_optimizer_states(weight)
                bounds = only._get_model_param_range_map(weight)["param"]
                begin = bounds.start
            else:
                main = getattr(weight, "main_param", weight)
                state, begin = {"param": main, **only.optimizer.state[main]}, 0
            values = {key: state[key].detach().flatten().clone() for key in ("param", *STATE)}
            numbers[f"{number}.{name}"] = {"begin": begin, "step": float(state["step"]), **values}
    groups = [
        {key: group[key] for key in ("lr", "wd_mult", "betas", "eps", "weight_decay")}
        for group in only.optimizer.param_groups
    ]
    torch.save({"state": numbers, "groups": groups}, file)
