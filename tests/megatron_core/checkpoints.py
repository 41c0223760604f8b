"""Load checkpoints in Megatron Core and save them, as its training does."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.megatron_core.models import begin, build_chunks, logits


def load_and_save(folder: Path, wanted: Sequence[tuple[Sequence[int], Mapping[str, Any]]]) -> None:
    """Load every case in every layout from both formats, leave the logits, and save it in both.

    Args:
        folder: with CASE-dist and, for each layout, CASE-core-LAYOUT, of ours, and tokens.npy.
        wanted: sizes of tp, pp and vp, and arguments of Megatron's by the name of the case.
    """
    token_BS = torch.from_numpy(np.load(folder / "tokens.npy"))
    for sizes, cases in wanted:
        begin(*sizes)
        layout = "".join(map(str, sizes))
        for case, flags in cases.items():
            sys.stdout.write(f"{case} {layout}\n")  # seen where it fails
            _keep(folder / f"{case}-dist-{layout}.npy", _load_dist(folder / f"{case}-dist", token_BS))
            chunks, scores = _load_core(folder / f"{case}-core-{layout}", token_BS)
            _keep(folder / f"{case}-core-{layout}.npy", scores)
            save_dist(folder / f"{case}-theirs-dist-{layout}", chunks, _args(flags, sizes))
            _save_core(folder / f"{case}-theirs-core-{layout}", chunks, _args(flags, sizes))


def _args(flags: Mapping[str, Any], sizes: Sequence[int]) -> Namespace:
    tp, pp, vp = sizes
    return Namespace(
        **flags,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp if vp > 1 else None,
        padded_vocab_size=padded_vocab(flags, tp),
    )


def padded_vocab(flags: Mapping[str, Any], tp: int) -> int:
    multiple = flags["make_vocab_size_divisible_by"] * tp
    return -(-61 // multiple) * multiple


def _keep(file: Path, scores: torch.Tensor | None) -> None:
    from megatron.core import parallel_state as ranks

    if scores is not None and ranks.get_tensor_model_parallel_rank() == 0:
        np.save(file, scores.numpy())


def _names(chunks: Sequence[Any]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]


def _load_dist(run: Path, token_BS: torch.Tensor) -> torch.Tensor | None:
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ranks

    path = str(run / "iter_0000005")
    args = dist_checkpointing.load_common_state_dict(path)["args"]
    tp = ranks.get_tensor_model_parallel_world_size()
    args.padded_vocab_size = padded_vocab(vars(args), tp)  # a training pads by its own layout
    chunks = build_chunks(args)
    wanted = {name: chunk.sharded_state_dict() for name, chunk in zip(_names(chunks), chunks, strict=True)}
    state = dist_checkpointing.load(wanted, path, strict="raise_all")
    for name, chunk in zip(_names(chunks), chunks, strict=True):
        chunk.load_state_dict(state[name], strict=True)
    return logits(chunks, token_BS)


def rank_folder(run: Path) -> Path:
    from megatron.core import parallel_state as ranks

    tp, pp = ranks.get_tensor_model_parallel_rank(), ranks.get_pipeline_model_parallel_rank()
    piped = ranks.get_pipeline_model_parallel_world_size() > 1
    return run / "iter_0000005" / (f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if piped else ""))


def _load_core(run: Path, token_BS: torch.Tensor) -> tuple[list[Any], torch.Tensor | None]:
    file = torch.load(rank_folder(run) / "model_optim_rng.pt", weights_only=False)
    chunks = build_chunks(file["args"])
    for name, chunk in zip(_names(chunks), chunks, strict=True):
        chunk.load_state_dict(_unfuse_names(chunk, file[name]), strict=True)
    return chunks, logits(chunks, token_BS)


def _unfuse_names(chunk: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """In the names of the local modules: Megatron's own table between those and TransformerEngine's."""
    fused = chunk.transformer_layer_spec.submodules.sharded_state_dict_keys_map
    tensors = dict(state)
    for local, module_name in fused.items():
        tensors = {name.replace(module_name, local): values for name, values in tensors.items()}
    return tensors


def save_dist(run: Path, chunks: Sequence[Any], args: Namespace) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ranks
    from megatron.core.dist_checkpointing import ShardedObject

    path = run / "iter_0000005"
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
        (run / "latest_checkpointed_iteration.txt").write_text("5", "utf-8")
    dist.barrier()
    tp, pp = ranks.get_tensor_model_parallel_rank(), ranks.get_pipeline_model_parallel_rank()
    sizes = ranks.get_pipeline_model_parallel_world_size(), ranks.get_tensor_model_parallel_world_size()
    random = [{"torch_rng_state": torch.get_rng_state(), "rng_tracker_states": {}}]
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 5,
        "rng_state": ShardedObject("rng_state", random, sizes, (pp, tp), ranks.get_data_parallel_rank()),
        **{name: chunk.sharded_state_dict() for name, chunk in zip(_names(chunks), chunks, strict=True)},
    }
    dist_checkpointing.save(state, str(path), content_metadata={"singleton_local_shards": False})


def _save_core(run: Path, chunks: Sequence[Any], args: Namespace) -> None:
    folder = rank_folder(run)
    folder.mkdir(parents=True)
    state = {"args": args, "checkpoint_version": 3.0, "iteration": 5}
    for name, chunk in zip(_names(chunks), chunks, strict=True):
        state[name] = chunk.state_dict_for_save_checkpoint()
    torch.save(state, folder / "model_optim_rng.pt")
    (run / "latest_checkpointed_iteration.txt").write_text("5", "utf-8")
    dist.barrier()
