"""API keys: read from a file or the environment, stored as SHA-256, compared in constant time."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mega_schema.errors import ConfigError
from mega_serve.http.errors import HttpError

ENVIRONMENT = "MEGA_SERVE_API_KEYS"
# a key is stored as one round of SHA-256, which is safe for random keys and not for passwords
_MIN_KEY_CHARS = 16
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KEY_HINT = "openssl rand -hex 32"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as the server stores it.

    Attributes:
        key_id: its name, in audit lines, metrics and cache namespaces.
        digest: SHA-256 of the key.
    """

    key_id: str
    digest: bytes


class KeyRing:
    """The keys that the server accepts. An empty ring accepts every request."""

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: str) -> str | None:
        """Return the name of a key, or None. The time does not depend on which key it is, or is not."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        name = None
        for known in self._keys:
            if hmac.compare_digest(known.digest, digest):
                name = known.key_id
        return name

    def authenticate(self, headers: Mapping[str, str]) -> str:
        """Return the name of the key in the headers; "" if the ring is empty.

        `Authorization: Bearer KEY` is OpenAI's form. A browser offers Basic authentication for the web
        page, with the key as password.

        Raises:
            HttpError: 401.
        """
        if not self._keys:
            return ""
        key = _read_authorization(headers.get("authorization", ""))
        name = None if key is None else self.find(key)
        if name is None:
            # a browser that navigates to the page asks its user; a program must not be asked
            wants_page = "text/html" in headers.get("accept", "")
            challenge = 'Basic realm="mega-serve: any name, API key as password"' if wants_page else "Bearer"
            what = (
                "no API key: send the header Authorization: Bearer KEY" if key is None else "unknown API key"
            )
            raise HttpError(401, what, code="invalid_api_key", headers={"WWW-Authenticate": challenge})
        return name


def load_keys(path: Path | None, environment: Mapping[str, str]) -> KeyRing:
    """Read the keys of a file and of the environment.

    A line of the file, or an item of the comma-separated variable, is `KEY`, `NAME:KEY` or
    `NAME:sha256:HEX`, the last for a file that must not hold the key itself. Lines that begin with # are
    comments. A key never comes from the command line, which every user of the machine can read.

    Raises:
        ConfigError: a line that is none of them, a key that is too short, a repeated name, an empty file.
    """
    keys: list[ApiKey] = []
    if path is not None:
        try:
            lines = path.read_text("utf-8").splitlines()
        except UnicodeDecodeError:
            raise ConfigError(path, "not a text file", hint=_KEY_HINT) from None
        keys += _parse_keys(lines, str(path))
        if not keys:
            raise ConfigError(path, "holds no API key", hint=f"{_KEY_HINT} >> {path}")
    keys += _parse_keys(environment.get(ENVIRONMENT, "").split(","), ENVIRONMENT)
    names = [key.key_id for key in keys]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError("API keys", "two have one name", found=name)
    return KeyRing(keys)


def _parse_keys(lines: Iterable[str], where: str) -> list[ApiKey]:
    """Parse the lines. Messages name the line, never what is in it."""
    keys = []
    for number, text in enumerate(lines, start=1):
        line = text.strip()
        if not line or line.startswith("#"):
            continue
        name, separator, key = line.partition(":")
        if not separator:
            name, key = "", line
        elif not _NAME.fullmatch(name):
            what = "a key's name is 1 to 64 letters, digits, _ . or -"
            raise ConfigError(f"{where} line {number}", what, hint="alice:KEY")
        digest = _DIGEST.fullmatch(key)
        if digest is None and len(key) < _MIN_KEY_CHARS:
            raise ConfigError(
                f"{where} line {number}",
                "the API key is too short",
                found=f"{len(key)} characters",
                wanted=f"at least {_MIN_KEY_CHARS}",
                hint=_KEY_HINT,
            )
        value = bytes.fromhex(digest[1]) if digest else hashlib.sha256(key.encode()).digest()
        keys.append(ApiKey(name or f"key-{value.hex()[:8]}", value))
    return keys


def _read_authorization(header: str) -> str | None:
    """Return the key in an Authorization header; None if there is none."""
    scheme, _, value = header.partition(" ")
    match scheme.lower():
        case "bearer":
            return value.strip() or None
        case "basic":
            try:
                user_and_key = base64.b64decode(value.strip(), validate=True).decode(
                    "utf-8", "surrogateescape"
                )
            except (binascii.Error, ValueError):
                return None
            return user_and_key.partition(":")[2] or None
        case _:
            return None
