"""Parse a stream of server-sent events (HTML Living Standard, section 9.2.6), incrementally."""

from __future__ import annotations

from typing import Final, NamedTuple

from mega_schema.errors import FormatError

MAX_EVENT_BYTES: Final = 64 << 20
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class ServerSentEvent(NamedTuple):
    """An event.

    Attributes:
        data: the values of the event's data fields, joined by line feeds.
        name: the value of its event field; "" if it has none.
    """

    data: bytes
    name: str = ""


class EventParser:
    """Splits received bytes into events, wherever the network cut them.

    Lines end with LF, CRLF or CR. Comments (keep-alives) and the fields id and retry are ignored.
    """

    def __init__(self) -> None:
        self._partial_line = b""
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._name = ""
        self._is_first_line = True
        self._ended_with_cr = False

    def feed(self, received: bytes) -> list[ServerSentEvent]:
        """Return the events that the received bytes complete.

        Raises:
            FormatError: an event is longer than MAX_EVENT_BYTES.
        """
        if self._ended_with_cr and received:
            self._ended_with_cr = False
            received = received.removeprefix(b"\n")  # the second half of CRLF
        events = []
        lines = (self._partial_line + received).splitlines(keepends=True)
        self._partial_line = lines.pop() if lines and lines[-1][-1:] not in (b"\n", b"\r") else b""
        for line in lines:
            text = line.rstrip(b"\r\n")
            if text:
                self._add_field(text)
            elif self._data:
                events.append(ServerSentEvent(b"\n".join(self._data), self._name))
                self._reset()
            else:
                self._reset()
        if lines and not self._partial_line:
            self._ended_with_cr = lines[-1].endswith(b"\r")
        if self._data_bytes + len(self._partial_line) > MAX_EVENT_BYTES:
            raise FormatError("the server's event stream", "an event is too long", wanted="at most 64 MiB")
        return events

    def _add_field(self, line: bytes) -> None:
        if self._is_first_line:
            self._is_first_line = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
            self._data_bytes += len(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")

    def _reset(self) -> None:
        self._data = []
        self._data_bytes = 0
        self._name = ""
