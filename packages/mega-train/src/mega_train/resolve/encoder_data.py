"""Check the options of BERT's samples, and those that samples of BERT exclude."""

from __future__ import annotations

from collections.abc import Iterator

from mega_schema.app.config import config_keys
from mega_schema.errors import ConfigError, MegaError
from mega_schema.parallel_layout import Layout
from mega_schema.spec import ModelSpec
from mega_train.config import CurriculumConfig, EncoderDataConfig, RunConfig
from mega_train.data.encoder.probabilities import check_probabilities


def check_encoder_data(run: RunConfig, spec: ModelSpec, layout: Layout) -> Iterator[MegaError]:
    """Check that the options fit the family of the model.

    Yields:
        an error for every option that the family does not have, and for a value out of range.
    """
    if spec.causal:
        yield from _check_decoder(run)
        return
    yield from check_probabilities(run.encoder_data)
    yield from _check_binary_head(run, spec)
    yield from _check_decoder_options(run)
    if layout.cp > 1:
        yield ConfigError(
            "--context-parallel-size",
            "is not supported for BERT: padding would give the ranks unequal work",
            found=layout.cp,
            wanted="1",
            hint="--tensor-model-parallel-size with --sequence-parallel",
        )


def _check_decoder(run: RunConfig) -> Iterator[MegaError]:
    """Refuse options of BERT in a run of a decoder; with their default values they change nothing."""
    default = EncoderDataConfig()
    for key in config_keys(RunConfig):
        if key.section == "encoder_data":
            value = key.value_in(run)
            if value != getattr(default, key.field.name):
                yield ConfigError(
                    key.flag,
                    "applies to BERT only",
                    found="given" if value is True else value,
                    hint="mega-train bert, or leave it out",
                )


def _check_binary_head(run: RunConfig, spec: ModelSpec) -> Iterator[MegaError]:
    has_pairs = run.encoder_data.has_pairs
    if spec.binary_head and not has_pairs:
        yield ConfigError(
            "--bert-no-binary-head",
            "gives no pairs of segments to the model's binary head",
            found="given, and a model with a binary head",
            wanted="pairs of segments",
            hint="leave it out",
        )
    elif has_pairs and not spec.binary_head:
        yield ConfigError(
            "--bert-no-binary-head",
            "is missing: the model has no binary head for the order of two segments",
            found="not given",
            hint="--bert-no-binary-head",
        )


def _check_decoder_options(run: RunConfig) -> Iterator[MegaError]:
    """Refuse options that apply to the samples and the loss of decoders only."""
    data, train = run.data, run.train
    reasons = {
        "--mock-data": (data.mock, "its documents have no sentences"),
        "--sft": (data.sft, "BERT generates no answers"),
        "--reset-position-ids": (data.reset_positions, "a sample of BERT has one document"),
        "--reset-attention-mask": (data.reset_attention, "a sample of BERT has one document"),
        "--eod-mask-loss": (data.eod_mask_loss, "BERT's data has no end-of-document tokens"),
        "--calculate-per-token-loss": (
            train.per_token_loss,
            "BERT's loss is a mean over masked tokens and one over samples",
        ),
        "--batch-invariant": (train.batch_invariant, "its attention kernel is causal"),
        "--curriculum-start-length": (
            run.curriculum != CurriculumConfig(),
            "a sample of BERT cannot be cut; --short-seq-prob makes some shorter",
        ),
    }
    for flag, (is_given, reason) in reasons.items():
        if is_given:
            yield ConfigError(flag, f"does not apply to BERT: {reason}", hint="leave it out")
