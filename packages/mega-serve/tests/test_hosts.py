"""Which Host headers name this server."""

from __future__ import annotations

import pytest

from mega_serve.http.hosts import is_allowed_host, is_host_name


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:5000", "LOCALHOST.", "127.0.0.1:1", "127.8.9.1", "[::1]:5000", "10.1.2.3:5000",
     "api.example", "API.example.:443"],
)  # fmt: skip
def test_loopback_the_bound_address_and_listed_names_are_allowed(host: str) -> None:
    assert is_allowed_host(host, {"api.example"}, local_address="10.1.2.3")


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.1.2.4", "x/health?y=",
     "localhost/x", "localhost:99999", "localhost:", "localhost@evil.example", "evil.example#localhost",
     "a b", "[::1", "::1", "0.0.0.0", "127.1", "2130706433", "0x7f000001", "xn--lcalhost-0ta",
     "localhost\\x", "api.example.evil"],
)  # fmt: skip
def test_any_other_host_is_refused(host: str) -> None:
    assert not is_allowed_host(host, {"api.example"}, local_address="10.1.2.3")


def test_a_star_allows_every_well_formed_host() -> None:
    assert is_allowed_host("evil.example", {"*"})
    assert not is_allowed_host("x/health?y=", {"*"})


def test_a_host_of_the_list_has_neither_scheme_nor_port() -> None:
    for name in ("a.example", "LOCALHOST", "10.0.0.1", "::1", "[::1]", "*"):
        assert is_host_name(name), name
    for name in ("", "a.example:80", "http://a.example", "a b", "[::1]:80", "a/b", "*.example"):
        assert not is_host_name(name), name
