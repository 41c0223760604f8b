"""Filter documents by address: the rules of openwebtext's blacklist_urls.py.

A missing comma there disables .7z and .ai; this list has both.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mega_data.clean.step import Row, RowFunction, Verdict, import_for_step
from mega_data.readers.nested_keys import value_or_none
from mega_data.readers.versions import FileVersion, file_version
from mega_schema.errors import ConfigError

MIN_CHARACTERS = 9
_DOMAINS = (
    "500px aapks akamaihd amazon apple artifactfire artstation awwni bandcamp battleforthenet "
    "coinscalendar dailymotion deviantart discord discordapp dlapkandroid dropbox e621 ebay edealinfo "
    "erome eroshare explosm facebook fbcdn flickr furaffinity futhead gatopardo gfycat gifsound "
    "gifsoup giphy github google gunprime gyazo hotdealstar imagefap imageshack imgflip imgur "
    "instagram karmadecay kryptocal kym-cdn liveleak livememe lmgtfy magaimg memegenerator "
    "minorplanetcenter minus mobafire morejpeg nocookie pcpartpicker photobucket pinimg pinterest "
    "pixiv pornhub prntscr puu qkme quickmeme radd redd reddit reddit-stream redditlog redditmedia "
    "reddituploads redtube reupp reverb roanoke rollingstone sli soundcloud soundgasm spankbang "
    "spotify strawpoll streamable timeanddate tinypic touhouradio tumblr twimg twitch twitter vid "
    "vimeo vine vkaao vocaroo voyagefusion walmart wciu wikimedia wikipedia xhamster xkcd xvideos "
    "youtu youtube youtubedoubler ytimg zillexplorer "
)
_ENDINGS = (
    "3gp 7z ai aif apk app avi bin bmp bz2 css csv dat deb dmg doc docx exe gif gifv gz iso jar jpeg "
    "jpg js log mid midi mkv mov mp3 mp4 mpeg mpg ogg ogv otf pdf pkg png pps ppt pptx psd py qt ram "
    "rar sql svg swf tar tar.gz tgz tiff ttf txt wav webm wma wmv xls xlsx xml xz zip "
)
_URL = re.compile(
    r"https?://(?:(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z0-9-]{2,}\.?|localhost|\d{1,3}(?:\.\d{1,3}){3})"
    r"(?::\d+)?(?:/?|[/?]\S+)",
    re.IGNORECASE,
)


_ADBLOCK = re.compile(r"\|\|([^/^$|]+)\^?$")
_NULL_ADDRESSES = frozenset({"0.0.0.0", "127.0.0.1", "::", "::1"})  # targets of blocked names in a hosts file


@dataclass(frozen=True, slots=True)
class UrlFilter:
    """Drop documents with a listed domain, a listed file extension or an invalid address.

    A listed word without a dot matches a registered name: `google` matches www.google.co.uk. A word with dots
    matches a domain and its subdomains: `bad.example.org` matches a.bad.example.org but not example.org.

    Attributes:
        key: key of the address; a document without one is kept.
        domains: a file of more domains: one per line, a hosts file, or an adblock list
            (`||bad.example.org^`).
    """

    key: str = "url"
    domains: str = ""

    def start(self) -> RowFunction:
        if self.domains and not Path(self.domains).is_file():
            raise ConfigError("step urls: domains", "no such file", found=self.domains)
        path = Path(self.domains)
        listed_domains = load_domain_list(path, file_version(path)) if self.domains else frozenset[str]()
        names = listed_domains.union(_DOMAINS.split())
        endings = tuple(f".{ending}" for ending in _ENDINGS.split())
        extract = _domain_extractor(import_for_step("urls", "tldextract"))

        def work(row: Row) -> Verdict:
            url = value_or_none(row.values, self.key)
            if not isinstance(url, str):
                return [row]
            url = ascii_url(url)
            if (domain := extract(url).domain) in names:
                return f"domain {domain}"
            if listed_domains and (domain := find_listed_domain(host_of(url), listed_domains)):
                return f"domain {domain}"
            address = url.partition("?")[0].lower()
            if address.endswith(endings):
                return f"ends in .{address.rpartition('.')[2]}"
            if len(url) < MIN_CHARACTERS:
                return "a short address"
            return [row] if _URL.fullmatch(url) else "not an address"

        return work


@cache
def _domain_extractor(tldextract: Any) -> Any:
    """Build the function that finds the registered name, with tldextract's bundled suffix list."""
    return tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)


@lru_cache(maxsize=1)
def load_domain_list(path: Path, version: FileVersion) -> frozenset[str]:
    """Read a file of domains; `version` of the file is part of the cache key."""
    return _parse_domain_list(path.read_text("utf-8", "replace"))


def _parse_domain_list(text: str) -> frozenset[str]:
    """Parse the names and domains of a list into ASCII and lower case."""
    names = set[str]()
    for line in text.splitlines():
        line = re.sub(r"(^|\s)[#!].*", "", line.removeprefix("\ufeff")).strip()
        if adblock := _ADBLOCK.match(line):
            line = adblock[1]
        names.update(_ascii_name(word.strip(".")) for word in line.split() if word not in _NULL_ADDRESSES)
    return frozenset(names - {""})


def find_listed_domain(host: str, names: Collection[str]) -> str:
    """Return the listed domain that is the host or a parent of it; "" for none."""
    labels = host.strip(".").split(".")
    parents = (".".join(labels[index:]) for index in range(len(labels) - 1))
    return next((parent for parent in parents if parent in names), "")


def host_of(url: str) -> str:
    """Return the host of a URL in lower case; "" for none."""
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:  # brackets without an IPv6 address
        return ""


def ascii_url(url: str) -> str:
    """Convert an international domain to ASCII: xn--mnchen-3ya.de for münchen.de."""
    if url.isascii() or not (host := host_of(url)) or host.isascii():
        return url
    begin = url.lower().find(host)
    return url[:begin] + _ascii_name(host) + url[begin + len(host) :] if begin >= 0 else url


def _ascii_name(name: str) -> str:
    """Convert a domain to its DNS form; return anything else unchanged."""
    try:
        return name.lower().encode("idna").decode("ascii")
    except UnicodeError:
        return name.lower()
