"""Check the options of prefix language models and span corruption, and those that they exclude."""

from __future__ import annotations

from collections.abc import Iterator

from mega_schema.errors import ConfigError, MegaError
from mega_schema.spec import ModelSpec
from mega_train.config import CurriculumConfig, ObjectiveConfig, ParallelConfig, RunConfig
from mega_train.data.span_corruption import SpanLengths

_REWEIGHT = "--reweight-loss-based-on-position-frequency"


def check_objective(run: RunConfig, spec: ModelSpec, length: int) -> Iterator[MegaError]:
    """Check that the options of the objective fit the model and the other options.

    Args:
        length: tokens of a sample.

    Yields:
        an error for every option that does not apply.

    Raises:
        ConfigError: spans of noise do not fit a sample.
    """
    objective = run.objective
    yield from _check_prefix_options(objective)
    if objective.span_length is not None and objective.noise_density is None:
        yield ConfigError(
            "--mean-noise-span-length",
            "needs --noise-density",
            found=objective.span_length,
            hint="--noise-density 0.15, or leave it out",
        )
    if objective.is_causal:
        return
    flag, name = _name_objective(objective)
    if not spec.is_decoder_only:
        yield ConfigError(flag, "applies to decoders only", found=spec.family, wanted="gpt | llama")
        return
    if spec.sliding_window is not None:
        yield ConfigError(
            "--window-size",
            "is not defined for tokens of a prefix, which see later tokens too",
            found=f"{spec.sliding_window - 1},0",
            wanted="a model without a sliding window",
        )
    for other_flag, (is_given, reason) in _excluded_options(run).items():
        if is_given:
            yield ConfigError(other_flag, f"does not apply to {name}: {reason}", hint="leave it out")
    if objective.noise_density is not None:
        SpanLengths.fit(length, objective.noise_density, objective.mean_span_length)


def check_objective_degrees(parallel: ParallelConfig, objective: ObjectiveConfig) -> Iterator[MegaError]:
    """Refuse degrees that an objective has on no number of processes."""
    if not objective.is_causal and parallel.cp > 1:
        _, name = _name_objective(objective)
        yield ConfigError(
            "--context-parallel-size",
            f"is not supported for {name}: prefixes would give the ranks unequal work",
            found=parallel.cp,
            wanted="1",
            hint="--tensor-model-parallel-size with --sequence-parallel",
        )


def _name_objective(objective: ObjectiveConfig) -> tuple[str, str]:
    """Return the flag of an objective that is not causal, and its name."""
    if objective.noise_density is None:
        return "--prefix-lm", "prefix language models"
    return "--noise-density", "span corruption"


def _check_prefix_options(objective: ObjectiveConfig) -> Iterator[MegaError]:
    if objective.prefix:
        return
    options = {"--loss-on-targets-only": objective.targets_only, _REWEIGHT: objective.reweight}
    for flag, is_given in options.items():
        if is_given:
            hint = "mega-train prefix, or leave it out"
            yield ConfigError(flag, "applies to prefix language models only", found="given", hint=hint)


def _excluded_options(run: RunConfig) -> dict[str, tuple[bool, str]]:
    """List the options that the objective excludes: whether they are given, and the reason."""
    objective, data = run.objective, run.data
    options = {
        "--batch-invariant": (run.train.batch_invariant, "its attention kernel is causal"),
        "--curriculum-start-length": (
            run.curriculum != CurriculumConfig(),
            "a shorter sample would be cut within its prefix",
        ),
        _REWEIGHT: (
            objective.reweight and (data.sft or objective.noise_density is not None),
            "it weighs positions of random prefixes, and these are not random",
        ),
    }
    if objective.noise_density is None:
        return options
    one_document = "a sample is one document"
    return options | {
        "--sft": (data.sft, "it corrupts text, not prompts and answers"),
        "--reset-position-ids": (data.reset_positions, one_document),
        "--reset-attention-mask": (data.reset_attention, one_document),
        "--eod-mask-loss": (data.eod_mask_loss, "only the spans of noise have a loss"),
    }
