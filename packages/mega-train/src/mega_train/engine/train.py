"""Prepare and run training: open inputs, check the configuration, join the other ranks, train."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from mega_model.distributed.mesh import Mesh, World
from mega_model.fp8 import unsupported_reason
from mega_model.kernels.dispatch import KernelChoice
from mega_schema.app.config import to_dict
from mega_schema.checkpoint.checkpoint_dir import TOKENIZER
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import ConfigError, MegaError
from mega_schema.params import count_params
from mega_schema.presets import preset
from mega_schema.spec import Family, ModelSpec
from mega_schema.tasks.pair_tasks import family_of_task
from mega_schema.tokenizer.identity import TokenizerIdentity
from mega_schema.tokenizer.tokenizer import Tokenizer, check_same_tokenizer, open_tokenizer_folder
from mega_train.checkpointing import resume
from mega_train.checkpointing.changed_settings import Change, describe_changes, find_changes
from mega_train.config import RunConfig
from mega_train.config.refusals import Refusals
from mega_train.data.dataloaders import RunDatasets
from mega_train.data.datasets import Datasets
from mega_train.data.identities import compute_identities
from mega_train.data.sft import SftExamples
from mega_train.data.task_data import TaskData
from mega_train.data.tokenizer_from_flags import (
    check_tokenizer_flag,
    open_tokenizer_from_flags,
    tokenizer_folder,
)
from mega_train.engine.determinism import check_nccl_algorithm, deterministic_algorithms
from mega_train.engine.run_datasets import add_vocabulary, open_datasets
from mega_train.engine.train_loop import TrainLoop
from mega_train.engine.trainer import Trainer, choose_run_kernels
from mega_train.fault_tolerance.exit_conditions import ExitConditions
from mega_train.fault_tolerance.hang_reporter import HangReporter
from mega_train.fault_tolerance.heartbeat_monitor import HeartbeatMonitor
from mega_train.fault_tolerance.peer_protocol import PeerProtocol
from mega_train.fault_tolerance.signal_handler import SignalHandler
from mega_train.fault_tolerance.watchdog import Watchdog
from mega_train.optim.factory import choose_adamw
from mega_train.resolve import ResolvedConfig, resolve
from mega_train.resolve.task import apply_task
from mega_train.telemetry.event_log import lock_run
from mega_train.telemetry.events import Message, TrainStart
from mega_train.telemetry.factory import open_observers
from mega_train.telemetry.observers import Observers

_SIGTERM_GRACE = 15.0  # seconds; torchrun kills processes 30 s after SIGTERM
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h

log = logging.getLogger("mega.train")


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A checked run, with its input files open.

    Attributes:
        prepare_older: prepares the run with a checkpoint older than an iteration.
        superseded: iterations in --save whose checkpoints the run supersedes.
        changes: settings that differ from those that the checkpoint recorded.
        refusal: the reason why the run must not write into --save, if that is not an error.
    """

    config: ResolvedConfig
    datasets: RunDatasets
    checkpoint: Checkpoint | None
    tokenizer: Path | Tokenizer | None
    prepare_older: Callable[[int], PreparedRun]
    superseded: tuple[int, ...] = ()
    changes: tuple[Change, ...] = ()
    refusal: ConfigError | None = None


def prepare(
    run: RunConfig,
    family: Family | None,
    world: World,
    before_iteration: int | None = None,
    *,
    unconverted_spec: ModelSpec | None = None,
    may_write: bool = True,
) -> PreparedRun:
    """Open the datasets and the checkpoint, and check the whole configuration.

    Args:
        family: of the model; None takes the checkpoint's, or gpt.
        before_iteration: take a checkpoint older than this iteration.
        unconverted_spec: the model of a checkpoint that is converted before the run.
        may_write: whether the run writes into --save; if not, a reason against it is not an error.

    Raises:
        MegaError: the run cannot start. Nothing was written and no process group was joined.
    """
    prepare_older = partial(prepare, run, family, world)
    if run.model.preset is not None:
        preset(run.model.preset)  # report an unknown preset before a missing file
    resume_point = resume.find_checkpoint(run, world, before_iteration)
    checkpoint, schedules = resume_point.checkpoint, resume_point.schedules
    loaded_spec = checkpoint.spec if checkpoint else unconverted_spec
    default_family = family_of_task(run.task.name) if run.task.name else "gpt"
    family = family or (loaded_spec.family if loaded_spec else default_family)
    run, flag_tokenizer = open_tokenizer_from_flags(resume_point.run, family)
    refusals = Refusals()
    if resume_point.refusal is not None and may_write:
        refusals.extend([resume_point.refusal])
    datasets = refusals.attempt(open_datasets, run, flag_tokenizer, loaded_spec)
    if datasets is None:  # values that depend on it are neither checked nor called missing
        refusals.unknown |= {"--data-path"} | ({"--vocab-size"} if flag_tokenizer is None else set())
        if run.task.name is not None:
            refusals.raise_any()  # classes and duration depend on the task's files
    identity, tokenizer = _choose_tokenizer(datasets, flag_tokenizer, checkpoint)
    if isinstance(datasets, TaskData):
        length = run.batch.length or (loaded_spec.max_seq_len if loaded_spec else None)
        datasets = datasets.encode_windows(tokenizer, length)
        run, loaded_spec = apply_task(run, datasets, world.size, loaded_spec)
    config = resolve(
        run,
        family,
        world.size,
        corpus=identity,
        loaded_spec=loaded_spec,
        loaded_schedules=schedules,
        cuda=torch.cuda.is_available(),
        refusals=refusals,
    )
    assert datasets is not None
    run_datasets = add_vocabulary(datasets, tokenizer, config)
    _check_machine(config, world)
    changes = find_changes(config.run, checkpoint, partial(compute_identities, config.run.data, datasets))
    return PreparedRun(
        config,
        run_datasets,
        checkpoint,
        tokenizer,
        prepare_older,
        resume_point.superseded,
        tuple(changes),
        resume_point.refusal,
    )


def _choose_tokenizer(
    datasets: Datasets | SftExamples | TaskData | None,
    flag_tokenizer: Tokenizer | None,
    checkpoint: Checkpoint | None,
) -> tuple[TokenizerIdentity | None, Path | Tokenizer | None]:
    """Return the tokenizer of the datasets, of the flags or of the checkpoint, and its identity.

    Raises:
        MegaError: two of them differ.
    """
    identity = datasets.identity if datasets else None
    tokenizer = (datasets.tokenizer if datasets else None) or flag_tokenizer
    if flag_tokenizer is not None:
        if identity is not None:
            check_tokenizer_flag(flag_tokenizer.identity, identity)
        identity = flag_tokenizer.identity
    if checkpoint is not None and (checkpoint.folder / TOKENIZER).is_dir():
        if identity is not None:
            check_same_tokenizer(
                identity, open_tokenizer_folder(checkpoint.folder / TOKENIZER).identity, "--data-path"
            )
        tokenizer = tokenizer or checkpoint.folder / TOKENIZER
    return identity, tokenizer


def _check_machine(config: ResolvedConfig, world: World) -> None:
    """Check that this machine has the GPUs and kernels that the run needs.

    Raises:
        ConfigError: there are too few GPUs, or a kernel is not available.
    """
    if config.device == "cuda" and world.local_rank >= (gpus := torch.cuda.device_count()):
        raise ConfigError(
            "--device",
            "more processes on this machine than GPUs",
            found=f"process {world.local_rank + 1} and {gpus} GPUs",
            wanted="a GPU for each process",
            hint=f"torchrun --nproc-per-node {gpus}, or --device cpu",
        )
    if config.run.train.deterministic and config.device == "cuda" and world.size > 1:
        check_nccl_algorithm(os.environ)
    if config.run.train.fp8 and (missing_feature := unsupported_reason(torch.device(config.device))):
        raise ConfigError(
            "--fp8-format",
            "this device does not support FP8 matrix products",
            found=missing_feature,
            wanted="compute capability 8.9 or more (Ada, Hopper and after)",
            hint="--bf16 without --fp8-format",
        )
    # fails before the rendezvous if a kernel is not available
    choose_run_kernels(config.run.train, torch.device(config.device))


def train(prepared: PreparedRun, world: World, out: TextIO, init_method: str = "env://") -> int:
    """Train as one rank; rank 0 reports on `out` and writes the event log.

    Args:
        init_method: the rendezvous of the ranks, a torch.distributed init_method.

    Returns:
        the exit code of the exit reason.

    Raises:
        MegaError: another run writes to the same folder, an observer is not available, or the run cannot
            continue.
    """
    run = prepared.config.run
    with (
        deterministic_algorithms(run.train.deterministic),
        open_observers(run, world, out) as observers,  # first: a refusal leaves no folder behind
        lock_run(run.checkpoint.save if world.rank == 0 else None),
    ):
        return _train(prepared, world, observers, init_method)


def _train(prepared: PreparedRun, world: World, observers: Observers, init_method: str) -> int:
    config = prepared.config
    start_time = time.perf_counter()
    if config.device == "cpu":
        tune_malloc()
    mesh = Mesh.join(
        config.layout,
        world,
        device=config.device,
        sequence=config.run.parallel.sequence,
        fused=config.run.parallel.tp_overlap,
        init_method=init_method,
        timeout_minutes=config.run.parallel.timeout_minutes + 1,  # the watchdog acts first, and reports more
    )
    prepared = _agree_on_checkpoint(prepared, mesh)
    config = prepared.config
    with tokenizer_folder(None if world.rank else prepared.tokenizer) as tokenizer:
        trainer = Trainer(
            config,
            mesh,
            prepared.datasets,
            checkpoint=prepared.checkpoint,
            tokenizer=tokenizer,
            superseded=prepared.superseded,
        )
        with (
            SignalHandler() if config.run.checkpoint.exit_signal_handler else nullcontext() as signal_handler,
            _build_watchdog(trainer) as watchdog,
            _report_early_exit(trainer, watchdog),
        ):
            observers.on_event(start_event(trainer))
            if prepared.changes and prepared.checkpoint is not None:
                observers.on_event(Message(describe_changes(prepared.changes, prepared.checkpoint)))
            reason = TrainLoop(
                trainer,
                observers,
                exit_conditions=ExitConditions(
                    config,
                    mesh,
                    received_signal=None if signal_handler is None else signal_handler.received_signal,
                    start_time=start_time,
                ),
            ).run()
    mesh.destroy()
    return reason.code


def _agree_on_checkpoint(prepared: PreparedRun, mesh: Mesh) -> PreparedRun:
    """Agree over all ranks on the checkpoint, and return the run prepared with it."""
    if prepared.checkpoint is None:
        return prepared
    candidates = {prepared.checkpoint.iteration: prepared}

    def prepare_older(iteration: int) -> Checkpoint:
        candidate = prepared.prepare_older(iteration)
        assert candidate.checkpoint is not None
        candidates[candidate.checkpoint.iteration] = candidate
        return candidate.checkpoint

    return candidates[
        resume.agree_on_checkpoint(prepared.checkpoint, mesh, prepared.config.run, prepare_older).iteration
    ]


def _build_watchdog(trainer: Trainer) -> AbstractContextManager[Watchdog | None]:
    """Build the watchdog of a rank; none in a run of one process."""
    mesh = trainer.mesh
    if mesh.store is None:
        return nullcontext()
    monitor = HeartbeatMonitor(
        lambda: (trainer.state.iteration, trainer.forward_backward.heartbeat, trainer.saver.heartbeat),
        limit=60 * trainer.config.run.parallel.timeout_minutes,
        sigterm_grace=_SIGTERM_GRACE if trainer.config.run.checkpoint.exit_signal_handler else 0,
    )
    reporter = HangReporter(
        mesh.rank,
        lambda: (f"after iteration {trainer.state.iteration}", trainer.saver.resume_hint),
        sys.stderr,
    )
    return Watchdog(monitor, PeerProtocol(mesh.store, mesh.rank, mesh.layout.world), reporter)


@contextmanager
def _report_early_exit(trainer: Trainer, watchdog: Watchdog | None) -> Iterator[None]:
    """Report from one rank the reason of an early exit: an interruption, an error, or a lost rank."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"after iteration {trainer.state.iteration}; {trainer.saver.resume_hint}"
        ) from None
    except MegaError as error:
        if watchdog is None:
            raise
        watchdog.on_error(error)
    except RuntimeError as error:
        if watchdog is None or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        watchdog.on_peer_lost(error)


def tune_malloc() -> None:
    """Make malloc reuse freed memory in the next step. Only on Linux with glibc.

    By default glibc maps and unmaps blocks of a few megabytes each time: the kernel must zero the pages of a
    step's logits again, and the host of a virtual machine may have to allocate them.
    bench/cpu_optimizations.py measures the difference. With it torch's huge pages (THP_MEM_ALLOC_ENABLE) save
    nothing, and glibc reuses aligned blocks badly (docs/log.md).
    """
    setting = getattr(ctypes.CDLL(None), "mallopt", None)
    if setting is not None:
        setting(_M_MMAP_MAX, 0)
        setting(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def start_event(trainer: Trainer) -> TrainStart:
    """Build the first event of a run."""
    config = trainer.config
    layout = trainer.config.layout
    return TrainStart(
        iteration=trainer.state.iteration,
        iterations=config.iterations,
        consumed_samples=trainer.state.consumed_samples,
        family=config.spec.family,
        parameters=count_params(trainer.rt.table.values()),
        layout={axis: getattr(layout, axis) for axis in ("tp", "pp", "vp", "cp", "dp")},
        world=layout.world,
        global_batch_size=trainer.state.global_batch_size,
        seq_length=config.seq_length,
        device=torch.cuda.get_device_name(trainer.mesh.device) if config.device == "cuda" else config.device,
        kernels=kernels_summary(config.run, trainer.kernel_choice, trainer.mesh.device),
        loaded=str(trainer.loaded_from or ""),
        objective=config.run.objective.label,
        config=to_dict(config.run),
        time=time.time(),
    )


def kernels_summary(run: RunConfig, kernel_choice: KernelChoice, device: torch.device) -> str:
    """Describe the kernels of a run, its AdamW if it is not torch's, and FP8 if it is used."""
    adamw_source = choose_adamw(run.train.kernels, device).source
    adamw_note = (
        f", {adamw_source} (adamw)" if adamw_source != "torch" and run.optimizer.name != "sgd" else ""
    )
    return (
        kernel_choice.summary
        + adamw_note
        + (f", torch (products in FP8, {run.train.fp8})" if run.train.fp8 else "")
    )
