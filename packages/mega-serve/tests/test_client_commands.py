"""The commands complete, chat and bench against a small server."""

from __future__ import annotations

import importlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from mega_schema.errors import MegaError
from tests.fake_openai import FakeServer, serve
from tests.megatron_client import text_generation_cli


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serve(FakeServer()) as running:
        yield running


def command(name: str) -> click.Command:
    value: click.Command = getattr(importlib.import_module(f"mega_serve.commands.{name}"), name)
    return value


def run(name: str, words: Sequence[str], *, stdin: str | bytes = "") -> Result:
    result = CliRunner().invoke(command(name), list(words), input=stdin)
    if result.exception is not None and not isinstance(result.exception, MegaError | SystemExit):
        raise result.exception
    return result


def get_error(name: str, words: Sequence[str], *, stdin: str | bytes = "") -> str:
    result = run(name, words, stdin=stdin)
    assert result.exception is not None, result.output
    text = str(result.exception) if isinstance(result.exception, MegaError) else result.stderr
    assert "\n" not in text or "Error: " in text
    return text


def test_complete_prints_the_continuation(server: FakeServer) -> None:
    result = run(
        "complete", [server.address, "Hello", "--max-tokens", "3", "--temperature", "0", "--seed", "5"]
    )
    assert result.stdout == "one two three\n"
    body = server.bodies[0]
    assert (body["prompt"], body["max_tokens"], body["stream"]) == ("Hello", 3, True)
    assert (body["model"], body["temperature"], body["seed"]) == ("tiny", 0.0, 5)
    assert "top_p" not in body


@pytest.mark.parametrize("api", ["openai", "megatron"])
def test_a_short_context_lowers_the_default_of_max_tokens(server: FakeServer, api: str) -> None:
    server.max_model_len = 20
    name = {"openai": "max_tokens", "megatron": "tokens_to_generate"}[api]
    words = [server.address, "a prompt of 14", "--api", api]
    run("complete", words)
    assert server.bodies[-1][name] == 6
    if api == "openai":
        error = get_error("complete", [*words, "--max-tokens", "7"])
        assert error == (
            "--max-tokens: exceeds the model's context of 20 tokens after a prompt of 14: found 7, wanted "
            "at most 6; hint: --max-tokens 6"
        )
    run("complete", [*words, "--max-tokens", "6"])
    assert server.bodies[-1][name] == 6
    error = get_error("complete", [server.address, "x" * 20, "--api", api])
    assert error == "PROMPT: fills the model's context: found 20 tokens, wanted at most 19"
    server.max_model_len = 4096
    run("complete", words)
    assert server.bodies[-1][name] == 64
    server.max_model_len, server.has_tokenizer = 20, False  # nobody counts: the server decides
    run("complete", words)
    assert server.bodies[-1][name] == 64


def test_complete_reads_the_prompt_from_standard_input(server: FakeServer) -> None:
    for words in ([], ["-"]):
        run("complete", [server.address, *words, "--echo", "--max-tokens", "1"], stdin="a\nb\n")
        assert server.bodies[-1]["prompt"] == "a\nb"
    assert "standard input: is not UTF-8: found byte 0xff" in get_error(
        "complete", [server.address], stdin=b"\xff"
    )


def test_complete_prints_several_sequences_scores_and_json(server: FakeServer) -> None:
    result = run("complete", [server.address, "a", "--n", "2", "--max-tokens", "1", "--stop", "x", "y"])
    assert result.stdout == "=== 0 (length)\none\n=== 1 (length)\none\n"
    assert server.bodies[-1]["stop"] == ["x", "y"]
    result = run("complete", [server.address, "a", "--logprobs", "2", "--max-tokens", "1"])
    assert result.stdout == ' -0.2500  "one"                 -0.2500 "one"  -1.5000 " other"\n'
    result = run("complete", [server.address, "a", "--json", "--max-tokens", "1"])
    assert json.loads(result.stdout)["choices"][0]["text"] == "one"


def test_complete_speaks_the_megatron_api(server: FakeServer) -> None:
    words = [server.address, "Hi", "--api", "megatron", "--max-tokens", "2"]
    assert run("complete", words).stdout == "one two\n"
    assert run("complete", [*words, "--echo"]).stdout == "Hione two\n"
    assert run("complete", [*words, "--logprobs", "0"]).stdout.splitlines()[:2] == [
        '       -  "H"',
        ' -0.5000  "i"',
    ]
    assert [path for _, path, _, _ in server.requests] == ["/api"] * 3
    run("complete", [*words, "--temperature", "0", "--top-p-decay", "0.5", "--seed", "3", "--add-BOS"])
    assert server.bodies[-1] == {
        "prompts": ["Hi"],
        "tokens_to_generate": 2,
        "top_k": 1,
        "top_p_decay": 0.5,
        "random_seed": 3,
        "add_BOS": True,
    }


@pytest.mark.parametrize("legacy", [False, True])
def test_complete_reports_errors_of_megatron_servers_of_both_kinds(server: FakeServer, legacy: bool) -> None:
    server.legacy = legacy
    error = get_error("complete", [server.address, "", "--api", "megatron"])
    assert ": Empty prompts require add_BOS=true" in error


def test_options_of_the_other_api_are_refused() -> None:
    error = get_error("complete", ["a:1", "x", "--beam-width", "2"])
    assert error == "--beam-width: is not in the openai API; hint: remove it, or use --api megatron"
    assert get_error("complete", ["a:1", "x", "--api", "megatron", "--stop", "a"]).startswith("--stop: ")


def test_the_fake_server_is_one_that_text_generation_cli_understands(server: FakeServer) -> None:
    assert text_generation_cli(server.address, "Hi", 2) == "Megatron Response: \nHione two"
    assert text_generation_cli(server.address, "", 2) == "Error 400: Empty prompts require add_BOS=true"


def test_chat_answers_every_line_of_a_pipe_and_keeps_the_history(server: FakeServer) -> None:
    lines = "hello\n\n/system be brief\nagain\nand again\n/reset\nlast\n/quit\nnever\n"
    result = run("chat", [server.address, "--max-tokens", "2", "--system", "a"], stdin=lines)
    assert result.stdout == "one two\n" * 4
    contents = [[message["content"] for message in body["messages"]] for body in server.bodies]
    assert contents == [
        ["a", "hello"],
        ["be brief", "again"],
        ["be brief", "again", "one two", "and again"],
        ["be brief", "last"],
    ]
    assert server.bodies[0]["model"] == "tiny"


@pytest.mark.parametrize("stdin", ["", "\n \n"])
def test_chat_without_a_message_says_how_to_send_one(server: FakeServer, stdin: str) -> None:
    error = get_error("chat", [server.address], stdin=stdin)
    assert error == (
        "standard input: has no message: wanted one message a line; hint: "
        f"echo Hello | mega-serve chat http://{server.address}"
    )
    assert run("chat", [server.address], stdin="/quit\n").exit_code == 0


def test_chat_saves_the_conversation_and_overwrites_no_other_file(server: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    words = [server.address, "--max-tokens", "1"]
    for _ in range(2):
        run("chat", words, stdin=f"hello\n/save {file}\n")
        assert json.loads(file.read_text()) == {
            "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "one"}]
        }
    file.write_text("mine")
    assert "/save: is a file that this command did not write" in get_error(
        "chat", words, stdin=f"/save {file}\n"
    )
    assert file.read_text() == "mine"
    assert "/sabe: no such command" in get_error("chat", words, stdin="/sabe x\n")


PROGRAM = """
from mega_schema.app.cli_runner import run_command
from mega_serve.commands.chat import chat

run_command(chat)
"""


def read_until(terminal: int, pattern: str, seconds: float = 20) -> str:
    """Read what the program shows until the pattern is there."""
    text, end = "", time.monotonic() + seconds
    while not re.search(pattern, text):
        assert time.monotonic() < end, text
        if select.select([terminal], [], [], 0.1)[0]:
            text += os.read(terminal, 4096).decode()
    return text


def test_ctrl_c_stops_the_answer_and_not_the_program(server: FakeServer) -> None:
    server.delay = 0.01
    terminal, program_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, server.address, "--max-tokens", "100000"],
        stdin=program_end,
        stdout=program_end,
        stderr=program_end,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "INPUTRC": os.devnull},
    )
    os.close(program_end)
    try:
        read_until(terminal, "you>")
        os.write(terminal, b"hello\n")
        read_until(terminal, "five")
        process.send_signal(signal.SIGINT)
        read_until(terminal, "(?s)stopped.*you>")
        assert server.disconnected.wait(10)
        process.send_signal(signal.SIGINT)  # at the prompt it leaves neither
        read_until(terminal, "(?s)Ctrl-D or /quit leaves.*you>")
        server.delay = 0.002  # without any, a busy machine reads for longer than the test waits
        os.write(terminal, b"and now\n")
        read_until(terminal, "five")
        assert [message["role"] for message in server.bodies[-1]["messages"]] == ["user", "assistant", "user"]
        process.send_signal(signal.SIGINT)
        read_until(terminal, "(?s)stopped.*you>")
        os.write(terminal, b"/quit\n")
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def bench(server: FakeServer, *words: str) -> Result:
    return run("bench", ["--base-url", f"http://{server.address}", "--num-prompts", "6", *words])


def test_bench_reports_and_saves_the_figures_of_vllm(server: FakeServer, tmp_path: Path) -> None:
    server.delay = 0.002
    file = tmp_path / "result.json"
    words = [
        "--random-input-len",
        "12",
        "--random-output-len",
        "5",
        "--max-concurrency",
        "2",
        "--num-warmups",
        "1",
    ]
    words += ["--goodput", "ttft:100000", "e2el:100000", "--save-result", "--result-filename", str(file)]
    result = bench(server, *words, "--metadata", "tp=2", "--save-detailed", "--plot", str(tmp_path / "a.png"))
    assert "Successful requests:                      6" in result.stdout
    for line in ("Mean TTFT (ms):", "P99 ITL (ms):", "Median TPOT (ms):", "P99 E2EL (ms):", "Client CPU"):
        assert line in result.stdout
    summary = json.loads(file.read_text())
    assert summary["completed"] == 6
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (42, 30)
    assert summary["input_lens"] == [7] * 6  # as the server counts
    assert summary["generated_texts"] == ["one two three four five"] * 6
    assert [len(gaps) for gaps in summary["itls"]] == [4] * 6
    assert summary["request_goodput"] == summary["request_throughput"]
    assert summary["tp"] == "2"
    assert (summary["request_rate"], summary["max_concurrency"]) == ("inf", 2)
    assert summary["max_concurrent_requests"] <= 2
    # sleeping cannot take less than it was asked for; how much more is the machine's matter
    assert summary["mean_ttft_ms"] >= 2
    assert summary["mean_e2el_ms"] >= 10
    assert summary["duration"] >= 3 * 0.010
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert len(server.bodies) == 7
    for body in server.bodies:
        assert body["ignore_eos"] is True
        assert len(body["prompt"]) == 12
        assert all(0 <= token < 99 for token in body["prompt"])


def test_bench_sends_the_same_prompts_for_the_same_seed(server: FakeServer) -> None:
    for seed in ("1", "1", "2"):
        bench(server, "--seed", seed, "--random-range-ratio", "0.5", "--output-len", "2", "--input-len", "9")
    prompts = [sorted(str(body["prompt"]) for body in server.bodies[i : i + 6]) for i in (0, 6, 12)]
    assert prompts[0] == prompts[1] != prompts[2]


def test_bench_measures_chat_and_megatron_servers(server: FakeServer, tmp_path: Path) -> None:
    server.has_tokenizer = False
    file = tmp_path / "a.json"
    save = ["--append-result", "--result-filename", str(file), "--output-len", "3", "--input-len", "4"]
    bench(server, "--backend", "openai-chat", *save)
    result = bench(server, "--backend", "megatron", *save)
    assert "Mean TTFT (ms):                           not measured" in result.stdout
    chat, megatron = [json.loads(line) for line in file.read_text().splitlines()]
    assert chat["prompt_form"] == megatron["prompt_form"] == "words"
    assert (chat["total_output_tokens"], megatron["total_output_tokens"]) == (18, 18)
    assert megatron["mean_ttft_ms"] is None
    assert megatron["mean_e2el_ms"] > 0
    assert server.bodies[-1]["tokens_to_generate"] == 3


def test_bench_counts_failures_and_fails_if_all_do(server: FakeServer) -> None:
    server.statuses = [(500, {}, {"error": {"message": "out of memory"}})]
    result = bench(server, "--input-len", "4", "--output-len", "2")
    assert "Failed requests:                          1" in result.stdout
    assert "1 requests failed; the first: " in result.stderr
    server.statuses = [(500, {}, {"error": {"message": "out of memory"}})] * 6
    result = bench(server, "--input-len", "4", "--output-len", "2")
    assert "bench: all 6 requests failed: http" in str(result.exception)
    assert str(result.exception).endswith("refused with status 500: out of memory")
    assert result.stdout == ""  # no table of zeros


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            [],
            "--random-input-len: prompt and output exceed the model's context: found 1,024 + 128 tokens, "
            "wanted at most 64; hint: --random-input-len 32 --random-output-len 32",
        ),
        (["--input-len", "60", "--output-len", "5"], "found 60 + 5 tokens, wanted at most 64"),
        (
            ["--input-len", "40", "--output-len", "16", "--random-range-ratio", "0.5", "--model", "tiny"],
            "found 60 + 24 tokens",
        ),
        (["--random-prefix-len", "80"], "found 1,104 + 128 tokens, wanted at most 64"),
        (
            ["--dataset-name", "prefix_repetition", "--num-prompts", "10"],
            "--prefix-repetition-suffix-len: prompt and output exceed the model's context: found 512 + 128",
        ),
    ],
)
def test_bench_refuses_prompts_that_the_context_cannot_hold(
    server: FakeServer, words: list[str], error: str
) -> None:
    server.max_model_len = 64
    result = bench(server, *words)
    assert error in str(result.exception)
    assert server.bodies == []
    bench(server, "--input-len", "60", "--output-len", "4")
    assert len(server.bodies) == 6


def test_bench_reads_prompts_of_a_file(server: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a", "output_tokens": 2}\n{"prompt": "b"}\n')
    words = ["--dataset-name", "custom", "--dataset-path", str(file), "--disable-shuffle", "--no-oversample"]
    bench(server, *words, "--custom-output-len", "3")
    assert sorted((body["prompt"], body["max_tokens"]) for body in server.bodies) == [("a", 2), ("b", 3)]
    assert "ignore_eos" not in server.bodies[0]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--goodput", "itl:5"], "--goodput: is not a bound: found itl:5"),
        (["--goodput", "ttft"], "--goodput: is not a bound"),
        (["--percentile-metrics", "ttft,x"], "--percentile-metrics: no such metric: found x"),
        (["--metric-percentiles", "101"], "--metric-percentiles: is not a percentile: found 101"),
        (["--ramp-up-strategy", "linear"], "needs --ramp-up-start-rps and --ramp-up-end-rps"),
        (["--ramp-up-end-rps", "2"], "need --ramp-up-strategy"),
        (["--dataset-name", "custom"], "--dataset-name custom: needs --dataset-path; hint: --dataset-path"),
        (["--extra-body", "[1]"], "--extra-body: is not a JSON object"),
        (["--result-filename", "a.json"], "--result-filename: needs --save-result"),
        (["--plot", "/dev/null/a.png"], "--plot: is below a file"),
        (["--plot", "a.txt"], "--plot: is not a PNG: found a.txt, wanted FILE.png; hint: --plot a.png"),
        (
            ["--save-result", "--result-dir", "no/a"],
            "--result-dir: does not exist: found no/a; hint: mkdir -p no/a",
        ),
        (["--save-result", "--result-dir", __file__], "--result-dir: is a file"),
        (["--save-result", "--result-dir", "/proc"], "--result-dir: cannot be written: found /proc: No such"),
        (
            ["--save-result", "--result-filename", "no/a"],
            "--result-filename: is in a folder that does not exist",
        ),
        (["--save-result", "--result-filename", "/dev/full"], "--result-filename: is not a regular file"),
        (["--plot", "no/a.png"], "--plot: is in a folder that does not exist: found no; hint: mkdir"),
        (["--header", "a"], "--header: is not a pair: found a, wanted KEY=VALUE"),
        (["--base-url", "ftp://a"], "--base-url: is not an address"),
        (["--burstiness", "0"], "--burstiness"),
        (
            ["--num-prompts", "20000000000"],
            "--num-prompts: too many: found 20,000,000,000, wanted at most 1,",
        ),
        (
            ["--num-warmups", "20000000000"],
            "--num-warmups: too many: found 20,000,000,000, wanted at most 1,",
        ),
        (["--input-len", "9" * 30], "--num-prompts: too many tokens of prompts in all: found 999,"),
        (
            ["--random-prefix-len", "67109"],
            "in all: found 68,133,000, wanted at most 67,108,864; hint: fewer",
        ),
        (["--output-len", "9" * 30], "--random-output-len: too many: found 9"),
        (["--random-output-len", "9" * 30], "--random-output-len: too many: found 9"),
        (["--vocab-size", "9" * 30], "--vocab-size: too many: found 9"),
        (
            ["--dataset-name", "prefix_repetition", "--prefix-repetition-suffix-len", "99999999"],
            "--num-prompts: too many tokens of prompts in all",
        ),
    ],
)
def test_bench_refuses_options_before_it_sends_anything(words: list[str], error: str) -> None:
    assert error in get_error("bench", words)


def test_bench_overwrites_only_its_own_results(server: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"a": 1}')
    error = get_error("bench", ["--save-result", "--result-filename", str(file)])
    assert "is a file that this command did not write" in error
    assert file.read_text() == '{"a": 1}'


@pytest.mark.parametrize("name", ["chat", "complete", "bench"])
def test_help_lists_options_in_groups_and_imports_nothing_slow(name: str) -> None:
    probe = (
        "import sys\n"
        f"from mega_serve.commands.{name} import {name}\n"
        f"try: {name}(['--help'])\n"
        "except SystemExit: pass\n"
        "slow = ('torch', 'fastapi', 'aiohttp', 'numpy', 'rich', 'matplotlib')\n"
        "print([x for x in slow if x in sys.modules])\n"
    )
    process = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert process.stdout.endswith("[]\n")
    assert "Connection:\n" in process.stdout
    assert "Sampling:\n" in process.stdout
