"""Which addresses are worth reading: the rules of openwebtext's blacklist_urls.py.

Where that has a missing comma, so that neither .7z nor .ai is found, this has both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mega_data.clean.rows import Row, Verdict, Work, library
from mega_schema.errors import ConfigError

SHORTEST = 9  # characters
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
_ADDRESS = re.compile(
    r"https?://(?:(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z0-9-]{2,}\.?|localhost|\d{1,3}(?:\.\d{1,3}){3})"
    r"(?::\d+)?(?:/?|[/?]\S+)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Urls:
    """Drop documents from listed domains, of listed file endings, and with an address that is none.

    The domain is the registered name alone: `google` of www.google.co.uk.

    Attributes:
        key: where the address is; a document without one stays.
        domains: a file of more names, one a line.
    """

    key: str = "url"
    domains: str = ""

    def start(self) -> Work:
        if self.domains and not Path(self.domains).is_file():
            raise ConfigError("step urls: domains", "no such file", found=self.domains)
        more = Path(self.domains).read_text("utf-8").split() if self.domains else []
        names = frozenset(_DOMAINS.split()).union(more)
        endings = tuple(f".{ending}" for ending in _ENDINGS.split())
        extract = library("urls", "tldextract").TLDExtract(
            suffix_list_urls=(), cache_dir=None
        )  # the list of suffixes its wheel carries

        def work(row: Row) -> Verdict:
            url = row.values.get(self.key)
            if not isinstance(url, str):
                return [row]
            if (domain := extract(url).domain) in names:
                return f"domain {domain}"
            bare = url.partition("?")[0].lower()
            if bare.endswith(endings):
                return f"ends in .{bare.rpartition('.')[2]}"
            if len(url) < SHORTEST:
                return "a short address"
            return [row] if _ADDRESS.fullmatch(url) else "not an address"

        return work
