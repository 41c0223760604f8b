"""Commands of multiple-choice tasks: one for each preset, and `choice` for a file of your own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mega_eval.commands.classification_commands import ENCODER_OPTIONS
from mega_eval.commands.data_files import choose_path, choose_paths, data_files
from mega_eval.commands.encoder_dispatch import ENCODER_TASKS, run_encoder
from mega_eval.commands.fewshot_options import fewshot_options
from mega_eval.commands.task_options import TaskOptions, task_options
from mega_eval.presets.choice_presets import CHOICE_PRESETS, CONTINUATION, LETTER_CHOICES, ChoicePreset
from mega_eval.presets.own_choices import OwnChoices
from mega_schema.app.click_options import add_options
from mega_schema.tasks.pair_tasks import PairFiles

if TYPE_CHECKING:
    from mega_eval.tasks.fewshot import FewShot

_NAME = click.option("--name", help="Name of the task in the result.  [default: the command's]")


def build_command(preset: ChoicePreset) -> click.Command:
    """Build the command of a preset."""

    def run(paths: tuple[Path, ...], data: tuple[Path, ...], **keywords: Any) -> None:
        if preset.name in ENCODER_TASKS:
            task_files = PairFiles(ENCODER_TASKS[preset.name])
            if run_encoder(preset.name, task_files, choose_paths(paths, data), keywords):
                return
        run_choice(preset, choose_path(paths, data), **keywords)

    function: Any = run
    function.__doc__ = (
        f"{preset.title}\n\nThe model chooses by the probability of each choice. Prompts and choices: "
        + "; ".join(f"{source} ({formulation})" for formulation, source in preset.sources.items())
        + "."
    )
    function = fewshot_options(preset.sampler)(_NAME(function))
    if preset.name in ENCODER_TASKS:
        function.__doc__ += "\n\nA fine-tuned encoder chooses by its own head: accuracy, F1 and loss."
        function = add_options(function, ENCODER_OPTIONS)
    if len(preset.readers) > 1:
        function = click.option(
            "--formulation",
            type=click.Choice(list(preset.readers)),
            default=next(iter(preset.readers)),
            show_default=True,
            help="continuation: score the choices. letters: list them, and score their letters.",
        )(function)
    function = data_files(f"{preset.wants}.")(function)
    return click.command(preset.name)(task_options(function))


@click.command("choice")
@task_options
@data_files("JSON lines, CSV or TSV, also .gz and .zst.")
@click.option(
    "--prompt",
    default="Question: {question}\nAnswer:",
    show_default=True,
    help="Text before the choices; {KEY} is the value of a key of the record. \\n is a line break.",
)
@click.option(
    "--choices-key",
    default="choices",
    show_default=True,
    help="Key of the list of choices, or keys with commas between them, one for each choice.",
)
@click.option(
    "--answer-key",
    default="answer",
    show_default=True,
    help="Key of the answer: its number, its letter or its text.",
)
@click.option(
    "--first-answer",
    type=click.IntRange(0, 1),
    default=0,
    show_default=True,
    help="Number of the first choice.",
)
@click.option("--tag-key", help="Key of a tag, such as the subject; each of its values gets an accuracy.")
@click.option(
    "--formulation",
    type=click.Choice([CONTINUATION, LETTER_CHOICES]),
    default=CONTINUATION,
    show_default=True,
    help="continuation: score the choices. letters: list them, and score their letters.",
)
@click.option("--name", help="Name of the task in the result.  [default: the file's]")
@fewshot_options()
def choice(
    paths: tuple[Path, ...],
    data: tuple[Path, ...],
    prompt: str,
    choices_key: str,
    answer_key: str,
    first_answer: int,
    tag_key: str | None,
    name: str | None,
    **keywords: Any,
) -> None:
    """Multiple choice from a file of your own: the model picks the most probable choice."""
    path = choose_path(paths, data)
    own = OwnChoices(prompt.replace("\\n", "\n"), choices_key, answer_key, first_answer, tag_key)
    settings = {
        "prompt": own.prompt,
        "choices_key": choices_key,
        "answer_key": answer_key,
        "first_answer": first_answer,
        "tag_key": tag_key,
    }
    run_choice(
        own.preset, path, name=name or path.name.split(".")[0] or "choice", settings=settings, **keywords
    )


def run_choice(
    preset: ChoicePreset,
    data: Path,
    *,
    name: str | None = None,
    formulation: str | None = None,
    num_fewshot: int,
    fewshot_data: Path | None,
    fewshot_seed: int,
    fewshot_sampler: str,
    settings: dict[str, object] | None = None,
    **keywords: Any,
) -> None:
    """Evaluate a preset on a file."""
    from mega_eval.commands.evaluate import run_task
    from mega_eval.records import list_record_files, read_records
    from mega_eval.tasks.choice import evaluate
    from mega_eval.tasks.choice_items import build_items
    from mega_eval.tasks.fewshot import FewShot

    options = TaskOptions(**keywords)
    formulation = formulation or next(iter(preset.readers))
    files = list_record_files(data, preset.suffixes)
    records = read_records(files, preset.columns)
    fewshot = FewShot(
        count=num_fewshot, sampler=fewshot_sampler, seed=fewshot_seed, where=str(fewshot_data or data)
    )
    example_files = list_record_files(fewshot_data, preset.suffixes) if fewshot_data and num_fewshot else []
    items, skipped = build_items(
        records,
        preset.readers[formulation],
        fewshot,
        read_records(example_files, preset.columns) if example_files else None,
        group=preset.group,
        draws_spare=preset.draws_spare,
        limit=options.limit,
    )
    task, convention = check_name(name or preset.name), formulation + fewshot.suffix
    run_task(
        lambda model: evaluate(
            model,
            items,
            task=task,
            convention=convention,
            group=preset.group,
            counts={"questions_without_answer": skipped, **_count_examples(fewshot)},
            is_whole=options.limit is None or options.limit >= len(records),
        ),
        task,
        convention,
        [*files, *example_files],
        {
            "formulation": formulation,
            "prompts_of": preset.sources[formulation],
            **describe_fewshot(fewshot),
            **(settings or {}),
        },
        options,
        published_as=preset.name,
    )


def check_name(name: str) -> str:
    """Return the name of a task if it can be part of a file name.

    Raises:
        ConfigError: it cannot.
    """
    from mega_schema.errors import ConfigError

    if not name or not all(letter.isalnum() or letter in "._-" for letter in name):
        raise ConfigError(
            "--name", "cannot be part of a file name", found=repr(name), wanted="letters and digits"
        )
    return name


def describe_fewshot(fewshot: FewShot) -> dict[str, object]:
    """Return the options of the examples, for the result."""
    return {
        "num_fewshot": fewshot.count,
        "fewshot_seed": fewshot.seed,
        "fewshot_sampler": fewshot.sampler,
    }


def _count_examples(fewshot: FewShot) -> dict[str, int]:
    return {"fewshot_examples": fewshot.count} if fewshot.count else {}


COMMANDS = (*(build_command(preset) for preset in CHOICE_PRESETS), choice)
