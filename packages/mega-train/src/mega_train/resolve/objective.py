"""Check the options of prefix language models, and those that they exclude."""

from __future__ import annotations

from collections.abc import Iterator

from mega_schema.errors import ConfigError, MegaError
from mega_schema.parallel_layout import Layout
from mega_schema.spec import ModelSpec
from mega_train.config import CurriculumConfig, RunConfig

_REWEIGHT = "--reweight-loss-based-on-position-frequency"


def check_objective(run: RunConfig, spec: ModelSpec, layout: Layout) -> Iterator[MegaError]:
    """Check that the options of prefix language models fit the model and the other options.

    Yields:
        an error for every option that does not apply.
    """
    objective = run.objective
    if not objective.prefix:
        for flag, is_given in (
            ("--loss-on-targets-only", objective.targets_only),
            (_REWEIGHT, objective.reweight),
        ):
            if is_given:
                hint = "mega-train prefix, or leave it out"
                yield ConfigError(flag, "applies to prefix language models only", found="given", hint=hint)
        return
    if not spec.is_decoder_only:
        yield ConfigError("--prefix-lm", "applies to decoders only", found=spec.family, wanted="gpt | llama")
        return
    if layout.cp > 1:
        yield ConfigError(
            "--context-parallel-size",
            "is not supported with prefixes: their random lengths would give the ranks unequal work",
            found=layout.cp,
            wanted="1",
            hint="--tensor-model-parallel-size with --sequence-parallel",
        )
    if spec.sliding_window is not None:
        yield ConfigError(
            "--window-size",
            "is not defined for tokens of a prefix, which see later tokens too",
            found=f"{spec.sliding_window - 1},0",
            wanted="a model without a sliding window",
        )
    if objective.reweight and run.data.sft:
        reason = "weighs positions of samples with random prefixes; prompts are not random"
        yield ConfigError(_REWEIGHT, reason, found="--sft", hint="leave one of them out")
    reasons = {
        "--batch-invariant": (run.train.batch_invariant, "its attention kernel is causal"),
        "--curriculum-start-length": (
            run.curriculum != CurriculumConfig(),
            "a shorter sample would be cut within its prefix",
        ),
    }
    for flag, (is_given, reason) in reasons.items():
        if is_given:
            yield ConfigError(
                flag, f"does not apply to prefix language models: {reason}", hint="leave it out"
            )
