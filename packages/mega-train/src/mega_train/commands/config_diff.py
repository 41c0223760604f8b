"""Runs before they begin: what follows from what was said, and what differs between two of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mega_model.distributed.mesh import World
from mega_schema.app.config import config_keys, load_config
from mega_schema.arch import table
from mega_schema.checkpoint.checkpoint_dir import RUN_CONFIG
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import ConfigError
from mega_schema.params import count_params
from mega_schema.spec import Family, ModelSpec, preset
from mega_train.checkpointing import resume
from mega_train.checkpointing.foreign_checkpoint import find_conversion, inspect_model, load_copy
from mega_train.checkpointing.save_dir import list_iterations
from mega_train.config import Optimizer, Run, Train
from mega_train.config.refusals import parts
from mega_train.engine.train import prepare
from mega_train.resolve import Plan, resolve
from mega_train.resolve.run_mode import only_validates


@dataclass(frozen=True, slots=True)
class Validation:
    """What a run would be, and how it would start.

    Attributes:
        start: what it begins with, in words.
        refusal: why it may not write into --save.
    """

    plan: Plan
    start: str
    refusal: ConfigError | None


def validated(run: Run, world: int) -> Validation:
    """What the run will be on so many processes; its corpora and its checkpoint are opened where it has any.

    The family is the configuration's, the preset's, the checkpoint's, or gpt. Nothing is converted.

    Raises:
        MegaError: it could not begin.
    """
    conversion = find_conversion(run)
    unconverted, start = None, ""
    if conversion is not None and conversion.is_done:
        run = load_copy(run, conversion)
    elif conversion is not None:
        unconverted = inspect_model(conversion, run)
        run = replace(run, checkpoint=replace(run.checkpoint, load=None, pretrained=None))
        start = f"with {conversion.source}, which mega-ckpt converts to {conversion.copy}"
    named = preset(run.model.preset).family if run.model.preset is not None else None
    family, data = run.model.family or named, run.data
    if any((data.path, data.path_file, data.by_use, data.mock)):
        prepared = prepare(run, family, World(world), unconverted=unconverted, starts=False)
        start = start or _start(prepared.plan.run, prepared.checkpoint, prepared.superseded)
        return Validation(prepared.plan, start, prepared.refusal)
    begins = resume.found(run, World(world))
    loaded = begins.checkpoint.spec if begins.checkpoint else unconverted
    plan = resolve(
        begins.run,
        family or (loaded.family if loaded else "gpt"),
        world,
        corpus=None,
        loaded=loaded,
        loaded_courses=begins.courses,
        cuda=torch.cuda.is_available(),
    )
    start = start or _start(plan.run, begins.checkpoint, begins.superseded)
    return Validation(plan, start, begins.refusal)


def _start(run: Run, checkpoint: Checkpoint | None, superseded: Collection[int]) -> str:
    if checkpoint is None:
        start = "anew"
    elif run.checkpoint.finetune or only_validates(run):
        start = f"with the weights of {checkpoint.folder}"
    else:
        start = f"from iteration {checkpoint.iteration} of {checkpoint.folder.parent}"
    if superseded:
        start += f"; supersedes {list_iterations(superseded)} in {run.checkpoint.save}"
    return start


def derived(plan: Plan) -> dict[str, object]:
    """What follows from a run's configuration, by name."""
    layout, rate = plan.layout, plan.rate
    return {
        **{f"model.{name}": value for name, value in plan.spec.to_dict().items()},
        "parameters": count_params(table(plan.spec)),
        **{name: getattr(layout, name) for name in ("tp", "pp", "vp", "cp", "dp")},
        "dropout": _dropout(plan.run.train),
        "optimizer": _optimizer(plan.run.optimizer),
        "learning rate": _learning_rate(plan.run.optimizer),
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


def _dropout(train: Train) -> str:
    return f"hidden {train.hidden_dropout:g}, attention {train.attention_dropout:g}"


def _optimizer(optimizer: Optimizer) -> str:
    """The algorithm with its constants, clipping and decay."""
    adam = f"betas {optimizer.beta1:g} {optimizer.beta2:g}, eps {optimizer.eps:g}"
    constants = {
        "adam": adam,
        "sgd": f"momentum {optimizer.sgd_momentum:g}",
        "muon": f"momentum {optimizer.muon_momentum:g}, the rest by adam: {adam}",
    }[optimizer.name]
    decay = f"{optimizer.weight_decay:g}"
    if optimizer.weight_decay_style != "constant":
        decay = f"{optimizer.start_weight_decay or 0:g} to {optimizer.end_weight_decay or 0:g}"
    return f"{optimizer.name}, {constants}, weight decay {decay}, clipped at {optimizer.clip:g}"


def _learning_rate(optimizer: Optimizer) -> str:
    style = str(optimizer.decay_style)
    if style == "WSD":
        style += f" with {optimizer.wsd_style} decay"
    ends = "" if optimizer.ends_lr is None else f"; embedding and output {optimizer.ends_lr:g}"
    return f"{optimizer.lr or 0:g} to {optimizer.min_lr:g}, {style}{ends}"


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
    run = load_config(Run, file, {})
    said = {key.dotted: getattr(getattr(run, key.section), key.name) for key in config_keys(Run)}
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
            family or run.model.family or (spec.family if spec else named) or "gpt",
            ranks,
            corpus=None,
            loaded=spec,
            cuda=False,
        )
    except ConfigError as error:
        return Side(said, {}, "; ".join(map(str, parts(error))))
    return Side(said, derived(plan))


_UNSAID = frozenset({None, False})
_MODEL_KEYS = frozenset(key.dotted for key in config_keys(Run) if key.section == "model")


def differences(one: Side, other: Side) -> Iterator[tuple[str, Any, Any]]:
    """Name and both values of all that differs: first what was said, then what follows.

    One model can be described by other keys. A key that one side leaves out is compared in what follows.
    """
    both_follow = bool(one.follows and other.follows)
    for first, second in ((one.said, other.said), (one.follows, other.follows)):
        if first and second:
            for name in first:
                described = name in _MODEL_KEYS and both_follow and _UNSAID & {first[name], second[name]}
                if first[name] != second[name] and not described:
                    yield name, first[name], second[name]
