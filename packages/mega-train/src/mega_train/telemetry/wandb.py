"""Weights & Biases: the same names as in Megatron's logs."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError
from mega_train.config import Run
from mega_train.telemetry.events import Began, Event, Progress, Stepped, Validated
from mega_train.telemetry.megatron_tags import OVER_SAMPLES, Names


class WeightsAndBiases:
    """Logs to --wandb-project, over iterations, with the samples consumed beside.

    Whether it is online, and whether a resumed run goes on in the same curves, the package's own environment
    says: WANDB_MODE, WANDB_RUN_ID, WANDB_RESUME.
    """

    def __init__(self, run: Run) -> None:
        """
        Raises:
            ConfigError: wandb is not installed.
        """
        try:
            self._module: Any = import_module("wandb")
        except ImportError:
            hint = install_hint("mega-train", "wandb")
            raise ConfigError("--wandb-project", "needs wandb", hint=hint) from None
        self._run, self._names = run, Names(run.log)
        self._remote: Any = None

    def see(self, event: Event) -> None:
        if isinstance(event, Began):
            self._begin(event)
        values = {name: value for name, value, _ in self._names.of(event) if not name.endswith(OVER_SAMPLES)}
        if values and isinstance(event, Stepped | Progress | Validated):
            if isinstance(event, Stepped):
                values["samples vs steps"] = event.consumed_samples
            self._remote.log(values, step=event.iteration)

    def close(self) -> None:
        if self._remote is not None:
            self._remote.finish()

    def _begin(self, event: Began) -> None:
        log, save = self._run.log, self._run.checkpoint.save
        folder = log.wandb_save_dir or (save / "wandb" if save is not None else Path("wandb"))
        folder.mkdir(parents=True, exist_ok=True)
        self._remote = self._module.init(
            project=log.wandb_project,
            entity=log.wandb_entity,
            name=log.wandb_exp_name or (save.name if save is not None else None),
            dir=str(folder),
            config={
                **{key: _plain(value) for key, value in event.config.items()},
                "parameters": event.parameters,
                "layout": dict(event.layout),
                "world_size": event.world,
            },
            settings=self._module.Settings(console="off"),  # the live line is no log
        )


def _plain(value: Any) -> Any:
    """As JSON has it: paths are text."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value
