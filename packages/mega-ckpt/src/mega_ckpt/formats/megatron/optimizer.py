"""Read Megatron's optimizer state and training state.

An optimizer of torch or Apex numbers parameters by their position in groups: first those with weight decay,
then biases and norms, each in module order, which is the tensor order of the file. The distributed optimizer
stores all parameters of a chunk in one vector, the last parameter first; since release 0.7, each begins at a
multiple of 64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

from mega_ckpt.checkpoint.checkpoint_source import MatchedTensors
from mega_ckpt.formats.megatron.rank_files import RankFile
from mega_ckpt.name_maps.alias import ForeignTensor
from mega_ckpt.tensors.mapped_tensor import MappedTensor
from mega_schema.checkpoint.reader import OPTIMIZER

MAIN, FIRST, SECOND = OPTIMIZER
_MOMENTS = ((FIRST, "exp_avg"), (SECOND, "exp_avg_sq"))
_FLAT = ((MAIN, "param"), *_MOMENTS)
_NAMES: Mapping[str, str] = MappingProxyType(
    {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}
)
_PARSE_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class _UnknownError(Exception):
    """The layout of the state is not documented."""


@dataclass(frozen=True, slots=True)
class ModelWeight:
    """One tensor of the model in a file, in module order; `foreign` is None for a copy."""

    stored: MappedTensor
    decays: bool
    foreign: ForeignTensor | None


Spaces = dict[str, list[tuple[ForeignTensor, MappedTensor]]]


def optimizer_spaces(
    shards: Sequence[tuple[RankFile, Sequence[Sequence[ModelWeight]]]],
) -> Mapping[str, MatchedTensors] | None:
    """Return the optimizer's namespaces; {} if no state was saved, None if its layout is unknown.

    Args:
        shards: the file of every rank, and the weights of each of its chunks.
    """
    if not any(shard.optimizer is not None or shard.tree.get("optimizer") is not None for shard, _ in shards):
        return {}
    spaces: Spaces = {}
    has_main_weights = any(
        weight.stored.dtype != "F32" for _, chunks in shards for chunk in chunks for weight in chunk
    )
    try:
        for shard, chunks in shards:
            is_grouped = shard.optimizer is None
            for space, weight, stored in (
                _group_state(shard, chunks, has_main_weights) if is_grouped else _flat(shard, chunks)
            ):
                if stored.shape != weight.stored.shape or stored.dtype != "F32":
                    return None
                if weight.foreign is not None:
                    spaces.setdefault(space, []).append((weight.foreign, stored))
    except (_UnknownError, *_PARSE_ERRORS):
        return None
    if not has_main_weights:  # the main weights equal the model's weights
        spaces.pop(MAIN, None)
    return spaces


def _group_state(
    shard: RankFile, chunks: Sequence[Sequence[ModelWeight]], has_main_weights: bool
) -> Iterator[tuple[str, ModelWeight, MappedTensor]]:
    """Yield the state of torch's or Apex's optimizer, with float32 copies of 16-bit weights."""
    outer = shard.tree["optimizer"]
    inner = outer.get("optimizer", outer)
    weights = list(chain.from_iterable(chunks))
    parts = [part for wanted in (True, False) if (part := [w for w in weights if w.decays == wanted])]
    groups = inner["param_groups"]
    if groups[0].get("wd_mult", 1.0) == 0.0:
        parts = parts[::-1]
    if [len(group["params"]) for group in groups] != [len(part) for part in parts]:
        raise _UnknownError
    main_params = outer.get("fp32_from_fp16_params", [[] for _ in groups])
    for group, part, mains in zip(groups, parts, main_params, strict=True):
        remaining = iter(mains)
        for number, weight in zip(group["params"], part, strict=True):
            for space, name in _MOMENTS:
                yield space, weight, _as_tensor(inner["state"][number][name])
            if weight.stored.dtype != "F32":
                yield MAIN, weight, _as_tensor(next(remaining, None))
            elif has_main_weights:
                yield MAIN, weight, weight.stored
        if next(remaining, None) is not None:
            raise _UnknownError


def _flat(
    shard: RankFile, chunks: Sequence[Sequence[ModelWeight]]
) -> Iterator[tuple[str, ModelWeight, MappedTensor]]:
    """Yield the state of the distributed optimizer: one vector per chunk and parameter dtype."""
    ranks = shard.args.get("data_parallel_size")
    multiple = ranks if type(ranks) is int and ranks > 0 else 1
    for number, chunk in enumerate(chunks):
        vectors = shard.optimizer[number]
        for key, vector in vectors.items():
            vector_weights = [
                weight for weight in reversed(chunk) if len(vectors) == 1 or _holds_weight(key, weight)
            ]
            for space, name in _FLAT:
                flat = _as_tensor(vector[name])
                padded = 1 if "numel_unpadded" in vector else multiple
                for weight, begin in zip(
                    vector_weights, _offsets(vector_weights, math.prod(flat.shape), padded), strict=True
                ):
                    offset = flat.offset + 4 * begin
                    yield space, weight, replace(flat, shape=weight.stored.shape, offset=offset)
        if len(vectors) > 1 and not all(
            any(_holds_weight(key, weight) for key in vectors) for weight in chunk
        ):
            raise _UnknownError


def _holds_weight(key: Any, weight: ModelWeight) -> bool:
    """Return whether a vector holds the weight; the key is (parameter dtype, gradient dtype)."""
    if not isinstance(key, tuple):
        raise _UnknownError
    return _NAMES[key[0]] == weight.stored.dtype


def _offsets(weights: Sequence[ModelWeight], length: int, padded: int) -> list[int]:
    """Return where each weight begins in a vector whose length is a multiple of `padded`."""
    for align in (1, 64):
        begins = []
        end = 0
        for weight in weights:
            begin = -(-end // align) * align
            begins.append(begin)
            end = begin + math.prod(weight.stored.shape)
        if length in (end, -(-end // padded) * padded):
            return begins
    raise _UnknownError


def _as_tensor(value: Any) -> MappedTensor:
    if not isinstance(value, MappedTensor):
        raise _UnknownError
    return value


def trainer_state(shard: RankFile, *, released: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the training state in the form of trainer.json, and descriptions of the parts it cannot store.

    Args:
        released: the file is a release, from which training does not resume.
    """
    tree = shard.tree
    args = shard.args
    dropped = ["the random number generator states"] if "rng_state" in tree or "np_rng_state" in tree else []
    consumed = args.get("consumed_train_samples", 0)
    if released or not shard.iteration:
        return {"iteration": 0, "consumed_samples": 0, "optimizer_steps": 0}, dropped
    state: dict[str, Any] = {
        "iteration": shard.iteration,
        "consumed_samples": consumed if type(consumed) is int else 0,
        "optimizer_steps": _steps(tree.get("optimizer"), shard.iteration),
    }
    try:
        state |= _loss_scale(tree.get("optimizer"))
    except _PARSE_ERRORS:
        dropped.append("the loss scale")
    schedule = tree.get("opt_param_scheduler")
    try:
        if schedule is not None:
            state |= _schedules(schedule, args)
            state["skipped_samples"] = max(0, state["consumed_samples"] - int(schedule["num_steps"]))
        elif "lr_scheduler" in tree:
            dropped.append("the schedule, which has an older format")
    except _PARSE_ERRORS:
        dropped.append("the schedule")
    return state, dropped


def _steps(optimizer: Any, iteration: int) -> int:
    """Return the number of optimizer steps: torch counts per parameter, Apex per group, torch_dist once."""
    try:
        inner = optimizer.get("optimizer", optimizer)
        first: Any = next(iter(inner.get("state", {}).values()), None)
        counted = (
            inner["param_groups"][0].get("step"),
            first.get("step") if isinstance(first, dict) else first,
        )
        known = [step for step in counted if step is not None]
        return int(_as_float(known[0])) if known else iteration
    except _PARSE_ERRORS:
        return iteration


def _loss_scale(optimizer: Any) -> dict[str, Any]:
    """Return the loss scale of a float16 run."""
    scaler = optimizer.get("grad_scaler") if isinstance(optimizer, dict) else None
    if not scaler or "growth_tracker" not in scaler:
        return {}
    counts = {name: int(scaler[name]) for name in ("growth_tracker", "hysteresis_tracker")}
    return {"loss_scale": {"value": _as_float(scaler["scale"]), **counts}}


def _as_float(value: Any) -> float:
    return float(value.values().reshape(-1)[0]) if isinstance(value, MappedTensor) else float(value)


def _schedules(scheduler: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the learning rate and weight decay schedules; their lengths are in samples."""
    rate: dict[str, Any] = {
        "peak": float(scheduler["max_lr"]),
        "least": float(scheduler["min_lr"]),
        "warmup": float(scheduler["lr_warmup_steps"]),
        "decay": int(scheduler["lr_decay_steps"]),
        "style": str(scheduler["lr_decay_style"]),
        "initial": float(args.get("lr_warmup_init") or 0.0),
    }
    if rate["style"] == "WSD":
        batches = (args.get("lr_wsd_decay_iters") or 0) * (args.get("global_batch_size") or 0)
        rate |= {"anneal": int(args.get("lr_wsd_decay_samples") or batches)}
        rate |= {"anneal_style": str(args.get("lr_wsd_decay_style") or "exponential")}
    decay = {
        "start": float(scheduler["start_wd"]),
        "end": float(scheduler["end_wd"]),
        "samples": int(scheduler["wd_incr_steps"]),
        "style": str(scheduler["wd_incr_style"]),
    }
    return {"lr_schedule": rate, "wd_schedule": decay}
