"""Offline batches: resumable output, OpenAI batch files, samples."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import click
import pytest
from click.testing import CliRunner, Result

from mega_schema.errors import ConfigError, FormatError, MegaError
from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_serve.client.offline.asgi_handler import AsgiHandler
from mega_serve.client.offline.batch_run import WorkItem, run_items
from mega_serve.client.offline.openai_batch import BatchAnswer, read_batch
from mega_serve.client.offline.resumable_lines import ResumableLines, request_id
from mega_serve.commands import offline
from mega_serve.commands.generate import OfflineEngine, build_generate_command
from mega_serve.engine.interfaces import EngineDeadError, EngineOverloadedError, ModelInfo
from mega_serve.engine.requests import EngineRequest, EngineStats, SamplingParams, SequenceOutput


class FakeEngine:
    """Continues a prompt of n letters with n words; ends by itself if n is odd."""

    is_alive = True
    stats = EngineStats()
    model = ModelInfo(name="tiny", iteration=7, created=0, max_seq_len=12, vocab_size=30, eod=0, bos=None)

    def __init__(self) -> None:
        self.requests: list[EngineRequest] = []
        self.opened = 0
        self.errors: list[Exception] = []
        self.bodies: list[Mapping[str, Any]] = []
        self.answers: list[BatchAnswer] = []

    async def generate(self, request: EngineRequest) -> AsyncIterator[SequenceOutput]:
        if self.errors:
            raise self.errors.pop(0)
        self.requests.append(request)
        size = len(request.prompt_token_ids)
        for i in range(size):
            await asyncio.sleep(0)
            is_last = i == size - 1
            yield SequenceOutput(
                request_id=request.request_id,
                token_ids=(i + 1,),
                text="" if is_last and size % 2 else f" w{i}",
                finish_reason=("stop" if size % 2 else "length") if is_last else None,
            )

    async def answer(self, url: str, body: Mapping[str, Any]) -> BatchAnswer:
        if self.errors:
            raise self.errors.pop(0)
        self.bodies.append(body)
        await asyncio.sleep(0)
        if self.answers:
            return self.answers.pop(0)
        return BatchAnswer(200, {"id": "cmpl-1", "choices": [{"text": body["prompt"] + "!"}], "url": url})

    def command(self) -> click.Command:
        """The command `generate` around this engine."""

        @asynccontextmanager
        async def open_engine(options: Mapping[str, Any]) -> AsyncIterator[OfflineEngine]:
            assert options["load"] == "run"
            self.opened += 1
            yield OfflineEngine(self, lambda text: list(text.encode()), self.answer)

        return build_generate_command(open_engine, [click.option("--load", required=True)])


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def run(engine: FakeEngine, *words: object) -> Result:
    result = CliRunner().invoke(engine.command(), ["--load", "run", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, MegaError | SystemExit):
        raise result.exception
    return result


def get_error(engine: FakeEngine, *words: object) -> str:
    result = run(engine, *words)
    assert isinstance(result.exception, MegaError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_batch(path: Path, count: int) -> None:
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": {"prompt": f"p{i}"}}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("api", ["completions", "chat/completions", "responses", "embeddings"])
def test_a_batch_asks_any_of_openais_apis(engine: FakeEngine, tmp_path: Path, api: str) -> None:
    line = {"custom_id": "a", "method": "POST", "url": f"/v1/{api}", "body": {"prompt": "x"}}
    (tmp_path / "in").write_text(json.dumps(line))
    assert run(engine, "--input-file", tmp_path / "in", "--output-file", tmp_path / "out").exit_code == 0
    [answer] = read_lines(tmp_path / "out")
    assert answer["response"]["body"]["url"] == f"/v1/{api}"


@pytest.fixture
def batch(tmp_path: Path) -> tuple[Path, Path]:
    """An input of five requests, and an output that does not exist."""
    write_batch(tmp_path / "in.jsonl", 5)
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def test_a_batch_gets_an_answer_for_every_request(engine: FakeEngine, batch: tuple[Path, Path]) -> None:
    result = run(engine, "--input-file", batch[0], "--output-file", batch[1])
    assert "5 of 5 requests" in result.stderr
    lines = read_lines(batch[1])
    assert sorted(line["custom_id"] for line in lines) == [f"r{i}" for i in range(5)]
    for line in lines:
        body = line["response"]["body"]
        assert body["choices"][0]["text"] == f"p{line['custom_id'][1:]}!"
        assert (line["response"]["status_code"], line["error"], body["url"]) == (200, None, "/v1/completions")


def test_a_finished_batch_does_not_load_the_engine_again(
    engine: FakeEngine, batch: tuple[Path, Path]
) -> None:
    for _ in range(2):
        run(engine, "--input-file", batch[0], "--output-file", batch[1])
    assert (engine.opened, len(engine.bodies)) == (1, 5)
    write_batch(batch[0], 7)
    run(engine, "--input-file", batch[0], "--output-file", batch[1])
    assert (engine.opened, len(engine.bodies)) == (2, 7)
    assert len(read_lines(batch[1])) == 7


def test_an_output_cut_at_any_byte_is_completed(engine: FakeEngine, batch: tuple[Path, Path]) -> None:
    run(engine, "--input-file", batch[0], "--output-file", batch[1])
    whole = batch[1].read_bytes()
    expected = sorted(whole.splitlines())
    for size in [*range(0, len(whole), 7), len(whole) - 1]:
        batch[1].write_bytes(whole[:size])
        engine.bodies.clear()
        run(engine, "--input-file", batch[0], "--output-file", batch[1])
        assert sorted(batch[1].read_bytes().splitlines()) == expected
        assert len(engine.bodies) == 5 - whole[:size].count(b"\n")


def test_a_changed_request_or_a_foreign_file_is_refused_unchanged(
    engine: FakeEngine, batch: tuple[Path, Path]
) -> None:
    run(engine, "--input-file", batch[0], "--output-file", batch[1])
    whole = batch[1].read_bytes()
    batch[0].write_text(batch[0].read_text().replace('"p2"', '"other"'))
    error = get_error(engine, "--input-file", batch[0], "--output-file", batch[1])
    assert (
        "--output-file: was written by a run with other requests or options: r2 was another request" in error
    )
    write_batch(batch[0], 3)
    assert "was not in the input" in get_error(engine, "--input-file", batch[0], "--output-file", batch[1])
    assert batch[1].read_bytes() == whole
    for content in (b"notes", b"notes\n", b'{"id": 1}\n', b"[1]\n", b"\x00", b'{"id":"a"}\n'):
        batch[1].write_bytes(content)
        error = get_error(engine, "--input-file", batch[0], "--output-file", batch[1])
        assert "that this command did not write" in error
        assert batch[1].read_bytes() == content
    error = get_error(engine, "--input-file", batch[0], "--output-file", batch[0])
    assert "--output-file: is one of the inputs" in error


def test_a_refused_request_has_a_line_and_every_run_counts_it(
    engine: FakeEngine, batch: tuple[Path, Path]
) -> None:
    engine.answers = [BatchAnswer(400, {"error": {"message": "too long"}})]
    words = ("--input-file", batch[0], "--output-file", batch[1])
    first = run(engine, *words)
    refused = [line for line in read_lines(batch[1]) if line["response"]["status_code"] == 400]
    assert [line["response"]["body"]["error"]["message"] for line in refused] == ["too long"]
    assert [line["custom_id"] for line in refused] == ["r0"]
    second = run(engine, *words)
    assert "out.jsonl: 4 of 5 requests, 1 refused\n" in first.stderr
    assert "out.jsonl: 4 of 5 requests, 1 refused; 5 of these lines by an earlier run\n" in second.stderr
    assert engine.opened == 1
    for result in (first, second):
        assert isinstance(result.exception, MegaError)
        assert str(result.exception).startswith(
            f"{batch[1]}: 1 of 5 requests were refused: found r0: too long; hint: "
        )


def test_a_refused_request_that_was_removed_from_the_output_is_sent_again(
    engine: FakeEngine, batch: tuple[Path, Path]
) -> None:
    engine.answers = [BatchAnswer(400, {"error": {"message": "too long"}})]
    words = ("--input-file", batch[0], "--output-file", batch[1])
    run(engine, *words)
    lines = batch[1].read_text().splitlines(keepends=True)
    batch[1].write_text("".join(line for line in lines if "too long" not in line))
    result = run(engine, *words)
    assert result.exception is None
    assert "5 of 5 requests; 4 of these lines by an earlier run" in result.stderr


def test_a_request_waits_while_the_engine_is_full(engine: FakeEngine, batch: tuple[Path, Path]) -> None:
    engine.answers = [BatchAnswer(429, {}, retry_after=0.01)]
    engine.errors = [EngineOverloadedError("full", 0.01)]
    run(engine, "--input-file", batch[0], "--output-file", batch[1])
    assert len(read_lines(batch[1])) == 5


def test_a_failure_of_the_engine_leaves_its_request_for_the_next_run(
    engine: FakeEngine, batch: tuple[Path, Path]
) -> None:
    engine.answers = [BatchAnswer(500, {"error": {"message": "bug"}})]
    error = get_error(engine, "--input-file", batch[0], "--output-file", batch[1])
    assert error == "r0: failed: found bug; hint: run the same command again: it sends only these"
    assert len(read_lines(batch[1])) == 4
    run(engine, "--input-file", batch[0], "--output-file", batch[1])
    assert len(read_lines(batch[1])) == 5


def test_a_dead_engine_ends_the_run_after_the_finished_lines_are_written(
    engine: FakeEngine, batch: tuple[Path, Path]
) -> None:
    words = ("--input-file", batch[0], "--output-file", batch[1], "--max-concurrency", 1)
    empty = BatchAnswer(200, {})
    engine.answers = [empty, empty, BatchAnswer(503, {"error": {"message": "gone"}})]
    assert "r2: the engine stopped: found gone" in get_error(engine, *words)
    assert [line["custom_id"] for line in read_lines(batch[1])] == ["r0", "r1"]
    engine.errors = [EngineDeadError("killed")]
    assert "the engine stopped: found killed" in get_error(engine, *words)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ":1: is not JSON: found unexpected end of data, wanted one object a line; hint: {"),
        ("[]", ":1: is not a JSON object: found list; hint: {"),
        ("{}", ":1: custom_id: found None"),
        ('{"custom_id": "a", "url": "/v1/x"}', ":1: url: found /v1/x, wanted /v1/completions | "),
        ('{"custom_id": "a", "url": "/v1/completions", "method": "GET"}', ":1: method: found GET"),
        ('{"custom_id": "a", "url": "/v1/completions"}', ":1: body: found NoneType"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {"stream": true}}', ":1: body.stream"),
        (
            '{"custom_id": "a", "url": "/v1/completions", "body": {}}\n' * 2,
            ":2: custom_id is used twice: found a, wanted one that no other line has; hint: a-2",
        ),
        ("\n", ': has no requests; hint: {"custom_id": "a", '),
    ],
)
def test_a_wrong_batch_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(line)
    with pytest.raises(FormatError) as caught:
        read_batch(file)
    assert f"{file}{words}" in str(caught.value)


def test_samples_of_a_file_of_prompts_are_in_the_default_output(engine: FakeEngine, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("abc\nstop it\n\nabcdefghijklmnop\n")
    words = [
        "--sample-input-file",
        file,
        "--out-seq-length",
        "4",
        "--top_k",
        "5",
        "--top_p",
        "0.9",
        "--recompute",
    ]
    result = run(engine, *words)
    assert "prompts.txt.out: 2 of 4 requests, 2 refused\n" in result.stderr
    assert "2 of 4 requests were refused: found sample-" in str(result.exception)
    lines = {line["custom_id"]: line for line in read_lines(tmp_path / "prompts.txt.out")}
    first = lines["sample-0"]
    assert (first["prompt"], first["text"], first["length"], first["finished"]) == ("abc", " w0 w1", 2, True)
    assert (lines["sample-1"]["length"], lines["sample-1"]["finished"]) == (6, True)
    assert lines["sample-2"]["error"] == "empty prompt"
    assert lines["sample-3"]["error"] == "the prompt has 16 tokens and the context 12"
    params = {len(request.prompt_token_ids): request.params for request in engine.requests}
    assert isinstance(params[3], SamplingParams)
    assert (params[3].max_tokens, params[3].top_k, params[3].top_p, params[3].temperature) == (4, 5, 0.9, 1.0)
    assert params[7].max_tokens == 4
    result = run(engine, *words)
    assert "2 of 4 requests, 2 refused; 4 of these lines by an earlier run" in result.stderr
    assert isinstance(result.exception, MegaError)
    assert engine.opened == 1
    error = get_error(engine, *words, "--seed", "9", "--greedy")
    assert error == (
        f"--sample-output-file: was written by a run with other options: found --temperature 1.0 --seed 1234 "
        f"at {file}.out:1, wanted --greedy --seed 9; hint: --temperature 1.0 --seed 1234, or name another "
        "file"
    )
    file.write_text("another\n" * 4)
    assert "other requests or options: sample-" in get_error(engine, *words)


def test_prompts_are_read_from_json_lines(engine: FakeEngine, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "ab"}\n{"text": "abc"}\n{"prompt": {"text": "abcd"}}\n')
    run(engine, "--sample-input-file", file, "--sample-output-file", tmp_path / "b.jsonl", "--greedy")
    assert sorted(len(request.prompt_token_ids) for request in engine.requests) == [2, 3, 4]
    assert all(isinstance(r.params, SamplingParams) and r.params.temperature == 0 for r in engine.requests)
    file.write_text('{"prompt": 1}\n')
    error = get_error(engine, "--sample-input-file", file, "--sample-output-file", tmp_path / "c.jsonl")
    assert f"{file}:1: has no prompt" in error
    for content, words in (("", ": has no prompts: wanted "), ("nope", ":1: is not JSON: found ")):
        file.write_text(content)
        error = get_error(engine, "--sample-input-file", file, "--sample-output-file", tmp_path / "c.jsonl")
        assert error.startswith(f"{file}{words}")
        assert 'wanted {"prompt": "..."}' in error


def test_unconditional_samples_begin_with_the_end_of_document(engine: FakeEngine, tmp_path: Path) -> None:
    run(engine, "--num-samples", "20", "--genfile", tmp_path / "a.jsonl")
    assert {request.prompt_token_ids for request in engine.requests} == {(0,)}
    seeds = {request.params.seed for request in engine.requests if isinstance(request.params, SamplingParams)}
    assert len(seeds) == 20
    assert None not in seeds
    lines = read_lines(tmp_path / "a.jsonl")
    assert {"text", "length", "finished"} <= lines[0].keys()
    assert "prompt" not in lines[0]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "generate: has nothing to do: wanted --input-file | --sample-input-file | --num-samples"),
        (["--num-samples", "1"], "--genfile: missing: --num-samples needs it"),
        (["--num-samples", "1", "--input-file", __file__], "--input-file, --num-samples: exclude each other"),
        (
            ["--num-samples", "1", "--genfile", "no/such/folder.jsonl"],
            "--genfile: is in a folder that does not",
        ),
    ],
)
def test_flags_that_mean_nothing_are_one_line(engine: FakeEngine, words: list[str], error: str) -> None:
    assert error in get_error(engine, *words)
    assert engine.opened == 0


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/dev/full", ": is not a regular file: found /dev/full, wanted the path of a file"),
        ("/proc/x.out", ": is in a folder that cannot be written: found /proc: No such file or directory"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_engine_starts(
    engine: FakeEngine, batch: tuple[Path, Path], path: str, words: str
) -> None:
    error = get_error(engine, "--input-file", batch[0], "--output-file", path)
    assert error.startswith(f"--output-file{words}")
    assert "remove" not in error
    assert engine.opened == 0


def test_ctrl_c_says_how_to_resume(engine: FakeEngine, batch: tuple[Path, Path]) -> None:
    async def answer(url: str, body: Mapping[str, Any]) -> BatchAnswer:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(1)
        return BatchAnswer(200, {})

    engine.answer = answer  # type: ignore[method-assign]
    words = ["--load", "run", "--input-file", str(batch[0]), "--output-file", str(batch[1])]
    with pytest.raises(click.Abort) as caught:
        engine.command().main(words, standalone_mode=False)
    assert str(caught.value.__cause__) == "run the same command again to resume"


def test_a_run_that_cannot_start_leaves_no_file(batch: tuple[Path, Path]) -> None:
    engine = FakeEngine()
    engine.errors = [ConfigError("--load", "no checkpoint")] * 5
    assert "no checkpoint" in get_error(engine, "--input-file", batch[0], "--output-file", batch[1])
    assert not batch[1].exists()


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with ResumableLines("--output-file", path, {}):
        with (
            pytest.raises(ConfigError, match="another run writes it"),
            ResumableLines("--output-file", path, {}),
        ):
            pass
        assert path.exists()


def test_random_runs_with_interruptions_end_with_every_line_once(tmp_path: Path) -> None:
    rng = random.Random(3)
    for trial in range(150):
        path = tmp_path / f"{trial}.jsonl"
        items = [WorkItem(f"r{i}", request_id("x", i), i) for i in range(rng.randrange(1, 30))]
        ids = {item.custom_id: item.id for item in items}
        interruptions = rng.randrange(4)

        async def process(item: WorkItem[int], stop_at: int) -> dict[str, Any] | None:
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
            if rng.randrange(30) == stop_at:
                raise KeyError(item.custom_id)
            return {"id": item.id, "custom_id": item.custom_id}

        for attempt in range(interruptions + 1):
            stop_at = -1 if attempt == interruptions else 0
            with ResumableLines("--output-file", path, ids) as output, suppress(KeyError):
                asyncio.run(
                    run_items(
                        items,
                        output,
                        lambda item, stop=stop_at: process(item, stop),
                        max_concurrency=rng.randrange(1, 9),
                        group_seconds=0.0,
                    )
                )
            if attempt < interruptions and path.exists():
                content = path.read_bytes()
                path.write_bytes(content[: max(len(content) - rng.choice((0, 0, 1, 5)), 0)])
        assert sorted(line["custom_id"] for line in read_lines(path)) == sorted(ids)


class FakeEngineProcess(FakeEngine):
    """The client of an engine process; embeds every text as [3, 4]."""

    requests_of_all: ClassVar[list[EngineRequest]] = []
    failure = ""

    def __init__(self, settings: object) -> None:
        super().__init__()
        self.model = replace(self.model, max_seq_len=4096, hidden_size=2)

    async def start(self) -> None:
        self.requests_of_all.clear()

    async def wait_status(self, *statuses: str) -> str:
        return "ready"

    async def close(self) -> None:
        self.requests_of_all.extend(self.requests)

    async def generate(self, request: EngineRequest) -> AsyncIterator[SequenceOutput]:
        self.requests.append(request)
        yield SequenceOutput(
            request_id=request.request_id,
            text="hi",
            finish_reason="stop",
            embedding=(3.0, 4.0) if request.params.max_tokens == 0 else (),
        )


def test_a_batch_has_the_options_of_the_servers_apis(
    checkpoint: Path, tokenizer: Tokenizer, batch: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = batch
    template = source.with_name("chat.jinja")
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "field_of_another_server": 1}
    bodies = {"/v1/chat/completions": chat, "/v1/embeddings": {"input": "Text"}}
    lines = [{"custom_id": url, "method": "POST", "url": url, "body": body} for url, body in bodies.items()]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr("mega_serve.process.engine_client.EngineProcessClient", FakeEngineProcess)
    words = ["--load", checkpoint, "--input-file", source, "--output-file", output, "--lenient"]
    words += ["--chat-template", template, "--pooling", "mean", "--served-model-name", "our-model"]
    result = CliRunner().invoke(offline.generate, [str(word) for word in words], standalone_mode=False)
    assert result.exception is None, result.exception
    answers = {line["custom_id"]: line["response"] for line in read_lines(output)}
    assert [answer["status_code"] for answer in answers.values()] == [200, 200]
    assert {answer["body"]["model"] for answer in answers.values()} == {"our-model"}
    requests = {request.params.max_tokens: request for request in FakeEngineProcess.requests_of_all}
    assert tokenizer.decode(requests[4].prompt_token_ids) == "<user>Hi"
    assert isinstance(requests[0].params, SamplingParams)
    assert requests[0].params.pooling == "mean"


def test_an_application_in_the_process_answers_a_batch() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        body = json.loads(message["body"])
        assert (scope["method"], scope["path"]) == ("POST", "/v1/completions")
        assert (b"authorization", b"Bearer k") in scope["headers"]
        disconnect = asyncio.ensure_future(receive())
        await asyncio.sleep(0)
        assert not disconnect.done()
        disconnect.cancel()
        status = body["status"]
        await send({"type": "http.response.start", "status": status, "headers": [(b"Retry-After", b"3")]})
        await send({"type": "http.response.body", "body": b'{"a"', "more_body": True})
        await send({"type": "http.response.body", "body": b": 1}" if status == 429 else b""})

    handler = AsgiHandler(app, {"Authorization": "Bearer k"})
    assert asyncio.run(handler("/v1/completions", {"status": 429})) == BatchAnswer(429, {"a": 1}, 3.0)
    broken = asyncio.run(handler("/v1/completions", {"status": 500}))
    assert broken.body["error"]["message"] == '{"a"'
