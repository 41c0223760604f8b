"""From a configuration to a run: open what it reads, check it all, meet the other ranks, train."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from mega_model.distributed.mesh import Mesh, World
from mega_model.fp8 import why_unsupported
from mega_model.kernels.dispatch import KernelChoice, choose_kernels
from mega_schema.checkpoint.checkpoint_dir import TOKENIZER
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import ConfigError, MegaError
from mega_schema.params import count_params
from mega_schema.spec import Family, ModelSpec, preset
from mega_schema.tokenizer.tokenizer import Tokenizer, check_same_tokenizer, open_tokenizer_folder
from mega_train.checkpointing import resume
from mega_train.checkpointing.changed_settings import Change, describe_changes, find_changes
from mega_train.config import Run
from mega_train.config.refusals import Refusals
from mega_train.data.datasets import Corpora
from mega_train.data.identities import compute_identities
from mega_train.data.sft import Pairs
from mega_train.data.tokenizer_from_flags import check_said, folder_of, named
from mega_train.engine.determinism import check_algorithm, repeatable
from mega_train.engine.train_loop import Loop
from mega_train.engine.trainer import Trainer
from mega_train.fault_tolerance.exit_conditions import Leaving
from mega_train.fault_tolerance.signal_handler import Told
from mega_train.fault_tolerance.watchdog import Watchdog
from mega_train.optim.factory import adam
from mega_train.resolve import Plan, resolve
from mega_train.telemetry.event_log import only_run
from mega_train.telemetry.events import Began, Said
from mega_train.telemetry.factory import opened
from mega_train.telemetry.observers import Observers

_HURRY = 15.0  # seconds; torchrun kills what has not ended 30 s after it was told to
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h

log = logging.getLogger("mega.train")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that can begin, with the files it reads open.

    Attributes:
        older: prepares it with an older checkpoint than that of an iteration.
        superseded: iterations in --save whose checkpoints the run supersedes.
        changes: settings that are not what the checkpoint recorded.
        refusal: why the run may not write into --save, where that was not to be an error.
    """

    plan: Plan
    corpora: Corpora | Pairs
    checkpoint: Checkpoint | None
    tokenizer: Path | Tokenizer | None
    older: Callable[[int], Prepared]
    superseded: tuple[int, ...] = ()
    changes: tuple[Change, ...] = ()
    refusal: ConfigError | None = None


def prepare(
    run: Run,
    family: Family | None,
    world: World,
    before: int | None = None,
    *,
    unconverted: ModelSpec | None = None,
    starts: bool = True,
) -> Prepared:
    """Open the corpora and the checkpoint, and check everything against everything.

    Args:
        family: of the model; None means the checkpoint's, or gpt.
        before: the checkpoint is to be older than that of this iteration.
        unconverted: the model of a checkpoint that is to be converted before the run.
        starts: whether the run is to write into --save, so that what keeps it from that is an error.

    Raises:
        MegaError: the run cannot begin. Nothing was written and no process was met.
    """
    older = partial(prepare, run, family, world)
    if run.model.preset is not None:
        preset(run.model.preset)  # a name that is not known is told before a file that is not there
    begins = resume.found(run, world, before)
    checkpoint, courses = begins.checkpoint, begins.courses
    loaded = checkpoint.spec if checkpoint else unconverted
    family = family or (loaded.family if loaded else "gpt")
    run, said = named(begins.run)
    refused = Refusals()
    if begins.refusal is not None and starts:
        refused.extend([begins.refusal])
    corpora = refused.attempt(_corpora, run, said, loaded)
    if corpora is None:  # what it decides is not checked, and is not called missing
        refused.unknown |= {"--data-path"} | ({"--vocab-size"} if said is None else set())
    identity = corpora.identity if corpora else None
    tokenizer = (corpora.tokenizer if corpora else None) or said
    if said is not None:
        if identity is not None:
            check_said(said.identity, identity)
        identity = said.identity
    if checkpoint is not None and (checkpoint.folder / TOKENIZER).is_dir():
        if identity is not None:
            check_same_tokenizer(
                identity, open_tokenizer_folder(checkpoint.folder / TOKENIZER).identity, "--data-path"
            )
        tokenizer = tokenizer or checkpoint.folder / TOKENIZER
    plan = resolve(
        run,
        family,
        world.size,
        corpus=identity,
        loaded=loaded,
        loaded_courses=courses,
        cuda=torch.cuda.is_available(),
        refused=refused,
    )
    assert corpora is not None
    _check_machine(plan, world)
    changes = find_changes(plan.run, checkpoint, partial(compute_identities, plan.run.data, corpora))
    return Prepared(
        plan, corpora, checkpoint, tokenizer, older, begins.superseded, tuple(changes), begins.refusal
    )


def _check_machine(plan: Plan, world: World) -> None:
    """What this machine must have for the plan.

    Raises:
        ConfigError: there are too few GPUs, or a kernel cannot be had.
    """
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
    if plan.run.train.fp8 and (lacking := why_unsupported(torch.device(plan.device))):
        raise ConfigError(
            "--fp8-format",
            "no products in FP8 here",
            found=lacking,
            wanted="compute capability 8.9 or more (Ada, Hopper and after)",
            hint="--bf16 alone",
        )
    choose_kernels(
        plan.run.train.kernels, torch.device(plan.device)
    )  # what cannot be had is said before ranks meet


def _corpora(run: Run, said: Tokenizer | None, loaded: ModelSpec | None) -> Corpora | Pairs:
    """Open what the run reads.

    Args:
        said: the tokenizer that flags name.
        loaded: the model of the checkpoint.

    Raises:
        MegaError: it cannot be opened, or no vocabulary is known for mock data.
    """
    if not run.data.mock:
        return Pairs.open(run.data) if run.data.sft else Corpora.open(run.data)
    if run.data.sft:
        raise ConfigError("--mock-data", "has no prompts and answers", found="--sft", hint="leave it out")
    model = run.model
    vocab = said.identity.vocab_size if said else model.vocab
    if vocab is None:
        spec = preset(model.preset) if model.preset else loaded
        vocab = spec.vocab if spec else None
    if vocab is None:
        wanted = "ids for the mock data"
        raise ConfigError("--vocab-size", "missing", wanted=wanted, hint="--vocab-size 50257")
    eod = said.identity.eod if said else None
    return Corpora.mock(vocab, vocab - 1 if eod is None else eod, run.data)


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
        opened(run, world, out) as watch,  # first, since what it refuses leaves no folder behind
        only_run(run.checkpoint.save if world.rank == 0 else None),
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
        init_method=meet,
        timeout_minutes=plan.run.parallel.timeout_minutes + 1,  # the watchdog is first, and knows more
    )
    prepared = _agreed(prepared, mesh)
    plan = prepared.plan
    with folder_of(None if world.rank else prepared.tokenizer) as tokenizer:
        trainer = Trainer(
            plan,
            mesh,
            prepared.corpora,
            checkpoint=prepared.checkpoint,
            tokenizer=tokenizer,
            superseded=prepared.superseded,
        )
        with (
            Told() if plan.run.checkpoint.signals else nullcontext() as told,
            _watched(trainer) as watchdog,
            _ended_from_outside(trainer, watchdog),
        ):
            watch.see(began(trainer))
            if prepared.changes and prepared.checkpoint is not None:
                watch.see(Said(describe_changes(prepared.changes, prepared.checkpoint)))
            reason = Loop(trainer, watch, leaving=Leaving(plan, mesh, told=told, began=started)).run()
    mesh.destroy()
    return reason.code


def _agreed(prepared: Prepared, mesh: Mesh) -> Prepared:
    """As `resume.agreed`, with all that follows from the checkpoint."""
    if prepared.checkpoint is None:
        return prepared
    others = {prepared.checkpoint.iteration: prepared}

    def older(iteration: int) -> Checkpoint:
        other = prepared.older(iteration)
        assert other.checkpoint is not None
        others[other.checkpoint.iteration] = other
        return other.checkpoint

    return others[resume.agreed(prepared.checkpoint, mesh, prepared.plan.run, older).iteration]


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
    """Say why a run ends early, one rank for all: an interruption, a mistake, another rank that was lost."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"after iteration {trainer.iteration}; {trainer.goes_on}") from None
    except MegaError as error:
        if watchdog is None:
            raise
        watchdog.failed(error)
    except RuntimeError as error:
        if watchdog is None or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        watchdog.lost(error)


def keep_freed_memory() -> None:
    """Let what tensors free serve the next step. On Linux with glibc alone.

    By default glibc takes blocks of a few megabytes from the system, and gives them back, each time: a step's
    logits come as pages that the system clears first, and the host of a virtual machine may have to find.
    bench/cpu_training.py measures the difference. Beside it torch's large pages (THP_MEM_ALLOC_ENABLE) save
    nothing, and glibc reuses badly what they align (docs/log.md).
    """
    setting = getattr(ctypes.CDLL(None), "mallopt", None)
    if setting is not None:
        setting(_M_MMAP_MAX, 0)
        setting(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def began(trainer: Trainer) -> Began:
    """What observers are told first."""
    plan, layout = trainer.plan, trainer.plan.layout
    return Began(
        iteration=trainer.iteration,
        iterations=plan.iterations,
        consumed_samples=trainer.consumed,
        family=plan.spec.family,
        parameters=count_params(trainer.rt.table.values()),
        layout={axis: getattr(layout, axis) for axis in ("tp", "pp", "vp", "cp", "dp")},
        world=layout.world,
        global_batch_size=trainer.samples,
        seq_length=plan.length,
        device=torch.cuda.get_device_name(trainer.mesh.device) if plan.device == "cuda" else plan.device,
        kernels=taken(plan.run, trainer.choice, trainer.mesh.device),
        loaded=str(trainer.loaded or ""),
        config=asdict(plan.run),
        time=time.time(),
    )


def taken(run: Run, choice: KernelChoice, device: torch.device) -> str:
    """Whose kernels a run computes with, whose AdamW where it is not torch's, and whether it uses FP8."""
    its = adam(run.train.kernels, device).whose
    named = f", {its} (adamw)" if its != "torch" and run.optimizer.name != "sgd" else ""
    return choice.summary + named + (f", torch (products in FP8, {run.train.fp8})" if run.train.fp8 else "")
