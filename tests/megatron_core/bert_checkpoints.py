"""Load `torch_dist` folders of a BERT in Megatron Core and save them, as its training does."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.megatron_core.checkpoints import padded_vocab, save_dist
from tests.megatron_core.models import begin, build_bert


def load_and_save(
    folder: Path, layouts: Sequence[Sequence[int]], cases: Mapping[str, Mapping[str, Any]]
) -> None:
    """Load every case in every layout strictly, leave the logits of both heads, and save it.

    Args:
        folder: with CASE-dist of ours and batch.npz.
        layouts: sizes of tp and pp.
        cases: arguments of Megatron's by the name of the case.
    """
    batch = {name: torch.from_numpy(values) for name, values in np.load(folder / "batch.npz").items()}
    for tp, pp in layouts:
        begin(tp, pp)
        for case, flags in cases.items():
            sys.stdout.write(f"{case} {tp}{pp}\n")  # seen where it fails
            model = _load(folder / f"{case}-dist" / "iter_0000005")
            scores = _logits(model, batch)
            if scores is not None and dist.get_rank() == dist.get_world_size() - 1:
                np.savez(folder / f"{case}-{tp}{pp}.npz", **scores)
            args = Namespace(**flags, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
            args.padded_vocab_size = padded_vocab(flags, tp)
            save_dist(folder / f"{case}-theirs-{tp}{pp}", [model], args)


def _load(path: Path) -> Any:
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ranks

    args = dist_checkpointing.load_common_state_dict(str(path))["args"]
    # a training pads by its own layout
    args.padded_vocab_size = padded_vocab(vars(args), ranks.get_tensor_model_parallel_world_size())
    model = build_bert(args)
    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(path), strict="raise_all")
    model.load_state_dict(state["model"], strict=True)
    return model


def _logits(model: Any, batch: Mapping[str, Tensor]) -> dict[str, np.ndarray] | None:
    """Those of both heads where the last stage is; elsewhere None. Every rank of the pipeline calls it."""
    from megatron.core import parallel_state as ranks

    (rows, length), hidden = batch["token"].shape, model.config.hidden_size
    token_types = batch["type"] if model.add_binary_head else None
    out: Any = None
    with torch.no_grad():
        for rank in dist.get_process_group_ranks(ranks.get_pipeline_model_parallel_group()):
            passed = torch.empty(length, rows, hidden)
            if rank == dist.get_rank():
                out = model(batch["token"], batch["real"], tokentype_ids=token_types)
                passed = passed if model.post_process else out
            dist.broadcast(passed, rank, group=ranks.get_pipeline_model_parallel_group())
            model.set_input_tensor(passed)
    if not model.post_process:
        return None
    return {
        name: scores.numpy()
        for name, scores in zip(("words", "binary"), out, strict=True)
        if scores is not None
    }
