"""Drop documents by lists of domains, URLs and words in URLs: the rules of datatrove's URLFilter."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mega_data.clean.step import Row, RowFunction, Verdict
from mega_data.clean.urls import ascii_url, find_listed_domain, host_of, load_domain_list
from mega_data.readers.nested_keys import value_or_none
from mega_data.readers.versions import FileVersion, file_version
from mega_schema.errors import ConfigError

_NOT_ALPHANUMERIC = re.compile(r"[^a-z0-9]+")
_FILES = ("domains", "urls", "words", "soft_words", "subwords")
_MAX_LISTS = 8  # kept of earlier tasks of the process


@dataclass(frozen=True, slots=True)
class UrlList:
    """Drop documents whose URL is in a list. Each list is a file in UTF-8 with one entry per line.

    Attributes:
        key: key of the URL; a document without one is kept.
        domains: domains with their subdomains; also a hosts file or an adblock list.
        urls: URLs; scheme, a "/" at the end and the case of the host are ignored.
        words: drop a URL with one of these words, which are separated by other characters than letters and
            digits.
        soft_words: drop a URL with `soft_limit` different words of this list.
        subwords: drop a URL in which one of these occurs anywhere, without regard to separators.
    """

    key: str = "url"
    domains: str = ""
    urls: str = ""
    words: str = ""
    soft_words: str = ""
    subwords: str = ""
    soft_limit: int = 2

    def start(self) -> RowFunction:
        for name in _FILES:
            path = getattr(self, name)
            if path and not Path(path).is_file():
                raise ConfigError(f"step url-list: {name}", "no such file", found=path)
            if path and (line := _find_wrong_line(path, file_version(Path(path)))):
                raise ConfigError(f"step url-list: {name}", "not UTF-8", found=f"{path}:{line}")
        if not any(getattr(self, name) for name in _FILES):
            hint = "--step url-list:domains=blocked-domains.txt"
            raise ConfigError("step url-list", "no list", wanted=" | ".join(_FILES), hint=hint)
        if not self.soft_limit:
            raise ConfigError(
                "step url-list: soft_limit", "not a number of words", found=0, wanted="1 or more"
            )
        domains = (
            load_domain_list(Path(self.domains), file_version(Path(self.domains))) if self.domains else ()
        )
        urls = _load(self.urls, _normalize_url)
        words = _load(self.words, _normalize_word)
        soft_words = _load(self.soft_words, _normalize_word)
        subwords = _subword_pattern(self.subwords) if self.subwords else None

        for name, entries in zip(_FILES, (domains, urls, words, soft_words, subwords), strict=True):
            if (path := getattr(self, name)) and not entries:
                raise ConfigError(f"step url-list: {name}", "has no entry", found=path)

        def work(row: Row) -> Verdict:
            url = value_or_none(row.values, self.key)
            if not isinstance(url, str):
                return [row]
            url = ascii_url(url.strip())
            if domains and (domain := find_listed_domain(host_of(url), domains)):
                return f"domain {domain}"
            if urls and _normalize_url(url) in urls:
                return "a listed URL"
            if not (words or soft_words or subwords):
                return [row]
            lower = url.lower()
            url_words = set(_NOT_ALPHANUMERIC.split(lower))
            if hits := words & url_words:
                return f"word {min(hits)}"
            if len(soft_words & url_words) >= self.soft_limit:
                return f"{self.soft_limit} or more soft words"
            if subwords and (match := subwords.search(_NOT_ALPHANUMERIC.sub("", lower))):
                return f"subword {match[0]}"
            return [row]

        return work


def _load(path: str, normalize: Callable[[str], str]) -> frozenset[str]:
    return _load_entries(path, file_version(Path(path)), normalize) if path else frozenset()


@lru_cache(maxsize=_MAX_LISTS)
def _find_wrong_line(path: str, version: FileVersion) -> int:
    """Return the number of the first line that is not UTF-8; 0 for none."""
    content = Path(path).read_bytes()
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return content.count(b"\n", 0, error.start) + 1
    return 0


@lru_cache(maxsize=_MAX_LISTS)
def _load_entries(path: str, version: FileVersion, normalize: Callable[[str], str]) -> frozenset[str]:
    lines = Path(path).read_text("utf-8", "replace").removeprefix("\ufeff").splitlines()
    entries = (line.strip() for line in lines)
    return frozenset(normalize(entry) for entry in entries if entry and not entry.startswith("#")) - {""}


def _subword_pattern(path: str) -> re.Pattern[str] | None:
    # longest first: of several that begin at one place the report names the longest
    subwords = sorted(_load(path, _normalize_word), key=lambda word: (-len(word), word))
    return re.compile("|".join(subwords)) if subwords else None


def _normalize_word(word: str) -> str:
    return _NOT_ALPHANUMERIC.sub("", word.lower())


def _normalize_url(url: str) -> str:
    url = ascii_url(url)
    rest = url.partition("://")[2] or url
    host, slash, path = rest.partition("/")
    return f"{host.lower()}{slash}{path}".rstrip("/")
