"""Flags of OpenAI's APIs, which a server and an offline batch share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from mega_schema.app.click_options import NonEmptyPath
from mega_schema.errors import ConfigError, RequestError
from mega_schema.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("mega.serve")


def build_api_options(group: Callable[..., Callable[..., Any]]) -> tuple[Callable[..., Any], ...]:
    """Return the options, listed under the heading of `group`."""
    return (
        group("--served-model-name", help="Id of the model in the APIs; by default its directory."),
        group(
            "--chat-template",
            type=NonEmptyPath(exists=True, dir_okay=False),
            help="Jinja template of chats; by default the checkpoint's.",
        ),
        group(
            "--pooling",
            default="last",
            show_default=True,
            type=click.Choice(["last", "mean"]),
            help="Hidden states that are the embedding of a text: of its last token, or the mean of all.",
        ),
        group("--lenient", is_flag=True, help="Ignore unknown fields of requests."),
    )


def api_settings(values: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the fields of `ApiContext` that the options set.

    Args:
        values: parameters of the command.

    Raises:
        ConfigError: the template is not a text file, or cannot be compiled.
    """
    from mega_serve.api.chat_templates import find_chat_template

    path = values["chat_template"]
    return {
        "chat_template": find_chat_template(tokenizer) if path is None else _read_template(path, tokenizer),
        "served_model_name": values["served_model_name"],
        "lenient": values["lenient"],
        "pooling": values["pooling"],
    }


def warn_of_template(source: str, tokenizer: Tokenizer) -> None:
    """Log that the template of a checkpoint cannot be compiled: every chat is going to be refused.

    It does not end the server, whose other routes need no template.
    """
    from mega_serve.api.chat_templates import ChatTemplate

    template = ChatTemplate(source, tokenizer)
    try:
        template.compile()
    except RequestError as error:
        logger.warning(
            "%s: %s; /v1/chat/completions and /v1/responses refuse all requests; hint: %s",
            error.what,
            error.found,
            error.hint,
        )
    finally:
        template.close()


def _read_template(path: Path, tokenizer: Tokenizer) -> str:
    from mega_serve.api.chat_templates import ChatTemplate

    try:
        source = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise ConfigError("--chat-template", "not a text file", found=path) from None
    if not source.strip():
        raise ConfigError("--chat-template", f"{path} is empty", wanted="a Jinja template")
    template = ChatTemplate(source, tokenizer)
    try:
        template.compile()
    except RequestError as error:
        what = f"{path} cannot be compiled"
        raise ConfigError("--chat-template", what, found=error.found, wanted="a Jinja template") from None
    finally:
        template.close()
    return source
