"""Render a chat template in Jinja's sandbox, and split its text into the assistant's turns and the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError, FormatError
from mega_schema.tokenizer.fast import FastTokenizer
from mega_schema.tokenizer.tokenizer import Tokenizer

TEMPLATE_FILE: Final = "chat_template.jinja"
_CONFIG_FILE: Final = "tokenizer_config.json"
_GENERATION: Final = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
ASSISTANT: Final = "assistant"
# of these, one that no message contains keeps special tokens in messages apart from the template's
_NONCHARACTERS: Final = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


def find_template(tokenizer: Tokenizer, file: Path | None) -> str:
    """Return the template of a file, or the one that came with the tokenizer.

    Raises:
        ConfigError: there is none.
        FormatError: the file is not text.
    """
    if file is not None:
        try:
            return file.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(file, f"not UTF-8 at byte {error.start}") from None
    companions = tokenizer.companions if isinstance(tokenizer, FastTokenizer) else {}
    if TEMPLATE_FILE in companions:
        return companions[TEMPLATE_FILE].decode("utf-8", "replace")
    template = json.loads(companions.get(_CONFIG_FILE, b"{}")).get("chat_template")
    if isinstance(template, list):  # several by name
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    if not isinstance(template, str):
        hint = "--chat-template FILE"
        raise ConfigError("--chat-template", "the tokenizer has no chat template", wanted="a file", hint=hint)
    return template


class TemplateError(Exception):
    """A template refuses or cannot render a conversation; the text says why."""


class TurnTemplate:
    """A template in Hugging Face's environment, without access to files, attributes of Python or the clock.

    `strftime_now` is not defined: a text must not depend on the day on which it is encoded.
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        """Compile a template.

        Raises:
            ConfigError: jinja2 is not installed, or the source is no template.
        """
        try:
            jinja: Any = import_module("jinja2")
            sandbox: Any = import_module("jinja2.sandbox")
        except ImportError:
            hint = install_hint("mega-data", "chat")
            raise ConfigError("--chat-template", "needs jinja2", hint=hint) from None
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _dump_json
        environment.globals["raise_exception"] = _raise_exception
        try:
            # the marks of the assistant's text: the turns are found without them
            self._template = environment.from_string(_GENERATION.sub("", source))
        except jinja.TemplateSyntaxError as error:
            found = f"line {error.lineno}: {error.message}"
            raise ConfigError("--chat-template", "is not a Jinja template", found=found) from None
        identity = tokenizer.identity
        ids = {"bos_token": identity.bos, "eos_token": identity.eod, "pad_token": identity.pad}
        self._names = {name: tokenizer.pieces([i])[0] for name, i in ids.items() if i is not None}

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """Render messages.

        Raises:
            TemplateError: the template refuses them or fails.
        """
        try:
            text: str = self._template.render(
                messages=messages, tools=None, add_generation_prompt=add_generation_prompt, **self._names
            )
            return text
        except TemplateError:
            raise
        except (Exception, RecursionError) as error:  # of any kind: a template is a program
            raise TemplateError(f"{type(error).__name__}: {error}") from None

    def split_turns(self, messages: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the text in parts: context, assistant's turn, context, ...; a last context may be empty.

        An assistant's turn begins after the prompt for it, and ends where the text of the messages up to it
        ends. So it includes the token that ends the turn.

        Raises:
            TemplateError: as `render`, or the text of earlier messages depends on later ones.
        """
        whole = self.render(messages, add_generation_prompt=False)
        parts = list[str]()
        position = 0
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            prompt = self.render(messages[:number], add_generation_prompt=True)
            text = self.render(messages[: number + 1], add_generation_prompt=False)
            is_prefix = text.startswith(prompt) and whole.startswith(text) and len(prompt) >= position
            if not is_prefix:
                raise TemplateError(f"the text of message {number + 1} depends on later messages")
            parts += [whole[position : len(prompt)], whole[len(prompt) : len(text)]]
            position = len(text)
        return [*parts, whole[position:]]


def _dump_json(value: Any, indent: int | None = None, **_: Any) -> str:
    """Write JSON as Hugging Face's filter does: no HTML escapes, letters as they are."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


class SpecialTokenParser:
    """Encodes a rendered text: the template's special tokens become ids, those in messages stay text."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        added = json.loads(tokenizer.source).get("added_tokens", [])
        self._ids = {token["content"]: token["id"] for token in added if token.get("special")}
        texts = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)) if texts else r"(?!)")

    def protect(self, messages: Any) -> tuple[Any, str]:
        """Return messages with a noncharacter inside each special token, and the noncharacter.

        Raises:
            TemplateError: the messages contain all noncharacters.
        """
        text = json.dumps(messages, ensure_ascii=False)
        marker = next((character for character in _NONCHARACTERS if character not in text), None)
        if marker is None:
            raise TemplateError("all Unicode noncharacters U+FDD0 to U+FDEF occur")
        return (self._break_tokens(messages, marker) if self._pattern.search(text) else messages), marker

    def _break_tokens(self, value: Any, marker: str) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(lambda match: match[0][0] + marker + match[0][1:], value)
        if isinstance(value, dict):
            return {key: self._break_tokens(part, marker) for key, part in value.items()}
        if isinstance(value, list):
            return [self._break_tokens(part, marker) for part in value]
        return value

    def encode(self, text: str, marker: str) -> list[int]:
        """Encode a text from protected messages."""
        pieces = list[str | int]()
        end = 0
        for match in self._pattern.finditer(text):
            pieces += [text[end : match.start()].replace(marker, ""), self._ids[match[0]]]
            end = match.end()
        pieces.append(text[end:].replace(marker, ""))
        encoded = iter(self._tokenizer.encode_batch([p for p in pieces if isinstance(p, str) and p]))
        ids = list[int]()
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            elif piece:
                ids += next(encoded)
        return ids
