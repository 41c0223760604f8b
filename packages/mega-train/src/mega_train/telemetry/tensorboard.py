"""TensorBoard: the curves of a run under Megatron's names."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError
from mega_train.config import LoggingConfig
from mega_train.telemetry.events import CheckpointSaved, Event
from mega_train.telemetry.megatron_tags import MegatronTags


class TensorBoard:
    """Writes event files into --tensorboard-dir.

    A resumed run writes another file there, and TensorBoard shows repeated steps twice: purging them would
    use one step number for both axes, and one axis counts iterations, the other samples.
    """

    def __init__(self, log: LoggingConfig) -> None:
        """Open the event file.

        Raises:
            ConfigError: tensorboard is not installed.
        """
        try:
            self._writer_class: Any = import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError:
            hint = install_hint("mega-train", "tensorboard")
            raise ConfigError("--tensorboard-dir", "needs tensorboard", hint=hint) from None
        self._tags = MegatronTags(log)
        self._writer: Any = None
        self._log = log

    def on_event(self, event: Event) -> None:
        if self._writer is None:  # opened at the first event: before, the run may still be refused
            self._writer = self._writer_class(
                self._log.tensorboard_dir, max_queue=self._log.tensorboard_queue
            )
        for name, value, step in self._tags.tags(event):
            self._writer.add_scalar(name, value, step)
        # after a crash the files then hold every step that a resumed run builds on
        if isinstance(event, CheckpointSaved):
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
