"""Resolve a run's configuration without starting it, and compare two configurations."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from mega_model.distributed.mesh import World
from mega_schema.app.config import config_keys, load_config
from mega_schema.arch import table
from mega_schema.checkpoint.checkpoint_dir import RUN_CONFIG
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import ConfigError
from mega_schema.params import count_params
from mega_schema.presets import preset
from mega_schema.spec import Family, ModelSpec
from mega_train.checkpointing import resume
from mega_train.checkpointing.foreign_checkpoint import find_conversion, inspect_model, load_copy
from mega_train.checkpointing.save_dir import list_iterations
from mega_train.config import OptimizerConfig, RunConfig, TrainConfig
from mega_train.config.refusals import parts
from mega_train.engine.train import prepare
from mega_train.resolve import ResolvedConfig, resolve
from mega_train.resolve.record import all_model_keys
from mega_train.resolve.run_mode import is_eval_only


@dataclass(frozen=True, slots=True)
class Validation:
    """The resolved configuration of a run, and the state it would start from.

    Attributes:
        start: the state it starts from, as text.
        refusal: the reason why it must not write into --save.
    """

    config: ResolvedConfig
    start: str
    refusal: ConfigError | None


def resolve_for_display(run: RunConfig, world: int) -> Validation:
    """Resolve the run for a number of processes; open its datasets and checkpoint if it names any.

    The family is the configuration's, the preset's, the checkpoint's, or gpt. Nothing is converted.

    Raises:
        MegaError: the run could not start.
    """
    conversion = find_conversion(run)
    unconverted_spec = None
    start = ""
    if conversion is not None and conversion.is_done:
        run = load_copy(run, conversion)
    elif conversion is not None:
        unconverted_spec = inspect_model(conversion, run)
        run = replace(run, checkpoint=replace(run.checkpoint, load=None, pretrained=None))
        start = f"with {conversion.source}, which mega-ckpt converts to {conversion.copy}"
    preset_family = preset(run.model.preset).family if run.model.preset is not None else None
    family = run.model.family or preset_family
    data = run.data
    if any((data.path, data.path_file, data.has_dataset_per_split, data.mock)):
        prepared_run = prepare(run, family, World(world), unconverted_spec=unconverted_spec, may_write=False)
        start = start or _describe_start(
            prepared_run.config.run, prepared_run.checkpoint, prepared_run.superseded
        )
        return Validation(prepared_run.config, start, prepared_run.refusal)
    resume_point = resume.find_checkpoint(run, World(world))
    loaded_spec = resume_point.checkpoint.spec if resume_point.checkpoint else unconverted_spec
    config = resolve(
        resume_point.run,
        family or (loaded_spec.family if loaded_spec else "gpt"),
        world,
        corpus=None,
        loaded_spec=loaded_spec,
        loaded_schedules=resume_point.schedules,
        cuda=torch.cuda.is_available(),
    )
    start = start or _describe_start(config.run, resume_point.checkpoint, resume_point.superseded)
    return Validation(config, start, resume_point.refusal)


def _describe_start(run: RunConfig, checkpoint: Checkpoint | None, superseded: Collection[int]) -> str:
    if checkpoint is None:
        start = "from new weights"
    elif run.checkpoint.finetune or is_eval_only(run):
        start = f"with the weights of {checkpoint.folder}"
    else:
        start = f"from iteration {checkpoint.iteration} of {checkpoint.folder.parent}"
    if superseded:
        start += f"; supersedes {list_iterations(superseded)} in {run.checkpoint.save}"
    return start


def derived_values(config: ResolvedConfig) -> dict[str, object]:
    """List the values derived from a run's configuration, by name."""
    layout = config.layout
    schedule = config.lr_schedule
    return {
        **_model_values(config.spec),
        "parameters": count_params(table(config.spec)),
        **{name: getattr(layout, name) for name in ("tp", "pp", "vp", "cp", "dp")},
        "dropout": _dropout(config.run.train),
        "optimizer": _optimizer(config.run.optimizer),
        "learning rate": _learning_rate(config.run.optimizer),
        "sequence length": config.seq_length,
        "sequence length of the first step": config.seq_length_schedule.length_at(1),
        "micro-batch size": config.micro_batch_size,
        "global batch size": config.global_batch_size,
        "batch size of the first step": config.batch_size_schedule.size_at(0),
        "gradient accumulation steps": config.accumulation_steps,
        "tokens per step": config.tokens_per_step,
        "training iterations": config.iterations,
        "training samples": config.train_samples,
        "learning-rate warmup samples": round(schedule.warmup),
        "learning-rate decay samples": schedule.decay,
        "ZeRO stage": config.sharding_config.stage,
        "device": config.device,
    }


# fields of ModelConfig that repeat another field, and that of an optional bias
_OTHER_MODEL_KEYS = frozenset({"preset", "padded_vocab", "swiglu", "glu", "bias_gelu_fusion", "qkv_bias"})
# fields of ModelSpec that no key describes; only presets and converted models have them
_FIELDS_WITHOUT_KEY = (
    "qkv_bias",
    "scale_embedding",
    "rope_scaling_low",
    "rope_scaling_high",
    "rope_scaling_context",
)


def _model_values(spec: ModelSpec) -> dict[str, object]:
    """List a model's values by the keys that describe it, then those that no key describes."""
    run = RunConfig(model=all_model_keys(spec))
    values = {
        key.dotted: key.value_in(run)
        for key in config_keys(RunConfig)
        if key.section == "model" and key.field.name not in _OTHER_MODEL_KEYS
    }
    if run.model.positions is None:
        values["model.position_embedding_type"] = spec.positions
    return values | {name: getattr(spec, name) for name in _FIELDS_WITHOUT_KEY}


def _dropout(train: TrainConfig) -> str:
    return f"hidden {train.hidden_dropout:g}, attention {train.attention_dropout:g}"


def _optimizer(optimizer: OptimizerConfig) -> str:
    """Format the optimizer with its constants, clipping and weight decay."""
    adam = f"betas {optimizer.beta1:g} {optimizer.beta2:g}, eps {optimizer.eps:g}"
    constants = {
        "adam": adam,
        "sgd": f"momentum {optimizer.sgd_momentum:g}",
        "muon": f"momentum {optimizer.muon_momentum:g}, the rest by adam: {adam}",
    }[optimizer.name]
    decay = f"{optimizer.weight_decay:g}"
    if optimizer.weight_decay_style != "constant":
        decay = f"{optimizer.start_weight_decay or 0:g} to {optimizer.end_weight_decay or 0:g}"
    return f"{optimizer.name}, {constants}, weight decay {decay}, gradient clipping {optimizer.clip:g}"


def _learning_rate(optimizer: OptimizerConfig) -> str:
    style = str(optimizer.decay_style)
    if style == "WSD":
        style += f" with {optimizer.wsd_style} decay"
    ends = "" if optimizer.decoupled_lr is None else f"; embedding and output {optimizer.decoupled_lr:g}"
    return f"{optimizer.lr or 0:g} to {optimizer.min_lr:g}, {style}{ends}"


@dataclass(frozen=True, slots=True)
class ConfigSide:
    """One of the two configurations to compare.

    Attributes:
        values: every configured value by section.key.
        derived: the derived values; empty if the run could not start; then `error` has the reason.
    """

    values: dict[str, object]
    derived: dict[str, object]
    error: str = ""


def load_side(path: Path, family: Family | None, world: int | None) -> ConfigSide:
    """Load a TOML file, a run's folder or a checkpoint's folder.

    Args:
        world: processes, where no checkpoint records their number.

    Raises:
        MegaError: the path is none of these.
    """
    spec: ModelSpec | None = None
    file = path
    if not path.exists():
        wanted = "a TOML file, or the folder of a run or checkpoint"
        raise ConfigError(path, "no such file or folder", wanted=wanted)
    if path.is_dir():
        checkpoint = Checkpoint.open(path)
        spec = checkpoint.spec
        file = checkpoint.folder / RUN_CONFIG
        if not file.is_file():
            raise ConfigError(path, "contains no configuration", wanted=RUN_CONFIG)
        world = world or math.prod(checkpoint.written_by.get(axis, 1) for axis in ("tp", "pp", "cp", "dp"))
    run = load_config(RunConfig, file, {})
    values = {key.dotted: key.value_in(run) for key in config_keys(RunConfig)}
    standalone = replace(
        run,
        checkpoint=replace(run.checkpoint, load=None, pretrained=None),
        train=replace(run.train, device="cpu"),
    )
    parallel = run.parallel
    ranks = world or max(1, parallel.tp) * max(1, parallel.pp) * max(1, parallel.cp)
    try:
        preset_family = preset(run.model.preset).family if run.model.preset else None
        config = resolve(
            standalone,
            family or run.model.family or (spec.family if spec else preset_family) or "gpt",
            ranks,
            corpus=None,
            loaded_spec=spec,
            cuda=False,
        )
    except ConfigError as error:
        return ConfigSide(values, {}, "; ".join(map(str, parts(error))))
    return ConfigSide(values, derived_values(config))


_MODEL_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {key.dotted: key.field.default for key in config_keys(RunConfig) if key.section == "model"}
)


def diff_sides(first_side: ConfigSide, second_side: ConfigSide) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name and both values of every difference: configured values first, then derived ones.

    Different keys can describe one model. A key that one side does not set is compared by the derived values.
    """
    both_follow = bool(first_side.derived and second_side.derived)
    shown = set[str]()
    for name, first in first_side.values.items():
        second = second_side.values[name]
        is_left_out = name in _MODEL_DEFAULTS and _MODEL_DEFAULTS[name] in (first, second)
        if first != second and not (is_left_out and both_follow):
            shown.add(name)
            yield name, first, second
    if both_follow:
        for name, first in first_side.derived.items():
            second = second_side.derived[name]
            if first != second and name not in shown:
                yield name, first, second
