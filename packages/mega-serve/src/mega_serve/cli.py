"""The command: `mega-serve --load DIR`. It opens the port first, then the checkpoint, then answers."""

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

from mega_schema.command import run
from mega_schema.errors import ConfigError
from mega_serve import __version__


@click.command(name="mega-serve", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--load",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Checkpoint, or folder of a run.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 is all.")
@click.option(
    "--port", default=5000, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one."
)
@click.option(
    "--megatron-legacy-status",
    is_flag=True,
    help="Answer mistakes as Megatron does: most with status 200 and a bare JSON string.",
)
@click.option(
    "--max-tokens-to-oom",
    default=12000,
    show_default=True,
    type=click.IntRange(min=1),
    help="Most prompts (or beams) x tokens of one request.",
)
@click.option(
    "--max-body-bytes",
    default=2 * 1024 * 1024,
    show_default=True,
    type=click.IntRange(min=1),
    help="Longest request body.",
)
@click.option(
    "--log-prompts", is_flag=True, help='Write prompts to the log, except of requests with "no_log": true.'
)
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1; auto: cuda if any.")
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    type=click.Choice(["float32", "bfloat16"]),
    help="Of the weights in memory.",
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
    """Answer text generation requests over HTTP from the checkpoint in DIR.

    PUT /api takes Megatron's requests, GET / is a page to try prompts on, GET /health says that it is up.
    """
    # asked to stop, it stops: at once while loading, after the requests in progress while serving
    signal.signal(signal.SIGTERM, _leave)
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s", level=logging.INFO)
    listener = _bind(host, port)

    import torch

    from mega_schema.checkpoint import Checkpoint
    from mega_serve.api.app import create_app
    from mega_serve.engine import load as load_engine
    from mega_serve.server import Server

    checkpoint = Checkpoint.open(load)
    engine = load_engine(
        checkpoint, most_tokens=max_tokens_to_oom, device=_device(device), dtype=getattr(torch, dtype)
    )
    app = create_app(engine, legacy=megatron_legacy_status, most_body=max_body_bytes, log_prompts=log_prompts)
    spec = checkpoint.spec
    model = f"{spec.family}, {spec.layers} layers, {spec.context:,} tokens of context"
    line = f"mega-serve: {_url(listener)} ready ({model}, iteration {checkpoint.iteration})"
    Server(app, ready=lambda: click.echo(line)).run([listener])


def main() -> None:
    """The console entry point."""
    run(serve)


def _leave(_signal: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(0)


def _bind(host: str, port: int) -> socket.socket:
    """The port, ours before the weights are read; connections are refused until the server listens."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise ConfigError("--host", "no such address", found=host, hint="--host 127.0.0.1") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            hint = f"--port {port + 1 if port < 65535 else 5000}"
            raise ConfigError("--port", "in use by another program", found=port, hint=hint) from None
        flag, found, hint = (
            ("--host", host, "--host 127.0.0.1")
            if error.errno == errno.EADDRNOTAVAIL
            else ("--port", port, "--port 5000")
        )
        raise ConfigError(flag, f"cannot be listened on ({error.strerror})", found=found, hint=hint) from None
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError):  # torch raises the second where it is built without CUDA
        wanted = "auto, cpu, or a CUDA device of this machine"
        raise ConfigError("--device", "not here", found=name, wanted=wanted, hint="--device cpu") from None
    return name
