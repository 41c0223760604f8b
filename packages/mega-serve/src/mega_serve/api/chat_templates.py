"""Chat templates: messages to text, and text to token ids.

The template is the operator's, or the checkpoint's; never the client's. It runs in a process of its own with
a limit of time and memory (`template_worker`).

Only the template writes special tokens. A special token in a message stays text: before rendering, it is
broken by a character that is no text (a Unicode noncharacter), which is removed from the result.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mega_schema.errors import FormatError, RequestError
from mega_schema.tokenizer.tokenizer import HF_CONFIG, FastTokenizer, Tokenizer
from mega_serve.api import template_worker
from mega_serve.api.bodies import name_field
from mega_serve.api.encoding_threads import EncodingThreads

TEMPLATE_FILE = "chat_template.jinja"
RENDER_SECONDS = 2.0
START_SECONDS = 10.0
_NONCHARACTERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


def find_chat_template(tokenizer: Tokenizer) -> str | None:
    """Return the template that came with the tokenizer: chat_template.jinja, or tokenizer_config.json's.

    Of several templates by name, "tool_use" is for requests with tools and "default" for the others.

    Raises:
        FormatError: the file is not UTF-8, the template has another type, or several have no "default".
    """
    companions = tokenizer.companions if isinstance(tokenizer, FastTokenizer) else {}
    if TEMPLATE_FILE in companions:
        try:
            return companions[TEMPLATE_FILE].decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(TEMPLATE_FILE, f"not UTF-8 at byte {error.start}") from None
    template = json.loads(companions.get(HF_CONFIG, b"{}")).get("chat_template")
    if isinstance(template, list):
        return _join_templates(template)
    if template is not None and not isinstance(template, str):
        raise FormatError(HF_CONFIG, "chat_template", found=type(template).__name__, wanted="a string")
    return template


def _join_templates(entries: Sequence[object]) -> str:
    """Return one template of those by name, which chooses as Hugging Face does."""
    sources: dict[str, str] = {}
    for entry in entries:
        match entry:
            case {"name": str(name), "template": str(source)}:
                sources[name] = source
            case _:
                wanted = 'objects of "name" and "template"'
                raise FormatError(HF_CONFIG, "chat_template", found=json.dumps(entry)[:60], wanted=wanted)
    if "default" not in sources:
        found = ", ".join(sources) or "none"
        raise FormatError(
            HF_CONFIG, 'chat_template has no "default"', found=found, hint="--chat-template FILE"
        )
    if "tool_use" not in sources:
        return sources["default"]
    # an empty expression beside a tag keeps it from stripping blanks of a template, as Jinja strips a last \n
    tools, default = (
        f"{{{{ '' }}}}{sources[n].removesuffix(chr(10))}{{{{ '' }}}}" for n in ("tool_use", "default")
    )
    return f"{{% if tools %}}{tools}{{% else %}}{default}{{% endif %}}"


class ChatTemplate:
    """A template and the process that renders it. Methods may be called from several threads.

    Args:
        render_seconds: limit of one rendering; the process is killed after it.
        start_seconds: limit of the start of the process, which compiles the template.
        encoding_threads: those of the other APIs, with which long texts share one thread.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        *,
        render_seconds: float = RENDER_SECONDS,
        start_seconds: float = START_SECONDS,
        encoding_threads: EncodingThreads | None = None,
    ) -> None:
        self.source = source
        self.tokenizer = tokenizer
        self.render_seconds = render_seconds
        self.special_ids = special_token_ids(tokenizer)
        texts = sorted(self.special_ids, key=len, reverse=True)
        self.special_pattern = re.compile("|".join(map(re.escape, texts)) if texts else r"(?!)")
        self.start_seconds = start_seconds
        # conversations wait for the process here, not in the threads that encode texts
        self._executor = ThreadPoolExecutor(1, "chat-template")
        self._encoding_threads = encoding_threads or EncodingThreads()
        self._lock = threading.Lock()
        self._start_error: RequestError | None = None
        self._process: subprocess.Popen[bytes] | None = None

    async def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[int]]:
        """Render messages in the process, and encode the text in a thread.

        Args:
            continue_final_message: end within the last message, for the model to continue it.
            options: further variables of the template, by names that the caller has checked.

        Returns:
            the text, and its ids.

        Raises:
            RequestError: the template refuses the messages, fails, or takes too long.
        """
        marker = _unused_noncharacter(messages, tools)
        values = {
            **(options or {}),
            "messages": self._break_special_tokens(list(messages), marker),
            "tools": None if tools is None else self._break_special_tokens(list(tools), marker),
            "add_generation_prompt": add_generation_prompt,
            **self._special_names(),
        }
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(self._executor, self.render, values, time.time())
        if continue_final_message:
            text = _cut_after_final_message(text, values["messages"][-1])
        return await self._encoding_threads.run(len(text), self._encode, text, marker)

    def render(self, values: Mapping[str, Any], now: float) -> str:
        """Render the template.

        Args:
            now: seconds since 1970, for the template's `strftime_now`.

        Raises:
            RequestError: as `encode`.
        """
        line = json.dumps({"values": dict(values), "now": now}).encode() + b"\n"
        with self._lock:
            process = self._running_process()
            try:
                answer = _exchange(process, line, self.render_seconds)
            except (TimeoutError, OSError, EOFError) as error:
                self._stop()
                message = (
                    "the template failed" if isinstance(error, EOFError) else "the template took too long"
                )
                hint = "a shorter conversation, or another --chat-template"
                limit = f"at most {self.render_seconds:g} seconds and "
                limit += f"{template_worker.MAX_MEMORY_BYTES >> 20} MiB"
                raise RequestError("messages", message, wanted=limit, hint=hint) from None
        if "error" in answer:
            if answer["kind"] == "messages":
                raise RequestError("messages", f"refused by the chat template: {answer['error']}")
            raise RequestError("messages", f"the chat template failed: {answer['error']}")
        return answer["text"]

    def compile(self) -> None:
        """Start the process, which compiles the template.

        Raises:
            RequestError: it is no Jinja template; `found` says why.
        """
        with self._lock:
            self._running_process()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()
        self._executor.shutdown(wait=False)

    def _running_process(self) -> subprocess.Popen[bytes]:
        if self._start_error is not None:
            raise self._start_error
        if self._process is None:
            self._process = self._start()
        return self._process

    def _start(self) -> subprocess.Popen[bytes]:
        path = Path(template_worker.__file__)
        # nothing of the server's environment is a template's business
        environment = {name: os.environ[name] for name in ("TZ", "LD_LIBRARY_PATH") if name in os.environ}
        process = subprocess.Popen(
            [sys.executable, "-I", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            close_fds=True,
        )
        weakref.finalize(self, _kill, process)
        template = json.dumps({"template": self.source}).encode() + b"\n"
        try:
            answer = _exchange(process, template, self.start_seconds)
        except (TimeoutError, OSError, EOFError):
            answer = {"error": f"it was not compiled within {self.start_seconds:g} seconds"}
        if "error" in answer:
            _kill(process)
            # the next attempt would take as long and end the same way
            self._start_error = RequestError(
                "messages",
                "the checkpoint's chat template cannot be compiled",
                found=answer["error"],
                hint="start the server with --chat-template FILE",
            )
            raise self._start_error
        return process

    def _stop(self) -> None:
        if self._process is not None:
            _kill(self._process)
            self._process = None

    def _special_names(self) -> dict[str, str]:
        identity = self.tokenizer.identity
        ids = {"bos_token": identity.bos, "eos_token": identity.eod, "pad_token": identity.pad}
        return {name: self.tokenizer.pieces([i])[0] for name, i in ids.items() if i is not None}

    def _break_special_tokens(self, value: Any, marker: str) -> Any:
        """Return the value with a noncharacter inside every special token of its strings."""
        if isinstance(value, str):
            return self.special_pattern.sub(lambda match: match[0][0] + marker + match[0][1:], value)
        if isinstance(value, Mapping):
            return {
                self._break_special_tokens(key, marker): self._break_special_tokens(part, marker)
                for key, part in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._break_special_tokens(part, marker) for part in value]
        return value

    def _encode(self, text: str, marker: str) -> tuple[str, list[int]]:
        parts: list[str | int] = []
        end = 0
        for match in self.special_pattern.finditer(text):
            parts += [text[end : match.start()], self.special_ids[match[0]]]
            end = match.end()
        parts.append(text[end:])
        texts = [part.replace(marker, "") for part in parts if isinstance(part, str) and part]
        with name_field("messages"):
            encoded = iter(self.tokenizer.encode_batch(texts))
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            elif part:
                ids += next(encoded)
        return text.replace(marker, ""), ids


def special_token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of the tokenizer's added tokens by their text."""
    ids = named_token_ids(tokenizer)
    if isinstance(tokenizer, FastTokenizer):
        added = json.loads(tokenizer.source).get("added_tokens", [])
        ids |= {token["content"]: token["id"] for token in added if token.get("special")}
    return {text: token for text, token in ids.items() if text}


def named_token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of end of document, beginning of text and padding by their text."""
    identity = tokenizer.identity
    named = [token for token in (identity.eod, identity.bos, identity.pad) if token is not None]
    return dict(zip(tokenizer.pieces(named), named, strict=True))


def _unused_noncharacter(*values: Any) -> str:
    text = json.dumps(values, ensure_ascii=False)
    marker = next((character for character in _NONCHARACTERS if character not in text), None)
    if marker is None:
        raise RequestError("messages", "all Unicode noncharacters U+FDD0 to U+FDEF occur", wanted="text")
    return marker


def _cut_after_final_message(text: str, message: Mapping[str, Any]) -> str:
    """Cut a rendered text after the content of its last message, as Hugging Face does."""
    content = str(message.get("content") or "").strip()
    start = text.rfind(content)
    if not content or start < 0:
        raise RequestError("continue_final_message", "the template does not show the last message as it is")
    return text[: start + len(content)]


def _exchange(process: subprocess.Popen[bytes], line: bytes, seconds: float) -> dict[str, str]:
    """Send a line and return the answer.

    Raises:
        TimeoutError: no answer in time.
        EOFError, OSError: the process has ended.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    deadline = time.monotonic() + seconds
    target, source = process.stdin.fileno(), process.stdout.fileno()
    os.set_blocking(target, False)
    poll = select.poll()  # select() cannot watch the descriptors of a server with 1,024 connections
    poll.register(source, select.POLLIN)
    poll.register(target, select.POLLOUT)
    unsent = memoryview(line)
    answer = bytearray()
    while not answer.endswith(b"\n"):
        ready = poll.poll(1000 * max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        for descriptor, _ in ready:
            if descriptor == target:
                unsent = unsent[os.write(target, unsent) :]
                if not unsent:
                    poll.unregister(target)
            else:
                chunk = os.read(source, 1 << 16)
                if not chunk:
                    raise EOFError
                answer += chunk
    decoded: dict[str, str] = json.loads(answer)
    return decoded


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()
