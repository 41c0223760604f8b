"""The command `mega-serve`: bind the port, load the checkpoint, serve requests."""

from __future__ import annotations

import errno
import logging
import signal
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from mega_schema.app.cli_runner import run_command
from mega_schema.errors import ConfigError
from mega_serve import __version__
from mega_serve.limits import MAX_BATCH_TOKENS, MAX_BODY_BYTES


@click.command(name="mega-serve", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--load",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Checkpoint directory, or run directory (its latest).",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; 0.0.0.0 listens on all interfaces.",
)
@click.option(
    "--port",
    default=5000,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Port to listen on; 0 selects a free port.",
)
@click.option(
    "--megatron-legacy-status",
    is_flag=True,
    help="Answer bad requests as Megatron does: most with status 200 and a bare JSON string.",
)
@click.option(
    "--max-tokens-to-oom",
    default=MAX_BATCH_TOKENS,
    show_default=True,
    type=click.IntRange(min=1),
    help="Maximum prompts (or beams) x tokens of the longest row, per request.",
)
@click.option(
    "--max-body-bytes",
    default=MAX_BODY_BYTES,
    show_default=True,
    type=click.IntRange(min=1),
    help="Maximum size of a request body, in bytes.",
)
@click.option("--log-prompts", is_flag=True, help='Log the prompts, except of requests with "no_log": true.')
@click.option(
    "--device",
    default="auto",
    show_default=True,
    help="cpu, cuda or cuda:N; auto is the first GPU, or the CPU.",
)
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    type=click.Choice(["float32", "bfloat16"]),
    help="Dtype of the weights in memory.",
)
@click.version_option(__version__)
def serve(
    load: Path,
    host: str,
    port: int,
    megatron_legacy_status: bool,
    max_tokens_to_oom: int,
    max_body_bytes: int,
    log_prompts: bool,
    device: str,
    dtype: str,
) -> None:
    """Serve text generation requests over HTTP with the checkpoint in DIR.

    PUT /api takes Megatron's requests, GET / is a page with a prompt box, GET /health is the health check.
    """
    # while loading, SIGTERM exits at once; while serving, uvicorn waits for the requests in progress
    signal.signal(signal.SIGTERM, _exit_on_signal)
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s", level=logging.INFO)
    listener = _bind_socket(host, port)

    import torch

    from mega_model.devices import resolve_device
    from mega_schema.checkpoint.reader import Checkpoint
    from mega_serve.api.app import create_app
    from mega_serve.engine import load_engine
    from mega_serve.server import Server

    checkpoint = Checkpoint.open(load)
    engine = load_engine(
        checkpoint,
        max_batch_tokens=max_tokens_to_oom,
        device=resolve_device(device, where="--device"),
        dtype=getattr(torch, dtype),
    )
    app = create_app(
        engine, legacy=megatron_legacy_status, max_body_bytes=max_body_bytes, log_prompts=log_prompts
    )
    spec = checkpoint.spec
    model = f"{spec.family}, {spec.layers} layers, {spec.max_seq_len:,} tokens of context"
    line = f"mega-serve: {_url(listener)} ready ({model}, iteration {checkpoint.iteration})"
    Server(app, on_ready=lambda: click.echo(line)).run([listener])


def main() -> None:
    """Run the program `mega-serve`."""
    run_command(serve)


def _exit_on_signal(_signal: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(0)


def _bind_socket(host: str, port: int) -> socket.socket:
    """Bind the port before the weights are loaded; connections are refused until the server listens."""
    try:
        family, socket_type, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise ConfigError("--host", "no such address", found=host, hint="--host 127.0.0.1") from None
    listener = socket.socket(family, socket_type, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            hint = f"--port {port + 1 if port < 65535 else 5000}"
            raise ConfigError("--port", "in use by another program", found=port, hint=hint) from None
        flag, value, hint = (
            ("--host", host, "--host 127.0.0.1")
            if error.errno == errno.EADDRNOTAVAIL
            else ("--port", port, "--port 5000")
        )
        raise ConfigError(flag, f"cannot be listened on ({error.strerror})", found=value, hint=hint) from None
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
