import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from mega_eval.cli import cli
from mega_eval.models.endpoint_client import EndpointClient, EndpointError, NoAnswerError
from mega_eval.models.interface import GenerationRequest
from mega_eval.models.server_model import ServerModel
from mega_eval.windows import Window, as_tokens
from mega_schema.app import cli_runner
from mega_schema.errors import ConfigError
from mega_schema.tokenizer.tokenizer import open_tokenizer

VOCAB = 41
EOD = 40
TABLE = np.log(np.random.default_rng(5).dirichlet(np.ones(VOCAB), VOCAB))  # ln P(next | token)


class FakeEndpoint:
    """A server of a bigram model whose texts are ids.

    Attributes:
        failures: status, headers and body of the next answers of /v1/completions; None closes the connection.
        failing_from: requests of /v1/completions from this number on have no answer.
        noise: added to ln P while other requests run.
        knows: request fields that it does not refuse.
        is_silent: answers without logprobs.
        extra_tokens: scores more tokens than the prompt has.
    """

    def __init__(self) -> None:
        self.failures: list[tuple[int, dict[str, str], str] | None] = []
        self.failing_from = 10**9
        self.noise = 0.0
        self.knows = {"max_tokens=0", "prompt_logprobs"}
        self.is_silent = False
        self.extra_tokens = 0
        self.has_tokenizer = True
        self.api_key = ""
        self.table = TABLE
        self.bodies: list[dict] = []
        self.times: list[float] = []
        self.lock = threading.Lock()
        self.running = 0

    def answer(self, path: str, body: dict, key: str) -> tuple[int, dict[str, str], object] | None:
        if self.api_key and key != f"Bearer {self.api_key}":
            return 401, {}, {"error": {"message": "wrong key"}}
        if path == "/v1/models":
            return (
                200,
                {},
                {"data": [{"id": "bigram", "owned_by": "fake", "max_model_len": 20, "iteration": 7}]},
            )
        if path == "/version":
            return 200, {}, {"version": "1.2"}
        if path == "/tokenizer_info" and self.has_tokenizer:
            return 200, {}, {"tokenizer_class": "NullTokenizer", "vocab_size": VOCAB, "eos_token_id": EOD}
        if path == "/tokenize" and self.has_tokenizer:
            return 200, {}, {"tokens": [int(word) for word in body["prompt"].split()]}
        if path == "/detokenize":
            return 200, {}, {"prompt": " ".join(map(str, body["tokens"]))}
        if path != "/v1/completions":
            return 404, {}, {"error": {"message": "no such path"}}
        with self.lock:
            self.bodies.append(body)
            self.times.append(time.monotonic())
            if len(self.bodies) >= self.failing_from:
                return None
            if self.failures:
                return self.failures.pop(0)
        for field in ("prompt_logprobs", "max_tokens=0"):
            used = field in body or (field == "max_tokens=0" and body["max_tokens"] == 0)
            if used and field not in self.knows:
                return 400, {}, {"error": {"message": f"{field} is not supported"}}
        return 200, {}, {"choices": [self.complete(body) if body.get("echo") else self.generate(body)]}

    def generate(self, body: dict) -> dict:
        ids = list(body["prompt"])
        for _ in range(body["max_tokens"]):
            ids.append(int(self.table[ids[-1]].argmax()))
        return {"text": " ".join(map(str, ids[len(body["prompt"]) :]))}

    def complete(self, body: dict) -> dict:
        with self.lock:
            self.running += 1
        time.sleep(0.01 if self.noise else 0)
        shift = self.noise if self.running > 1 else 0.0
        ids = body["prompt"] + [0] * (self.extra_tokens + body["max_tokens"])
        own = [None, *(float(self.table[a, b]) + shift for a, b in zip(ids, ids[1:], strict=False))]
        best = [self.table[a] + shift for a in ids[:-1]]
        top = [None, *({str(row.argmax()): float(row.max())} for row in best)]
        with self.lock:
            self.running -= 1
        choice = {
            "text": "",
            "logprobs": None if self.is_silent else {"token_logprobs": own, "top_logprobs": top},
        }
        if "prompt_logprobs" in body:
            choice["prompt_logprobs"] = [
                None,
                *({str(row.argmax()): {"logprob": float(row.max())}} for row in best),
            ]
        return choice


@contextmanager
def serve(endpoint: FakeEndpoint) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # headers and body are two writes

        def handle_request(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            answer = endpoint.answer(self.path, body, self.headers.get("Authorization", ""))
            if answer is None:
                self.close_connection = True
                return
            status, headers, value = answer
            content = value.encode() if isinstance(value, str) else json.dumps(value).encode()
            self.send_response(status)
            for name, text in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = handle_request

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def endpoint():
    return FakeEndpoint()


@pytest.fixture
def url(endpoint):
    with serve(endpoint) as address:
        yield address


@pytest.fixture
def connect(url):
    """A function that opens the model of the server."""
    clients = []

    def open_server(**options):
        clients.append(EndpointClient(url, retries=2, first_delay=0.01))
        return ServerModel(clients[-1], **options)

    yield open_server
    for client in clients:
        client.close()


def check_scores(model, windows):
    scores = dict(pair for batch in model.score_batches(windows) for pair in batch)
    for index, window in enumerate(windows):
        n = window.target_length
        before, targets = window.tokens[:-1][-n:], window.targets
        assert scores[index].logprobs.tolist() == TABLE[before, targets].tolist()
        assert scores[index].is_greedy.tolist() == (TABLE[before].argmax(1) == targets).tolist()
        assert scores[index].greedy_ids.tolist() in ([], TABLE[before].argmax(1).tolist())
    return scores


def build_windows():
    rng = np.random.default_rng(3)
    windows = []
    for size in rng.integers(2, 19, 30):
        tokens = rng.integers(0, VOCAB, size)
        for place in rng.integers(1, size, 2):
            tokens[place] = TABLE[tokens[place - 1]].argmax()
        windows.append(Window(as_tokens(tokens), int(rng.integers(1, size))))
    return windows


def test_scores_are_those_of_the_servers_model(connect):
    model = connect()
    assert (model.context_length, model.vocab_size) == (19, VOCAB)
    assert (model.identity.iteration, model.identity.noise) == (7, 0.0)
    assert model.identity.versions == {"server": "fake 1.2"}
    scores = check_scores(model, build_windows())
    assert all(len(score.greedy_ids) for score in scores.values())
    model.close()


@pytest.mark.parametrize(("knows", "context"), [({"max_tokens=0"}, 19), (set(), 18)])
def test_a_server_that_knows_less_is_asked_for_less(connect, endpoint, knows, context):
    endpoint.knows = knows
    model = connect()
    assert model.context_length == context
    check_scores(model, build_windows())
    model.close()


def test_answered_windows_are_not_asked_for(connect, endpoint):
    model = connect()
    before = len(endpoint.bodies)
    windows = build_windows()
    indices = [index for batch in model.score_batches(windows, range(28)) for index, _ in batch]
    assert sorted(indices) == [28, 29]
    assert len(endpoint.bodies) == before + 2
    model.close()


def test_a_text_ends_before_its_first_stop_string(connect):
    model = connect()
    ids = [3]
    for _ in range(6):
        ids.append(int(TABLE[ids[-1]].argmax()))
    stop = f" {ids[4]}"
    whole = " ".join(map(str, ids[1:]))
    requests = [GenerationRequest((3,), 6), GenerationRequest((3,), 6, (stop,))]
    texts = dict(pair for batch in model.generate_batches(requests) for pair in batch)
    assert texts == {0: whole, 1: whole[: whole.find(stop)]}
    model.close()


def test_a_request_is_repeated_until_the_server_answers(connect, endpoint):
    model = connect()
    endpoint.failures = [(503, {}, "{}"), None]
    check_scores(model, build_windows()[:1])
    model.close()


@pytest.mark.parametrize("header", ["1", "date"])
def test_a_retry_waits_as_long_as_the_server_asks(url, endpoint, header):
    client = EndpointClient(url, retries=1, first_delay=0.0)
    seconds = formatdate(time.time() + 2, usegmt=True) if header == "date" else header
    endpoint.failures = [(429, {"Retry-After": seconds}, "{}")]
    client.post_json("/v1/completions", {"prompt": [1, 2], "max_tokens": 1})
    assert endpoint.times[1] - endpoint.times[0] > 0.9
    client.close()


def test_delays_double(url, endpoint, monkeypatch):
    delays = []
    client = EndpointClient(url, retries=4, first_delay=0.5)
    monkeypatch.setattr(client._is_closed, "wait", lambda delay: delays.append(delay) or False)
    client.get_json("/v1/models")
    endpoint.failing_from = 0
    with pytest.raises(NoAnswerError, match="no answer after 5 requests"):
        client.post_json("/v1/completions", {})
    assert delays == [0.5, 1.0, 2.0, 4.0]
    client.close()


def test_each_wait_for_a_retry_is_a_line_with_its_seconds(url, endpoint, caplog):
    client = EndpointClient(url, retries=2, first_delay=0.05)
    client.get_json("/v1/models")
    endpoint.failures = [(503, {}, '{"error": {"message": "busy"}}'), None]
    client.post_json("/v1/completions", {"prompt": [1], "max_tokens": 1})
    problems = ("status 503: busy", "Remote end closed connection without response")
    notices = [
        f"{url}: {problem}; the next request is in {seconds} s"
        for problem, seconds in zip(problems, ("0.05", "0.1"), strict=True)
    ]
    assert caplog.messages == notices
    client.close()


def test_requests_that_wait_together_are_one_line(connect, endpoint, caplog):
    model = connect()
    endpoint.failures = [(503, {}, "{}")] * 8
    check_scores(model, build_windows()[:8])
    assert 1 <= len(caplog.messages) <= 8
    for seconds, lines in ((60.0, 1), (0.0, 8)):
        caplog.clear()
        client = EndpointClient("http://127.0.0.1:9")
        for _ in range(8):
            client._report_wait("busy", seconds)
        assert len(caplog.messages) == lines
    model.close()


def test_an_address_without_server_is_one_line_at_once(call):
    start = time.monotonic()
    with pytest.raises(NoAnswerError) as error:
        ServerModel(EndpointClient("http://127.0.0.1:9", retries=6, first_delay=20.0))
    assert time.monotonic() - start < 10
    assert str(error.value) == (
        "http://127.0.0.1:9: no server answers: found Connection refused; "
        "hint: mega-serve --load RUN --port 9 starts one; or name another --url"
    )
    assert call("--url=http://127.0.0.1:9") == (2, "", f"error: {error.value}\n")


def test_a_host_that_does_not_exist_and_a_server_that_hangs_up_are_one_line_at_once(url, endpoint):
    def refuse(*words):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.getaddrinfo", refuse)
        message = "no server answers: found Name or service not known; hint: mega-serve --load RUN starts one"
        with pytest.raises(NoAnswerError, match=message):
            EndpointClient("http://host.invalid", first_delay=20.0).get_json("/v1/models")
    endpoint.failing_from = 0
    with pytest.raises(NoAnswerError, match="no server answers: found Remote end closed connection"):
        EndpointClient(url, first_delay=20.0).post_json("/v1/completions", {})


def test_the_first_connection_waits_less_than_an_answer(monkeypatch):
    timeouts = []

    class Connection(http.client.HTTPConnection):
        def connect(self):
            timeouts.append(self.timeout)
            raise TimeoutError("timed out")

    monkeypatch.setattr("http.client.HTTPConnection", Connection)
    with pytest.raises(NoAnswerError, match="no server answers: found timed out"):
        EndpointClient("http://10.255.255.1:80").get_json("/v1/models")
    assert timeouts == [10.0]


def test_scores_that_depend_on_other_requests_are_refused(connect, endpoint):
    endpoint.noise = 0.01
    with pytest.raises(ConfigError, match="--url: ln P of a token depends .*found 0.01 .*--allow-noise"):
        connect()
    model = connect(allow_noise=True)
    assert model.identity.noise == pytest.approx(0.01)
    model.close()


@pytest.mark.parametrize("problem", ["silent", "longer"])
def test_answers_without_a_score_for_each_token_are_refused(connect, endpoint, problem):
    endpoint.is_silent = problem == "silent"
    endpoint.extra_tokens = int(problem == "longer")
    with pytest.raises(EndpointError, match="the answer has no ln P for each token of the prompt"):
        connect()


def test_a_server_without_tokenizer_needs_the_option(connect, endpoint, words):
    endpoint.has_tokenizer = False
    with pytest.raises(
        ConfigError, match="--tokenizer: .* does not describe its tokenizer; hint: --tokenizer DIR"
    ):
        connect()
    connect(tokenizer=type(words)(VOCAB)).close()


def test_a_tokenizer_that_encodes_otherwise_than_the_server_is_refused(connect, words):
    # its ids are tokens of the server too, and the numbers were wrong without a word
    with pytest.raises(ConfigError) as error:
        connect(tokenizer=type(words)(VOCAB))
    assert str(error.value) == (
        "--tokenizer: does not encode as the server does: found 1 2 3 4 5 for '12 7 30 5 19'..., "
        "wanted 12 7 30 5 19; hint: leave --tokenizer out, or name the tokenizer of the server's model"
    )
    connect(tokenizer=open_tokenizer("NullTokenizer", vocab_size=EOD)).close()


def test_a_model_that_the_server_does_not_have_is_one_line(connect):
    with pytest.raises(
        ConfigError, match="--model: does not name a model of the server: found gpt, wanted bigram"
    ):
        connect(name="gpt")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://host:port", "http://"])
def test_an_address_that_is_none_is_one_line(url):
    with pytest.raises(ConfigError, match="--url: not the address of a server: found .* hint: --url http"):
        EndpointClient(url)


@pytest.fixture
def call(url, tmp_path, capsys, monkeypatch):
    """A function that runs `mega-eval lambada --url` and returns exit code, stdout and stderr."""
    defaults = EndpointClient.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "retries", 1)
    monkeypatch.setitem(defaults, "first_delay", 0.01)
    data = tmp_path / "held-out.jsonl"
    texts = [" ".join(str(n * 7 % 40) for n in range(s, 2 * s + 4)) for s in range(1, 13)]
    data.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))

    def run(*words):
        argv = ["lambada", f"--url={url}/v1", f"--data={data}", f"--output={tmp_path / 'r.json'}", *words]
        with pytest.raises(SystemExit) as exit_info:
            cli_runner.run_command(cli, argv)
        return exit_info.value.code or 0, *capsys.readouterr()

    return run


def test_a_server_that_stops_answering_leaves_a_run_that_resumes(call, endpoint, tmp_path):
    endpoint.failing_from = 24
    code, out, err = call("--concurrency=1")
    assert (code, out) == (2, "")
    assert err.startswith("error: http://127.0.0.1:")
    assert err.endswith("hint: repeat the command to resume, once the server answers\n")
    assert err.count("\n") == 1
    endpoint.failing_from = 10**9
    endpoint.bodies.clear()
    code, out, _ = call("--concurrency=1")
    assert code == 0
    # 1 + 8 + 8 requests before the first of 12 windows, so that 6 had their answers, or fewer where a
    # connection was lost and its request was repeated
    answers = int(re.search(r"(\d+) answers are of earlier runs", out)[1])
    assert 4 <= answers <= 6
    assert 1 + 8 + 8 + 12 - answers <= len(endpoint.bodies) < 1 + 8 + 8 + 12
    record = json.loads((tmp_path / "r.json").read_bytes())
    assert record["model"]["noise"] == 0
    assert record["versions"]["server"] == "fake 1.2"
    assert not (tmp_path / ".mega-eval-cache").exists()


def test_a_server_with_other_weights_gets_a_cache_of_its_own(call, endpoint, tmp_path):
    named = (f"--cache={tmp_path / 'kept'}", "--overwrite")
    call(*named)
    assert "12 answers are of earlier runs" in call(*named)[1]
    endpoint.table = TABLE[::-1]
    assert "earlier runs" not in call(*named)[1]
    assert "12 answers are of earlier runs" in call(*named)[1]
    endpoint.table = TABLE
    assert "12 answers are of earlier runs" in call(*named)[1]


def test_a_key_is_read_from_the_environment(call, endpoint, monkeypatch):
    endpoint.api_key = "secret"
    code, _, err = call()
    assert code == 2
    assert "status 401: wrong key; hint: --api-key-env VARIABLE" in err
    assert "--api-key-env: no such variable" in call("--api-key-env=FAKE_KEY")[2]
    monkeypatch.setenv("FAKE_KEY", "secret")
    code, out, err = call("--api-key-env=FAKE_KEY")
    assert code == 0
    assert "secret" not in out + err


def test_options_that_contradict_the_source_are_one_line(call, run):
    assert "--load: contradicts --url; hint: --load RUN, or --url" in call(f"--load={run}")[2]


@pytest.mark.parametrize(
    "option",
    [
        "--dtype=float32",
        "--device=cpu",
        "--micro-batch-size=4",
        "--batch-invariant",
        "--tp=2",
        "--pp=2",
        "--dp=2",
    ],
)
def test_an_option_of_checkpoints_is_refused_before_a_server_is_asked_or_a_file_read(
    tmp_path, capsys, option
):
    argv = ["lambada", "--url=http://127.0.0.1:9", f"--data={tmp_path / 'none'}", option]
    with pytest.raises(SystemExit) as exit_info:
        cli_runner.run_command(cli, argv)
    assert exit_info.value.code == 2
    flag = option.partition("=")[0]
    message = f"error: {flag}: is set by the server, not by mega-eval; hint: leave {flag} out\n"
    assert capsys.readouterr().err == message


def test_a_server_is_refused_under_torchrun_on_every_rank(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit):
            cli_runner.run_command(cli, ["lambada", "--url=http://127.0.0.1:9", "--data=none"])
        assert capsys.readouterr().err.startswith(
            "error: --url: is evaluated by one process: found 2 of torchrun"
        )


def test_a_command_without_a_source_is_one_line(run, tmp_path, capsys):
    data = tmp_path / "held-out.jsonl"
    data.write_text('{"text": "1 2 3"}\n')
    common = ["lambada", f"--data={data}", f"--output={tmp_path / 'r.json'}"]
    cases = {"--load: missing; hint: --load RUN": [], "--model: needs --url": [f"--load={run}", "--model=a"]}
    cases["--concurrency: needs --url"] = [f"--load={run}", "--concurrency=2"]
    for message, words in cases.items():
        with pytest.raises(SystemExit) as exit_info:
            cli_runner.run_command(cli, [*common, *words])
        assert exit_info.value.code == 2
        assert message in capsys.readouterr().err
