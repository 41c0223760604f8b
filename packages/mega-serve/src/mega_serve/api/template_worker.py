"""The process that renders chat templates. It reads and writes JSON lines until its input ends.

A template comes with a checkpoint: it may loop for ever or build a text of any size. No interpreter can stop
that in a thread, so templates run here, without files or memory to spare, and the server kills the process
that takes too long. It imports nothing of the project: it starts in a tenth of a second.

The first line of input is {"template": source}, every other one {"values": {...}, "now": seconds}. Every
answer is {"text": ...} or {"error": ..., "kind": "template" | "messages"}.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEXT_CHARS = 4 << 20
MAX_MEMORY_BYTES = 1 << 30
MAX_OPEN_FILES = 16


class MessagesRefusedError(Exception):
    """The template refused the messages by `raise_exception`."""


class GenerationExtension(Extension):
    """Accepts {% generation %}, by which Hugging Face marks the assistant's text, and renders its body."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # jinja2 only reads it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def main() -> None:
    """Render templates from standard input to standard output."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN_FILES, MAX_OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lines = iter(sys.stdin.buffer)
    source = json.loads(next(lines))["template"]
    now = datetime.fromtimestamp(0)
    try:
        template = build_environment(lambda: now).from_string(source)
    except Exception as error:
        _write({"error": describe(error), "kind": "template"})
        return
    _write({"text": ""})
    for line in lines:
        request = json.loads(line)
        now = datetime.fromtimestamp(request["now"])
        try:
            _write({"text": render(template, request["values"])})
        except MessagesRefusedError as error:
            _write({"error": str(error)[:1000], "kind": "messages"})
        except (Exception, RecursionError) as error:
            _write({"error": describe(error), "kind": "template"})


def build_environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """Return Hugging Face's environment of chat templates: sandboxed, without files to include."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationExtension, "jinja2.ext.loopcontrols"],
    )

    def raise_exception(message: str) -> None:
        raise MessagesRefusedError(message)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    return environment


def render(template: jinja2.Template, values: dict[str, Any]) -> str:
    """Return the text of a template.

    Raises:
        ValueError: it is longer than MAX_TEXT_CHARS.
    """
    return "".join(_within_limit(template.generate(values)))


def to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    """Write JSON as Hugging Face's filter does: no HTML escapes, letters as they are."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def describe(error: BaseException) -> str:
    """Return an error in one line."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"[:300].replace("\n", " ")
    return f"{type(error).__name__}: {error}"[:300].replace("\n", " ")


def _within_limit(parts: Iterator[str]) -> Iterator[str]:
    chars = 0
    for part in parts:
        chars += len(part)
        if chars > MAX_TEXT_CHARS:
            raise ValueError(f"the text is longer than {MAX_TEXT_CHARS:,} characters")
        yield part


def _write(answer: dict[str, str]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
