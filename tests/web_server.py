"""A web server of files with byte ranges, and with the failures that real ones have."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class FileServer(ThreadingHTTPServer):
    """Serves the files of a folder.

    Attributes:
        failures: number of the next requests for bytes that fail: with status 503, or cut off.
        is_cut: a failed request sends half of its bytes and ends the connection.
        denied: names of files whose bytes are refused with status 403.
        has_ranges: ranges are sent; if not, always the whole file.
        requests: method and range of each request.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.failures = 0
        self.is_cut = False
        self.denied = set[str]()
        self.has_ranges = True
        self.requests = list[tuple[str, str]]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FileServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(sends_body=False)

    def do_GET(self) -> None:
        self._answer(sends_body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def _answer(self, *, sends_body: bool) -> None:
        wanted = self.headers.get("Range", "")
        self.server.requests.append((self.command, wanted))
        path = self.server.folder / self.path.partition("?")[0].lstrip("/")
        if self.path == "/":
            links = "".join(f'<a href="{file.name}">a</a>' for file in sorted(path.iterdir()))
            return self._send(200, links.encode(), {"Content-Type": "text/html"}, sends_body=sends_body)
        if not path.is_file():
            return self._send(404, b"no such file", {}, sends_body=sends_body)
        if sends_body and path.name in self.server.denied:
            return self._send(403, b"archived", {}, sends_body=sends_body)
        fails = sends_body and self.server.failures > 0
        self.server.failures -= fails
        if fails and not self.server.is_cut:
            return self._send(503, b"busy", {}, sends_body=sends_body)
        size = path.stat().st_size
        headers = {"ETag": f'"{path.stat().st_mtime_ns:x}-{size:x}"'}
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
        start, end = 0, size
        is_part = match is not None and self.server.has_ranges
        if match and is_part:
            start, end = int(match[1]), min(int(match[2]) + 1, size)
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(end - start)
        return self._send(206 if is_part else 200, data, headers, sends_body=sends_body, is_cut=fails)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], *, sends_body: bool, is_cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        if self.server.has_ranges:
            self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if sends_body:
            self.wfile.write(body[: len(body) // 2] if is_cut else body)
        if is_cut:
            self.close_connection = True


@contextmanager
def serve_files(folder: Path) -> Iterator[FileServer]:
    """Serve a folder while the block runs."""
    server = FileServer(folder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
