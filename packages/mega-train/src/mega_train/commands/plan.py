"""Build the workload to plan from a run's configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from mega_schema.arch import table
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import ConfigError, LayoutError
from mega_schema.params import count_params, is_layer_matrix
from mega_schema.presets import preset
from mega_schema.spec import Family, ModelSpec
from mega_train.config import (
    CheckpointConfig,
    CurriculumConfig,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    OptimizerConfig,
    ParallelConfig,
    RecomputeConfig,
    RunConfig,
)
from mega_train.planning.estimate import Estimate, estimate
from mega_train.planning.hardware import HARDWARE
from mega_train.planning.search import search
from mega_train.planning.sharded_sizes import ShardedModel
from mega_train.planning.workload import BF16, FLOAT16, FLOAT32, FP8, Implementation, Precision, Workload
from mega_train.resolve import resolve


def estimate_run(run: RunConfig, family: Family | None, world: int | None, hardware: str) -> Estimate:
    """Estimate the run as configured.

    Raises:
        MegaError: the run could not begin.
    """
    return estimate(build_workload(run, family, world), HARDWARE[hardware])


def search_layouts(run: RunConfig, family: Family | None, world: int | None, hardware: str) -> list[Estimate]:
    """Search the fastest layouts of the run's model and batch.

    Raises:
        MegaError: the batch size is not given, or no layout fits.
    """
    machine = HARDWARE[hardware]
    size = world or model_ranks(run)
    fastest = search(search_template(run, family), size, machine)
    if not fastest:
        raise LayoutError(
            "--world",
            "no layout fits",
            found=f"{size} x {machine.name}",
            wanted="more GPUs, or a batch that more layouts divide",
            hint=f"--world {2 * size}",
        )
    return fastest


def model_ranks(run: RunConfig) -> int:
    """Return the ranks of one replica of the model."""
    parallel = run.parallel
    return max(1, parallel.tp) * max(1, parallel.pp) * max(1, parallel.cp)


def build_workload(run: RunConfig, family: Family | None, world: int | None) -> Workload:
    """Build the workload of this run on `world` ranks; None: on the ranks of one replica.

    Reads no dataset; with --load the model is the checkpoint's.

    Raises:
        MegaError: the run could not start; the same errors as in training.
    """
    loaded_spec = Checkpoint.open(run.checkpoint.load).spec if run.checkpoint.load is not None else None
    model = preset(run.model.preset) if run.model.preset is not None else loaded_spec
    family = family or (model.family if model else "gpt")
    # options without effect on a plan get valid values
    has_no_pairs = model is not None and model.family == "bert" and not model.binary_head
    encoder_data = replace(run.encoder_data, no_binary_head=True) if has_no_pairs else run.encoder_data
    minimal = replace(
        run,
        batch=replace(run.batch, rampup=None),
        curriculum=CurriculumConfig(),
        train=replace(run.train, iterations=1, samples=None, device="cuda"),
        optimizer=OptimizerConfig(lr=1.0),
        data=DataConfig(),
        encoder_data=encoder_data,
        evaluation=EvaluationConfig(),
        checkpoint=CheckpointConfig(),
        log=LoggingConfig(),
    )
    config = resolve(
        minimal, family, world or model_ranks(run), corpus=None, loaded_spec=loaded_spec, cuda=True
    )
    if config.spec.encoder_layers is not None:
        raise ConfigError(
            "model.family",
            "cannot be estimated yet",
            found=config.spec.family,
            wanted="gpt | llama | bert",
            hint="mega-train validate checks the flags of a T5",
        )
    return Workload(
        model=ShardedModel.from_layout(config.spec, config.layout),
        seq_length=config.seq_length,
        micro_batch_size=config.micro_batch_size,
        global_batch_size=config.global_batch_size,
        precision=choose_precision(run, config.spec),
        recompute=config.recompute,
        zero=config.sharding_config.stage if config.layout.dp * config.layout.cp > 1 else 0,
        bucket_elements=config.sharding_config.bucket_elements,
        schedule=run.parallel.schedule,
        sequence=run.parallel.sequence and config.layout.tp > 1,
        implementation=choose_implementation(run),
    )


def search_template(run: RunConfig, family: Family | None) -> Workload:
    """Build the workload whose layout is searched: the run's model and batch on one rank.

    Raises:
        ConfigError: the global batch size is not given.
    """
    if run.batch.global_samples is None:
        raise ConfigError(
            "--global-batch-size", "missing", wanted="the batch to search for", hint="--global-batch-size 512"
        )
    single_rank = replace(
        run, parallel=ParallelConfig(), recompute=RecomputeConfig(), batch=replace(run.batch, micro=1)
    )
    implementation = replace(choose_implementation(run), overlaps_reduce=True, overlaps_gather=True)
    return replace(build_workload(single_rank, family, 1), implementation=implementation)


def choose_precision(run: RunConfig, spec: ModelSpec) -> Precision:
    """Choose the bytes per parameter; those of the optimizer state are a mean over the model."""
    half = FP8 if run.train.fp8 else BF16
    precision = half if run.train.bf16 else FLOAT16 if run.train.fp16 else FLOAT32
    rows = [row for row in table(spec) if row.tied_to is None]
    moments = {
        "adam": 8.0,
        "sgd": 4.0,
        "muon": 8 - 4 * count_params(row for row in rows if is_layer_matrix(row)) / count_params(rows),
    }
    return replace(precision, moments=moments[run.optimizer.name])


def choose_implementation(run: RunConfig) -> Implementation:
    """Choose the implementation that the run's flags select."""
    return Implementation(
        attention=_attention(run),
        eager=run.train.kernels == "reference",
        fused=run.train.kernels not in ("reference", "compile"),
        overlaps_tp="both" if run.parallel.tp_overlap else "backward",
        overlaps_reduce=run.parallel.overlap_reduce,
        overlaps_gather=run.parallel.overlap_gather,
    )


def _attention(run: RunConfig) -> Literal["flash", "flash-2", "scores"]:
    if run.train.attention_dropout:
        return "scores"
    return "flash-2" if run.train.kernels == "flash-attn" else "flash"
