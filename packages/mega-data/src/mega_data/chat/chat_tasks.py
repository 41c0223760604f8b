"""Encode files of conversations to a dataset, a task for each file.

A document is a conversation. Its sequences alternate: the first, third, ... are context, the others are turns
of the assistant, which have a loss.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import orjson

from mega_data.chat.template import ASSISTANT, SpecialTokenParser, TemplateError, TurnTemplate
from mega_data.error_limit import error_counts
from mega_data.jsonl_shards import file_bytes, file_states, read_whole_lines
from mega_data.readers.blocks import parse_json
from mega_data.readers.nested_keys import value_or_none
from mega_data.task_stages import TaskResult, TaskStage, open_run_folder
from mega_schema.dataset.indexed_dataset import DatasetInfo, IndexedWriter, smallest_dtype
from mega_schema.errors import ConfigError, FormatError
from mega_schema.tokenizer.fast import FastTokenizer
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer

CHAT_KEY: Final = "chat"  # PREFIX_chat_document, and the option in PREFIX.json by which readers know it
_HINT: Final = "correct or delete the line, or skip such lines: --on-error skip"


@dataclass(frozen=True, slots=True)
class ChatEncoding:
    """A run that encodes conversations.

    Attributes:
        tokenizer: type and files as of `open_tokenizer`.
        template: source of the chat template.
        key: key of the messages.
        skip: leave out conversations that cannot be encoded; otherwise the first one ends the run.
    """

    inputs: tuple[Path, ...]
    work: Path
    tokenizer: tuple[tuple[str, Any], ...]
    template: str
    key: str
    skip: bool

    def begin(self) -> None:
        """Create the work folder, or resume the same run in an existing one.

        Raises:
            ConfigError: the folder holds another run, or the template or the tokenizer is refused.
        """
        tokenizer, _, _ = _open_encoder(self.tokenizer, self.template)
        wanted = {
            "inputs": file_states(self.inputs),
            "tokenizer": tokenizer.identity.to_dict(),
            "template": self.template,
            "key": self.key,
            "skip": self.skip,
        }
        open_run_folder(self.work, wanted)

    def stages(self) -> list[TaskStage]:
        """Return the stage."""
        sizes = tuple(map(file_bytes, self.inputs))
        return [TaskStage("encode", len(sizes), self.encode, sizes=sizes)]

    def part(self, task: int) -> Path:
        """Return the prefix of the dataset of a file."""
        return self.work / "parts" / f"{task:05d}"

    def encode(self, task: int) -> TaskResult:
        """Write the dataset of a file and return its counts.

        Raises:
            FormatError: a line is no conversation, or the template refuses it.
        """
        path = self.inputs[task]
        tokenizer, template, parser = _open_encoder(self.tokenizer, self.template)
        sha256 = hashlib.sha256(self.template.encode()).hexdigest()
        options = {"key": self.key, CHAT_KEY: {"template_sha256": sha256}}
        info = DatasetInfo(tokenizer.identity, sources=(str(path),), options=options)
        counts = dict.fromkeys(("documents", "tokens", "loss_tokens"), 0)
        skipped = 0
        first = ""
        self.part(task).parent.mkdir(parents=True, exist_ok=True)
        with IndexedWriter(self.part(task), smallest_dtype(tokenizer.identity.vocab_size), info) as writer:
            for number, line in self._lines(path):
                try:
                    turns = _encode_turns(line, path, number, self.key, template, parser)
                except FormatError as error:
                    if not self.skip:
                        raise
                    skipped += 1
                    first = first or f"{path}:{number}, {error.what}"
                    continue
                for turn in turns:
                    writer.add(turn)
                writer.end_document()
                counts["documents"] += 1
                counts["tokens"] += sum(map(len, turns))
                counts["loss_tokens"] += sum(map(len, turns[1::2]))
        result = {**counts, "read": file_bytes(path), "skipped": skipped}
        return {**result, **error_counts(skipped, first, counts["documents"] + skipped)}

    def _lines(self, path: Path) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that are not blank; damage of the file is an error in any case."""

        def fail(number: int, error: FormatError, line: bytes) -> None:
            raise error

        yield from ((n, line) for n, line in read_whole_lines(path, fail) if line.strip())


@lru_cache(maxsize=1)
def _open_encoder(
    options: tuple[tuple[str, Any], ...], template: str
) -> tuple[Tokenizer, TurnTemplate, SpecialTokenParser]:
    """Open the tokenizer and compile the template, once in a process.

    Raises:
        ConfigError: the tokenizer has no special tokens in its file, or the template is refused.
    """
    tokenizer = open_tokenizer(**dict(options))
    if not isinstance(tokenizer, FastTokenizer):
        found, wanted = (
            tokenizer.identity.type,
            "one with special tokens, such as HuggingFaceTokenizer",
        )
        raise ConfigError("--tokenizer-type", "cannot encode chats", found=found, wanted=wanted)
    return tokenizer, TurnTemplate(template, tokenizer), SpecialTokenParser(tokenizer)


def _encode_turns(
    line: bytes, path: Path, number: int, key: str, template: TurnTemplate, parser: SpecialTokenParser
) -> list[list[int]]:
    """Return the ids of context and assistant's turns, alternating.

    Raises:
        FormatError: the line is no conversation, or the template refuses it.
    """
    messages = _parse_messages(line, path, number, key)
    try:
        protected, marker = parser.protect(messages)
        texts = template.split_turns(protected)
    except TemplateError as error:
        what = "refused by the chat template"
        raise FormatError(f"{path}:{number}", what, found=str(error)[:300], hint=_HINT) from None
    turns = [parser.encode(text, marker) for text in texts]
    return turns if turns[-1] else turns[:-1]


def _parse_messages(line: bytes, path: Path, number: int, key: str) -> list[dict[str, Any]]:
    where = f"{path}:{number}"
    try:
        values = parse_json(line)
    except orjson.JSONDecodeError as error:
        found, wanted = f"{error.msg} at column {error.colno}", "one object per line, in UTF-8"
        raise FormatError(where, "not JSON", found=found, wanted=wanted, hint=_HINT) from None
    messages = value_or_none(values, key) if isinstance(values, dict) else None
    if not isinstance(messages, list):
        found = ", ".join(list(values)[:8]) if isinstance(values, dict) else type(values).__name__
        wanted = "a list of messages there (see --json-key)"
        raise FormatError(where, f"no messages under {key!r}", found=found, wanted=wanted, hint=_HINT)
    for position, message in enumerate(messages, 1):
        is_text = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not is_text or not (isinstance(message.get("content"), str) or message.get("tool_calls")):
            wanted = '{"role": "user", "content": "..."}'
            found = orjson.dumps(message).decode()[:100]
            raise FormatError(where, f"message {position} is no text", found=found, wanted=wanted, hint=_HINT)
    if not any(message["role"] == ASSISTANT for message in messages):
        roles = ", ".join(message["role"] for message in messages) or "no message"
        raise FormatError(where, "no message of the assistant", found=roles, hint=_HINT)
    return messages
