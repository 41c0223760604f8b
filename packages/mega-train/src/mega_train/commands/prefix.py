"""The run of `mega-train prefix`: that of another decoder, with prefixes."""

from __future__ import annotations

from dataclasses import replace

from mega_schema.presets import preset
from mega_schema.spec import Family
from mega_train.config import RunConfig


def as_prefix_run(run: RunConfig) -> tuple[RunConfig, Family | None]:
    """Return the run with prefixes, and the family of its model; None: that of its checkpoint, or gpt.

    Raises:
        ConfigError: the preset is unknown.
    """
    preset_family = preset(run.model.preset).family if run.model.preset is not None else None
    return replace(run, objective=replace(run.objective, prefix=True)), run.model.family or preset_family
