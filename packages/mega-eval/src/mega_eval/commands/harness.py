"""The command `harness`: lm-evaluation-harness on our models."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from mega_eval.commands.model_options import build_options, model_options
from mega_eval.commands.source_options import check_source
from mega_eval.commands.task_options import read_world
from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError

OTHER_COMMANDS = ("ls", "validate")
MODEL_FLAGS = ("--model", "-M", "--config", "-C")
VERBOSITY_FLAGS = ("--verbosity", "-v")
LOG_LEVEL = "LMEVAL_LOG_LEVEL"
# read once, when tqdm and datasets are imported
BAR_SWITCHES = ("TQDM_DISABLE", "HF_DATASETS_DISABLE_PROGRESS_BARS")


@click.command(
    params=[
        *model_options(),
        click.Argument(["words"], nargs=-1, type=click.UNPROCESSED, metavar="-- WORDS..."),
    ]
)
def harness(words: tuple[str, ...], **values: object) -> None:
    """Run lm-evaluation-harness (lm-eval) on a model: all of its tasks, with all of its options.

    Its command line follows --, for example: mega-eval harness --load RUN -- run --tasks lambada_openai.
    Nothing is downloaded unless HF_HUB_OFFLINE=0 is in the environment. Of lm-eval's log, warnings and errors
    are printed; LMEVAL_LOG_LEVEL=INFO in the environment prints all of it. Bars of lm-eval are shown on a
    terminal only.
    """
    if not words:
        raise ConfigError(
            "WORDS", "missing", hint="mega-eval harness --load RUN -- run --tasks lambada_openai"
        )
    for word in words:
        if word.partition("=")[0] in MODEL_FLAGS:
            raise ConfigError(
                word, "is set by mega-eval harness", hint="leave it out; --load names the model"
            )
    world = read_world()
    if world is not None and world.size > 1:
        raise ConfigError(
            "mega-eval harness",
            "does not run under torchrun: it starts the processes of --tp, --pp and --dp itself",
            found=f"{world.size} processes",
            hint="mega-eval harness --load RUN --tp 2 -- run --tasks lambada_openai",
        )
    is_run = words[0] not in OTHER_COMMANDS
    if is_run:
        check_source(build_options(values))
    if not sys.stderr.isatty() and not _names_level(words):
        for name in BAR_SWITCHES:
            os.environ.setdefault(name, "1")
    # set before lm_eval is imported, whose libraries read them once
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ.setdefault(name, os.environ.get("HF_HUB_OFFLINE", "1"))
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        hint = install_hint("mega-eval", "harness")
        raise ConfigError("mega-eval harness", "lm-eval is not installed", hint=hint) from None
    from mega_eval.harness import register_model

    register_model()
    with (
        _arguments(_add_model(words, values) if is_run else words),
        _log_level(words),
        _silent_git(),
        _explain_errors(),
    ):
        cli_evaluate()


def _add_model(words: Sequence[str], values: dict[str, object]) -> list[str]:
    """Return the words of `lm-eval run` with the model; the values are part of its result file."""
    arguments = {
        # the harness names the folder of its results after this argument, and else by chance
        "pretrained" if name == "load" else name: str(value) if isinstance(value, Path) else value
        for name, value in values.items()
        if name != "device" and value is not None and value is not False
    }
    more = words[1:] if words[0] == "run" else words
    return [
        "run",
        "--model",
        "mega",
        "--model_args",
        json.dumps(arguments),
        "--device",
        str(values["device"]),
        *more,
    ]


@contextmanager
def _arguments(words: Sequence[str]) -> Iterator[None]:
    """Give the harness its words: its parser reads those of the process."""
    own = sys.argv
    sys.argv = ["lm-eval", *words]
    try:
        yield
    finally:
        sys.argv = own


def _names_level(words: Sequence[str]) -> bool:
    """Return whether the environment or the words name a level of the harness's log."""
    return LOG_LEVEL in os.environ or any(word.partition("=")[0] in VERBOSITY_FLAGS for word in words)


@contextmanager
def _silent_git() -> Iterator[None]:
    """Outside a repository, do not let the harness ask git for a commit: git prints that it failed."""
    from lm_eval import evaluator

    folder = Path.cwd()
    is_repository = any((parent / ".git").exists() for parent in (folder, *folder.parents))
    original = getattr(evaluator, "get_git_commit_hash", None)
    if is_repository or original is None:
        yield
        return
    evaluator.get_git_commit_hash = lambda: None
    try:
        yield
    finally:
        evaluator.get_git_commit_hash = original


@contextmanager
def _log_level(words: Sequence[str]) -> Iterator[None]:
    """Print the harness's warnings and errors only, unless its words or the environment name a level."""
    if _names_level(words):
        yield
        return
    os.environ[LOG_LEVEL] = "WARNING"
    try:
        yield
    finally:
        del os.environ[LOG_LEVEL]


@contextmanager
def _explain_errors() -> Iterator[None]:
    """Report a missing data set, and words that the harness refuses, as mistakes of the user."""
    from datasets.exceptions import DatasetNotFoundError

    try:
        yield
    except (ConnectionError, DatasetNotFoundError) as error:
        found = str(error).partition("\n")[0]
        hint = "HF_HUB_OFFLINE=0 downloads it; or a local task with --include_path DIR"
        raise ConfigError("--tasks", "a data set is not on this machine", found=found, hint=hint) from None
    except ValueError as error:
        # its own checks of words raise it without a class of their own; a traceback names our frames else
        if error.__traceback__ is None or not _is_from_configuration(error):
            raise
        raise ConfigError("lm-eval", str(error)) from None


def _is_from_configuration(error: BaseException) -> bool:
    """Return whether the harness raised the error while it read its words."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    return module.startswith("lm_eval.config")
