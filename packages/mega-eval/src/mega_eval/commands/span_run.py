"""Evaluate answers in passages: open the model, evaluate, print the table and write the result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mega_eval import result
from mega_eval.commands.classification_commands import ClassificationOptions
from mega_eval.commands.classification_run import (
    check_folder_of_output,
    choose_length,
    choose_output,
    write_encoder_result,
)
from mega_eval.models.classifier_model import open_classifier
from mega_eval.tasks.span_answers import CONVENTION, evaluate
from mega_schema.app.progress import progress_bar
from mega_schema.tasks.span_options import SpanOptions
from mega_schema.tasks.squad_examples import SpanExample, has_unanswerable


def write_spans(
    path: Path, examples: Sequence[SpanExample], spans: SpanOptions, options: ClassificationOptions
) -> None:
    """Answer the questions of a file, print the table and write the result.

    Raises:
        MegaError: the model cannot be opened, or options do not fit it.
    """
    check_folder_of_output(options)
    model = open_classifier(options.load, dtype=options.dtype, device=options.device, heads=("span",))
    data = result.fingerprint_files([path])
    output = choose_output("squad", CONVENTION, model, [path], data, options)
    length = choose_length(options, model)
    spans.check(length)
    selected = examples[: options.limit]
    start = time.perf_counter()
    with progress_bar("answering", None, unit="windows") as bar:
        task_result = evaluate(
            model,
            selected,
            spans,
            length=length,
            batch_size=options.micro_batch_size,
            allows_null=has_unanswerable(examples),
            is_whole=len(selected) == len(examples),
            on_progress=bar,
        )
    values = {"seq_length": length, **asdict(spans)}
    seconds = time.perf_counter() - start
    write_encoder_result(task_result, model, data, values, options, output, seconds)
