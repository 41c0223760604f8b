"""Evaluate a fine-tuned encoder with `squad`, which also evaluates models that generate answers.

Imports neither torch nor numpy, for `--help`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from mega_eval.commands.classification_commands import ClassificationOptions
from mega_eval.commands.encoder_dispatch import refuse_decoder_options
from mega_schema.app.click_options import add_options
from mega_schema.errors import ConfigError, FormatError
from mega_schema.spec_checks import find_task_head
from mega_schema.tasks.span_options import SpanOptions

_DEFAULTS = SpanOptions()
_OPTIONS = (
    click.option(
        "--seq-length",
        type=click.IntRange(min=4),
        help="Fine-tuned encoder: tokens of a question with a window of its passage.  [default: the model's]",
    ),
    *(
        click.option(
            f"--{name.replace('_', '-')}",
            type=float if name.startswith("null") else click.IntRange(min=1),
            help=f"Fine-tuned encoder: {what}  [default: {getattr(_DEFAULTS, name)}]",
        )
        for name, what in (
            ("doc_stride", "tokens between the begins of two windows of a passage."),
            ("max_query_length", "tokens of a question; longer ones are cut."),
            ("max_answer_length", "tokens of the longest answer."),
            ("n_best_size", "begins and ends of a window that are combined."),
            ("null_score_diff_threshold", "SQuAD 2.0: no answer if its score exceeds the best's by more."),
        )
    ),
)
# options of generated answers, with their defaults
_GENERATION_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {"fewshot_seed": 1234, "fewshot_sampler": "shared", "max_tokens": 32}
)


def span_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of fine-tuned encoders."""
    return add_options(function, _OPTIONS)


def run_spans(path: Path, generation: Mapping[str, object], keywords: dict[str, Any]) -> bool:
    """Evaluate the model of --load if it has a head of spans; return whether it has.

    The options of spans are removed from `keywords` otherwise.

    Args:
        generation: options of generated answers that are not in `keywords`; None if they are not given.

    Raises:
        ConfigError: an option does not apply to the model.
        FormatError: the file has no answers, or another layout.
    """
    own = {
        name: keywords.pop(name) for name in ("seq_length", *(field.name for field in fields(SpanOptions)))
    }
    load = keywords["load"]
    if load is None or find_task_head(load) != "span":
        for name, value in own.items():
            if value is not None:
                flag = f"--{name.replace('_', '-')}"
                hint = "leave it out, or --load a run of mega-train finetune --task SQUAD"
                raise ConfigError(flag, "applies to a fine-tuned encoder only", found=value, hint=hint)
        return False
    refuse_decoder_options({**keywords, **generation}, {**_GENERATION_DEFAULTS, "prompt": None})
    from mega_eval.commands.span_run import write_spans
    from mega_schema.tasks.squad_examples import read_squad

    names = ClassificationOptions.__dataclass_fields__.keys() & keywords.keys()
    options = ClassificationOptions(
        **{name: keywords[name] for name in names}, labels=None, seq_length=own.pop("seq_length")
    )
    examples = read_squad(path)
    if examples[0].answers is None:
        hint = "mega-train finetune --epochs 0 writes predictions of a test set"
        raise FormatError(path, "has no answers", wanted="answers to compare with", hint=hint)
    spans = SpanOptions(**{name: value for name, value in own.items() if value is not None})
    write_spans(path, examples, spans, options)
    return True
