"""Weights & Biases, with the names of Megatron's logs."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError
from mega_train.config import RunConfig
from mega_train.telemetry.events import EvaluationEnd, Event, LogLine, StepEnd, TrainStart, ValidationEnd
from mega_train.telemetry.megatron_tags import SAMPLES_SUFFIX, MegatronTags


class WeightsAndBiases:
    """Logs metrics to --wandb-project over iterations, with the consumed samples.

    The package's environment variables decide whether it is online, and whether a resumed run continues the
    same curves: WANDB_MODE, WANDB_RUN_ID, WANDB_RESUME.
    """

    def __init__(self, run: RunConfig) -> None:
        """Start a Weights & Biases run.

        Raises:
            ConfigError: wandb is not installed.
        """
        try:
            self._module: Any = import_module("wandb")
        except ImportError:
            hint = install_hint("mega-train", "wandb")
            raise ConfigError("--wandb-project", "needs wandb", hint=hint) from None
        self._run = run
        self._tags = MegatronTags(run.log)
        self._wandb_run: Any = None

    def on_event(self, event: Event) -> None:
        if isinstance(event, TrainStart):
            self._start_run(event)
        values = {
            name: value for name, value, _ in self._tags.tags(event) if not name.endswith(SAMPLES_SUFFIX)
        }
        if values and isinstance(event, StepEnd | LogLine | ValidationEnd):
            if isinstance(event, StepEnd):
                values["samples vs steps"] = event.consumed_samples
            self._wandb_run.log(values, step=event.iteration)

        if values and isinstance(event, EvaluationEnd):  # it refuses values of an earlier step
            self._wandb_run.log({**values, "mega-eval/iteration": event.iteration})

    def close(self) -> None:
        if self._wandb_run is not None:
            self._wandb_run.finish()

    def _start_run(self, event: TrainStart) -> None:
        log = self._run.log
        save = self._run.checkpoint.save
        folder = log.wandb_save_dir or (save / "wandb" if save is not None else Path("wandb"))
        folder.mkdir(parents=True, exist_ok=True)
        self._wandb_run = self._module.init(
            project=log.wandb_project,
            entity=log.wandb_entity,
            name=log.wandb_exp_name or (save.name if save is not None else None),
            dir=str(folder),
            config={
                **{key: _to_json(value) for key, value in event.config.items()},
                "parameters": event.parameters,
                "layout": dict(event.layout),
                "world_size": event.world,
            },
            settings=self._module.Settings(console="off"),  # do not capture the live line
        )


def _to_json(value: Any) -> Any:
    """Convert values for JSON: paths become text."""
    if isinstance(value, dict):
        return {key: _to_json(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_to_json(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value
