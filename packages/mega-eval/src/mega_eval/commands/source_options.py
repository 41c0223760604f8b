"""Check which options fit the source of a model, before anything is read or connected to.

Imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mega_schema.checkpoint.formats import conversion_command, detect_format
from mega_schema.errors import ConfigError
from mega_schema.spec_checks import find_task_head, refuse_foreign_encoder

if TYPE_CHECKING:
    from mega_eval.commands.task_options import TaskOptions

DEFAULT_CONCURRENCY = 8


def is_hugging_face(load: Path) -> bool:
    """Return whether a path is a Hugging Face folder."""
    return detect_format(load) == "hf"


def check_source(options: TaskOptions) -> None:
    """Check that a model is named, once, and that every option applies to its source.

    Raises:
        ConfigError: it is not, an option does not, or a folder of Hugging Face is of an encoder.
    """
    if (options.load is None) == (options.url is None):
        what = "missing" if options.load is None else "contradicts --url"
        raise ConfigError("--load", what, hint="--load RUN, or --url http://HOST:PORT")
    processes = 1 if options.world is None else options.world.size
    if options.load is None:
        for flag in _list_given(_checkpoint_options(options)):
            raise ConfigError(flag, "is set by the server, not by mega-eval", hint=f"leave {flag} out")
        if processes > 1:
            found = f"{processes} of torchrun"
            raise ConfigError("--url", "is evaluated by one process", found=found, hint="leave torchrun out")
        return
    if find_task_head(options.load) == "none":  # the commands of tasks evaluate others
        refuse_foreign_encoder(options.load)
    is_foreign = is_hugging_face(options.load)
    for flag in _list_given(_server_options(options, is_foreign=is_foreign)):
        raise ConfigError(flag, "needs --url", hint=f"leave {flag} out, or name a server")
    if is_foreign:
        hint = conversion_command(options.load, "hf")
        for flag in _list_given({**_layout_options(options), "torchrun": processes > 1}):
            raise ConfigError(
                flag, "needs a checkpoint, not a Hugging Face folder", found=options.load, hint=hint
            )


def _list_given(values: Mapping[str, bool]) -> list[str]:
    return [flag for flag, is_given in values.items() if is_given]


def _layout_options(options: TaskOptions) -> dict[str, bool]:
    """Return which options are given that only a checkpoint of this project supports."""
    return {
        "--batch-invariant": options.batch_invariant,
        "--tp": options.tp > 1,
        "--pp": options.pp > 1,
        "--dp": (options.dp or 1) > 1,
    }


def _checkpoint_options(options: TaskOptions) -> dict[str, bool]:
    """Return which options are given that apply to weights in this process."""
    return {
        "--dtype": options.dtype != "auto",
        "--device": options.device != "auto",
        "--micro-batch-size": options.micro_batch_size is not None,
        **_layout_options(options),
    }


def _server_options(options: TaskOptions, *, is_foreign: bool) -> dict[str, bool]:
    """Return which options are given that apply to a server."""
    return {
        "--model": options.model is not None,
        "--api-key-env": options.api_key_env is not None,
        "--tokenizer": options.tokenizer is not None,
        "--max-model-len": options.max_model_len is not None and not is_foreign,
        "--concurrency": options.concurrency != DEFAULT_CONCURRENCY,
        "--allow-noise": options.allow_noise,
    }
