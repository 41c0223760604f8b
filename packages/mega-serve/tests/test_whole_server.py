"""The whole program: HTTP process, engine process and a small model, as clients and operators meet it."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from click.testing import CliRunner

from mega_model.build import load_model
from mega_model.generate import generate
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.spec import ModelSpec, gpt
from mega_schema.tokenizer.tokenizer import Tokenizer
from tests.megatron_client import text_generation_cli
from tests.serving.mixed_requests import build_mixed_request
from tests.serving.random_checkpoint import save_random_checkpoint
from tests.serving.server_program import ServerProgram, run_server, wait_until
from tests.shared_data import SHARED, needs_shared

openai = pytest.importorskip("openai")

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
SCHEMA = {
    "type": "object",
    "properties": {"town": {"enum": ["Bern", "Oslo"]}, "is_capital": {"type": "boolean"}},
    "required": ["town", "is_capital"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "visit", "parameters": SCHEMA}}
MESSAGES = [{"role": "user", "content": "Hi"}]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def wide_spec(tokenizer: Tokenizer) -> ModelSpec:
    """A small model with a context in which a chat has room."""
    vocab = tokenizer.identity.vocab_size + 2
    return gpt(layers=2, hidden=32, heads=4, vocab=vocab, max_seq_len=512, init_std=0.3, vocab_multiple=8)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, wide_spec: ModelSpec, tokenizer: Tokenizer) -> Path:
    """A run directory with one checkpoint, of iteration 7."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    folder.mkdir()
    tokenizer.save(folder / "words")
    save_random_checkpoint(folder, wide_spec, folder / "words")
    (folder / "chat.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[ServerProgram]:
    """One server for the module. It follows its run, which gets a second checkpoint in the last test."""
    flags = ("--attention", "torch", "--max-num-seqs", "32", "--chat-template", str(run / "chat.jinja"))
    with run_server(run, *flags, "--follow") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProgram) -> Iterator[Any]:
    """OpenAI's client."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as value:
        yield value


def complete(server: ServerProgram, **body: Any) -> dict[str, Any]:
    response = server.http.post("/v1/completions", json={"max_tokens": 8, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@needs_shared
def test_recorded_requests_of_megatron_get_texts_or_errors(server: ServerProgram) -> None:
    cases = json.loads((SHARED / "golden" / "server_requests.json").read_text("utf-8"))
    count = 0
    for case in cases:
        body = case.get("request")
        # test_megatron_routes compares all of them, and says which differ on purpose
        if body is None or body.get("prompts") == "<128 strings>" or body.get("stop_token", 0) is None:
            continue
        if body.get("top_p") == 1 or body.get("top_p_decay") == 1 or body.get("tokens_to_generate") is True:
            continue
        response = server.http.put("/api", json=body)
        if "error_about" in case:  # Megatron answers some of them with 200 and a text
            assert response.status_code == 400, (body, response.text)
            assert response.json()["error"]["param"] == case["error_about"]
        else:
            assert response.status_code == case["status"] == 200, (body, response.text)
            answer = response.json()
            assert answer["text"][0].startswith(body["prompts"][0]), body
            assert len(answer["segments"]) == len(answer["text"])
        count += 1
    assert count > 30


def test_the_command_line_client_of_megatron_works(server: ServerProgram) -> None:
    assert text_generation_cli(server.address, "Hello", 4).startswith("Megatron Response: \nHello")
    assert text_generation_cli(server.address, "", 4).startswith("Error 400: ")


@pytest.mark.parametrize("prompt", ["Hello", "a longer prompt, of several words: " * 4])
def test_greedy_text_is_that_of_the_plain_loop(
    server: ServerProgram, run: Path, tokenizer: Tokenizer, prompt: str
) -> None:
    saved = Checkpoint.open(run)
    model = load_model(saved.spec, saved.model_slab, dtype=torch.float32, device="cpu")
    ids = tokenizer.encode(prompt)
    limit = tokenizer.identity.vocab_size
    expected = generate(model, [ids], new_tokens=40, top_k=1, vocab_limit=limit).rows[0]
    answer = complete(server, prompt=ids, max_tokens=40, temperature=0, ignore_eos=True)
    assert answer["choices"][0]["text"] == tokenizer.decode(expected[len(ids) :])


def test_a_seed_gives_the_same_text_alone_and_among_thirty_requests(server: ServerProgram) -> None:
    body = {"prompt": "Once", "max_tokens": 24, "seed": 5, "temperature": 1.0, "ignore_eos": True}
    alone = complete(server, **body)["choices"][0]["text"]
    with ThreadPoolExecutor(30) as pool:
        others = [
            pool.submit(complete, server, prompt="x" * i, max_tokens=5 + i, temperature=1.0)
            for i in range(1, 30)
        ]
        together = pool.submit(complete, server, **body).result()["choices"][0]["text"]
        assert all(request.result()["choices"] for request in others)
    assert together == alone
    assert complete(server, **{**body, "seed": 6})["choices"][0]["text"] != alone


def test_the_client_of_openai_completes_streams_and_scores(server: ServerProgram, client: Any) -> None:
    [model] = client.models.list().data
    assert model.id == "tiny"
    settings = {"model": model.id, "prompt": "Hi", "max_tokens": 12, "seed": 1, "logprobs": 2}
    whole = client.completions.create(**settings)
    assert whole.usage.completion_tokens <= 12
    assert len(whole.choices[0].logprobs.token_logprobs) == whole.usage.completion_tokens
    parts = list(client.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
    assert parts[-1].usage == whole.usage
    scored = client.completions.create(model=model.id, prompt="Hello", max_tokens=0, echo=True, logprobs=0)
    assert scored.choices[0].logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in scored.choices[0].logprobs.token_logprobs[1:])
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="Hi")


def test_the_client_of_openai_chats_with_the_template_of_the_flag(client: Any) -> None:
    settings = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 12, "seed": 1}
    whole = client.chat.completions.create(**settings, logprobs=True, top_logprobs=3)
    assert whole.usage.prompt_tokens == len("user: Hi\nassistant:")
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 3
    parts = client.chat.completions.create(**settings, stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content


def test_a_random_model_writes_valid_json_calls_and_responses(client: Any) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "town", "schema": SCHEMA}}
    chat = client.chat.completions.create
    for seed in range(2):
        answer = chat(model="tiny", messages=MESSAGES, response_format=format, seed=seed, max_tokens=300)
        value = json.loads(answer.choices[0].message.content)
        assert value["town"] in ("Bern", "Oslo")
        assert isinstance(value["is_capital"], bool)
    choice = {"type": "function", "function": {"name": "visit"}}
    answer = chat(model="tiny", messages=MESSAGES, tools=[TOOL], tool_choice=choice, seed=1, max_tokens=300)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "visit"
    assert json.loads(call.function.arguments).keys() == SCHEMA["properties"].keys()
    response = client.responses.create(model="tiny", input="Hi", max_output_tokens=8, store=False)
    assert response.usage.output_tokens <= 8
    events = list(
        client.responses.create(model="tiny", input="Hi", max_output_tokens=8, store=False, stream=True)
    )
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")


def test_a_request_that_forbids_every_token_is_a_400(server: ServerProgram) -> None:
    body = {"prompt": "Hi", "response_format": {"type": "json_object"}, "allowed_token_ids": [0]}
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == "no_token_allowed"


def test_metrics_count_the_tokens_and_requests_that_clients_were_told(server: ServerProgram) -> None:
    before = server.wait_idle()
    usages = [complete(server, prompt="abc" * i, ignore_eos=True)["usage"] for i in range(1, 6)]
    assert server.http.post("/v1/completions", json={"prompt": 5}).status_code == 400
    after = server.wait_idle()
    change = {name: after[name] - before.get(name, 0) for name in after}
    assert change["generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages) == 40
    assert change["prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
    assert change["request_success_total"] == 5
    assert change["e2e_request_latency_seconds_count"] == 5  # not the refused one
    assert change["time_to_first_token_seconds_count"] == 5
    for name in ("queue", "prefill", "decode"):
        assert change[f"request_{name}_time_seconds_count"] == 5
    assert change["request_prefill_time_seconds_sum"] > 0
    assert change["request_time_per_output_token_seconds_count"] == 5
    assert change["iteration_tokens_total_count"] >= 8
    # tokens that come together have no time between them
    assert 0 < change["inter_token_latency_seconds_count"] <= 5 * 7


REFUSED_BODIES: dict[str, tuple[str, bytes]] = {
    "a million sequences": ("/v1/completions", b'{"prompt": "a", "n": 1000000}'),
    "all log-probabilities": ("/v1/completions", b'{"prompt": "a", "logprobs": 1000000000}'),
    "more tokens than memory": ("/v1/completions", b'{"prompt": "a", "max_tokens": 9223372036854775807}'),
    "a million beams": ("/api", b'{"prompts": ["a"], "tokens_to_generate": 2, "beam_width": 1000000}'),
    "more dimensions than memory": ("/v1/embeddings", b'{"input": "a", "dimensions": 2000000000}'),
    "half a million prompts": ("/v1/completions", b'{"prompt": [%s""]}' % (b'"",' * 500_000)),
    "half a million embeddings": ("/v1/embeddings", b'{"input": [%s""]}' % (b'"",' * 500_000)),
    "prompts of a token each": ("/v1/completions", b'{"prompt": [%s[1]]}' % (b"[1]," * 400_000)),
    "a million ids": ("/v1/completions", b'{"prompt": [%s1]}' % (b"1," * 1_000_000)),
    "a long prompt": ("/v1/completions", b'{"prompt": "%s"}' % (b"a b " * 450_000)),
    "a long prompt of Megatron": (
        "/api",
        b'{"prompts": ["%s"], "tokens_to_generate": 1}' % (b"a" * 1_900_000),
    ),
    "half a million stop strings": (
        "/v1/completions",
        b'{"prompt": "a", "stop": [%s"a"]}' % (b'"b",' * 450_000),
    ),
    "biases of half a million ids": (
        "/v1/completions",
        b'{"prompt": "a", "logit_bias": {%s}}' % b",".join(b'"%d":1' % i for i in range(180_000)),
    ),
    "a long grammar": (
        "/v1/completions",
        b'{"prompt": "a", "structured_outputs": {"regex": "%s"}}' % (b"(a|b)*" * 300_000),
    ),
    "many messages": (
        "/v1/chat/completions",
        b'{"messages": [%s{"role": "user", "content": "a"}]}' % (b'{"role":"user","content":"a"},' * 60_000),
    ),
    "many unknown fields": (
        "/v1/completions",
        b'{"prompt": "a", %s}' % b",".join(b'"x%d":1' % i for i in range(180_000)),
    ),
    "deep arrays": ("/v1/completions", b'{"prompt": %s%s}' % (b"[" * 900_000, b"]" * 900_000)),
    "a long body": ("/v1/completions", b'{"prompt": "%s"}' % (b"a" * 8_000_000)),
}


def read_memory(pid: int, key: str) -> int:
    """Return a line of /proc/PID/status in MiB: VmRSS, or VmHWM, its peak."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split(f"{key}:")[1].split()[0]) // 1024


@pytest.mark.parametrize("name", REFUSED_BODIES)
def test_a_refused_request_takes_bounded_memory(server: ServerProgram, name: str) -> None:
    path, body = REFUSED_BODIES[name]
    server.wait_idle()
    family = [server.process.pid, *(child.pid for child in psutil.Process(server.process.pid).children())]
    before = {}
    for pid in family:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # forgets the peak
        before[pid] = read_memory(pid, "VmRSS")
    response = server.http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 413), response.text[:500]
    grown = {pid: read_memory(pid, "VmHWM") - size for pid, size in before.items()}
    # MiB, for a body of 2 MiB at most; the tokenizer takes up to 320 bytes for one of text
    assert max(grown.values()) <= (640 if name.startswith("a long prompt") else 192), grown
    assert server.read_metrics()["kv_cache_usage_perc"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_rows(server: ServerProgram, stream: bool) -> None:
    body = json.dumps({"prompt": "Hi", "max_tokens": 480, "n": 4, "ignore_eos": True, "stream": stream})
    request = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    )
    tokens = server.wait_idle()["generation_tokens_total"]
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(request.encode())
        wait_until(lambda: server.read_metrics()["num_requests_running"] == 4)
    metrics = server.wait_idle()
    assert metrics["kv_cache_usage_perc"] == 0
    assert metrics["generation_tokens_total"] - tokens < 4 * 480


def test_two_hundred_mixed_requests_at_once_are_all_answered(server: ServerProgram) -> None:
    rng = random.Random(1)
    requests = [build_mixed_request(rng) for _ in range(200)]

    async def send_all() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits, trust_env=False) as http:
            return await asyncio.gather(*(http.post(path, json=body) for path, body, _ in requests))

    for (path, body, status), response in zip(requests, asyncio.run(send_all()), strict=True):
        assert response.status_code == status, (path, body, response.text)
        if body.get("stream"):
            assert response.text.endswith("data: [DONE]\n\n"), response.text
            assert '"error"' not in response.text
        if "choice" in body.get("structured_outputs", {}):
            assert response.json()["choices"][0]["text"] in ("yes", "no"), response.text
    metrics = server.wait_idle()
    assert metrics["kv_cache_usage_perc"] == 0
    # the server hears of two hundred closed connections a little later than the client closes them
    wait_until(lambda: server.read_metrics()["http_connections"] <= 2)


def test_the_other_commands_work_against_the_server(server: ServerProgram, tmp_path: Path) -> None:
    from mega_serve.commands.bench import bench
    from mega_serve.commands.chat import chat
    from mega_serve.commands.complete import complete as complete_command

    result = CliRunner().invoke(complete_command, [server.address, "Hi", "--max-tokens", "4", "--seed", "1"])
    assert result.exit_code == 0, result.output
    expected = complete(server, prompt="Hi", max_tokens=4, seed=1)["choices"][0]["text"]
    assert result.stdout.removesuffix("\n") == expected.removesuffix("\n")
    words = [server.address, "Hi", "--max-tokens", "4", "--api", "megatron", "--echo"]
    result = CliRunner().invoke(complete_command, words)
    assert result.stdout.startswith("Hi"), result.output
    result = CliRunner().invoke(chat, [server.address, "--max-tokens", "4"], input="Hello\n")
    assert result.exit_code == 0, result.output
    file = tmp_path / "bench.json"
    words = ["--base-url", server.url, "--num-prompts", "8", "--input-len", "8", "--output-len", "6"]
    words += ["--ignore-eos", "--save-result", "--result-filename", str(file), "--disable-tqdm"]
    result = CliRunner().invoke(bench, words)
    assert result.exit_code == 0, result.output
    figures = json.loads(file.read_text())
    assert (figures["completed"], figures["total_output_tokens"]) == (8, 48)


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_page_streams_tokens_with_probabilities(server: ServerProgram) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        page = browser.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda entry: entry.type == "error" and problems.append(entry.text))
        page.goto(server.url)
        sync_api.expect(page.locator("#health")).to_have_text("Ready")
        page.get_by_role("textbox", name="Prompt").fill("Hello")
        page.keyboard.press("Control+Enter")
        sync_api.expect(page.locator("#status")).to_contain_text("Done")
        output = page.get_by_role("textbox", name="Generated text")
        spans = output.locator("span")
        assert spans.count() > 3
        assert all(value in "012345" for value in spans.evaluate_all("all => all.map((s) => s.dataset.p)"))
        assert problems == []
        browser.close()


def test_a_killed_engine_fails_its_requests_and_is_started_again(server: ServerProgram) -> None:
    body = {"prompt": "Hi", "max_tokens": 480, "n": 8, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        future = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=30)
        wait_until(lambda: server.read_metrics()["num_requests_running"] == 8)
        server.find_engine().kill()
        response = future.result()
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "engine_dead"
    assert response.headers["x-request-id"] in response.json()["error"]["message"]
    assert server.http.get("/health").status_code == 503
    assert server.http.post("/v1/completions", json=body).status_code == 503
    wait_until(lambda: server.http.get("/health").status_code == 200, seconds=60)
    assert complete(server, prompt="Hi", ignore_eos=True)["usage"]["completion_tokens"] == 8
    assert server.read_metrics()["engine_restarts_total"] == 1


def test_a_newer_checkpoint_is_swapped_in_while_a_request_runs(
    server: ServerProgram, run: Path, wide_spec: ModelSpec
) -> None:
    assert server.http.post("/v1/completions", json={"prompt": "a"}).headers["x-mega-iteration"] == "7"
    before = complete(server, prompt="Hello", temperature=0, ignore_eos=True)["choices"][0]["text"]
    is_stopped = threading.Event()
    lengths: list[int] = []

    def keep_running() -> None:
        while not is_stopped.is_set():
            body = {"prompt": "Hi", "max_tokens": 480, "temperature": 0, "ignore_eos": True}
            lengths.append(complete(server, **body)["usage"]["completion_tokens"])

    with ThreadPoolExecutor() as pool:
        future = pool.submit(keep_running)
        save_random_checkpoint(run, wide_spec, run / "words", iteration=9, seed=4)
        try:
            wait_until(lambda: server.http.get("/v1/models").headers["x-mega-iteration"] == "9")
            time.sleep(0.2)
        finally:
            is_stopped.set()
        future.result()
    assert set(lengths) == {480}
    assert server.read_metrics()["checkpoint_iteration"] == 9
    after = complete(server, prompt="Hello", temperature=0, ignore_eos=True)["choices"][0]["text"]
    assert after != before  # nothing of the older model is left in the prefix cache


@pytest.mark.long
def test_ranks_that_the_server_starts_listen_on_the_loopback_device_alone(run: Path) -> None:
    with run_server(run, "--attention", "torch", "--tp", "2") as server:
        answer = complete(server, prompt="Hello", temperature=0, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 8
        processes = psutil.Process(server.process.pid).children(recursive=True)
        assert len(processes) == 2  # the engine, which is rank 0, and its worker
        for process in [psutil.Process(server.process.pid), *processes]:
            for connection in process.net_connections("inet"):
                assert connection.laddr.ip in ("127.0.0.1", "::1"), connection
        server.process.terminate()
        assert server.process.wait(20) == 0
        assert psutil.wait_procs(processes, timeout=5)[1] == []
