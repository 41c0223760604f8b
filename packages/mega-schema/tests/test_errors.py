"""The format of error messages."""

from __future__ import annotations

import pickle

import pytest

from mega_schema.errors import ConfigError, FormatError, LayoutError, MegaError, RequestError


def test_the_line_names_the_place_then_both_values_then_the_remedy() -> None:
    error = ConfigError("batch.size", "is odd", found=3, wanted=4, hint="--batch-size 4")
    assert str(error) == "batch.size: is odd: found 3, wanted 4; hint: --batch-size 4"
    assert (error.where, error.what, error.found, error.wanted, error.hint) == (
        "batch.size",
        "is odd",
        3,
        4,
        "--batch-size 4",
    )


def test_a_value_of_none_is_a_value() -> None:
    assert str(FormatError("x", "format", found=None)) == "x: format: found None"
    assert str(FormatError("x", "missing")) == "x: missing"


def test_a_value_with_line_breaks_does_not_make_two_lines() -> None:
    assert str(RequestError("x", "y", found="a\r\nerror: b")) == "x: y: found a\\r\\nerror: b"


@pytest.mark.parametrize("kind", [ConfigError, LayoutError, FormatError, RequestError])
def test_who_catches_mega_error_catches_all(kind: type[MegaError]) -> None:
    with pytest.raises(MegaError):
        raise kind("x", "y")


def test_an_error_of_another_process_says_the_same() -> None:
    error = LayoutError("tp", "is odd", found=None, wanted=2, hint="--tp 2")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is LayoutError
    assert str(copy) == str(error) == "tp: is odd: found None, wanted 2; hint: --tp 2"
