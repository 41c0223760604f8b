"""Bind the port, and say in one line what is wrong if that fails."""

from __future__ import annotations

import errno
import socket

from mega_schema.errors import ConfigError


def bind_listener(host: str, port: int) -> socket.socket:
    """Bind a TCP socket before the model is loaded.

    Raises:
        ConfigError: no such address, or the port is in use.
    """
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


def listener_url(listener: socket.socket, *, tls: bool = False) -> str:
    """Return the URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
