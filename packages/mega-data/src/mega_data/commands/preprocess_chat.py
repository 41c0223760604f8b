"""`mega-data preprocess-chat`: encode conversations for supervised fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mega_data.commands.common import (
    ANY_PATH,
    EXISTING,
    ON_ERROR,
    RepeatableOptionCommand,
    error_limit,
    exit_if_nothing_left,
    inputs_option,
    is_whole_run,
    max_errors_option,
    placement_options,
    run_job,
    warn_replaced,
    work_folder,
)
from mega_data.commands.result_file import record_counts
from mega_data.commands.upload import output_url, uploads_dataset
from mega_schema.app.counts import format_count
from mega_schema.app.output_option import OUTPUT_FOLDER, OUTPUT_PREFIX_OR_URL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_data.chat.chat_tasks import ChatEncoding
    from mega_data.task_stages import TaskResult
    from mega_schema.tokenizer.tokenizer import Tokenizer


@click.command("preprocess-chat", cls=RepeatableOptionCommand)
@inputs_option("JSON lines with a list of messages: files, globs, folders, also compressed.")
@click.option(
    "--output-prefix",
    type=OUTPUT_PREFIX_OR_URL,
    required=True,
    help="Prefix of PREFIX_chat_document, or s3:// URL.",
)
@click.option("--json-key", default="messages", help="Key of the list of role and content.")
@click.option("--tokenizer-type", default="HuggingFaceTokenizer", help="Megatron's name of the tokenizer.")
@click.option(
    "--tokenizer-model", type=ANY_PATH, required=True, help="tokenizer.json, or the folder that holds it."
)
@click.option("--chat-template", type=EXISTING, help="Jinja file.  [default: the template of the tokenizer]")
@click.option("--on-error", type=ON_ERROR, default="fail", help="What to do with a wrong conversation.")
@max_errors_option("wrong conversations")
@click.option(
    "--work-dir",
    "work",
    type=OUTPUT_FOLDER,
    help="Folder for intermediate files; with a URL also for the output.  "
    "[default: PREFIX_chat_document.work]",
)
@placement_options("Encoder processes.")
@uploads_dataset("inputs", keeps_work=True)
def preprocess_chat(
    inputs: tuple[str, ...],
    output_prefix: Path,
    json_key: str,
    tokenizer_type: str,
    tokenizer_model: Path,
    chat_template: Path | None,
    on_error: str,
    max_errors: str | None,
    work: Path | None,
    workers: int,
    executor: str,
    only: str | None,
) -> None:
    """Encode conversations by a chat template to a dataset for `mega-train --sft`.

    Only the assistant's turns have a loss. `mega-train` packs whole conversations into samples.
    """
    from mega_data.chat.chat_tasks import CHAT_KEY, ChatEncoding
    from mega_data.chat.template import find_template
    from mega_data.error_limit import ErrorCount
    from mega_data.jsonl_shards import find_shards
    from mega_schema.dataset.indexed_dataset import sibling
    from mega_schema.outputs import check_dataset_output, check_output
    from mega_schema.tokenizer.tokenizer import open_tokenizer

    errors = ErrorCount(error_limit(on_error, max_errors))
    files = tuple(find_shards(inputs))
    prefix = sibling(output_prefix, f"_{CHAT_KEY}_document")
    is_replaced = check_dataset_output("--output-prefix", prefix, inputs=files)
    if work is not None:
        check_output("--work-dir", work, "folder", inputs=files, is_ours=_has_plan)
    tokenizer = open_tokenizer(tokenizer_type, model=tokenizer_model)
    template = find_template(tokenizer, chat_template)
    if is_replaced:
        warn_replaced(prefix)
    default_work = sibling(prefix, ".work")
    whole_run = is_whole_run(executor, only)
    lock = work or default_work
    with work_folder(work, default_work, default_work, whole_run=whole_run, lock=lock) as folder:
        options = (("type", tokenizer_type), ("model", tokenizer_model))
        job = ChatEncoding(files, folder, options, template, json_key, on_error == "skip")
        results = run_job(job, folder, executor=executor, workers=workers, only=only, errors=errors)
        if results is None:
            return
        _finish(job, results[0], prefix, tokenizer, keep_work=work is not None)


def _has_plan(folder: Path) -> bool:
    from mega_data.task_stages import PLAN

    return (folder / PLAN).is_file()


def _finish(
    job: ChatEncoding, results: Sequence[TaskResult], prefix: Path, tokenizer: Tokenizer, *, keep_work: bool
) -> None:
    """Merge the datasets of the files and print the counts.

    Raises:
        SystemExit: there is no conversation: exit code 1.
    """
    from mega_data.merge import merge_datasets
    from mega_data.task_stages import remove_folder
    from mega_schema.dataset.indexed_dataset import open_dataset, sibling

    names = ("documents", "tokens", "loss_tokens", "skipped")
    counts = {name: sum(result[name] for result in results) for name in names}
    if counts["documents"]:
        merge_datasets([open_dataset(job.part(task)) for task in range(len(results))], prefix)
        tokenizer.save(sibling(prefix, ".tokenizer"))
        click.echo(
            f"{output_url() or prefix}: {format_count(counts['documents'], 'document')}, "
            f"{format_count(counts['tokens'], 'token')}, "
            f"{counts['loss_tokens']:,} of them with a loss"
        )
    if not keep_work:
        remove_folder(job.work)
    if counts["skipped"]:
        words = ("conversation was skipped", "conversations were skipped")
        click.echo(f"note: {format_count(counts['skipped'], *words)}", err=True)
    conversations = counts["documents"] + counts["skipped"]
    record_counts(
        documents_in=conversations,
        documents_out=counts["documents"],
        dropped={"not a conversation": counts["skipped"]},
    )
    exit_if_nothing_left(counts["documents"], conversations)
