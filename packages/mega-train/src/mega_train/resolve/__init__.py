"""From what a person said to what will be done: every derived number, and every check between two values.

This is the one validator. Past it, a `Plan` is right or the run has not begun.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from mega_schema.arch import table
from mega_schema.errors import ConfigError
from mega_schema.layout import Layout
from mega_schema.spec import Family, ModelSpec
from mega_schema.tokenizer import TokenizerIdentity
from mega_train.config import Run
from mega_train.dealing import dealt
from mega_train.rates import Courses
from mega_train.resolve.batch import (
    batch_course,
    batch_sizes,
    check_counts,
    check_length,
    duration,
    evaluated,
    length_course,
    passed_over,
)
from mega_train.resolve.begins import only_validates
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
from mega_train.resolve.fp8 import fp8_recipe
from mega_train.resolve.model import model_spec
from mega_train.resolve.optimizer import check_optimizer, courses
from mega_train.resolve.plan import Plan
from mega_train.resolve.watching import check_log, check_profile

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
) -> Plan:
    """Check the run against itself, the processes, the corpus and the checkpoint it goes on from.

    Args:
        world: processes of the run.
        corpus: the tokenizer the corpus was made with, where the dataset says so.
        loaded: the model of the checkpoint that is loaded, if one is.
        loaded_courses: of learning rate and weight decay, of the run that goes on, where it says them.
        cuda: whether this machine has a GPU that torch can use.

    Raises:
        ConfigError, LayoutError: two values disagree; the message names both.
    """
    if only_validates(run):
        run = evaluated(run)
    layout = Layout.of(world, tp=run.parallel.tp, pp=run.parallel.pp, cp=run.parallel.cp)
    spec = model_spec(run, family, vocab=corpus.vocab_size if corpus else None, loaded=loaded)
    run = replace(run, model=replace(run.model, family=spec.family))  # for the run's record
    layout = dealt(run.parallel, spec.layers, layout)
    _check_cut(spec, layout)
    length = spec.context if run.batch.length is None else run.batch.length
    check_length(run, spec, length, layout)
    micro, global_samples = batch_sizes(run, layout.dp)
    batches = batch_course(run, global_samples, micro * layout.dp)
    iterations = duration(run, batches)
    check_data(run.data)
    check_counts(run)
    check_log(run.log)
    check_profile(run.profile)
    check_folders(run)
    check_saving(run.checkpoint)
    check_optimizer(run)
    check_dropout(run.train)
    check_precision(run.train)
    check_replicas(run.parallel)
    if corpus is not None:
        _check_vocabulary(corpus, spec)
    if run.train.device == "cuda" and not cuda:
        raise ConfigError("--device", "no GPU that torch can use", found="cuda", hint="--device cpu")
    device: Literal["cpu", "cuda"] = "cuda" if cuda and run.train.device != "cpu" else "cpu"
    check_overlap(run.parallel, device)
    return Plan(
        run=run,
        spec=spec,
        layout=layout,
        length=length,
        lengths=length_course(run, length, layout),
        micro=micro,
        batches=batches,
        iterations=iterations,
        passed_over=passed_over(run),
        courses=courses(run, iterations, batches, loaded_courses),
        eod=_eod(run, corpus),
        recompute=recomputation(run, layout, micro * length // layout.cp),
        fp8=fp8_recipe(run, spec, layout),
        device=device,
    )


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
