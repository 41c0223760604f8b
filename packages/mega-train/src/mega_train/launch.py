"""From a configuration to a run: open what it reads, check it all, meet the other ranks, train."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from mega_model.mesh import Mesh, World
from mega_schema.checkpoint import MODEL, Checkpoint
from mega_schema.errors import ConfigError, FormatError
from mega_schema.params import count
from mega_schema.run_folder import LATEST, TOKENIZER, TRAINER
from mega_schema.spec import Family
from mega_schema.tokenizer import check_same, open_folder
from mega_train.config import Run
from mega_train.data.answers import Pairs
from mega_train.data.corpora import Corpora
from mega_train.leaving import Leaving
from mega_train.loop import Loop
from mega_train.metrics import only_run
from mega_train.optim import STATE, Name
from mega_train.rates import Courses
from mega_train.repeatable import check_algorithm, repeatable
from mega_train.resolve import Plan, resolve
from mega_train.resolve.begins import takes_optimizer
from mega_train.signals import Told
from mega_train.trainer import Trainer
from mega_train.watch.events import Began
from mega_train.watch.observers import Observers
from mega_train.watch.opened import opened
from mega_train.watchdog import Watchdog

_HURRY = 15.0  # seconds; torchrun kills what has not ended 30 s after it was told to
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h

log = logging.getLogger("mega.train")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that can begin, with the files it reads open."""

    plan: Plan
    corpora: Corpora | Pairs
    checkpoint: Checkpoint | None
    tokenizer: Path | None


def prepare(run: Run, family: Family, world: World) -> Prepared:
    """Open the corpora and the checkpoint, and check everything against everything.

    Raises:
        MegaError: the run cannot begin. Nothing was written and no process was met.
    """
    run, checkpoint = _checkpoint(run, world)
    corpora = Pairs.open(run.data) if run.data.sft else Corpora.open(run.data)
    identity, tokenizer = corpora.identity, corpora.tokenizer
    if checkpoint is not None and (checkpoint.folder / TOKENIZER).is_dir():
        if identity is not None:
            check_same(identity, open_folder(checkpoint.folder / TOKENIZER).identity, "--data-path")
        tokenizer = tokenizer or checkpoint.folder / TOKENIZER
    plan = resolve(
        run,
        family,
        world.size,
        corpus=identity,
        loaded=checkpoint.spec if checkpoint else None,
        loaded_courses=_courses(run, checkpoint) if checkpoint else None,
        cuda=torch.cuda.is_available(),
    )
    if plan.device == "cuda" and world.local_rank >= (gpus := torch.cuda.device_count()):
        raise ConfigError(
            "--device",
            "more processes on this machine than GPUs",
            found=f"process {world.local_rank + 1} and {gpus} GPUs",
            wanted="a GPU for each process",
            hint=f"torchrun --nproc-per-node {gpus}, or --device cpu",
        )
    if plan.run.train.deterministic and plan.device == "cuda" and world.size > 1:
        check_algorithm(os.environ)
    return Prepared(plan, corpora, checkpoint, tokenizer)


def _checkpoint(run: Run, world: World) -> tuple[Run, Checkpoint | None]:
    """What the run begins with; where that is --pretrained-checkpoint the run says so."""
    load, save, pretrained = run.checkpoint.load, run.checkpoint.save, run.checkpoint.pretrained
    if load is not None and load == save and not (load / LATEST).exists():
        if world.rank == 0:
            begins = "anew" if pretrained is None else f"with the weights of {pretrained}"
            log.warning("%s holds no checkpoint yet: the run begins %s", load, begins)
        load = None
    if load is None and pretrained is not None:
        load = pretrained
        run = replace(run, checkpoint=replace(run.checkpoint, load=pretrained, finetune=True))
    if load is None:
        return run, None
    checkpoint = Checkpoint.open(load)
    if not run.checkpoint.finetune:
        _check_resumable(checkpoint, run.optimizer.name if takes_optimizer(run) else None)
    return run, checkpoint


def _check_resumable(checkpoint: Checkpoint, optimizer: Name | None) -> None:
    """Whether there is what the run goes on with; None takes up no optimizer's state."""
    hint = "--finetune begins anew with its weights"
    found = {space for space in checkpoint.tensors if space not in (MODEL, "optim.main")}
    if optimizer and found != (wanted := STATE[optimizer]):
        writer = next((name for name, spaces in STATE.items() if spaces == found), None)
        raise FormatError(
            checkpoint.folder,
            f"holds the state of --optimizer {writer}"
            if writer
            else "holds no optimizer state to go on with",
            found=", ".join(sorted(found) or checkpoint.tensors),
            wanted=", ".join(sorted(wanted)),
            hint=f"--optimizer {writer}, or {hint}" if writer else hint,
        )
    # checkpoints of converters say nothing of skipped samples
    of_optimizer = (("optimizer_steps", None), ("skipped_samples", 0)) if optimizer else ()
    for key, absent in (("consumed_samples", None), *of_optimizer):
        value = checkpoint.trainer.get(key, absent)
        if type(value) is not int or value < 0:
            raise FormatError(
                f"{checkpoint.folder / TRAINER}: {key}",
                "not a count",
                found=value,
                wanted="0 or more",
                hint=hint,
            )


def _courses(run: Run, checkpoint: Checkpoint) -> Courses | None:
    """The courses to go on with; checkpoints of converters and of our first version say none."""
    if not takes_optimizer(run):
        return None
    said = checkpoint.trainer.get("courses")
    try:
        return None if said is None else Courses.of(said)
    except (TypeError, KeyError) as error:
        raise FormatError(
            f"{checkpoint.folder / TRAINER}: courses",
            "are not those of a learning rate and a weight decay",
            found=error,
            hint="--finetune begins anew with its weights",
        ) from error


def train_on(prepared: Prepared, world: World, out: TextIO, meet: str = "env://") -> int:
    """Train, as one rank of the world; the first rank shows the run on `out` and keeps its record.

    Args:
        meet: where the ranks find each other, a torch.distributed init_method.

    Returns:
        the exit code of why the run left.

    Raises:
        MegaError: another run saves to the same folder, an observer that is asked for cannot be had, or the
            run cannot go on.
    """
    run = prepared.plan.run
    with (
        repeatable(run.train.deterministic),
        only_run(run.checkpoint.save if world.rank == 0 else None),
        opened(run, world, out) as watch,
    ):
        return _train_on(prepared, world, watch, meet)


def _train_on(prepared: Prepared, world: World, watch: Observers, meet: str) -> int:
    plan, started = prepared.plan, time.perf_counter()
    if plan.device == "cpu":
        keep_freed_memory()
    mesh = Mesh.join(
        plan.layout,
        world,
        device=plan.device,
        sequence=plan.run.parallel.sequence,
        fused=plan.run.parallel.tp_overlap,
        meet=meet,
        timeout_minutes=plan.run.parallel.timeout_minutes + 1,  # the watchdog is first, and knows more
    )
    trainer = Trainer(
        plan, mesh, prepared.corpora, checkpoint=prepared.checkpoint, tokenizer=prepared.tokenizer
    )
    with (
        Told() if plan.run.checkpoint.signals else nullcontext() as told,
        _watched(trainer) as watchdog,
        _ended_from_outside(trainer, watchdog),
    ):
        watch.see(began(trainer))
        reason = Loop(trainer, watch, leaving=Leaving(plan, mesh, told=told, began=started)).run()
    mesh.leave()
    return reason.code


def _watched(trainer: Trainer) -> AbstractContextManager[Watchdog | None]:
    """A watchdog over a rank that has others to wait for."""
    mesh = trainer.mesh
    if mesh.store is None:
        return nullcontext()
    return Watchdog(
        mesh.store,
        mesh.rank,
        mesh.layout.world,
        limit=60 * trainer.plan.run.parallel.timeout_minutes,
        progress=lambda: (trainer.iteration, trainer.actions, trainer.saves.beat),
        standing=lambda: (f"after iteration {trainer.iteration}", trainer.goes_on),
        out=sys.stderr,
        hurry=_HURRY if trainer.plan.run.checkpoint.signals else 0,
    )


@contextmanager
def _ended_from_outside(trainer: Trainer, watchdog: Watchdog | None) -> Iterator[None]:
    """Say where a run stood when a person interrupted it, or when another rank of it was lost."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"after iteration {trainer.iteration}; {trainer.goes_on}") from None
    except RuntimeError as error:
        if watchdog is None or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        watchdog.lost(error)


def keep_freed_memory() -> None:
    """Let glibc keep what tensors free, so that the next step does not fault every page in again.

    By default blocks of a few megabytes come from the system and go back to it each time.
    bench/cpu_training.py measures the difference. Other C libraries have no such setting, and are left alone.
    """
    setting = getattr(ctypes.CDLL(None), "mallopt", None)
    if setting is not None:
        setting(_M_MMAP_THRESHOLD, 1 << 25)  # 32 MiB, the most it takes
        setting(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def began(trainer: Trainer) -> Began:
    """What observers are told first."""
    plan, layout = trainer.plan, trainer.plan.layout
    return Began(
        iteration=trainer.iteration,
        iterations=plan.iterations,
        consumed_samples=trainer.consumed,
        family=plan.spec.family,
        parameters=count(trainer.rt.table.values()),
        layout={axis: getattr(layout, axis) for axis in ("tp", "pp", "vp", "cp", "dp")},
        world=layout.world,
        global_batch_size=trainer.samples,
        seq_length=plan.length,
        device=torch.cuda.get_device_name(trainer.mesh.device) if plan.device == "cuda" else plan.device,
        loaded=str(trainer.loaded or ""),
        config=asdict(plan.run),
        time=time.time(),
    )
