from __future__ import annotations

from pathlib import Path

import pytest

from mega_schema.errors import ConfigError
from mega_schema.urls import check_local, format_url, url_scheme


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("s3://bucket/a", "s3"),
        ("s3:/bucket/a", "s3"),
        ("HTTPS://host/a", "https"),
        ("abfs+x://a", "abfs+x"),
        ("/data/a:/b", ""),
        ("data/s3://a", ""),
        ("C:/a", ""),
        ("hf:NAME", ""),
        ("step:key=a", ""),
        ("", ""),
        ("-", ""),
    ],
)
def test_a_url_begins_with_a_scheme_of_two_letters_or_more(text: str, scheme: str) -> None:
    assert url_scheme(text) == scheme


def test_a_url_that_was_a_path_is_printed_as_it_was_written() -> None:
    assert format_url(Path("s3://bucket/a//b")) == "s3://bucket/a/b"
    assert format_url(Path("file:///data/a")) == "file:///data/a"


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("gs://bucket/a", "name a local path, and copy the files as `gcloud storage cp --recursive` does"),
        ("file:///data/a", "/data/a"),
        ("ftp://host/a", "name a local path, and copy the files"),
    ],
)
def test_a_url_is_refused_with_a_hint_for_its_place(url: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_local("--load", Path(url))
    assert str(refused.value) == (
        f"--load: is a URL: found {url}, wanted a path of this machine; hint: {hint}"
    )


def test_a_path_of_this_machine_is_accepted() -> None:
    check_local("--load", "runs/a")
