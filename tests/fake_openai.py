"""A server in a thread: OpenAI's API, tokenizer endpoints, Megatron's PUT /api. Records its requests."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

WORDS = ("one", " two", " three", " four", " five", " six", " seven", " eight")


@dataclass
class FakeServer:
    """The settings of the server and what it received.

    Attributes:
        delay: seconds before each chunk.
        statuses: answers to the next requests for text, instead of 200.
        breaks_after: the stream ends without [DONE] after this many chunks.
        marks_end: a whole stream ends with [DONE]; that of `transformers serve` does not.
        error_after: an error event comes after this many chunks.
        legacy: PUT /api answers bad requests with status 200 and a bare string.
    """

    delay: float = 0.0
    statuses: list[tuple[int, dict[str, str], object]] = field(default_factory=list)
    breaks_after: int | None = None
    marks_end: bool = True
    error_after: int | None = None
    legacy: bool = False
    has_tokenizer: bool = True
    api_key: str | None = None
    max_model_len: int | None = None
    requests: list[tuple[str, str, dict[str, str], Any]] = field(default_factory=list)
    disconnects: int = 0
    started: threading.Event = field(default_factory=threading.Event)
    disconnected: threading.Event = field(default_factory=threading.Event)
    address: str = ""

    @property
    def bodies(self) -> list[Any]:
        """The bodies of the requests for text."""
        return [body for _, path, _, body in self.requests if path.endswith(("completions", "/api"))]

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the requests of a connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, path, _ = head[0].split(" ")
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in head[1:-2])
                }
                content = await reader.readexactly(int(headers.get("content-length", "0")))
                body = json.loads(content) if content else None
                self.requests.append((method, path, headers, body))
                await self.answer(writer, method, path, headers, body)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(
        self, writer: asyncio.StreamWriter, method: str, path: str, headers: dict[str, str], body: Any
    ) -> None:
        """Answer one request."""
        if self.api_key is not None and headers.get("authorization") != f"Bearer {self.api_key}":
            error = {"error": {"message": "no such key", "type": "invalid_request_error"}}
            return self.send(writer, 401, error)
        if path.endswith(("completions", "/api")) and self.statuses:
            status, more_headers, answer = self.statuses.pop(0)
            return self.send(writer, status, answer, more_headers)
        match method, path:
            case "GET", "/v1/models":
                model = {"id": "tiny", "object": "model", "max_model_len": self.max_model_len}
                self.send(writer, 200, {"data": [model]})
            case "GET", "/health":
                self.send(writer, 200, {"status": "ok"})
            case "GET", "/tokenizer_info" if self.has_tokenizer:
                self.send(writer, 200, {"vocab_size": 100, "eos_token_id": 99})
            case "POST", "/tokenize" if self.has_tokenizer:
                self.send(writer, 200, {"tokens": [ord(char) % 100 for char in body["prompt"]]})
            case "POST", "/detokenize" if self.has_tokenizer:
                self.send(writer, 200, {"prompt": "".join(chr(200 + token) for token in body["tokens"])})
            case "POST", "/v1/completions" | "/v1/chat/completions":
                await self.complete(writer, body, is_chat="chat" in path)
            case "PUT", "/api":
                self.send(writer, *self.megatron(body))
            case _:
                self.send(writer, 404, {"error": {"message": "Not Found"}})
        return None

    def megatron(self, body: Any) -> tuple[int, Any]:
        """Answer as tools/run_text_generation_server.py does."""
        if not body["prompts"][0]:
            message = "Empty prompts require add_BOS=true"
            return (200, message) if self.legacy else (400, {"message": message})
        words = WORDS[: body["tokens_to_generate"]]
        prompt = body["prompts"][0]
        segments = [*prompt, *words]
        logprobs = [[-0.5] * (len(segments) - 1)] if body.get("logprobs") else None
        return 200, {"text": [prompt + "".join(words)], "segments": [segments], "logprobs": logprobs}

    async def complete(self, writer: asyncio.StreamWriter, body: Any, *, is_chat: bool) -> None:
        """Answer a completion of as many words as it asks for."""
        count = body.get("max_tokens", body.get("max_completion_tokens", 3))
        words = [WORDS[i % len(WORDS)] for i in range(count)]
        usage = {"prompt_tokens": 7, "completion_tokens": count, "total_tokens": 7 + count}
        if not body.get("stream"):
            logprobs = None
            if body.get("logprobs") is not None:
                tops = [{word: -0.25, " other": -1.5} for word in words]
                logprobs = {"tokens": words, "token_logprobs": [-0.25] * count, "top_logprobs": tops}
            text = "".join(words) if not body.get("echo") else body["prompt"] + "".join(words)
            choices = [
                {"index": i, "text": text, "logprobs": logprobs, "finish_reason": "length"}
                for i in range(body.get("n", 1))
            ]
            return self.send(writer, 200, {"choices": choices, "usage": usage})
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        self.started.set()
        try:
            await self.stream(writer, words, usage, is_chat=is_chat)
        except ConnectionError:
            self.disconnects += 1
            self.disconnected.set()
            raise
        return None

    async def stream(
        self, writer: asyncio.StreamWriter, words: list[str], usage: dict[str, int], *, is_chat: bool
    ) -> None:
        """Send the chunks of an answer."""
        if is_chat:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            self.event(writer, {"choices": [role]})
        for number, word in enumerate(words):
            if self.delay:
                await asyncio.sleep(self.delay)
            if number == self.breaks_after:
                writer.write(b"0\r\n\r\n")
                return
            if number == self.error_after:
                self.event(writer, {"error": {"message": "engine died", "code": 500}})
            text = {"delta": {"content": word}} if is_chat else {"text": word}
            self.event(writer, {"choices": [{"index": 0, "finish_reason": None, **text}]})
            await writer.drain()
        end = {"index": 0, "finish_reason": "length", **({"delta": {}} if is_chat else {"text": ""})}
        self.event(writer, {"choices": [end]})
        self.event(writer, {"choices": [], "usage": usage})
        if self.marks_end:
            self.chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def event(self, writer: asyncio.StreamWriter, values: object) -> None:
        """Send one event, after a comment as keep-alive."""
        self.chunk(writer, b": ping\n\ndata: " + json.dumps(values).encode() + b"\n\n")

    @staticmethod
    def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
        """Send a chunk of HTTP's transfer encoding."""
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    @staticmethod
    def send(
        writer: asyncio.StreamWriter, status: int, body: object, headers: dict[str, str] | None = None
    ) -> None:
        """Send a JSON answer."""
        content = json.dumps(body).encode()
        lines = [f"HTTP/1.1 {status} X", "content-type: application/json", f"content-length: {len(content)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + content)


@contextmanager
def serve(server: FakeServer) -> Iterator[FakeServer]:
    """Run the server on a free port of the loopback device."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    stop = asyncio.Event()

    async def run() -> None:
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        server.address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        listener.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    thread = threading.Thread(target=loop.run_until_complete, args=[run()], daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
