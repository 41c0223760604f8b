"""TensorBoard: the curves of a run under the names that Megatron's have."""

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

    A resumed run writes one more file there, and TensorBoard shows steps that were done twice twice: what it
    could be told to forget it would forget on both axes, of which one counts iterations and one samples.
    """

    def __init__(self, log: LoggingConfig) -> None:
        """
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
        if self._writer is None:  # the first event: till then a run may be refused
            self._writer = self._writer_class(
                self._log.tensorboard_dir, max_queue=self._log.tensorboard_queue
            )
        for name, value, step in self._tags.tags(event):
            self._writer.add_scalar(name, value, step)
        if isinstance(
            event, CheckpointSaved
        ):  # who looks after a crash sees all that a resumed run builds on
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
