"""Check the options of the samples of BERT and T5, and those that these samples exclude."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

from mega_schema.app.config import config_keys
from mega_schema.errors import ConfigError, LayoutError, MegaError
from mega_schema.parallel_layout import Layout
from mega_schema.spec import ModelSpec
from mega_train.config import CurriculumConfig, EncoderDataConfig, ParallelConfig, RunConfig
from mega_train.data.encoder.probabilities import check_probabilities

# options of the section that one family has; both have the others
_BERT_ONLY = frozenset({"mask_type", "no_binary_head"})
_T5_ONLY = frozenset({"decoder_length"})
_OTHER_OPTIONS: Mapping[str, Collection[str]] = MappingProxyType({"bert": _T5_ONLY, "t5": _BERT_ONLY})


def check_encoder_data(run: RunConfig, spec: ModelSpec, layout: Layout) -> Iterator[MegaError]:
    """Check that the options fit the family of the model.

    Yields:
        an error for every option that the family does not have, and for a value out of range.
    """
    yield from _check_other_families(run, spec)
    if spec.is_decoder_only:
        return
    name = spec.family.upper()
    yield from check_probabilities(run.encoder_data)
    yield from _check_decoder_options(run, name)
    if spec.task_head != "none":
        return
    if spec.encoder_layers is None:
        yield from _check_binary_head(run, spec)
    else:
        yield from _check_decoder_length(run, spec, layout)
        if run.encoder_data.unpad and run.task.name is not None:
            yield ConfigError(
                "--unpad-samples",
                "does not apply to tasks of T5, whose rows have padding",
                hint="leave it out",
            )


def check_encoder_degrees(parallel: ParallelConfig, spec: ModelSpec) -> Iterator[MegaError]:
    """Refuse degrees that an encoder has on no number of processes."""
    if not spec.is_decoder_only and parallel.cp > 1:
        yield ConfigError(
            "--context-parallel-size",
            f"is not supported for {spec.family.upper()}: padding would give the ranks unequal work",
            found=parallel.cp,
            wanted="1",
            hint="--tensor-model-parallel-size with --sequence-parallel",
        )


def _check_other_families(run: RunConfig, spec: ModelSpec) -> Iterator[MegaError]:
    """Refuse options of samples of other families; with their default values they change nothing."""
    default = EncoderDataConfig()
    for key in config_keys(RunConfig):
        option = key.field.name
        is_other = spec.is_decoder_only or option in _OTHER_OPTIONS[spec.family]
        if key.section == "encoder_data" and is_other:
            value = key.value_in(run)
            owner = "t5" if option in _T5_ONLY else "bert"
            names = owner.upper() if option in _T5_ONLY | _BERT_ONLY else "BERT and T5"
            if value != getattr(default, option):
                yield ConfigError(
                    key.flag,
                    f"applies to {names} only",
                    found="given" if value is True else value,
                    hint=f"mega-train {owner}, or leave it out",
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


def _check_decoder_length(run: RunConfig, spec: ModelSpec, layout: Layout) -> Iterator[MegaError]:
    """Check that the text of T5's decoder fits the model and divides over the ranks."""
    flag = "--decoder-seq-length"
    length = run.encoder_data.decoder_length
    if not 1 <= length <= spec.max_seq_len:
        wanted = f"1 to {spec.max_seq_len} (--max-position-embeddings)"
        yield ConfigError(flag, "does not fit the model", found=f"{length} tokens", wanted=wanted)
        return
    tokens = run.batch.micro * length
    if (run.parallel.sequence or run.recompute.distribute_saved) and tokens % layout.tp:
        yield LayoutError(
            flag,
            "the tokens of a micro-batch cannot be split evenly",
            found=f"{tokens} tokens over tp={layout.tp}",
            wanted=f"micro-batch size x decoder length a multiple of {layout.tp}",
        )


def _check_decoder_options(run: RunConfig, name: str) -> Iterator[MegaError]:
    """Refuse options that apply to the samples and the loss of decoders only.

    Args:
        name: of the family, as people write it.
    """
    data, train = run.data, run.train
    reasons = {
        "--mock-data": (data.mock, "its documents have no sentences"),
        "--sft": (data.sft, f"samples of {name} are masked text, not prompts and answers"),
        "--reset-position-ids": (data.reset_positions, f"a sample of {name} has one document"),
        "--reset-attention-mask": (data.reset_attention, f"a sample of {name} has one document"),
        "--eod-mask-loss": (data.eod_mask_loss, f"{name}'s data has no end-of-document tokens"),
        "--calculate-per-token-loss": (
            train.per_token_loss,
            "BERT's loss is a mean over masked tokens and one over samples"
            if name == "BERT"
            else "T5's loss is a mean over the tokens of a micro-batch",
        ),
        "--batch-invariant": (train.batch_invariant, "its attention kernel is causal"),
        "--curriculum-start-length": (
            run.curriculum != CurriculumConfig(),
            f"a sample of {name} cannot be cut; --short-seq-prob makes some shorter",
        ),
    }
    for flag, (is_given, reason) in reasons.items():
        if is_given:
            yield ConfigError(flag, f"does not apply to {name}: {reason}", hint="leave it out")
