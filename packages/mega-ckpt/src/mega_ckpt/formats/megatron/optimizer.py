"""The state of Megatron's optimizers, and where its training stood, as ours say it.

An optimizer of torch or Apex counts parameters by their places in groups: those that decay, then biases and
norms, each in the order of the model's modules, which is that of the tensors in the file. The distributed one
has all of a chunk's in one vector, the last parameter first; from release 0.7 on, each begins at a multiple
of 64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

from mega_ckpt.checkpoint.checkpoint_source import Found
from mega_ckpt.formats.megatron.rank_files import Shard
from mega_ckpt.name_maps.alias import Foreign
from mega_ckpt.tensors.mapped_tensor import Stored
from mega_schema.checkpoint import OPTIMIZER

MAIN, FIRST, SECOND = OPTIMIZER
_MOMENTS = ((FIRST, "exp_avg"), (SECOND, "exp_avg_sq"))
_FLAT = ((MAIN, "param"), *_MOMENTS)
_NAMES: Mapping[str, str] = MappingProxyType(
    {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}
)
_BROKEN = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class _UnknownError(Exception):
    """The state is laid out in a way that is not documented."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the model's in a file, in the order of the modules; `foreign` is None of a copy."""

    stored: Stored
    decays: bool
    foreign: Foreign | None


Spaces = dict[str, list[tuple[Foreign, Stored]]]


def optimizer_spaces(
    shards: Sequence[tuple[Shard, Sequence[Sequence[Weight]]]],
) -> Mapping[str, Found] | None:
    """The namespaces of the optimizer; none where it was not kept, None where its layout is not known.

    Args:
        shards: and the weights of each chunk of each.
    """
    if not any(shard.optimizer is not None or shard.tree.get("optimizer") is not None for shard, _ in shards):
        return {}
    spaces: Spaces = {}
    narrow = any(weight.stored.dtype != "F32" for _, chunks in shards for chunk in chunks for weight in chunk)
    try:
        for shard, chunks in shards:
            grouped = shard.optimizer is None
            for space, weight, stored in _grouped(shard, chunks, narrow) if grouped else _flat(shard, chunks):
                if stored.shape != weight.stored.shape or stored.dtype != "F32":
                    return None
                if weight.foreign is not None:
                    spaces.setdefault(space, []).append((weight.foreign, stored))
    except (_UnknownError, *_BROKEN):
        return None
    if not narrow:  # the optimizer's weights are the same numbers
        spaces.pop(MAIN, None)
    return spaces


def _grouped(
    shard: Shard, chunks: Sequence[Sequence[Weight]], narrow: bool
) -> Iterator[tuple[str, Weight, Stored]]:
    """Of torch's or Apex's optimizer, with float32 weights beside where the model has some of 16 bits."""
    outer = shard.tree["optimizer"]
    inner = outer.get("optimizer", outer)
    every = list(chain.from_iterable(chunks))
    parts = [part for wanted in (True, False) if (part := [w for w in every if w.decays == wanted])]
    groups = inner["param_groups"]
    if groups[0].get("wd_mult", 1.0) == 0.0:
        parts = parts[::-1]
    if [len(group["params"]) for group in groups] != [len(part) for part in parts]:
        raise _UnknownError
    kept = outer.get("fp32_from_fp16_params", [[] for _ in groups])
    for group, part, mains in zip(groups, parts, kept, strict=True):
        left = iter(mains)
        for number, weight in zip(group["params"], part, strict=True):
            for space, name in _MOMENTS:
                yield space, weight, _tensor(inner["state"][number][name])
            if weight.stored.dtype != "F32":
                yield MAIN, weight, _tensor(next(left, None))
            elif narrow:
                yield MAIN, weight, weight.stored
        if next(left, None) is not None:
            raise _UnknownError


def _flat(shard: Shard, chunks: Sequence[Sequence[Weight]]) -> Iterator[tuple[str, Weight, Stored]]:
    """Of the distributed optimizer, one vector a chunk and a type of parameters."""
    ranks = shard.args.get("data_parallel_size")
    multiple = ranks if type(ranks) is int and ranks > 0 else 1
    for number, chunk in enumerate(chunks):
        vectors = shard.optimizer[number]
        for key, vector in vectors.items():
            mine = [weight for weight in reversed(chunk) if len(vectors) == 1 or _is_of(key, weight)]
            for space, name in _FLAT:
                flat = _tensor(vector[name])
                padded = 1 if "numel_unpadded" in vector else multiple
                for weight, begin in zip(mine, _begins(mine, math.prod(flat.shape), padded), strict=True):
                    at = flat.offset + 4 * begin
                    yield space, weight, replace(flat, shape=weight.stored.shape, offset=at)
        if len(vectors) > 1 and not all(any(_is_of(key, weight) for key in vectors) for weight in chunk):
            raise _UnknownError


def _is_of(key: Any, weight: Weight) -> bool:
    """Whether a vector of this key has the weight: the key is (type of parameters, type of gradients)."""
    if not isinstance(key, tuple):
        raise _UnknownError
    return _NAMES[key[0]] == weight.stored.dtype


def _begins(weights: Sequence[Weight], length: int, padded: int) -> list[int]:
    """Where each begins in a vector of this length, whose end is at a multiple of `padded`."""
    for align in (1, 64):
        begins, end = [], 0
        for weight in weights:
            begin = -(-end // align) * align
            begins.append(begin)
            end = begin + math.prod(weight.stored.shape)
        if length in (end, -(-end // padded) * padded):
            return begins
    raise _UnknownError


def _tensor(value: Any) -> Stored:
    if not isinstance(value, Stored):
        raise _UnknownError
    return value


def trainer(shard: Shard, *, released: bool) -> tuple[dict[str, Any], list[str]]:
    """Where the training stood, as our trainer.json says it, and what has no place there.

    Args:
        released: the file is of a model that is handed on; nothing goes on from there.
    """
    tree, args = shard.tree, shard.args
    left = ["the states of random numbers"] if "rng_state" in tree or "np_rng_state" in tree else []
    consumed = args.get("consumed_train_samples", 0)
    if released or not shard.iteration:
        return {"iteration": 0, "consumed_samples": 0, "optimizer_steps": 0}, left
    found: dict[str, Any] = {
        "iteration": shard.iteration,
        "consumed_samples": consumed if type(consumed) is int else 0,
        "optimizer_steps": _steps(tree.get("optimizer"), shard.iteration),
    }
    try:
        found |= _scale(tree.get("optimizer"))
    except _BROKEN:
        left.append("the scale of the loss")
    schedule = tree.get("opt_param_scheduler")
    try:
        if schedule is not None:
            found["courses"] = _courses(schedule, args)
            found["skipped_samples"] = max(0, found["consumed_samples"] - int(schedule["num_steps"]))
        elif "lr_scheduler" in tree:
            left.append("the schedule, which is of an older form")
    except _BROKEN:
        left.append("the schedule")
    return found, left


def _steps(optimizer: Any, iteration: int) -> int:
    """Steps that the optimizer did: torch counts them by parameter, Apex by group, torch_dist once."""
    try:
        inner = optimizer.get("optimizer", optimizer)
        first: Any = next(iter(inner.get("state", {}).values()), None)
        counted = (
            inner["param_groups"][0].get("step"),
            first.get("step") if isinstance(first, dict) else first,
        )
        known = [step for step in counted if step is not None]
        return int(_number(known[0])) if known else iteration
    except _BROKEN:
        return iteration


def _scale(optimizer: Any) -> dict[str, Any]:
    """Of float16's loss."""
    scaler = optimizer.get("grad_scaler") if isinstance(optimizer, dict) else None
    if not scaler or "growth_tracker" not in scaler:
        return {}
    good, patience = int(scaler["growth_tracker"]), int(scaler["hysteresis_tracker"])
    return {"loss_scale": {"value": _number(scaler["scale"]), "good": good, "patience": patience}}


def _number(value: Any) -> float:
    return float(value.values().reshape(-1)[0]) if isinstance(value, Stored) else float(value)


def _courses(said: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the learning rate and of the weight decay; lengths are in samples there too."""
    rate: dict[str, Any] = {
        "peak": float(said["max_lr"]),
        "least": float(said["min_lr"]),
        "warmup": float(said["lr_warmup_steps"]),
        "decay": int(said["lr_decay_steps"]),
        "style": str(said["lr_decay_style"]),
        "initial": float(args.get("lr_warmup_init") or 0.0),
    }
    if rate["style"] == "WSD":
        batches = (args.get("lr_wsd_decay_iters") or 0) * (args.get("global_batch_size") or 0)
        rate |= {"anneal": int(args.get("lr_wsd_decay_samples") or batches)}
        rate |= {"anneal_style": str(args.get("lr_wsd_decay_style") or "exponential")}
    decay = {
        "start": float(said["start_wd"]),
        "end": float(said["end_wd"]),
        "samples": int(said["wd_incr_steps"]),
        "style": str(said["wd_incr_style"]),
    }
    return {"learning_rate": rate, "weight_decay": decay}
