"""From what a person said of a run to a job to plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from mega_schema.arch import table
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import ConfigError, LayoutError
from mega_schema.params import count_params, is_layer_matrix
from mega_schema.spec import Family, ModelSpec, preset
from mega_train.config import Curriculum, Data, Evaluation, Log, Optimizer, Parallel, Recomputation, Run, Save
from mega_train.planning.estimate import Estimate, estimate
from mega_train.planning.hardware import HARDWARE
from mega_train.planning.search import search
from mega_train.planning.sharded_sizes import Cut
from mega_train.planning.workload import BF16, FLOAT16, FLOAT32, FP8, Job, Precision, Software
from mega_train.resolve import resolve


def made(run: Run, family: Family | None, world: int | None, hardware: str) -> Estimate:
    """The run as it is said.

    Raises:
        MegaError: the run could not begin.
    """
    return estimate(job(run, family, world), HARDWARE[hardware])


def found(run: Run, family: Family | None, world: int | None, hardware: str) -> list[Estimate]:
    """The fastest layouts of the run's model and batch.

    Raises:
        MegaError: the batch is not said, or no layout fits.
    """
    machine, size = HARDWARE[hardware], world or machine_size(run)
    fastest = search(searchable(run, family), size, machine)
    if not fastest:
        raise LayoutError(
            "--world",
            "no layout fits",
            found=f"{size} x {machine.name}",
            wanted="more GPUs, or a batch that more layouts divide",
            hint=f"--world {2 * size}",
        )
    return fastest


def machine_size(run: Run) -> int:
    """Ranks of one copy of the model."""
    cut = run.parallel
    return max(1, cut.tp) * max(1, cut.pp) * max(1, cut.cp)


def job(run: Run, family: Family | None, world: int | None) -> Job:
    """The job that this run would be on `world` ranks; one copy of the model's where that is not said.

    No corpus is read; with --load the checkpoint says which model it is.

    Raises:
        MegaError: the run could not begin, for the reasons it would be refused for.
    """
    loaded = Checkpoint.open(run.checkpoint.load).spec if run.checkpoint.load is not None else None
    if family is None:
        named = preset(run.model.preset) if run.model.preset is not None else loaded
        family = named.family if named else "gpt"
    # what a plan does not depend on takes values that pass
    checked = replace(
        run,
        batch=replace(run.batch, rampup=None),
        curriculum=Curriculum(),
        train=replace(run.train, iterations=1, samples=None, device="cuda"),
        optimizer=Optimizer(lr=1.0),
        data=Data(),
        evaluation=Evaluation(),
        checkpoint=Save(),
        log=Log(),
    )
    plan = resolve(checked, family, world or machine_size(run), corpus=None, loaded=loaded, cuda=True)
    return Job(
        cut=Cut.of(plan.spec, plan.layout),
        length=plan.length,
        micro=plan.micro,
        global_samples=plan.global_samples,
        precision=precision(run, plan.spec),
        recompute=plan.recompute,
        zero=plan.sharing.stage if plan.layout.dp * plan.layout.cp > 1 else 0,
        bucket=plan.sharing.bucket,
        schedule=run.parallel.schedule,
        sequence=run.parallel.sequence and plan.layout.tp > 1,
        software=software(run),
    )


def searchable(run: Run, family: Family | None) -> Job:
    """The job whose layout is to be found: the model and the batch of the run, cut for one rank.

    Raises:
        ConfigError: the batch is not said, and with it there is nothing to hold constant.
    """
    if run.batch.global_samples is None:
        raise ConfigError(
            "--global-batch-size", "missing", wanted="the batch to search for", hint="--global-batch-size 512"
        )
    alone = replace(run, parallel=Parallel(), recompute=Recomputation(), batch=replace(run.batch, micro=1))
    hidden = replace(software(run), overlaps_reduce=True, overlaps_gather=True)
    return replace(job(alone, family, 1), software=hidden)


def precision(run: Run, spec: ModelSpec) -> Precision:
    """Bytes of each parameter; those of the optimizer's state a mean over the model."""
    half = FP8 if run.train.fp8 else BF16
    precision = half if run.train.bf16 else FLOAT16 if run.train.fp16 else FLOAT32
    rows = [row for row in table(spec) if row.tied_to is None]
    moments = {
        "adam": 8.0,
        "sgd": 4.0,
        "muon": 8 - 4 * count_params(row for row in rows if is_layer_matrix(row)) / count_params(rows),
    }
    return replace(precision, moments=moments[run.optimizer.name])


def software(run: Run) -> Software:
    """What of our own program the run's flags choose."""
    return Software(
        attention=_attention(run),
        eager=run.train.kernels == "reference",
        fused=run.train.kernels not in ("reference", "compile"),
        overlaps_tp="both" if run.parallel.tp_overlap else "backward",
        overlaps_reduce=run.parallel.overlap_reduce,
        overlaps_gather=run.parallel.overlap_gather,
    )


def _attention(run: Run) -> Literal["flash", "flash-2", "scores"]:
    if run.train.attention_dropout:
        return "scores"
    return "flash-2" if run.train.kernels == "flash-attn" else "flash"


def words(job: Job) -> str:
    """The flags that make a run the layout of a job that was searched for."""
    layout, again = job.layout, job.recompute
    full = again.granularity == "full"
    flags = {
        "--tensor-model-parallel-size": layout.tp if layout.tp > 1 else None,
        "--sequence-parallel": "" if job.sequence else None,
        "--tp-comm-overlap": "" if job.sequence and job.software.overlaps_tp == "both" else None,
        "--context-parallel-size": layout.cp if layout.cp > 1 else None,
        "--pipeline-model-parallel-size": layout.pp if layout.pp > 1 else None,
        "--pipeline-schedule": job.schedule if layout.pp > 1 and job.schedule != "1f1b" else None,
        "--num-layers-per-virtual-pipeline-stage": (
            job.spec.layers // (layout.pp * layout.vp) if layout.vp > 1 else None
        ),
        "--micro-batch-size": job.micro,
        "--global-batch-size": job.global_samples,
        "--use-distributed-optimizer": "" if job.zero else None,
        "--overlap-grad-reduce": "" if job.zero and job.software.overlaps_reduce else None,
        "--overlap-param-gather": "" if job.zero and job.software.overlaps_gather else None,
        "--recompute-granularity": again.granularity,
        "--recompute-modules": " ".join(again.modules) if again.is_custom else None,
        "--recompute-method": again.method if full else None,
        "--recompute-num-layers": again.layers if full else None,
    }
    return " ".join(f"{flag} {value}".rstrip() for flag, value in flags.items() if value is not None)
