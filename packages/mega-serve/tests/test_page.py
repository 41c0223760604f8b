"""The web page in headless Chromium, against a small OpenAI-compatible server with canned answers."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from mega_serve.http.auth import ENVIRONMENT, KeyRing, load_keys
from mega_serve.http.errors import HttpError
from mega_serve.http.responses import error_response
from mega_serve.web.page_routes import build_router

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
Page = Any
expect = sync_api.expect

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

CHECKS = Path(__file__).with_name("page_checks.js").read_text("utf-8").partition("\n")[2].strip()
PROMPT = "The capital of France is"
# (token, its text in the stream, log-probability); a face of two tokens, the stop token has no text
ANSWER = [
    (" Paris", " Paris", -0.05),
    (",", ",", -0.4),
    (" a", " a", -1.2),
    (" city", " city", -2.5),
    (" of", " of", -0.01),
    (" light", " light", -3.8),
    (".", ".", -0.3),
    ("\n", "\n", -0.9),
    ("It", "It", -1.5),
    (" smiles", " smiles", -6.0),
    (" ", " ", -0.02),
    ("bytes:\\xf0\\x9f", "", -0.7),
    ("bytes:\\x99\\x82", "\N{SLIGHTLY SMILING FACE}", -0.1),
    ("<eos>", "", -0.2),
]
ANSWER_TEXT = "".join(text for _, text, _ in ANSWER)
HOSTILE_TEXT = "<img src=x onerror=\"document.title='hit'\"><script>document.title='hit'</script>&amp;"
ALTERNATIVES = {" London": -1.9, " Rome": -3.1, "<b>bold</b>": -4.4, "bytes:\\xc3": -5.0}


@dataclass
class FakeServer:
    """What tests set and read: the answers' form, and the requests that came."""

    chat_template: str | None = "{{ messages }}"
    max_model_len: int = 1024
    wants_key: bool = False
    ring: KeyRing = field(default_factory=KeyRing)
    delay: float = 0.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    disconnects: int = 0
    origin: str = ""

    def answer_tokens(self, prompt: str) -> list[tuple[str, str, float]]:
        if "HOSTILE" in prompt:
            return [(HOSTILE_TEXT, HOSTILE_TEXT, -2.0)]
        if "NOTHING" in prompt:
            return []
        return [(" word", " word", -1.0)] * 500 if "LONG" in prompt else ANSWER

    async def stream(self, body: dict[str, Any], is_chat: bool) -> AsyncIterator[str]:
        prompt = body["messages"][-1]["content"] if is_chat else body["prompt"]
        tokens = self.answer_tokens(prompt)[: body["max_tokens"]]
        build = _chat_chunk if is_chat else _completion_chunk
        for number, token in enumerate(tokens):
            try:
                await asyncio.sleep(self.delay)
            except asyncio.CancelledError:
                self.disconnects += 1
                raise
            if "CUT" in prompt and number == 3:
                yield _event({"error": {"message": "the engine died", "type": "server_error", "code": 500}})
                return
            yield ": keep-alive\n\n" + _event(build(token, has_logprobs="logprobs" in body))
        reason = "stop" if len(tokens) < body["max_tokens"] else "length"
        choice = {"index": 0, "finish_reason": reason} | ({"delta": {}} if is_chat else {"text": ""})
        yield _event({"choices": [choice]})
        yield _event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": len(tokens)}})
        yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _completion_chunk(token: tuple[str, str, float], *, has_logprobs: bool) -> dict[str, Any]:
    word, text, logprob = token
    top = {word: logprob} | ALTERNATIVES
    logprobs = {"tokens": [word], "token_logprobs": [logprob], "top_logprobs": [top], "text_offset": [0]}
    return {"choices": [{"index": 0, "text": text, "logprobs": logprobs if has_logprobs else None}]}


def _chat_chunk(token: tuple[str, str, float], *, has_logprobs: bool) -> dict[str, Any]:
    word, text, logprob = token
    top = [{"token": name, "logprob": value} for name, value in ({word: logprob} | ALTERNATIVES).items()]
    content = [{"token": word, "logprob": logprob, "bytes": None, "top_logprobs": top}]
    logprobs = {"content": content} if has_logprobs else None
    return {"choices": [{"index": 0, "delta": {"content": text}, "logprobs": logprobs}]}


def build_app(fake: FakeServer) -> FastAPI:
    def require_key(request: Request) -> None:
        fake.ring.authenticate(request.headers)

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HttpError)
        return error_response(error)

    app = FastAPI(openapi_url=None, exception_handlers={HttpError: refuse})
    app.include_router(build_router(), dependencies=[Depends(require_key)])

    @app.get("/health")
    async def get_health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models", dependencies=[Depends(require_key)])
    async def get_models(request: Request) -> Response:
        if fake.wants_key and request.headers.get("authorization") != "Bearer sk-secret":
            return JSONResponse({"error": {"message": "no API key was sent", "code": None}}, 401)
        model = {"id": "gpt-124m", "object": "model", "max_model_len": fake.max_model_len}
        return JSONResponse({"data": [model]})

    @app.get("/tokenizer_info")
    async def get_tokenizer_info() -> dict[str, Any]:
        return {"eos_token": "<eos>", "chat_template": fake.chat_template}

    @app.post("/tokenize")
    async def post_tokenize(request: Request) -> dict[str, Any]:
        body = await request.json()
        texts = [body["prompt"]] if "prompt" in body else [row["content"] for row in body["messages"]]
        return {"count": sum(len(text.split()) for text in texts), "max_model_len": fake.max_model_len}

    @app.post("/v1/completions", dependencies=[Depends(require_key)])
    @app.post("/v1/chat/completions")
    async def post_completions(request: Request) -> Response:
        body = await request.json()
        fake.bodies.append(body)
        fake.keys.append(request.headers.get("authorization"))
        if body.get("prompt") == "BUSY" and len(fake.bodies) == 1:
            error = {"message": "the queue is full: 64 of 64 requests", "code": "queue_full", "param": None}
            return JSONResponse({"error": error}, 429, {"Retry-After": "1", "x-request-id": "req-7"})
        is_chat = request.url.path.endswith("/chat/completions")
        return StreamingResponse(fake.stream(body, is_chat), media_type="text/event-stream")

    return app


@pytest.fixture(scope="module")
def running_server() -> Iterator[FakeServer]:
    fake = FakeServer()
    listener = socket.create_server(("127.0.0.1", 0))
    fake.origin = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(build_app(fake), log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield fake
    server.should_exit = True
    thread.join()


@pytest.fixture
def server(running_server: FakeServer) -> FakeServer:
    """The running server as if nobody had used it."""
    fresh = FakeServer(origin=running_server.origin)
    running_server.__dict__.update(fresh.__dict__)
    return running_server


@pytest.fixture(scope="module")
def tab(running_server: FakeServer) -> Iterator[tuple[Page, list[str]]]:
    """A browser's page, and its problems: errors, violations of the policy, requests to other origins."""
    with sync_api.sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        page = browser.new_page()
        page.set_default_timeout(5_000)
        problems: list[str] = []
        origin = running_server.origin + "/"
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: _note_console(message, problems))
        page.on("request", lambda sent: sent.url.startswith(origin) or problems.append(sent.url))
        page.goto(origin)
        yield page, problems
        browser.close()


@pytest.fixture
def problems(tab: tuple[Page, list[str]]) -> list[str]:
    tab[1].clear()
    return tab[1]


@pytest.fixture
def page(tab: tuple[Page, list[str]], server: FakeServer, problems: list[str]) -> Iterator[Page]:
    """The page as on a first visit. Any problem fails the test."""
    page = tab[0]
    page.set_viewport_size({"width": 1280, "height": 800})
    page.emulate_media(color_scheme="light")
    page.mouse.move(0, 0)
    page.evaluate("localStorage.clear(); sessionStorage.clear()")
    page.goto(server.origin)
    expect(page.locator("#health")).to_have_text("Ready")
    yield page
    page.context.set_offline(False)
    assert problems == []


def _note_console(message: Any, problems: list[str]) -> None:
    # Chromium reports every status of 400 and more itself
    if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
        problems.append(message.text)


def send(page: Page, prompt: str = PROMPT) -> None:
    page.get_by_role("textbox", name="Prompt").fill(prompt)
    page.keyboard.press("Control+Enter")


def output_of(page: Page) -> Any:
    return page.get_by_role("textbox", name="Generated text")


def run_check(page: Page, name: str) -> list[Any]:
    """Run a function of page_checks.js in the page."""
    faults: list[Any] = page.evaluate(f"{CHECKS}.{name}()")
    return faults


def test_streamed_tokens_are_coloured_and_counted(page: Page, server: FakeServer) -> None:
    send(page)
    expect(page.locator("#status")).to_have_text("Done: the text ended")
    assert output_of(page).evaluate("element => element.textContent") == ANSWER_TEXT
    classes = output_of(page).locator("span").evaluate_all("spans => spans.map((span) => span.dataset.p)")
    assert classes == list("012304122502")  # the two tokens of the face are one span
    assert page.locator("[data-figure=prompt]").inner_text() == "5"
    assert page.locator("[data-figure=output]").inner_text() == str(len(ANSWER))
    assert page.locator("[data-figure=first]").inner_text().endswith(" ms")
    assert server.bodies == [
        {"model": "gpt-124m", "prompt": PROMPT, "max_tokens": 128, "temperature": 0.8, "top_p": 0.95}
        | {"logprobs": 5, "stream": True, "stream_options": {"include_usage": True}}
    ]


def test_an_alternative_is_shown_on_hover_and_continues_from_there(page: Page, server: FakeServer) -> None:
    send(page)
    expect(page.locator("#status")).to_contain_text("Done")
    output_of(page).locator("span").nth(3).hover()
    card = page.get_by_role("dialog", name="Token probability")
    expect(card.locator(".card-head")).to_have_text("·city8.21 %ln P = −2.500")
    rows = card.get_by_role("listitem").all_inner_texts()
    assert [row.split() for row in rows] == [
        *(["·London", "15.0", "%"], ["·city", "8.21", "%"], ["·Rome", "4.50", "%"]),
        *(["<b>bold</b>", "1.23", "%"], ["\\xc3", "0.67", "%"]),
    ]
    expect(card.get_by_role("button", name="city, 8.21 %, generated")).to_be_disabled()
    expect(card.get_by_role("button", name="part of a character")).to_be_disabled()
    card.get_by_role("button", name="Continue from space Rome").click()
    expect(page.locator("#status")).to_contain_text("Done")
    assert server.bodies[1]["prompt"] == PROMPT + " Paris, a Rome"
    assert output_of(page).evaluate("element => element.textContent") == " Paris, a Rome" + ANSWER_TEXT
    assert output_of(page).locator(".chosen").all_inner_texts() == [" Rome"]
    expect(card).to_be_hidden()


def test_the_keyboard_alone_reaches_an_alternative(page: Page, server: FakeServer) -> None:
    page.keyboard.type(PROMPT)  # the prompt has the focus
    page.keyboard.press("Control+Enter")
    expect(page.locator("#status")).to_contain_text("Done")
    page.keyboard.press("Tab")
    expect(output_of(page)).to_be_focused()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#announcement")).to_have_text("space a, 30.1 %")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Continue from space London")).to_be_focused()
    page.keyboard.press("Escape")
    expect(output_of(page)).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_contain_text("Done")
    assert [body["prompt"] for body in server.bodies] == [PROMPT, PROMPT + " Paris, Rome"]


def test_stop_ends_the_request_and_continue_resumes_it(page: Page, server: FakeServer) -> None:
    server.delay = 0.02
    send(page, "LONG")
    expect(output_of(page)).to_contain_text(" word word word")
    expect(page.get_by_role("button", name="Stop")).to_be_enabled()
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_have_text("Stopped")
    text = output_of(page).evaluate("element => element.textContent")
    deadline = time.monotonic() + 5
    while server.disconnects == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.disconnects == 1
    server.delay = 0
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#status")).to_have_text("Done: max tokens reached")
    assert server.bodies[1]["prompt"] == "LONG" + text
    assert output_of(page).evaluate("element => element.textContent") == text + 128 * " word"


def test_a_chat_keeps_its_turns_and_branches(page: Page, server: FakeServer) -> None:
    page.get_by_role("tab", name="Chat").click()
    for message in ("Hello", "More"):
        page.get_by_role("textbox", name="Message", exact=True).fill(message)
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#status")).to_contain_text("Done")
    answer = {"role": "assistant", "content": ANSWER_TEXT}
    messages = [{"role": "user", "content": "Hello"}, answer, {"role": "user", "content": "More"}]
    assert server.bodies[1]["messages"] == messages
    assert (server.bodies[1]["logprobs"], server.bodies[1]["top_logprobs"]) == (True, 5)
    page.get_by_role("textbox", name="Assistant").first.locator("span").nth(1).hover()
    page.get_by_role("button", name="Continue from space London").click()
    expect(page.locator("#status")).to_contain_text("Done")
    prefix = {"role": "assistant", "content": " Paris London"}
    assert server.bodies[2]["messages"] == [messages[0], prefix]
    assert server.bodies[2]["continue_final_message"] is True
    assert page.get_by_role("article").count() == 2


def test_a_short_context_lowers_max_tokens_instead_of_refusing_the_default(
    page: Page, server: FakeServer
) -> None:
    server.max_model_len = 9
    page.reload()
    expect(page.locator("#context-length")).to_have_text("9 tokens of context")
    send(page)
    expect(page.locator("#status")).to_have_text("Done: the context is full")
    page.get_by_role("tab", name="Chat").click()
    page.get_by_role("textbox", name="Message", exact=True).fill("Hello you")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#status")).to_have_text("Done: the context is full")
    page.get_by_role("button", name="Clear").click()
    page.get_by_label("Max tokens").fill("3")  # fits
    page.get_by_role("textbox", name="Message", exact=True).fill("Hello you")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#status")).to_have_text("Done: max tokens reached")
    assert [body["max_tokens"] for body in server.bodies] == [9 - 5, 9 - 2, 3]


def test_a_click_on_a_tab_goes_to_its_input_and_leaves_no_status_of_the_other(page: Page) -> None:
    send(page)
    expect(page.locator("#status")).to_contain_text("Done")
    page.get_by_role("tab", name="Chat").click()
    expect(page.get_by_role("textbox", name="Message", exact=True)).to_be_focused()
    expect(page.locator("#status")).to_have_text("")
    expect(page.locator("[data-figure=output]")).to_have_text("–")
    page.get_by_role("tab", name="Chat").press("ArrowLeft")
    expect(page.get_by_role("tab", name="Prompt")).to_be_focused()  # arrow keys walk over the tabs


@pytest.mark.parametrize("mode", ["Prompt", "Chat"])
def test_an_answer_without_text_says_so(page: Page, mode: str) -> None:
    page.get_by_role("tab", name=mode).click()
    box = page.get_by_role("textbox", name="Prompt" if mode == "Prompt" else "Message", exact=True)
    view = output_of(page) if mode == "Prompt" else page.get_by_role("textbox", name="Assistant").first
    shown = "element => getComputedStyle(element, '::before').content"
    box.fill("NOTHING")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#status")).to_have_text("Done: the answer is empty")
    assert view.evaluate(shown) == '"empty answer"'
    box.fill("Hello")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#status")).to_have_text("Done: the text ended")
    last = output_of(page) if mode == "Prompt" else page.get_by_role("textbox", name="Assistant").last
    assert last.evaluate(shown) == "none"
    page.get_by_role("button", name="Clear").click()
    page.locator("#history").get_by_role("button", name="NOTHING").click()
    restored = output_of(page) if mode == "Prompt" else page.get_by_role("textbox", name="Assistant").first
    assert restored.evaluate(shown) == '"empty answer"'


def test_chat_is_off_without_a_template_and_says_why(page: Page, server: FakeServer) -> None:
    server.chat_template = None
    page.reload()
    reason = "Chat is off: no chat template. Start the server with --chat-template FILE."
    expect(page.get_by_text(reason)).to_be_visible()
    page.get_by_role("tab", name="Chat").click(force=True)
    expect(page.get_by_role("tabpanel", name="Prompt")).to_be_visible()


def test_a_refused_request_shows_the_reason_and_counts_down(page: Page, server: FakeServer) -> None:
    send(page, "BUSY")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("429 Too Many Requests")
    expect(alert).to_contain_text("the queue is full: 64 of 64 requests")
    expect(alert).to_contain_text("code queue_full · request req-7")
    expect(alert.get_by_role("button", name="Retry in 1 s")).to_be_disabled()
    alert.get_by_role("button", name="Retry", exact=True).click()
    expect(page.locator("#status")).to_contain_text("Done")
    expect(alert).to_be_hidden()
    assert [body["prompt"] for body in server.bodies] == ["BUSY", "BUSY"]


@pytest.mark.long
def test_an_error_within_the_stream_keeps_the_text(page: Page) -> None:
    send(page, "CUT")
    expect(page.get_by_role("alert")).to_contain_text("the engine died")
    assert output_of(page).evaluate("element => element.textContent") == " Paris, a"


@pytest.mark.long
def test_a_server_that_is_gone_is_named(page: Page) -> None:
    page.context.set_offline(True)
    send(page)
    expect(page.get_by_role("alert")).to_contain_text("The server does not answer.")
    expect(page.locator("#output-placeholder")).to_be_visible()


@pytest.mark.parametrize("mode", ["Prompt", pytest.param("Chat", marks=pytest.mark.long)])
def test_text_of_the_model_and_of_the_user_never_becomes_html(page: Page, mode: str) -> None:
    page.get_by_role("tab", name=mode).click()
    name = "Message" if mode == "Chat" else "Prompt"
    page.get_by_role("textbox", name=name, exact=True).fill("HOSTILE " + HOSTILE_TEXT)
    page.keyboard.press("Control+Enter")
    expect(page.locator("#status")).to_contain_text("Done")
    tokens = page.locator(".tokens:visible")
    assert tokens.evaluate("element => element.textContent") == HOSTILE_TEXT
    tokens.locator("span").first.hover()
    expect(page.locator("#token-card")).to_contain_text("<b>bold</b>")
    expect(page.locator("#history")).to_contain_text("<img src=x onerror=")
    assert page.locator("img").count() == 1  # the logo
    assert page.locator("body script, body b").count() == 0
    assert page.title() == "mega-serve"


def test_the_policy_itself_refuses_html_from_strings(page: Page, problems: list[str]) -> None:
    refusal = page.evaluate(
        "() => { try { document.body.innerHTML = '<b>x</b>'; } catch (error) { return error.name; } }"
    )
    assert refusal == "TypeError"
    assert [
        text for text in problems if "TrustedHTML" in text
    ]  # and the page's own problems are seen like it
    problems.clear()


@pytest.mark.long
def test_settings_are_remembered_and_sent_and_the_key_is_not_stored(page: Page, server: FakeServer) -> None:
    page.get_by_role("button", name="Greedy").click()
    page.get_by_label("Max tokens").fill("7")
    page.get_by_label("Top-k").fill("40")
    page.get_by_label("Repetition").fill("1.1")
    page.get_by_label("Seed").fill("3")
    page.get_by_label("Stop strings").fill("END\n\\n\\n")
    page.get_by_label("Show token probabilities").uncheck()
    page.get_by_label("API key").fill("sk-secret")
    page.reload()
    send(page)
    expect(page.locator("#status")).to_have_text("Done: max tokens reached")
    assert server.bodies == [
        {"model": "gpt-124m", "prompt": PROMPT, "max_tokens": 7, "temperature": 0, "top_k": 40}
        | {"repetition_penalty": 1.1, "seed": 3, "stop": ["END", "\n\n"]}
        | {"stream": True, "stream_options": {"include_usage": True}}
    ]
    assert server.keys == ["Bearer sk-secret"]
    assert "sk-secret" not in page.evaluate("JSON.stringify(localStorage)")
    page.get_by_label("Top-p").fill("2")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_label("Top-p")).to_be_focused()
    assert len(server.bodies) == 1


@pytest.mark.long
def test_a_server_with_keys_is_ready_once_the_key_is_typed(page: Page, server: FakeServer) -> None:
    server.wants_key = True
    page.reload()
    expect(page.locator("#health")).to_have_text("API key needed")
    page.get_by_label("API key").fill("sk-secret")
    page.keyboard.press("Tab")
    expect(page.locator("#health")).to_have_text("Ready")
    expect(page.get_by_label("Model")).to_have_value("gpt-124m")


def test_the_password_of_the_page_is_the_key_of_its_requests(page: Page, server: FakeServer) -> None:
    key = "k" * 32
    server.ring = load_keys(None, {ENVIRONMENT: key})
    credentials = {"username": "any", "password": key}
    with page.context.browser.new_context(http_credentials=credentials) as context:  # as typed by a user
        locked_page = context.new_page()
        locked_page.goto(server.origin)
        expect(locked_page.locator("#health")).to_have_text("Ready")
        expect(locked_page.get_by_label("API key")).to_have_value("")
        send(locked_page)
        expect(locked_page.locator("#status")).to_have_text("Done: the text ended")
    assert [word.partition(" ")[0] for word in server.keys if word] == ["Basic"]


@pytest.mark.long
def test_history_restores_prompt_and_probabilities(page: Page) -> None:
    send(page, "first")
    expect(page.locator("#status")).to_contain_text("Done")
    send(page, "LONG")
    expect(page.locator("#status")).to_contain_text("Done")
    page.locator("#history").get_by_role("button", name="first").click()
    expect(page.get_by_role("textbox", name="Prompt")).to_have_value("first")
    assert output_of(page).evaluate("element => element.textContent") == ANSWER_TEXT
    output_of(page).locator("span").first.hover()
    expect(page.locator("#token-card")).to_contain_text("95.1 %")


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.long)])
def test_text_has_contrast_and_controls_have_names(page: Page, theme: str) -> None:
    page.get_by_label("Theme").select_option(theme)
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).colorScheme") == theme
    send(page, "CUT")
    expect(page.get_by_role("alert")).to_be_visible()
    send(page)
    expect(page.locator("#status")).to_contain_text("Done")
    send(page, "CUT")
    expect(page.get_by_role("alert")).to_be_visible()
    output_of(page).locator("span").nth(1).hover()
    expect(page.locator("#token-card")).to_be_visible()
    assert run_check(page, "findAccessibilityFaults") == []
    page.get_by_role("tab", name="Chat").click()
    page.get_by_role("textbox", name="Message", exact=True).fill("Hello")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#status")).to_contain_text("Done")
    assert run_check(page, "findAccessibilityFaults") == []


@pytest.mark.long
def test_the_theme_of_the_system_is_followed(page: Page) -> None:
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light


@pytest.mark.long
def test_a_phone_shows_everything_without_scrolling_sideways(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    send(page)
    expect(page.locator("#status")).to_contain_text("Done")
    output_of(page).locator("span").nth(6).click()
    card = page.locator("#token-card").bounding_box()
    assert card["x"] >= 0
    assert card["x"] + card["width"] <= 390
    page.keyboard.press("Escape")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    expect(page.get_by_label("Max tokens")).to_be_hidden()
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_role("button", name="Close")).to_be_focused()
    page.get_by_label("Max tokens").fill("9")
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Settings")).to_be_focused()


@pytest.mark.long
def test_nothing_moves_while_text_streams_or_an_error_comes(page: Page, server: FakeServer) -> None:
    def boxes() -> list[Any]:
        selectors = ("#prompt", "#output", "#send", "#stop", "#status", "#figures", "#sidebar")
        return [page.locator(selector).bounding_box() for selector in selectors]

    before = boxes()
    server.delay = 0.01
    send(page, "LONG")
    expect(output_of(page)).to_contain_text(" word word word")
    assert boxes() == before
    page.keyboard.press("Escape")
    send(page, "CUT")
    expect(page.get_by_role("alert")).to_be_visible()
    assert boxes() == before


@pytest.mark.long
def test_events_do_not_depend_on_where_the_stream_is_cut(page: Page) -> None:
    assert run_check(page, "findCutFaults") == []


@pytest.mark.long
def test_aligned_pieces_contain_each_character_and_token_once(page: Page) -> None:
    assert run_check(page, "findAlignmentFaults") == []
