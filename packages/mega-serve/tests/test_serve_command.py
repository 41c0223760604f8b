"""The command: wrong values in one line, and a server from flags to exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path

import httpx
import pytest

from mega_schema.errors import ConfigError, FormatError
from mega_schema.spec import ModelSpec
from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_serve.commands.engine_options import open_checkpoint
from mega_serve.commands.serve import build_application, build_serve_command
from mega_serve.commands.server_options import LIMIT_FLAGS, build_config, build_limits
from mega_serve.http.auth import ENVIRONMENT
from mega_serve.http.limits import Limits
from tests import fork_server
from tests.serving.damaged_checkpoint import copy_damaged
from tests.serving.echo_server import build_echo_router
from tests.serving.random_checkpoint import save_random_checkpoint

FACTORY = "tests.serving.echo_engine:build_echo_engine"
KEY = "k" * 32


def run_command(*flags: str) -> None:
    command = build_serve_command(FACTORY, lambda context: [build_echo_router(context)])
    command.main(list(flags), standalone_mode=False)


def test_every_limit_has_a_flag() -> None:
    assert sorted(name for name, _ in LIMIT_FLAGS.values()) == sorted(field.name for field in fields(Limits))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "no such host"], "--host: no such address: found no such host; hint: --host 127.0.0.1"),
        (["--allowed-origin", "app.example"], "--allowed-origin: not an origin: found app.example"),
        (["--allowed-origin", "*"], "--allowed-origin: not an origin"),
        (["--allowed-host", ""], "--allowed-host: not a host: found '', wanted a name or an address"),
        (["--allowed-host", "https://a.example"], "--allowed-host: not a host: found 'https://a.example'"),
        (["--allowed-host", "a.example:8000"], "--allowed-host: not a host: found 'a.example:8000'"),
        (
            ["--otlp-traces-endpoint", "collector"],
            "--otlp-traces-endpoint: not a URL: found collector; hint: ",
        ),
        (["--ssl-certfile", "c.pem"], "--ssl-keyfile: missing"),
        (["--ssl-certfile", "c.pem", "--ssl-keyfile", "k.pem"], "--ssl-certfile: no such file: found c.pem"),
    ],
)
def test_a_wrong_value_is_one_line(checkpoint: Path, flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        run_command("--load", str(checkpoint), "--port", "0", *flags)
    assert str(error.value).startswith(message)


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Return a certificate and its key."""
    key, certificate = folder / f"{name}-key.pem", folder / f"{name}.pem"
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    command = [*words.split(), "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def test_tls_files_that_cannot_be_used_are_one_line(checkpoint: Path, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "a")
    _, second_key = make_certificate(tmp_path, "b")
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    locked = tmp_path / "locked.pem"
    command = ["openssl", "ec", "-in", key, "-aes256", "-passout", "pass:secret", "-out", locked]
    subprocess.run(command, check=True, capture_output=True)
    for files, message in (
        (
            (text, text),
            f"--ssl-certfile: no certificate chain in PEM, .*: found {text} and {text}; hint: openssl req ",
        ),
        ((certificate, second_key), f"--ssl-keyfile: is not the key of {certificate}: found {second_key}"),
        ((certificate, locked), f"--ssl-keyfile: has a password: found {locked}; hint: openssl pkey -in "),
    ):
        flags = ("--ssl-certfile", str(files[0]), "--ssl-keyfile", str(files[1]))
        with pytest.raises(ConfigError, match=message):
            run_command("--load", str(checkpoint), "--port", "0", *flags)


def test_a_model_of_hugging_face_gets_the_line_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FormatError, match="mega-ckpt convert --from hf --to mega --load .* --save "):
        run_command("--load", str(tmp_path), "--port", "0")


def test_a_bert_of_hugging_face_is_refused_without_a_conversion_that_leads_back(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(
        ConfigError, match="is of an encoder, which predicts no next token: found bert"
    ) as error:
        run_command("--load", str(tmp_path), "--port", "0")
    assert "mega-ckpt" not in str(error.value)


def test_a_broken_template_of_a_checkpoint_is_logged_at_the_start(
    spec: ModelSpec, tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, words = tmp_path / "run", tmp_path / "words"
    tokenizer.save(words)
    (words / "chat_template.jinja").write_text("{% for %}")
    save_random_checkpoint(run, spec, words)
    command = build_serve_command(FACTORY, lambda context: [build_echo_router(context)])
    values = command.make_context("serve", ["--load", str(run)]).params
    limits = build_limits(values)
    config = build_config(values, host="127.0.0.1", limits=limits, log_prompts=False)
    build_application(values, config, open_checkpoint(values), FACTORY, lambda context: [], tuple)
    next(thread for thread in threading.enumerate() if thread.name == "template-check").join(30)
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    message = record.getMessage()
    assert message.startswith("the checkpoint's chat template cannot be compiled: ")
    assert message.endswith("refuse all requests; hint: start the server with --chat-template FILE")


def test_weights_that_were_damaged_on_disk_are_one_line_and_exit_code_2(
    checkpoint: Path, tmp_path: Path
) -> None:
    weights = copy_damaged(checkpoint, tmp_path / "copy")
    command = [sys.executable, "-m", "mega_serve", "--load", str(weights.parent), "--port", "0"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert process.returncode == 2
    *progress, line = process.stderr.splitlines()
    assert line.startswith(f"error: {weights}: model ")
    assert "values are not those that were written: crc32: found" in line
    assert [text for text in progress if "crc32" in text] == []  # said once


def test_no_flag_takes_an_api_key() -> None:
    command = build_serve_command(FACTORY, lambda context: [])
    flags = [flag for param in command.params for flag in param.opts]
    assert [flag for flag in flags if "key" in flag and "ssl" not in flag] == ["--api-key-file"]


def test_the_command_serves_and_ends_at_a_signal(checkpoint: Path) -> None:
    program = f"""
from mega_schema.app.cli_runner import run_command
from mega_serve.commands.serve import build_serve_command
from tests.serving.echo_server import build_echo_router
from tests.serving.random_checkpoint import save_random_checkpoint

run_command(build_serve_command({FACTORY!r}, lambda context: [build_echo_router(context)]))
"""
    environment = {**os.environ, "PYTHONPATH": fork_server.module_path(), ENVIRONMENT: f"alice:{KEY}"}
    command = [sys.executable, "-c", program, "--load", str(checkpoint), "--port", "0"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            line = process.stdout.readline()
            assert line.startswith("mega-serve: http://127.0.0.1:"), line
            assert line.endswith("ready (gpt, 2 layers, 4,096 tokens of context, iteration 7)\n")
            url = line.split()[1]
            body = {"prompt": "A"}
            assert httpx.post(f"{url}/echo", json=body).status_code == 401
            response = httpx.post(f"{url}/echo", json=body, headers={"Authorization": f"Bearer {KEY}"})
            assert response.json() == {"text": "AAAA"}
            process.send_signal(signal.SIGTERM)
            log = process.communicate(timeout=10)[1]
            assert process.returncode == 0
            assert "Traceback" not in log
            assert '"key_id": "alice"' in log
            assert KEY not in log
        finally:
            process.kill()
