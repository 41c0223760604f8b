"""Runs before they begin: what follows from what was said, and what differs between two of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mega_model.mesh import World
from mega_schema.arch import table
from mega_schema.checkpoint import Checkpoint
from mega_schema.config import keys, load
from mega_schema.errors import ConfigError
from mega_schema.params import count
from mega_schema.run_folder import RUN_CONFIG
from mega_schema.spec import Family, ModelSpec, preset
from mega_train.config import Run
from mega_train.launch import prepare
from mega_train.resolve import Plan, resolve


def validated(run: Run, family: Family | None, world: int) -> Plan:
    """What the run will be on so many processes; its corpora and its checkpoint are opened where it has any.

    Raises:
        MegaError: it could not begin.
    """
    named = preset(run.model.preset).family if run.model.preset is not None else None
    if run.checkpoint.load is not None and named is None and family is None:
        named = Checkpoint.open(run.checkpoint.load).spec.family
    family = family or named or "gpt"
    data = run.data
    if any((data.path, data.path_file, data.by_use)):
        return prepare(run, family, World(world)).plan
    loaded = Checkpoint.open(run.checkpoint.load).spec if run.checkpoint.load is not None else None
    return resolve(run, family, world, corpus=None, loaded=loaded, cuda=torch.cuda.is_available())


def derived(plan: Plan) -> dict[str, object]:
    """What follows from a run's configuration, by name."""
    layout, rate = plan.layout, plan.rate
    return {
        **{f"model.{name}": value for name, value in plan.spec.to_dict().items()},
        "parameters": count(table(plan.spec)),
        **{name: getattr(layout, name) for name in ("tp", "pp", "vp", "cp", "dp")},
        "tokens of a sample": plan.length,
        "tokens of a sample in the first step": plan.lengths.at(1),
        "samples of a micro-batch": plan.micro,
        "samples of a step": plan.global_samples,
        "samples of the first step": plan.batches.at(0),
        "micro-batches of a rank and step": plan.accumulation,
        "tokens of a step": plan.tokens_per_step,
        "steps": plan.iterations,
        "samples of the run": plan.train_samples,
        "samples of warm-up": round(rate.warmup),
        "samples until the least rate": rate.decay,
        "ZeRO stage": plan.sharing.stage,
        "device": plan.device,
    }


@dataclass(frozen=True, slots=True)
class Side:
    """One of two runs to compare.

    Attributes:
        said: every value of its configuration by section.key.
        follows: what is derived of it; none where it cannot begin as it stands, and `why` not.
    """

    said: dict[str, object]
    follows: dict[str, object]
    why: str = ""


def side(path: Path, family: Family | None, world: int | None) -> Side:
    """A TOML file, a run's folder or a checkpoint's.

    Args:
        world: processes, where no checkpoint says how many there were.

    Raises:
        MegaError: it is none of these.
    """
    spec: ModelSpec | None = None
    file = path
    if path.is_dir():
        checkpoint = Checkpoint.open(path)
        spec, file = checkpoint.spec, checkpoint.folder / RUN_CONFIG
        if not file.is_file():
            raise ConfigError(path, "holds no configuration", wanted=RUN_CONFIG)
        world = world or math.prod(checkpoint.written_by.get(axis, 1) for axis in ("tp", "pp", "cp", "dp"))
    run = load(Run, file, {})
    said = {key.dotted: getattr(getattr(run, key.section), key.name) for key in keys(Run)}
    alone = replace(
        run,
        checkpoint=replace(run.checkpoint, load=None, pretrained=None),
        train=replace(run.train, device="cpu"),
    )
    cut = run.parallel
    ranks = world or max(1, cut.tp) * max(1, cut.pp) * max(1, cut.cp)
    try:
        named = preset(run.model.preset).family if run.model.preset else None
        plan = resolve(
            alone,
            family or (spec.family if spec else named) or "gpt",
            ranks,
            corpus=None,
            loaded=spec,
            cuda=False,
        )
    except ConfigError as error:
        return Side(said, {}, str(error))
    return Side(said, derived(plan))


def differences(one: Side, other: Side) -> Iterator[tuple[str, Any, Any]]:
    """Name and both values of all that differs: first what was said, then what follows."""
    for first, second in ((one.said, other.said), (one.follows, other.follows)):
        if first and second:
            for name in first:
                if first[name] != second[name]:
                    yield name, first[name], second[name]
