"""The command `main`: Megatron's `tasks/main.py` for LAMBADA and WIKITEXT103, with its flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mega_eval.commands.lambada_command import run_lambada
from mega_eval.commands.model_options import build_options, option_flags
from mega_eval.commands.task_options import TaskOptions, read_world
from mega_eval.commands.word_level import CorpusOptions, run_corpus
from mega_eval.conventions import LAST_TOKEN, OVERLAPPING, STRICT
from mega_schema.errors import ConfigError

if TYPE_CHECKING:
    from mega_eval.task_result import TaskResult
    from mega_schema.tokenizer.tokenizer import Tokenizer

Flags = Mapping[str, Sequence[str]]
TASKS = ("LAMBADA", "WIKITEXT103")
CHOICE_TASKS = ("RACE", "MNLI", "QQP")
DEFAULT_STRIDE = 32
PROBE_LENGTH = 2000  # characters of the data that two tokenizers must encode alike


@click.command(
    context_settings={"ignore_unknown_options": True},
    params=[click.Argument(["words"], nargs=-1, type=click.UNPROCESSED, metavar="FLAGS...")],
)
def main(words: tuple[str, ...]) -> None:
    """Evaluate as Megatron's tasks/main.py does: --task LAMBADA|WIKITEXT103 --valid-data FILE --load RUN.

    Accepts all of Megatron's flags and the options of mega-eval lambada. Flags that describe the model are
    compared with the checkpoint, and those without effect on an evaluation are listed once.
    """
    from mega_eval.megatron_command_line import parse_flags, read_count, read_value

    flags = parse_flags(words, option_flags())
    task = read_value(flags, "--task")
    if task not in TASKS:
        raise ConfigError(
            "--task", "not supported", found=task, wanted=" | ".join(TASKS), hint=_task_hint(task)
        )
    data = [Path(value) for value in flags.get("--valid-data", ())]
    if len(data) != 1:
        raise ConfigError(
            "--valid-data", "not one file", found=len(data), wanted="1", hint="--valid-data FILE"
        )
    options = replace(_read_options(flags), world=read_world())
    if options.world is not None and options.world.rank:
        from mega_eval.commands.model_source import run_other_rank

        run_other_rank(options, options.world)
        return
    used = _check_model(flags, options, data[0])
    stride = read_count(flags, "--overlapping-eval") or DEFAULT_STRIDE
    seq_length = read_count(flags, "--seq-length")
    _report_ignored(flags, used)
    if task == "LAMBADA":
        convention = STRICT if "--strict-lambada" in flags else LAST_TOKEN
        result = run_lambada(data[0], convention, "text", options)
    else:
        from mega_eval.detokenize import choose_detokenizer

        corpus = CorpusOptions(
            convention=OVERLAPPING,
            overlapping_eval=stride,
            seq_length=seq_length,
            detokenizer=choose_detokenizer(data[0], None),
        )
        result = run_corpus("wikitext103", data[0], corpus, options)
    line = f" validation results on {task} | {_format_result(result)}"
    rule = "-" * (len(line) + 1)
    click.echo(f"{rule}\n{line}\n{rule}\ndone :-)")


def _read_options(flags: Flags) -> TaskOptions:
    """Return the options of the task: those of mega-eval, and Megatron's of the same meaning."""
    from mega_eval.megatron_command_line import BATCH_FLAGS, read_count, read_value

    values: dict[str, object] = {}
    for name in option_flags() & flags.keys():
        values[name.removeprefix("--")] = read_value(flags, name) if flags[name] else True
    if "--bf16" in flags:
        values.setdefault("dtype", "bfloat16")
    counts = [count for name in BATCH_FLAGS if (count := read_count(flags, name)) is not None]
    if counts:
        values["micro-batch-size"] = counts[-1]
    for name, option in _parallel_options().items():
        if name in flags:
            values[option.removeprefix("--")] = read_count(flags, name)
    return build_options(values)


def _parallel_options() -> dict[str, str]:
    """Return Megatron's flags of the layout, with the option of the same meaning if the tasks have it."""
    from mega_eval.megatron_command_line import PARALLEL_FLAGS

    return {name: option for name, option in PARALLEL_FLAGS.items() if option in option_flags()}


def _check_model(flags: Flags, options: TaskOptions, data: Path) -> set[str]:
    """Compare the model's flags with the checkpoint; return the flags that were compared."""
    from mega_eval.megatron_command_line import TOKENIZER_FLAGS, check_architecture
    from mega_schema.checkpoint.checkpoint_tokenizer import open_checkpoint_tokenizer
    from mega_schema.checkpoint.reader import Checkpoint

    if options.load is None:
        raise ConfigError("--load", "missing", hint="--load RUN")
    checkpoint = Checkpoint.open(options.load)
    used = check_architecture(flags, checkpoint.spec)
    tokenizer_flags = flags.keys() & {*TOKENIZER_FLAGS}
    if "--tokenizer-type" in tokenizer_flags:
        _check_tokenizer(flags, open_checkpoint_tokenizer(checkpoint), data)
        used |= tokenizer_flags
    return used


def _check_tokenizer(flags: Flags, tokenizer: Tokenizer, data: Path) -> None:
    """Check that the tokenizer of the flags encodes the beginning of the data as the checkpoint's does."""
    from mega_eval.documents import read_text
    from mega_eval.megatron_command_line import read_count, read_value
    from mega_schema.tokenizer.tokenizer import open_tokenizer

    def path_of(name: str) -> Path | None:
        value = read_value(flags, name)
        return None if value is None else Path(value)

    tokenizer_type = read_value(flags, "--tokenizer-type")
    assert tokenizer_type is not None
    flags_tokenizer = open_tokenizer(
        tokenizer_type,
        vocab_file=path_of("--vocab-file"),
        merge_file=path_of("--merge-file"),
        model=path_of("--tokenizer-model"),
        vocab_size=read_count(flags, "--vocab-size"),
    )
    probe = read_text(data)[:PROBE_LENGTH]
    if tokenizer_type != "NullTokenizer" and flags_tokenizer.encode(probe) != tokenizer.encode(probe):
        raise ConfigError(
            "--tokenizer-type",
            "not the tokenizer of the checkpoint: it encodes the data differently",
            found=tokenizer_type,
            hint="leave it and its files out: the checkpoint has its tokenizer",
        )


def _report_ignored(flags: Flags, used: set[str]) -> None:
    from mega_eval.megatron_command_line import BATCH_FLAGS

    read = {"--task", "--valid-data", "--strict-lambada", "--overlapping-eval", "--seq-length", "--bf16"}
    ignored = sorted(flags.keys() - read - used - option_flags() - {*BATCH_FLAGS, *_parallel_options()})
    if ignored:
        click.echo(f"ignored, without effect on an evaluation: {' '.join(ignored)}", err=True)


def _format_result(result: TaskResult) -> str:
    """Format the numbers of a result as Megatron prints them."""
    values, counts = result.values, result.counts
    if result.task == "lambada":
        return (
            f"number correct: {counts['correct']:.4E} | total examples: {counts['passages']:.4E} | "
            f"avg accuracy: {values['accuracy']:.4E}"
        )
    return (
        f"avg loss: {values['loss']:.4E} | ppl: {values['perplexity']:.4E} | "
        f"adjusted ppl: {values['adjusted_perplexity']:.4E} | token ratio: {values['token_ratio']} |"
    )


def _task_hint(task: str | None) -> str:
    if task in CHOICE_TASKS:
        return f"mega-eval {task.lower()} scores its answers as choices"
    return "--task LAMBADA --valid-data lambada_test.jsonl"
