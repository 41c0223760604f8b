"""A model over several processes: tensor and pipeline parallel serving.

Rank 0 is the engine. It sends every step as a command; the other ranks run the same step on their part of
the model. A command is small: token ids, block tables and numbers. Activations pass from stage to stage as
tensors, and the logits of the asked rows come back to every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mega_model.attention_backends import AttentionBackend
from mega_model.decoder import Decoder
from mega_model.distributed.mesh import Mesh
from mega_serve.engine.interfaces import Chunk, RunnerOutput
from mega_serve.execution.model_runner import RunnerOptions, TorchModelRunner
from mega_serve.execution.rank_sockets import CommandReceiver, CommandSender


class StageRunner(TorchModelRunner):
    """Runs this rank's part of the model; every rank makes the same calls in the same order.

    Args:
        model: this rank's stage and slice.
    """

    def __init__(
        self, model: Decoder, options: RunnerOptions, mesh: Mesh, *, vocab_size: int | None = None
    ) -> None:
        self.mesh = mesh
        super().__init__(model, options, vocab_size=vocab_size)
        self.num_pages = -mesh.all_reduce_max(-self.num_pages)  # the smallest pool decides

    def _hidden_states(self, token_T: Tensor, position_T: Tensor, attend: AttentionBackend) -> Tensor:
        """Run this stage: from token ids or the previous stage's output to (T, D) for the next one."""
        x = token_T
        if self.mesh.channels.input is not None:
            shape = (len(token_T), self.model.spec.hidden)
            buffer = torch.empty(shape, dtype=self.dtype, device=self.device)
            x = self.mesh.channels.input.begin(buffer).wait()
        x_TD = self.model.hidden_states(x, position_T, attend)
        if self.mesh.channels.output is not None:
            self.mesh.channels.output.begin(x_TD.contiguous()).wait()
        return x_TD

    def _logits(self, x_RD: Tensor) -> Tensor:
        """Return the logits, (R, V) float32, on every rank; the last stage computes them."""
        rows, vocab = len(x_RD), self.model.spec.vocab
        if self.model.stage.is_last and rows:
            whole_RV = self._gather_vocab(self.model.logits(x_RD).float())[:, :vocab].contiguous()
        else:
            whole_RV = torch.empty((rows, vocab), dtype=torch.float32, device=self.device)
        if self.mesh.layout.pp > 1 and rows:
            dist.broadcast(whole_RV, self.mesh.layout.world - self.mesh.layout.tp)
        return whole_RV

    def _share_hidden(self, x_PD: Tensor) -> Tensor:
        """Return the pooled rows of the last stage, (P, D) float32, on every rank."""
        if self.mesh.layout.pp > 1:
            dist.broadcast(x_PD, self.mesh.layout.world - self.mesh.layout.tp)
        return x_PD

    def _gather_vocab(self, shard_RV: Tensor) -> Tensor:
        """Gather the columns of all ranks of tp."""
        tp = self.mesh.tp
        if tp.group is None:
            return shard_RV
        rows, columns = shard_RV.shape
        whole = shard_RV.new_empty((tp.size * rows, columns))
        tp.all_gather(whole, shard_RV.contiguous()).wait()
        return whole.view(tp.size, rows, columns).transpose(0, 1).flatten(1)


class ParallelRunner:
    """The `ModelRunner` of rank 0: every call is a command to all ranks."""

    def __init__(self, stage: StageRunner, commands: CommandSender) -> None:
        self.stage = stage
        self._commands = commands
        self.page_size = stage.page_size
        self.num_pages = stage.num_pages
        self.vocab_size = stage.vocab_size
        self.max_seq_len = stage.max_seq_len

    def run(self, chunks: Sequence[Chunk]) -> RunnerOutput:
        """Run one forward pass over all chunks, on all ranks."""
        with self._commands.name_lost_rank():
            self._commands.send({"run": chunks})
            return self.stage.run(chunks)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy keys and values of whole pages, on all ranks."""
        self._commands.send({"copy_pages": pairs})
        self.stage.copy_pages(pairs)


def run_commands(stage: StageRunner, commands: CommandReceiver) -> None:
    """Obey rank 0 until it stops or ends: the loop of every other rank."""
    while (command := commands.receive()) is not None:
        if "run" in command:
            stage.run([Chunk(**value) for value in command["run"]])
        else:
            stage.copy_pages([(source, target) for source, target in command["copy_pages"]])
