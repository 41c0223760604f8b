"""Promises of docs/security.md that concern the whole server rather than one module."""

from __future__ import annotations

import ast
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi import FastAPI

import mega_serve
from mega_model.runtime import Runtime
from mega_schema.checkpoint.checkpoint_tokenizer import open_checkpoint_tokenizer
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import MegaError
from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_serve.api.context import ApiContext
from mega_serve.commands.serve import serve
from mega_serve.commands.server_options import LIMIT_FLAGS
from mega_serve.execution import rank_sockets
from mega_serve.execution.token_scores import score_tokens
from mega_serve.execution.weight_loading import load_weights
from mega_serve.http.app import create_app
from mega_serve.http.config import ServerConfig
from mega_serve.http.limits import Limits
from tests.api_app import build_app, send
from tests.engine_clients import ScriptedEngineClient

ROOT = Path(__file__).parents[3]
SOURCES = sorted(Path(mega_serve.__file__).parent.glob("**/*.py"))
# the folders that run in the server and the engine process; client/ and commands/ are other programs
SERVER_FOLDERS = ("api", "engine", "execution", "http", "process", "web")
# what those may import beside the standard library: none of them opens a connection or runs code of a model
LIBRARIES = {
    "fastapi",
    "h11",
    "jinja2",
    "llguidance",
    "llvmlite",
    "mega_model",
    "mega_schema",
    "mega_serve",
    "numba",
    "numpy",
    "opentelemetry",  # in telemetry.py, with --otlp-traces-endpoint
    "orjson",
    "prometheus_client",
    "pydantic",
    "pydantic_core",
    "sentencepiece",
    "starlette",
    "torch",
    "triton",
    "uvicorn",
}
STANDARD_CLIENTS = {"ftplib", "http.client", "imaplib", "poplib", "smtplib", "telnetlib", "urllib", "xmlrpc"}
CONNECTING_CALLS = {"connect", "connect_ex", "create_connection", "open_connection", "urlopen", "urlretrieve"}
# words in the name of a field that would name a file, a place on the network, or a program
PLACES = {"callback", "code", "dir", "directory", "dump", "file", "filename", "folder", "hook", "host"}
PLACES |= {"image", "module", "path", "plugin", "processor", "save", "script", "uri", "url", "webhook"}
# beyond every range, and beyond 64 bits, which native code would truncate
HUGE_INTEGERS = (2**31, 2**63, -(2**63) - 1, 2**64, 10**30)
# any integer is a seed modulo 2**64; an id outside the vocabulary never stops a beam
UNBOUNDED = {("/api", "stop_token"), ("/api", "random_seed")}


def imported_packages(tree: ast.AST) -> Iterator[str]:
    # of http the module: the names of statuses in the package itself connect nowhere
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (_package(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield _package(node.module)


def _package(module: str) -> str:
    return module if module.startswith("http.") else module.partition(".")[0]


def server_trees() -> dict[str, ast.AST]:
    root = Path(mega_serve.__file__).parent
    return {
        str(path.relative_to(root)): ast.parse(path.read_text("utf-8"))
        for path in SOURCES
        if path.relative_to(root).parts[0] in SERVER_FOLDERS
    }


@pytest.fixture(scope="module")
def app(tokenizer: Tokenizer) -> FastAPI:
    client = ScriptedEngineClient(tokenizer)
    client.model = replace(client.model, max_seq_len=64)
    return build_app(ApiContext(client=client, tokenizer=tokenizer, limits=Limits(), chat_template="{{ 1 }}"))


def request_examples(app: FastAPI) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Yield method, path, body schema and an example of every route with a body."""
    for path, operations in app.openapi()["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if content:
                example = next(iter(content["examples"].values()))["value"]
                yield method, path, content["schema"], example


def property_names(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for item in schema:
            yield from property_names(item)
    elif isinstance(schema, dict):
        yield from schema.get("properties", {})
        for value in schema.values():
            yield from property_names(value)


def integer_fields(schema: dict[str, Any]) -> list[str]:
    """Return the names of the fields that take an integer, alone or among other types."""

    def is_integer(value: dict[str, Any]) -> bool:
        return "integer" in (value.get("type"), *(kind.get("type") for kind in value.get("anyOf", [])))

    return [name for name, value in schema["properties"].items() if is_integer(value)]


def test_every_test_that_the_document_names_exists() -> None:
    text = (ROOT / "docs/security.md").read_text("utf-8")
    named = re.findall(r"`([\w/]*test_\w+\.py)::(test_\w+)`", text)
    assert len(named) > 60  # the search itself works
    unknown = []
    for file, name in named:
        path = ROOT / (file if "/" in file else f"packages/mega-serve/tests/{file}")
        if not path.is_file() or f"def {name}(" not in path.read_text("utf-8"):
            unknown.append(f"{file}::{name}")
    assert unknown == []


def test_the_server_imports_no_client_and_no_loader_of_foreign_code() -> None:
    trees = server_trees()
    assert len(trees) > 50  # the search itself works
    imports = {(name, package) for name, tree in trees.items() for package in imported_packages(tree)}
    foreign = {pair for pair in imports if pair[1] not in LIBRARIES | sys.stdlib_module_names}
    assert foreign == set()
    assert {pair for pair in imports if pair[1] in STANDARD_CLIENTS} == set()
    assert {name for name, package in imports if package == "opentelemetry"} == {"http/telemetry.py"}


def test_the_server_calls_nothing_that_connects() -> None:
    calls = {
        (name, node.func.attr)
        for name, tree in server_trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in CONNECTING_CALLS
        if "sock" not in {keyword.arg for keyword in node.keywords}  # the socketpair of the engine process
    }
    assert calls == {("execution/rank_sockets.py", "connect")}
    source = Path(rank_sockets.__file__).read_text("utf-8")
    assert re.findall(r"AF_\w+", source) == ["AF_UNIX", "AF_UNIX"]  # of rank 0 and of the others: no network


def test_no_field_of_a_request_names_a_file_a_place_or_a_program(app: FastAPI) -> None:
    names = {(path, name) for _, path, schema, _ in request_examples(app) for name in property_names(schema)}
    assert len(names) > 60  # the search itself works
    assert {pair for pair in names if PLACES & set(pair[1].lower().split("_"))} == set()


def test_every_integer_out_of_range_is_a_400_on_every_route(app: FastAPI) -> None:
    wrong, count = [], 0
    for method, path, schema, example in request_examples(app):
        for name in integer_fields(schema):
            for value in HUGE_INTEGERS:
                if (path, name) in UNBOUNDED or (name == "seed" and -(2**63) <= value < 2**64):
                    continue
                count += 1
                response = send(app, method.upper(), path, json={**example, name: value})
                if response.status_code != 400 or name not in response.text:
                    wrong.append((path, name, value, response.status_code, response.text[:200]))
    assert wrong == []
    assert count > 140  # the search itself works


@pytest.mark.parametrize("name", ["stop_token", "random_seed"])
def test_an_unbounded_integer_of_megatron_does_not_make_the_server_fail(app: FastAPI, name: str) -> None:
    for value in HUGE_INTEGERS:
        body = {"prompts": ["a"], "tokens_to_generate": 2, name: value}
        if name == "stop_token":
            body["beam_width"] = 2
        assert send(app, "PUT", "/api", json=body).status_code in (200, 400), value


def test_scores_of_the_longest_prompt_take_bounded_memory() -> None:
    rows: list[int] = []

    def compute_logits(x_RD: torch.Tensor) -> torch.Tensor:
        rows.append(len(x_RD))
        return torch.zeros(len(x_RD), 50_304)

    tokens = [7] * 1000
    scores = score_tokens(compute_logits, torch.zeros(len(tokens), 4), tokens, 20, 50_304)
    assert len(scores) == len(tokens)
    # logits and log-probabilities, float32
    assert max(rows) * 50_304 * 4 * 2 <= 64 << 20


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}},
        {"type": "input_image", "image_url": "file:///etc/passwd"},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "file", "file": {"file_id": "x"}},
    ],
)
def test_media_in_a_message_is_a_400(app: FastAPI, part: dict[str, Any]) -> None:
    message = {"role": "user", "content": [part]}
    assert send(app, "POST", "/v1/chat/completions", json={"messages": [message]}).status_code == 400
    assert send(app, "POST", "/v1/responses", json={"input": [message]}).status_code == 400


@pytest.mark.parametrize(
    "extra",
    [
        {"chat_template": "{{ 1 }}"},
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {"chat_template_kwargs": {"tokenize": True}},
        {"logits_processors": ["os.system"]},
    ],
)
def test_a_template_or_a_program_in_a_request_is_a_400(app: FastAPI, extra: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], **extra}
    response = send(app, "POST", "/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unknown_parameter")


@pytest.mark.parametrize(
    "grammar",
    [
        {"regex": "a?" * 1000 + "a" * 1000},
        {"json": {"type": "integer", "multipleOf": 123456789}},
        {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
    ],
)
def test_a_hostile_grammar_is_a_400_before_it_reaches_the_engine(
    app: FastAPI, grammar: dict[str, Any]
) -> None:
    simple = {"prompt": "a", "max_tokens": 1, "structured_outputs": {"regex": "a"}}
    send(app, "POST", "/v1/completions", json=simple)  # starts the process of the checker
    start = time.process_time()
    response = send(app, "POST", "/v1/completions", json={**simple, "structured_outputs": grammar})
    assert response.status_code == 400
    assert (
        time.process_time() - start < 0.5
    )  # of this process: the work is in a child with a limit of its own


def test_default_limits_are_bounded_and_the_server_listens_on_loopback() -> None:
    with serve.make_context("serve", ["--load", "run"]) as context:
        defaults = context.params
    assert defaults["host"] == "127.0.0.1"
    assert not any(defaults[name] for name in ("log_prompts", "public_metrics", "lenient"))
    assert not defaults["allowed_origin"]
    assert defaults["otlp_traces_endpoint"] == ""
    for field, _ in LIMIT_FLAGS.values():
        assert 0 < defaults[f"limit_{field}"] < float("inf")


def test_no_route_of_the_framework_loads_scripts_from_elsewhere(tokenizer: Tokenizer) -> None:
    application = create_app(ScriptedEngineClient(tokenizer), ServerConfig(), apis=[]).asgi
    for path in ("/docs", "/redoc"):
        response = send(application, "GET", path, headers={"Host": "localhost"})
        assert "cdn" not in response.text
        assert "https://" not in response.text


def mutate(content: bytes, rng: np.random.Generator) -> bytes:
    """Return the content with a byte changed, a part removed or repeated, or a number enlarged."""
    data = bytearray(content)
    place = int(rng.integers(len(data)))
    match int(rng.integers(4)):
        case 0:
            data[place] ^= int(rng.integers(1, 256))
        case 1:
            del data[place:]
        case 2:
            data[place:place] = data[place : place + 64]
        case _:
            data[place : place + 1] = b"99999999999999999999"
    return bytes(data)


def is_in_a_tensor(source: Path, name: str, damaged: Path) -> bool:
    """Tell whether the values of a tensor differ between a file of a checkpoint and its damaged copy."""
    before = (source / name).read_bytes()
    after = damaged.read_bytes()
    places = [(p.offset, p.offset + p.bytes) for *_, p in Checkpoint(source).pieces() if p.file == name]
    return any(before[begin:end] != after[begin:end] for begin, end in places)


def load_mutated(checkpoint: Path, folder: Path, count: int, seed: int) -> int:
    """Load mutated copies of a checkpoint as the server does. Return how many were refused."""
    source = Checkpoint.open(checkpoint).folder
    files = sorted(path.relative_to(source) for path in source.rglob("*") if path.is_file())
    for path in files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes((source / path).read_bytes())
    rng = np.random.default_rng(seed)
    refused = 0
    for _ in range(count):
        name = files[int(rng.integers(len(files)))]
        (folder / name).write_bytes(mutate((source / name).read_bytes(), rng))
        try:
            opened = Checkpoint.open(folder)
            open_checkpoint_tokenizer(opened)
            load_weights(opened, Runtime.single_process(opened.spec), dtype="float32")
        except MegaError as error:
            refused += 1
            if "\n" in str(error):
                pytest.fail(f"{name}: the message has several lines: {error}")
        else:
            # the padding and the header of a weight file are not read, and the optimizer is not loaded
            if name.name.startswith("model-") and is_in_a_tensor(source, name.name, folder / name):
                pytest.fail(f"{name}: damaged weights were loaded")
        (folder / name).write_bytes((source / name).read_bytes())
    return refused


def test_a_damaged_checkpoint_is_refused_in_one_line(checkpoint: Path, tmp_path: Path) -> None:
    assert load_mutated(checkpoint, tmp_path / "copy", 60, seed=1) > 30


@pytest.mark.long
def test_five_thousand_damaged_checkpoints_are_refused_or_loaded(checkpoint: Path, tmp_path: Path) -> None:
    assert load_mutated(checkpoint, tmp_path / "copy", 5000, seed=2) > 2500
