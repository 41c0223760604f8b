"""TensorBoard: the curves of a run under the names that Megatron's have."""

from __future__ import annotations

from mega_schema.errors import ConfigError
from mega_train.config import Log
from mega_train.watch.events import Event, Saved
from mega_train.watch.names import Names


class TensorBoard:
    """Writes event files into --tensorboard-dir.

    A resumed run writes one more file there, and TensorBoard shows steps that were done twice twice: what it
    could be told to forget it would forget on both axes, of which one counts iterations and one samples.
    """

    def __init__(self, log: Log) -> None:
        """
        Raises:
            ConfigError: tensorboard is not installed.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            hint = 'pip install "mega-train[tensorboard]"'
            raise ConfigError("--tensorboard-dir", "needs tensorboard", hint=hint) from None
        self._names = Names(log)
        self._writer = SummaryWriter(log.tensorboard_dir, max_queue=log.tensorboard_queue)

    def see(self, event: Event) -> None:
        for name, value, place in self._names.of(event):
            self._writer.add_scalar(name, value, place)
        if isinstance(event, Saved):  # who looks after a crash sees all that a resumed run builds on
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()
