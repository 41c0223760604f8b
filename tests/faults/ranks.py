"""Small training runs whose ranks are killed, stopped or poisoned, as forks of one warm process.

A fork starts in milliseconds where a new interpreter takes seconds, so dozens of runs fit into a minute.
Ranks rendezvous by a file and end like ranks of torchrun: `train_on` under the command's error handling.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch._dynamo  # torch imports it with the first optimizer: once here, not in every fork

from mega_model.distributed.mesh import World
from mega_schema.app.cli_runner import run_command as run_command
from mega_schema.app.config import load_config
from mega_schema.errors import FormatError
from mega_train.cli import app
from mega_train.config import RunConfig
from mega_train.engine.train import prepare, train
from mega_train.engine.trainer import Trainer
from mega_train.fault_tolerance import error_reporting
from tests.parity.runs import corpus

STEPS, EVERY = 12, 3  # optimizer steps of a run, and between its checkpoints

Fault = Callable[[Trainer], None]  # what befalls a rank before a step

CONFIG = f"""
[model]
num_layers = 4
hidden_size = 16
num_attention_heads = 2
vocab_size = 101
make_vocab_size_divisible_by = 8
[batch]
seq_length = 16
global_batch_size = 8
[train]
train_iters = {STEPS}
seed = 7
device = "cpu"
[optimizer]
lr = 0.01
[evaluation]
eval_iters = 0
[checkpoint]
save_interval = {EVERY}
[log]
log_interval = 1
"""


@dataclass
class RunningRanks:
    """The processes of a run.

    Attributes:
        codes: exit code of each rank that has ended, negative for a signal.
    """

    folder: Path
    pids: list[int]
    codes: dict[int, int] = field(default_factory=dict)

    def wait(self, seconds: float, *, without: int | None = None) -> bool:
        """Whether all ranks, but for one, ended in time."""
        wanted = set(range(len(self.pids))) - {without}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for rank in set(range(len(self.pids))) - self.codes.keys():
                pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
                if pid:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
            if wanted <= self.codes.keys():
                return True
            time.sleep(0.02)
        return False

    def kill(self) -> None:
        """End what is left."""
        for rank in set(range(len(self.pids))) - self.codes.keys():
            os.kill(self.pids[rank], signal.SIGKILL)
        assert self.wait(10)

    def stderr_text(self) -> str:
        """What all ranks wrote to stderr."""
        return "".join(path.read_text("utf-8") for path in sorted(self.folder.glob("stderr-*")))


def start(
    folder: Path, save: Path, ranks: int, sets: tuple[str, ...] = (), faults: dict[int, Fault] | None = None
) -> RunningRanks:
    """Start a run, or resume the one in `save`; `folder` gets the output of the ranks."""
    folder.mkdir()
    config = folder / "run.toml"
    config.write_text(CONFIG)
    data = corpus(save.parent, "corpus")  # one place: a run that resumes refuses other data
    sets = (*sets, f'data.data_path="{data}"', f'checkpoint.save="{save}"', f'checkpoint.load="{save}"')
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            _rank(folder, config, sets, World(ranks, rank, rank), (faults or {}).get(rank))
        pids.append(pid)
    return RunningRanks(folder, pids)


def _rank(folder: Path, config: Path, sets: tuple[str, ...], world: World, fault: Fault | None) -> None:
    """Run one rank until the process ends."""
    code = 70  # an error of the test itself
    try:
        stderr = os.open(folder / f"stderr-{world.rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(stderr, 2)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size))
        torch.set_num_threads(1)
        error_reporting.REPORT_DELAY = 1.0  # under torchrun the first rank's end ends the others
        if fault is not None:
            _inject(fault)

        @app.command("as-configured")
        def _train() -> int:
            run = load_config(RunConfig, config, {}, sets)
            meet = f"file://{folder / 'meet'}"
            return train(prepare(run, "gpt", world), world, io.StringIO(), meet)

        run_command(app, ["as-configured"])
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0
    except BaseException as error:  # no child goes on as the test that forked it
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
    finally:
        sys.stderr.flush()
        os._exit(code)


def _inject(fault: Fault) -> None:
    step = Trainer.step

    def step_with_fault(trainer: Trainer, rate: float) -> tuple[float, float]:
        fault(trainer)
        return step(trainer, rate)

    Trainer.step = step_with_fault  # type: ignore[method-assign]


def signal_at(iteration: int, number: signal.Signals, after: float) -> Fault:
    """The rank gets this signal so many seconds into the step after `iteration`."""

    def fault(trainer: Trainer) -> None:
        if trainer.state.iteration == iteration:
            threading.Timer(after, os.kill, (os.getpid(), number)).start()

    return fault


def poison_at(iteration: int) -> Fault:
    """A weight of the rank becomes NaN before the step after `iteration`."""

    def fault(trainer: Trainer) -> None:
        if trainer.state.iteration == iteration:
            with torch.no_grad():
                trainer.params[-1][1].view(-1)[0] = torch.nan

    return fault


def bad_token_at(iteration: int) -> Fault:
    """The rank reads a token that is none in the step after `iteration`."""

    def fault(trainer: Trainer) -> None:
        if trainer.state.iteration == iteration:
            raise FormatError("corpus", "contains a token outside the model's vocabulary")

    return fault
