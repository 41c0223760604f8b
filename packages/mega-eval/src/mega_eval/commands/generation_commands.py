"""Commands of the tasks in which a model generates answers: `nq` and `squad`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mega_eval.commands.choice_commands import check_name, describe_fewshot
from mega_eval.commands.data_files import choose_path, data_files
from mega_eval.commands.fewshot_options import fewshot_options
from mega_eval.commands.span_commands import run_spans, span_options
from mega_eval.commands.task_options import TaskOptions, task_options
from mega_eval.presets.answer_prompts import NQ_PROMPT, SQUAD_PROMPT, AnswerPrompt

if TYPE_CHECKING:
    from mega_eval.records import TaskRecord

_MAX_TOKENS = click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Most tokens in an answer.",
)
_NAME = click.option("--name", help="Name of the task in the result.  [default: the command's]")


@click.command()
@task_options
@data_files("JSON lines with question and answer, a list of texts; also .gz and .zst.")
@fewshot_options()
@_MAX_TOKENS
@_NAME
def nq(paths: tuple[Path, ...], data: tuple[Path, ...], fewshot_data: Path | None, **keywords: Any) -> None:
    """NQ-open: generate answers; exact match and F1.

    The prompt is that of lm-evaluation-harness 0.4.13 nq_open. An answer ends at a line break, a period or a
    comma.
    """
    from mega_eval.records import list_record_files, read_records

    path = choose_path(paths, data)
    records = read_records(list_record_files(path))
    examples = read_records(list_record_files(fewshot_data)) if fewshot_data else None
    _run_answers("nq", NQ_PROMPT, path, records, fewshot_data, examples, {}, **keywords)


@click.command()
@task_options
@data_files("JSON in the layout of SQuAD or XQuAD; also .gz and .zst.")
@click.option(
    "--prompt",
    help="Text before an answer; {KEY} is title, context or question. \\n is a line break.  [default: "
    + SQUAD_PROMPT.template.replace("\n", "\\n")
    + "]",
)
@fewshot_options()
@_MAX_TOKENS
@_NAME
@span_options
def squad(
    paths: tuple[Path, ...],
    data: tuple[Path, ...],
    prompt: str | None,
    fewshot_data: Path | None,
    **keywords: Any,
) -> None:
    """SQuAD and XQuAD: generate answers from a passage; exact match and F1.

    The prompt is that of lm-evaluation-harness 0.4.13 xquad_en. Questions without an answer (SQuAD 2.0) are
    skipped and counted. A fine-tuned encoder (mega-train finetune --task SQUAD, or a Hugging Face folder of a
    BERT for question answering) finds the answers in the passage, also of SQuAD 2.0.
    """
    others = {"prompt": prompt, "fewshot_data": fewshot_data}
    if run_spans(choose_path(paths, data), others, keywords):
        return
    from mega_eval.presets.answer_prompts import read_squad
    from mega_eval.records import list_record_files

    [path] = list_record_files(choose_path(paths, data))
    records, unanswerable = read_squad(path)
    examples = read_squad(list_record_files(fewshot_data)[0])[0] if fewshot_data else None
    counts = {"questions_without_answer": unanswerable}
    text = SQUAD_PROMPT.template if prompt is None else prompt.replace("\\n", "\n")
    template = replace(SQUAD_PROMPT, template=text)
    _run_answers("squad", template, path, records, fewshot_data, examples, counts, **keywords)


def _run_answers(
    task: str,
    prompt: AnswerPrompt,
    data: Path,
    records: list[TaskRecord],
    fewshot_data: Path | None,
    examples: list[TaskRecord] | None,
    counts: dict[str, int],
    *,
    name: str | None,
    num_fewshot: int,
    fewshot_seed: int,
    fewshot_sampler: str,
    max_tokens: int,
    **keywords: Any,
) -> None:
    from mega_eval.commands.evaluate import run_task
    from mega_eval.tasks.answer_items import build_answer_items
    from mega_eval.tasks.fewshot import FewShot
    from mega_eval.tasks.generated_answers import evaluate

    options = TaskOptions(**keywords)
    fewshot = FewShot(
        count=num_fewshot, sampler=fewshot_sampler, seed=fewshot_seed, where=str(fewshot_data or data)
    )
    items = build_answer_items(records, prompt, fewshot, examples, limit=options.limit)
    label, convention = check_name(name or task), "generation" + fewshot.suffix
    run_task(
        lambda model: evaluate(
            model,
            items,
            task=label,
            convention=convention,
            max_tokens=max_tokens,
            stop=prompt.stop,
            counts=counts,
            is_whole=options.limit is None or options.limit >= len(records),
        ),
        label,
        convention,
        [data, *([fewshot_data] if fewshot_data else [])],
        {
            "prompt": prompt.description + prompt.template,
            "stop": prompt.stop,
            "max_tokens": max_tokens,
            **describe_fewshot(fewshot),
        },
        options,
        published_as=task,
    )
