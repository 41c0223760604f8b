"""The click type of every option that names an output.

A test lists the options of this type by command, so that no new output is forgotten.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mega_schema.app.click_options import flag_of
from mega_schema.errors import ConfigError
from mega_schema.remote_files import WRITABLE_SCHEMES, RemotePath, is_remote
from mega_schema.urls import check_host, check_local


class OutputPath(click.Path):
    """A path to write: a file, a folder, or the prefix of a dataset's files.

    Checks what the command line alone shows; `mega_schema.outputs` checks the rest once the inputs are known.
    """

    def __init__(self, kind: str, *, accepts_urls: bool = False) -> None:
        super().__init__(path_type=Path)
        self.kind = kind
        self.accepts_urls = accepts_urls

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        option = flag_of(param) if param else "output"
        if str(value) == "":
            raise ConfigError(option, "is empty", wanted=f"the path of a {self.kind}")
        if self.accepts_urls and is_remote(str(value)):
            check_host(option, str(value))
            return RemotePath(str(value))
        check_local(option, value, WRITABLE_SCHEMES if self.accepts_urls else ())
        if self.kind != "folder" and str(value).endswith(("/", "/.", "/..")):
            hint = f"{option} {Path(value) / 'corpus'}"
            raise ConfigError(option, "is a folder", found=value, wanted=f"a {self.kind}", hint=hint)
        return super().convert(value, param, ctx)


OUTPUT_FILE = OutputPath("file")
OUTPUT_FOLDER = OutputPath("folder")
OUTPUT_PREFIX = OutputPath("prefix")
# of commands that upload their output
OUTPUT_FOLDER_OR_URL = OutputPath("folder", accepts_urls=True)
OUTPUT_PREFIX_OR_URL = OutputPath("prefix", accepts_urls=True)
# for `extract`: a folder, or a file whose name ends in .jsonl
OUTPUT_ANY = OutputPath("folder", accepts_urls=True)
