"""Check pairs of values of a run, for `resolve`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mega_schema.errors import ConfigError, LayoutError, MegaError
from mega_schema.outputs import check_output
from mega_schema.parallel_layout import Layout
from mega_schema.recompute_policy import MODULES, Module, RecomputePolicy
from mega_train.config import CheckpointConfig, DataConfig, ParallelConfig, RunConfig, TrainConfig
from mega_train.data.splits import parse_split


def check_data(data: DataConfig) -> Iterator[MegaError]:
    """Check the data options.

    Yields:
        an error if a value is unknown or not supported.
    """
    if data.order == "external":
        yield ConfigError(
            "--dataloader-type",
            "external hands over a Python iterator of your own, which a command cannot",
            found="external",
            wanted="single or cyclic",
            hint="write an indexed dataset, and leave the flag out",
        )
    if not data.sharding and data.order != "cyclic":
        yield ConfigError(
            "--no-data-sharding", "only a cyclic order is sharded", wanted="--dataloader-type cyclic"
        )
    if data.split is not None:
        parse_split(data.split)


def check_precision(train: TrainConfig) -> Iterator[MegaError]:
    """Check precision and loss scale.

    Yields:
        an error if two flags exclude each other, or a value is out of range.
    """
    if train.fp16 and train.bf16:
        yield ConfigError("--fp16", "excludes --bf16", found="both", wanted="one of them")
    if train.loss_scale is not None and not train.fp16:
        hint = "leave it out"
        yield ConfigError("--loss-scale", "only float16 needs one", wanted="--fp16", hint=hint)
    scales = {
        "--loss-scale": train.loss_scale,
        "--initial-loss-scale": train.initial_loss_scale,
        "--min-loss-scale": train.min_loss_scale,
    }
    wrong = {flag: scale for flag, scale in scales.items() if scale is not None and not 0 < scale < math.inf}
    for flag, scale in wrong.items():
        yield ConfigError(flag, "not a scale", found=scale, wanted="a number above 0, such as 65536")
    if not wrong and train.min_loss_scale > train.initial_loss_scale:
        yield ConfigError(
            "--min-loss-scale",
            "is above --initial-loss-scale",
            found=train.min_loss_scale,
            wanted=f"at most {train.initial_loss_scale:g}",
        )
    for flag, count in (("--loss-scale-window", train.loss_scale_window), ("--hysteresis", train.hysteresis)):
        if count < 1:
            yield ConfigError(flag, "not a count", found=count, wanted="1 or more")


def check_folders(run: RunConfig) -> Iterator[MegaError]:
    """Check that output folders are local and not files.

    Yields:
        an error if one is a URL or a file.
    """
    for option, folder in (
        ("--save", run.checkpoint.save),
        ("--data-cache-path", run.data.cache),
        ("--tensorboard-dir", run.log.tensorboard_dir),
        ("--wandb-save-dir", run.log.wandb_save_dir),
        ("--codecarbon-dir", run.log.codecarbon_dir),
    ):
        if folder is not None:
            # checkpoints and logs have distinct names: other files may be in the folder
            try:
                check_output(option, folder, "folder", is_ours=lambda _: True)
            except ConfigError as error:
                yield error


def check_saving(checkpoint: CheckpointConfig) -> Iterator[MegaError]:
    """Check the intervals of saving.

    Yields:
        an error if a value is out of range, or --save is missing.
    """
    intervals = {
        "--save-interval": checkpoint.interval,
        "--keep-last": checkpoint.keep_last,
        "--keep-every": checkpoint.keep_every,
    }
    for flag, value in intervals.items():
        if value is None:
            continue
        if value < 1:
            what = "not a count" if flag == "--keep-last" else "not an interval"
            yield ConfigError(flag, what, found=value, wanted="1 or more")
        if checkpoint.save is None:
            yield ConfigError(flag, "needs --save", wanted="--save DIR", hint="--save RUN")
    every, interval = checkpoint.keep_every or 0, checkpoint.interval or 0
    if every > 0 and interval > 0 and every % interval:
        yield ConfigError(
            "--keep-every",
            "few saved iterations are multiples of it",
            found=every,
            wanted=f"a multiple of --save-interval {interval}",
            hint=f"--keep-every {interval * max(1, round(every / interval))}",
        )


def check_dropout(train: TrainConfig) -> Iterator[MegaError]:
    """Check the dropout probabilities.

    Yields:
        an error if a value is out of range.
    """
    probabilities = {"--hidden-dropout": train.hidden_dropout, "--attention-dropout": train.attention_dropout}
    for flag, probability in probabilities.items():
        if not 0 <= probability < 1:
            wanted = "0 or more, and less than 1"
            yield ConfigError(flag, "not a dropout probability", found=probability, wanted=wanted)


def recompute_policy(run: RunConfig, layout: Layout, tokens: int) -> RecomputePolicy:
    """Build the recomputation policy from its flags.

    Args:
        tokens: of a micro-batch, on one rank of cp.

    Raises:
        ConfigError: two flags disagree.
        LayoutError: the saved inputs do not divide over tp.
    """
    config = run.recompute
    granularity = run.recompute.granularity
    for flag, is_given, implied in (
        ("--recompute-activations", config.selective, "selective"),
        ("--checkpoint-activations", config.full, "full"),
    ):
        if is_given and granularity not in (None, implied):
            raise ConfigError(
                flag, f"means {implied}", found=granularity, wanted=implied, hint=f"leave {flag} out"
            )
        granularity = implied if is_given else granularity  # type: ignore[assignment]
    modules = _recomputed_modules(run, granularity)
    full_options = {
        "--recompute-method": config.method,
        "--recompute-num-layers": config.layers,
        "--distribute-saved-activations": config.distribute_saved or None,
    }
    for flag, value in full_options.items():
        if value is not None and granularity != "full":
            found = granularity or "no recomputation"
            raise ConfigError(
                flag, "applies to full recomputation only", found=found, hint="--recompute-granularity full"
            )
    if config.layers is not None and config.layers < 1:
        raise ConfigError("--recompute-num-layers", "not a count", found=config.layers, wanted="1 or more")
    if config.distribute_saved:
        _check_distributed_activations(run.parallel.sequence, layout.tp, tokens)
    return RecomputePolicy(
        granularity, config.method or "uniform", config.layers or 1, config.distribute_saved, modules
    )


def _recomputed_modules(run: RunConfig, granularity: str | None) -> tuple[Module, ...]:
    # a TOML file may give them as one text
    flag = "--recompute-modules"
    words = " ".join(run.recompute.modules).split()
    if not words:
        return RecomputePolicy().modules
    if granularity != "selective":
        found, hint = granularity or "no recomputation", "--recompute-granularity selective"
        raise ConfigError(flag, "applies to selective recomputation only", found=found, hint=hint)
    unknown = next((word for word in words if word not in MODULES), None)
    if unknown is not None:
        raise ConfigError(
            flag, "not a module of selective recomputation", found=unknown, wanted=" or ".join(MODULES)
        )
    if run.train.fp8 and set(words) != {"core_attn"}:
        raise ConfigError(flag, "applies to FP8 only", found=" ".join(words), wanted="core_attn")
    return tuple(module for module in MODULES if module in words)


def _check_distributed_activations(sequence: bool, tp: int, tokens: int) -> None:
    flag = "--distribute-saved-activations"
    if sequence and tp > 1:
        raise ConfigError(
            flag,
            "each rank already saves only its shard",
            found="--sequence-parallel",
            hint=f"leave {flag} out",
        )
    if tp == 1 or tokens % tp:
        raise LayoutError(
            flag,
            "the saved inputs cannot be split evenly",
            found=f"{tokens} tokens over tp={tp}",
            wanted="tp of 2 or more, and tokens of a micro-batch that are a multiple of it",
        )


def check_overlap(parallel: ParallelConfig, device: str) -> Iterator[MegaError]:
    """Check that --tp-comm-overlap has sequence parallelism and GPUs.

    Yields:
        an error without sequence parallelism, or on a CPU.
    """
    if not parallel.tp_overlap:
        return
    if not parallel.sequence:
        wanted = "--sequence-parallel, whose exchanges it overlaps"
        yield ConfigError("--tp-comm-overlap", "has no tokens to exchange", wanted=wanted)
    if device != "cuda":
        yield ConfigError("--tp-comm-overlap", "needs GPUs", found=device, hint="leave it out on a CPU")


def zero_stage(parallel: ParallelConfig) -> int:
    """Return the ZeRO stage of --zero-stage and --use-distributed-optimizer."""
    return int(parallel.distributed_optimizer) if parallel.zero_stage is None else parallel.zero_stage


def check_replicas(parallel: ParallelConfig) -> Iterator[MegaError]:
    """Check the ZeRO stage and its options.

    Yields:
        an error if the stage is unknown, or two flags disagree.
    """
    stage = zero_stage(parallel)
    if stage not in range(4):
        yield ConfigError("--zero-stage", "no such stage", found=stage, wanted="0 | 1 | 2 | 3")
    if stage == 3 and parallel.schedule == "zero-bubble":
        yield ConfigError(
            "--pipeline-schedule",
            "weight gradients of ZeRO stage 3 cannot be deferred",
            found="zero-bubble",
            wanted="1f1b or gpipe",
            hint="--zero-stage 2, or --pipeline-schedule 1f1b",
        )
    if parallel.distributed_optimizer and stage == 0:
        yield ConfigError(
            "--zero-stage",
            "disagrees with --use-distributed-optimizer",
            found=stage,
            wanted="1 or more, or not given",
            hint="--zero-stage 1",
        )
    elif parallel.overlap_gather and stage == 0:
        yield ConfigError(
            "--overlap-param-gather",
            "has no effect, as every rank updates all weights",
            wanted="a sharded optimizer",
            hint="--use-distributed-optimizer",
        )
    if parallel.bucket is not None and parallel.bucket < 1:
        yield ConfigError("--ddp-bucket-size", "not a size", found=parallel.bucket, wanted="1 or more")
