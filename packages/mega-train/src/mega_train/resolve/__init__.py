"""From what a person said to what will be done: every derived number, and every check between two values.

This is the one validator. Past it, a `Plan` is right or the run has not begun.
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
from mega_train.config import Run
from mega_train.config.refusals import Refusals
from mega_train.pipeline.stage_assignment import dealt
from mega_train.resolve.batch import (
    batch_course,
    batch_sizes,
    check_counts,
    check_duration,
    check_length,
    duration,
    evaluated,
    length_course,
    passed_over,
)
from mega_train.resolve.checks import (
    check_data,
    check_dropout,
    check_folders,
    check_overlap,
    check_precision,
    check_replicas,
    check_saving,
    recomputation,
)
from mega_train.resolve.flag_names import with_flag_names
from mega_train.resolve.fp8 import fp8_recipe
from mega_train.resolve.logging import check_log, check_profile
from mega_train.resolve.model import model_spec
from mega_train.resolve.optimizer import check_optimizer, courses, peak_rate
from mega_train.resolve.record import recorded_model
from mega_train.resolve.resolved_config import Plan
from mega_train.resolve.run_mode import only_validates
from mega_train.schedules.batch_size import BatchSizes
from mega_train.schedules.lr import Courses
from mega_train.schedules.seq_length import Lengths

__all__ = ["Plan", "model_spec", "resolve"]


def resolve(
    run: Run,
    family: Family,
    world: int,
    *,
    corpus: TokenizerIdentity | None,
    loaded: ModelSpec | None,
    loaded_courses: Courses | None = None,
    cuda: bool,
    refused: Refusals | None = None,
) -> Plan:
    """Check the run against itself, the processes, the corpus and the checkpoint it goes on from.

    Args:
        world: processes of the run.
        corpus: the tokenizer the corpus was made with, where the dataset says so.
        loaded: the model of the checkpoint that is loaded, if one is.
        loaded_courses: of learning rate and weight decay, of the run that goes on, where it says them.
        cuda: whether this machine has a GPU that torch can use.
        refused: what was refused before; all is raised together.

    Raises:
        ConfigError, LayoutError: two values disagree; the message names both.
        Refused: several do, or are wrong. What follows from a value that is wrong is not checked.
    """
    refused = Refusals() if refused is None else refused
    if only_validates(run):
        run = evaluated(run)
    parallel = run.parallel
    layout = refused.attempt(Layout.from_world_size, world, tp=parallel.tp, pp=parallel.pp, cp=parallel.cp)
    spec = refused.attempt(
        with_flag_names,
        run.model,
        partial(model_spec, run, family, vocab=corpus.vocab_size if corpus else None, loaded=loaded),
    )
    if spec is not None:
        run = replace(run, model=recorded_model(run, spec, loaded))
    steps = _steps(refused, run, layout, loaded_courses)
    cut = None if layout is None or spec is None else _cut(refused, run, spec, layout)
    for errors in _independent(run):
        refused.extend(errors)
    if corpus is not None and spec is not None:
        refused.attempt(_check_vocabulary, corpus, spec)
    device = refused.attempt(_device, run, cuda)
    if device is not None:
        refused.extend(check_overlap(parallel, device))
    ranges = refused.attempt(passed_over, run)
    eod = refused.attempt(_eod, run, corpus)
    refused.raise_any()
    assert spec is not None
    assert steps is not None
    assert cut is not None
    assert device is not None
    return Plan(
        run=run,
        spec=spec,
        layout=cut.layout,
        length=cut.length,
        lengths=cut.lengths,
        micro=steps.micro,
        batches=steps.batches,
        iterations=steps.iterations,
        passed_over=ranges or (),
        courses=steps.courses,
        eod=eod,
        recompute=cut.recompute,
        fp8=cut.fp8,
        device=device,
    )


def _independent(run: Run) -> Iterable[Iterator[MegaError]]:
    """The checks that need neither the processes nor the model."""
    return (
        check_data(run.data),
        check_counts(run),
        check_log(run.log),
        check_profile(run.profile),
        check_folders(run),
        check_saving(run.checkpoint),
        check_optimizer(run),
        check_dropout(run.train),
        check_precision(run.train),
        check_replicas(run.parallel),
    )


@dataclass(frozen=True, slots=True)
class _Steps:
    """The optimizer steps of a run: their sizes, their number and their rates."""

    micro: int
    batches: BatchSizes
    iterations: int
    courses: Courses


def _steps(
    refused: Refusals, run: Run, layout: Layout | None, loaded_courses: Courses | None
) -> _Steps | None:
    """The steps; None where something of them is refused, or they follow from what is."""
    has_duration = refused.extend(check_duration(run.train))
    if loaded_courses is None or not run.optimizer.checkpoint_schedule:
        refused.attempt(peak_rate, run.optimizer)  # the other rates depend on the duration, this does not
    if layout is None or (sizes := refused.attempt(batch_sizes, run, layout.dp)) is None:
        return None
    micro, global_samples = sizes
    batches = refused.attempt(batch_course, run, global_samples, micro * layout.dp)
    if batches is None or not has_duration:
        return None
    iterations = refused.attempt(duration, run.train, batches)
    if iterations is None:
        return None
    rates = refused.attempt(courses, run, iterations, batches, loaded_courses)
    return None if rates is None else _Steps(micro, batches, iterations, rates)


@dataclass(frozen=True, slots=True)
class _Cut:
    """What each rank has of the model and of a sample."""

    layout: Layout
    length: int
    lengths: Lengths
    recompute: RecomputePolicy
    fp8: Fp8Recipe | None


def _cut(refused: Refusals, run: Run, spec: ModelSpec, layout: Layout) -> _Cut | None:
    """The cut; None where something of it is refused."""
    staged = refused.attempt(dealt, run.parallel, spec.layers, layout)
    refused.attempt(with_flag_names, run.model, _check_cut, spec, layout)
    fp8 = refused.attempt(fp8_recipe, run, spec, layout)
    length = spec.context if run.batch.length is None else run.batch.length
    if not refused.extend(check_length(run, spec, length, layout)):
        return None
    lengths = refused.attempt(length_course, run, length, layout)
    recompute = refused.attempt(recomputation, run, layout, run.batch.micro * length // layout.cp)
    if staged is None or lengths is None or recompute is None:
        return None
    return _Cut(staged, length, lengths, recompute, fp8)


def _device(run: Run, cuda: bool) -> Literal["cpu", "cuda"]:
    if run.train.device == "cuda" and not cuda:
        raise ConfigError("--device", "no GPU that torch can use", found="cuda", hint="--device cpu")
    return "cuda" if cuda and run.train.device != "cpu" else "cpu"


def _check_cut(spec: ModelSpec, layout: Layout) -> None:
    """Cut every parameter as the ranks will, so that no rank finds out while it builds its model."""
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


def _eod(run: Run, corpus: TokenizerIdentity | None) -> int | None:
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
