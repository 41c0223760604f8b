"""API keys: files, environment, headers, comparison."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest

from mega_schema.errors import ConfigError
from mega_serve.http.auth import ENVIRONMENT, KeyRing, load_keys
from mega_serve.http.errors import HttpError

KEY = "k" * 32
OTHER = "o" * 32


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_keys_come_from_the_file_and_the_environment(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"d" * 32).hexdigest()
    path = tmp_path / "keys"
    path.write_text(f"# team\n\nalice:{KEY}\nbob:sha256:{digest}\n")
    ring = load_keys(path, {ENVIRONMENT: f"carol:{OTHER}, {'x' * 16}"})
    assert len(ring) == 4
    assert ring.find(KEY) == "alice"
    assert ring.find("d" * 32) == "bob"
    assert ring.find(OTHER) == "carol"
    assert ring.find("x" * 16) == f"key-{hashlib.sha256(b'x' * 16).hexdigest()[:8]}"
    assert ring.find(f"sha256:{digest}") is None


def test_the_ring_holds_no_key(tmp_path: Path) -> None:
    ring = load_keys(None, {ENVIRONMENT: f"alice:{KEY}"})
    assert KEY not in repr(vars(ring))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tiny", "line 1: the API key is too short: found 4 characters, wanted at least 16"),
        (f"a b:{KEY}", "line 1: a key's name is 1 to 64 letters"),
        ("# nothing", "holds no API key"),
        (f"a:{KEY}\na:{OTHER}", "two have one name: found a"),
        ("\udcff" * 20, "not a text file"),
    ],
)
def test_a_bad_key_file_is_refused_without_printing_a_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text, "utf-8", "surrogateescape")
    with pytest.raises(ConfigError) as error:
        load_keys(path, {})
    assert message in str(error.value)
    assert KEY not in str(error.value)
    assert "tiny" not in str(error.value)


def test_bearer_and_basic_are_accepted() -> None:
    ring = load_keys(None, {ENVIRONMENT: f"alice:{KEY}"})
    basic = base64.b64encode(f"anyone:{KEY}".encode()).decode()
    assert ring.authenticate(bearer(KEY)) == "alice"
    assert ring.authenticate({"authorization": f"bearer  {KEY}"}) == "alice"
    assert ring.authenticate({"authorization": f"Basic {basic}"}) == "alice"


@pytest.mark.parametrize(
    "value",
    ["", "Bearer", "Bearer ", f"Bearer {OTHER}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", KEY, f"Token {KEY}",
     "Basic !!", "Basic " + base64.b64encode(KEY.encode()).decode(), "Bearer \udcff\xe9"],
)  # fmt: skip
def test_anything_else_is_401(value: str) -> None:
    ring = load_keys(None, {ENVIRONMENT: f"alice:{KEY}"})
    with pytest.raises(HttpError) as error:
        ring.authenticate({"authorization": value})
    assert error.value.status == 401
    assert error.value.headers == {"WWW-Authenticate": "Bearer"}


def test_a_browser_is_asked_for_a_password() -> None:
    ring = load_keys(None, {ENVIRONMENT: KEY})
    with pytest.raises(HttpError) as error:
        ring.authenticate({"accept": "text/html,*/*"})
    assert error.value.headers["WWW-Authenticate"].startswith("Basic")


def test_an_empty_ring_accepts_everything() -> None:
    assert KeyRing().authenticate({}) == ""


def test_all_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = load_keys(None, {ENVIRONMENT: f"a:{KEY},b:{OTHER},c:{'c' * 32}"})
    compared = []

    def compare(first: bytes, second: bytes) -> bool:
        compared.append(first)
        return first == second

    monkeypatch.setattr("mega_serve.http.auth.hmac.compare_digest", compare)
    for key in (KEY, OTHER, "none" * 8):
        compared.clear()
        ring.find(key)
        assert len(compared) == 3
