"""Resolve a configuration: derive all values, and check that options agree.

This is the only validator. A `ResolvedConfig` is valid, or the run does not start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from mega_schema.arch import table
from mega_schema.errors import ConfigError, MegaError
from mega_schema.fp8_recipe import Fp8Recipe
from mega_schema.parallel_layout import Layout
from mega_schema.recompute_policy import RecomputePolicy
from mega_schema.spec import Family, ModelSpec
from mega_schema.tokenizer.tokenizer import TokenizerIdentity
from mega_train.config import RunConfig
from mega_train.config.refusals import Refusals
from mega_train.pipeline.stage_assignment import assign_layers
from mega_train.resolve.batch import (
    as_eval_run,
    batch_size_schedule,
    batch_sizes,
    check_counts,
    check_duration,
    check_length,
    num_iterations,
    seq_length_schedule,
    skipped_iterations,
)
from mega_train.resolve.batch_invariant import check_batch_invariant
from mega_train.resolve.checks import (
    check_data,
    check_dropout,
    check_folders,
    check_overlap,
    check_precision,
    check_replicas,
    check_saving,
    recompute_policy,
)
from mega_train.resolve.encoder_data import check_encoder_data, check_encoder_degrees
from mega_train.resolve.flag_names import with_flag_names
from mega_train.resolve.fp8 import fp8_recipe
from mega_train.resolve.logging import check_evaluations, check_log, check_profile
from mega_train.resolve.model import model_spec
from mega_train.resolve.objective import check_objective, check_objective_degrees
from mega_train.resolve.optimizer import check_optimizer, param_schedules, peak_lr
from mega_train.resolve.record import recorded_model
from mega_train.resolve.resolved_config import ResolvedConfig
from mega_train.resolve.run_mode import is_eval_only
from mega_train.schedules.batch_size import BatchSizeRampup
from mega_train.schedules.lr import ParamSchedules
from mega_train.schedules.seq_length import SeqLengthSchedule

__all__ = ["ResolvedConfig", "model_spec", "resolve"]


def resolve(
    run: RunConfig,
    family: Family,
    world: int,
    *,
    corpus: TokenizerIdentity | None,
    loaded_spec: ModelSpec | None,
    loaded_schedules: ParamSchedules | None = None,
    cuda: bool,
    refusals: Refusals | None = None,
) -> ResolvedConfig:
    """Resolve the run against the processes, the dataset and the checkpoint that it resumes from.

    Args:
        world: number of processes.
        corpus: the tokenizer of the dataset, if it records one.
        loaded_spec: the model of the checkpoint, if one is loaded.
        loaded_schedules: the checkpoint's learning-rate and weight-decay schedules, if it has any.
        cuda: whether this machine has a GPU that torch can use.
        refusals: earlier errors; all are raised together.

    Raises:
        ConfigError, LayoutError: two values disagree; the message names both.
        RefusedRunError: there are several errors. Values derived from a wrong value are not checked.
    """
    refusals = Refusals() if refusals is None else refusals
    if is_eval_only(run):
        run = as_eval_run(run)
    parallel = run.parallel
    vocab = corpus.vocab_size if corpus else None
    build_spec = partial(model_spec, run, family, vocab=vocab, loaded_spec=loaded_spec)
    spec = refusals.attempt(with_flag_names, run.model, build_spec)
    if spec is not None:
        run = replace(run, model=recorded_model(run, spec, loaded_spec))
    layout = _resolve_degrees(refusals, run, spec, world)
    steps = _resolve_steps(refusals, run, layout, loaded_schedules)
    model_layout = None if layout is None or spec is None else _resolve_layout(refusals, run, spec, layout)
    for errors in _independent_checks(run):
        refusals.extend(errors)
    if corpus is not None and spec is not None:
        refusals.attempt(_check_vocabulary, corpus, spec)
    device = refusals.attempt(_device, run, cuda)
    if device is not None:
        refusals.extend(check_overlap(parallel, device))
    skipped = refusals.attempt(skipped_iterations, run)
    eod = None
    if spec is None or spec.is_decoder_only:  # an encoder has none of the options that need it
        eod = refusals.attempt(_end_of_document, run, corpus)
    refusals.raise_any()
    assert spec is not None
    assert steps is not None
    assert model_layout is not None
    assert device is not None
    return ResolvedConfig(
        run=run,
        spec=spec,
        layout=model_layout.layout,
        seq_length=model_layout.seq_length,
        seq_length_schedule=model_layout.seq_length_schedule,
        micro_batch_size=steps.micro_batch_size,
        batch_size_schedule=steps.batch_size_schedule,
        iterations=steps.iterations,
        skipped_iterations=skipped or (),
        schedules=steps.schedules,
        eod=eod,
        recompute=model_layout.recompute,
        fp8=model_layout.fp8,
        device=device,
    )


def _resolve_degrees(refusals: Refusals, run: RunConfig, spec: ModelSpec | None, world: int) -> Layout | None:
    """Lay out the processes; None if the model, or their number, does not allow the degrees."""
    parallel = run.parallel
    if not refusals.extend(check_objective_degrees(parallel, run.objective)):
        return None
    if spec is not None and not refusals.extend(check_encoder_degrees(parallel, spec)):
        return None
    tp, pp, cp = parallel.tp, parallel.pp, parallel.cp
    return refusals.attempt(Layout.from_world_size, world, tp=tp, pp=pp, cp=cp)


def _independent_checks(run: RunConfig) -> Iterable[Iterator[MegaError]]:
    """List the checks that need neither the processes nor the model."""
    return (
        check_data(run.data),
        check_counts(run),
        check_log(run.log),
        check_evaluations(run),
        check_profile(run.profile),
        check_folders(run),
        check_saving(run.checkpoint),
        check_optimizer(run),
        check_dropout(run.train),
        check_precision(run.train),
        check_replicas(run.parallel),
    )


@dataclass(frozen=True, slots=True)
class _StepPlan:
    """Sizes, number and schedules of the optimizer steps."""

    micro_batch_size: int
    batch_size_schedule: BatchSizeRampup
    iterations: int
    schedules: ParamSchedules


def _resolve_steps(
    refusals: Refusals, run: RunConfig, layout: Layout | None, loaded_schedules: ParamSchedules | None
) -> _StepPlan | None:
    """Resolve the optimizer steps; None if part of them is refused."""
    has_duration = refusals.extend(check_duration(run.train))
    if loaded_schedules is None or not run.optimizer.checkpoint_schedule:
        refusals.attempt(peak_lr, run.optimizer)  # the other rates depend on the duration, this does not
    if layout is None or (sizes := refusals.attempt(batch_sizes, run, layout.dp)) is None:
        return None
    micro, global_samples = sizes
    batch_sizes_schedule = refusals.attempt(batch_size_schedule, run, global_samples, micro * layout.dp)
    if batch_sizes_schedule is None or not has_duration:
        return None
    iterations = refusals.attempt(num_iterations, run.train, batch_sizes_schedule)
    if iterations is None:
        return None
    schedules = refusals.attempt(param_schedules, run, iterations, batch_sizes_schedule, loaded_schedules)
    return None if schedules is None else _StepPlan(micro, batch_sizes_schedule, iterations, schedules)


@dataclass(frozen=True, slots=True)
class _ModelLayout:
    """Layout, sample lengths and recomputation."""

    layout: Layout
    seq_length: int
    seq_length_schedule: SeqLengthSchedule
    recompute: RecomputePolicy
    fp8: Fp8Recipe | None


def _resolve_layout(
    refusals: Refusals, run: RunConfig, spec: ModelSpec, layout: Layout
) -> _ModelLayout | None:
    """Resolve the layout of the model; None if part of it is refused."""
    staged_layout = refusals.attempt(assign_layers, run.parallel, spec, layout)
    refusals.attempt(with_flag_names, run.model, _check_param_shapes, spec, layout)
    fp8 = refusals.attempt(fp8_recipe, run, spec, layout)
    refusals.extend(check_batch_invariant(run.train, spec, layout))
    refusals.extend(check_encoder_data(run, spec, layout))
    length = spec.max_seq_len if run.batch.length is None else run.batch.length
    if not refusals.extend(check_length(run, spec, length, layout)):
        return None
    refusals.extend(check_objective(run, spec, length))
    seq_lengths = refusals.attempt(seq_length_schedule, run, length, layout)
    recompute = refusals.attempt(recompute_policy, run, layout, run.batch.micro * length // layout.cp)
    if staged_layout is None or seq_lengths is None or recompute is None:
        return None
    return _ModelLayout(staged_layout, length, seq_lengths, recompute, fp8)


def _device(run: RunConfig, cuda: bool) -> Literal["cpu", "cuda"]:
    if run.train.device == "cuda" and not cuda:
        raise ConfigError("--device", "no GPU that torch can use", found="cuda", hint="--device cpu")
    return "cuda" if cuda and run.train.device != "cpu" else "cpu"


def _check_param_shapes(spec: ModelSpec, layout: Layout) -> None:
    """Shard every parameter as the ranks will, so that errors appear before the model is built."""
    for row in table(spec):
        row.local_shape(layout.tp)


def _check_vocabulary(corpus: TokenizerIdentity, spec: ModelSpec) -> None:
    if corpus.vocab_size > spec.vocab:
        raise ConfigError(
            "--data-path",
            "the corpus is tokenized for a larger vocabulary than the model's",
            found=f"{corpus.vocab_size} tokens ({corpus.type})",
            wanted=f"at most {spec.vocab}",
            hint=f"--vocab-size {corpus.vocab_size}, or the tokenizer of the model",
        )


def _end_of_document(run: RunConfig, corpus: TokenizerIdentity | None) -> int | None:
    data = run.data
    if not (data.reset_attention or data.reset_positions or data.eod_mask_loss or data.sft):
        return None
    if corpus is None or corpus.eod is None:
        raise ConfigError(
            "--data-path",
            "the end-of-document token is not known",
            found="a dataset whose tokenizer has none" if corpus else "a dataset without a .json beside it",
            wanted="a token for --reset-position-ids, --reset-attention-mask, --eod-mask-loss and --sft",
            hint="preprocess the corpus with mega-data preprocess --append-eod",
        )
    return corpus.eod
