"""Parse the address of a server: HOST:PORT, as Megatron's text_generation_cli.py takes it, or a URL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from mega_schema.errors import ConfigError

_EXAMPLE: Final = "127.0.0.1:5000"


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The URL below which the endpoints of a server are.

    Attributes:
        base_url: without a slash at its end.
    """

    base_url: str

    def url(self, path: str) -> str:
        """Return the URL of an endpoint; `path` begins with a slash.

        A base URL that ends in /v1, as the OpenAI clients want it, is accepted.
        """
        base = self.base_url
        if base.endswith("/v1"):
            base = base.removesuffix("/v1")
        return base + path

    def __str__(self) -> str:
        return self.base_url


def parse_address(text: str, option: str) -> ServerAddress:
    """Return the address that a user wrote.

    Args:
        option: the argument that holds the text; begins the message.

    Raises:
        ConfigError: the text is no address.
    """
    has_scheme = "://" in text
    url = text if has_scheme else f"http://{text}"
    wanted = f"HOST:PORT or a URL, such as {_EXAMPLE}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigError(option, "is not an address", found=text or '""', wanted=wanted) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or any(c.isspace() for c in text):
        raise ConfigError(option, "is not an address", found=text or '""', wanted=wanted)
    if parts.query or parts.fragment or parts.username is not None:
        what = "has more than host, port and path"
        raise ConfigError(option, what, found=text, wanted=wanted)
    if port is None and not has_scheme:
        hint = f"{parts.hostname}:5000"
        raise ConfigError(option, "has no port", found=text, wanted="HOST:PORT", hint=hint)
    return ServerAddress(f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/"))
