"""Refuse requests that were sent to another host, or by the page of another site.

A web page on evil.example may let its own name point at 127.0.0.1 (DNS rebinding) and then read the responses
of a server on loopback; the Host header gives it away. It may also send simple requests across origins
without reading the response; the Origin header gives that away.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from mega_serve.http.errors import HttpError
from mega_serve.http.responses import error_response

ANY_HOST = "*"
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]{1,253})(:(?P<port>[0-9]{1,5}))?")
_READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class HostMiddleware:
    """Answer 421 to a Host and 403 to an Origin that are not allowed.

    Args:
        hosts: allowed names, without ports, beside loopback and the connection's address; "*" allows all.
        origins: allowed origins (`https://name:port`) beside the host itself.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        self._app = app
        self._hosts = frozenset(normalize_host(host) for host in hosts)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._check(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error_response(error)(scope, receive, send)

    def _check(self, scope: Scope) -> HttpError | None:
        headers = scope["headers"]
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        server = scope.get("server") or ("", None)
        host = hosts[0] if len(hosts) == 1 else ""
        if not is_allowed_host(host, self._hosts, local_address=server[0]):
            message = "the server does not serve this host; its operator can allow it with --allowed-host"
            return HttpError(421, message, code="host_not_allowed")
        if scope["method"] not in _READING_METHODS:
            for name, value in headers:
                if name == b"origin" and not self._is_allowed_origin(value.decode("latin-1"), host):
                    message = (
                        "requests from this origin are not allowed; the operator can with --allowed-origin"
                    )
                    return HttpError(403, message, code="origin_not_allowed")
        return None

    def _is_allowed_origin(self, origin: str, host: str) -> bool:
        return origin in self._origins or origin.partition("://")[2].lower() == host.lower()


def is_allowed_host(host: str, allowed: Iterable[str], *, local_address: str = "") -> bool:
    """Tell whether a Host header names this server.

    Loopback names and addresses, and the address at which the connection arrived (a kubelet's probe uses it),
    need no list: an attacker's page has a name.
    """
    match = _HOST.fullmatch(host)
    if match is None or int(match["port"] or 0) > 65535:
        return False
    name = normalize_host(match["name"])
    if name in allowed or ANY_HOST in allowed or name == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or name == local_address.lower()


def is_host_name(name: str) -> bool:
    """Tell whether a name can be the host of a Host header, or is "*"."""
    match = _HOST.fullmatch(f"[{name}]" if name.count(":") > 1 and "[" not in name else name)
    return name == ANY_HOST or (match is not None and match["port"] is None)


def normalize_host(name: str) -> str:
    """Return a name or address in lower case, without brackets and the root's dot."""
    return name.strip().lower().removeprefix("[").removesuffix("]").removesuffix(".")
