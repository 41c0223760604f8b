"""Write the output of a command to an object store: into a local folder first, then as whole objects.

    WORK/url             the URL of the output
    WORK/run/...         the work folder of the command
    WORK/output/NAME...  the output; uploaded and removed when the command has finished

A store shows an object when all its parts have arrived, so no reader sees half of a file. Of a folder,
`.mega-data.uploading` is the first object and is removed last, and readers refuse a folder that has it. Of a
dataset, the index is the last object.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from mega_data.output_formats import file_ending
from mega_data.readers.file_tree import UPLOADING
from mega_data.task_stages import remove_folder
from mega_schema.app.install_hint import install_hint
from mega_schema.atomic_io import write_text
from mega_schema.errors import ConfigError, MegaError
from mega_schema.outputs import check_output
from mega_schema.remote_files import WRITABLE_SCHEMES, RemotePath, check_libraries, is_remote, request
from mega_schema.urls import check_local

_THREADS: Final = 4  # files that are uploaded at the same time
_RUN: Final = "run"
_OUTPUT: Final = "output"
_URL: Final = "url"


class RemoteOutput:
    """The output of one command in an object store.

    Args:
        option: the command-line option that names it.
        url: folder, file or prefix.
        work: value of --work-dir.
        inputs: words of --input.
        is_prefix: it is the prefix of a dataset's files.

    Raises:
        ConfigError: the place is refused, or there is no work folder.
    """

    def __init__(
        self,
        option: str,
        url: RemotePath,
        work: Path | None,
        inputs: Sequence[str],
        *,
        is_prefix: bool = False,
    ) -> None:
        if url.scheme not in WRITABLE_SCHEMES:
            check_local(option, str(url), WRITABLE_SCHEMES)
        check_libraries(option, url, install_hint("mega-data", "remote"))
        if "/" not in url.key:
            raise ConfigError(
                option, "names no place in the bucket", found=url, hint=f"{option} {url}/corpus"
            )
        if work is None:
            what, hint = "a URL needs a folder for the files until they are uploaded", "--work-dir FOLDER"
            raise ConfigError(option, what, found=url, hint=hint)
        self.url = url
        self.work = work / _RUN
        self.local = work / _OUTPUT / url.name
        self._folder = work / _OUTPUT
        self._is_folder = not is_prefix and not file_ending(url)
        self._files = url.file_system()
        local_inputs = [Path(word) for word in inputs if not is_remote(word)]
        check_output(
            "--work-dir",
            work,
            "folder",
            inputs=local_inputs,
            read_folders=[path for path in local_inputs if path.is_dir()],
            is_ours=lambda folder: {path.name for path in folder.iterdir()} <= {_RUN, _OUTPUT, _URL},
        )
        for word in inputs:
            if is_remote(word) and f"{url}/".startswith(f"{word.rstrip('/')}/"):
                hint = "the next run would read what this one writes"
                raise ConfigError(option, "is in a folder that --input reads", found=url, hint=hint)
        self._url_file = work / _URL
        if self._url_file.exists() and (other := self._url_file.read_text("utf-8")) != str(url):
            what, hint = "holds the unfinished output of another command", "name another folder"
            raise ConfigError("--work-dir", what, found=other, wanted=url, hint=hint)
        self._check_free(option, is_prefix=is_prefix)
        work.mkdir(parents=True, exist_ok=True)
        write_text(self._url_file, str(url))

    def _check_free(self, option: str, *, is_prefix: bool) -> None:
        """Refuse a place that has objects, except those of an upload that was stopped."""
        if self._is_folder:
            objects = self._list(self.url.key) - self._started_upload()
        elif is_prefix:
            names = self._list(self.url.parent.key)
            objects = {
                name for name in names if name.startswith(f"{self.url.name}_") and name.endswith(".idx")
            }
        else:
            objects = self._list(self.url.parent.key) & {self.url.name}
        if objects:
            what = "exists" if not self._is_folder else "contains files"
            raise ConfigError(
                option, what, found=f"{self.url} with {min(objects)}", hint="name another place"
            )

    def _list(self, folder: str) -> set[str]:
        """Return the names of the objects below a folder, relative to it."""
        try:
            keys = request(self.url, lambda: self._files.find(folder))
        except FileNotFoundError:
            return set()
        return {str(key).removeprefix(folder).lstrip("/") for key in keys}

    def _started_upload(self) -> set[str]:
        """Return the names of the objects of an upload that was stopped; empty if there is none."""
        key = f"{self.url.key}/{UPLOADING}"
        try:
            names = json.loads(request(self.url, lambda: self._files.cat_file(key)))
        except (FileNotFoundError, ValueError):
            return set()
        return {*names, UPLOADING}

    def upload(self) -> int:
        """Upload the files and remove them here; return their bytes.

        Raises:
            MegaError: the store cannot be reached.
        """
        files = sorted(path for path in self._folder.rglob("*") if path.is_file())
        marker = f"{self.url.key}/{UPLOADING}"
        if self._is_folder:
            names = [str(path.relative_to(self.local)) for path in files if self.local in path.parents]
            stale = self._started_upload() - {*names, UPLOADING}
            self._put(marker, json.dumps(names).encode())
            for name in stale:
                self._remove(f"{self.url.key}/{name}")
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(self._upload_file, (path for path in files if path.suffix != ".idx")))
        for path in files:
            if path.suffix == ".idx":
                self._upload_file(path)
        if self._is_folder:
            self._remove(marker)
        size = sum(path.stat().st_size for path in files)
        remove_folder(self._folder)
        remove_folder(self.work)
        self._url_file.unlink()
        return size

    def _put(self, key: str, data: bytes) -> None:
        request(self.url, lambda: self._files.pipe_file(key, data))

    def _remove(self, key: str) -> None:
        request(self.url, lambda: self._files.rm_file(key))

    def _upload_file(self, path: Path) -> None:
        target = self.url.parent / path.relative_to(self._folder)
        size = path.stat().st_size

        def send() -> None:
            if size:
                self._files.put_file(str(path), target.key)  # in several parts if it is large
            else:
                self._files.pipe_file(target.key, b"")
            if (sent := self._files.info(target.key)["size"]) != size:
                raise OSError(f"{sent:,} of {size:,} bytes arrived")

        try:
            request(target, send)
        except FileNotFoundError:
            raise MegaError(target, "not written", found="no such bucket") from None


@contextmanager
def upload_after(
    place: RemoteOutput, report: Callable[[int], object], *, is_last_call: bool
) -> Iterator[None]:
    """Upload the output when the block ends, also if it ends with exit code 1: no document is left.

    Args:
        report: called with the bytes uploaded.
        is_last_call: other calls run only parts of a command.
    """
    ending: SystemExit | None = None
    try:
        yield
    except SystemExit as error:
        if error.code != 1:
            raise
        ending = error
    if is_last_call:
        report(place.upload())
    if ending is not None:
        raise ending
