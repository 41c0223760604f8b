"""Run many requests through an engine, several at a time, and write their lines as they finish."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from mega_serve.client.offline.resumable_lines import ResumableLines
from mega_serve.engine.interfaces import EngineOverloadedError

Line = dict[str, Any]
RequestT = TypeVar("RequestT")
GROUP_LINES: Final = 256
GROUP_SECONDS: Final = 1.0
_MIN_WAIT: Final = 0.05  # seconds before a request is offered again to a full engine


@dataclass(frozen=True, slots=True)
class WorkItem(Generic[RequestT]):
    """A request of a batch.

    Attributes:
        custom_id: unique in the batch.
        id: hash of the request.
    """

    custom_id: str
    id: str
    request: RequestT


Process = Callable[[WorkItem[RequestT]], Awaitable[Line | None]]


async def run_items(
    items: Sequence[WorkItem[RequestT]],
    output: ResumableLines,
    process: Process[RequestT],
    *,
    max_concurrency: int,
    on_lines: Callable[[int], None] = lambda count: None,
    group_seconds: float = GROUP_SECONDS,
) -> int:
    """Process all items that the output lacks; return their number.

    Lines are written in the order in which the requests finish. If a request raises, or the run is
    interrupted, the finished lines are written first.

    Args:
        process: returns the output line of an item, or None for no line; it is called again after
            EngineOverloadedError.
        max_concurrency: items that are processed at a time.
        on_lines: called with the number of requests of each group once their lines are on the disk.
        group_seconds: the longest time between the end of a request and the writing of its line.
    """
    missing = [item for item in items if item.custom_id not in output.finished]
    queue: asyncio.Queue[Line | None] = asyncio.Queue()
    group: list[Line | None] = []
    waiting = iter(missing)

    async def work() -> None:
        for item in waiting:
            queue.put_nowait(await _process_when_accepted(item, process))

    def write() -> None:
        lines = [line for line in group if line is not None]
        if lines:
            output.append(lines)
        on_lines(len(group))
        group.clear()

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(max_concurrency, len(missing))):
                tasks.create_task(work())
            remaining = len(missing)
            while remaining:
                await _take_group(queue, group, min(remaining, GROUP_LINES), group_seconds)
                remaining -= len(group)
                write()
    except BaseExceptionGroup as errors:
        raise _first_error(errors) from None
    finally:
        while not queue.empty():
            group.append(queue.get_nowait())
        write()
    return len(missing)


async def _process_when_accepted(item: WorkItem[RequestT], process: Process[RequestT]) -> Line | None:
    while True:
        try:
            return await process(item)
        except EngineOverloadedError as error:
            await asyncio.sleep(max(error.retry_after, _MIN_WAIT))


async def _take_group(
    queue: asyncio.Queue[Line | None], group: list[Line | None], size: int, seconds: float
) -> None:
    """Wait for a line, then move up to `size` lines that come within `seconds` into the group."""
    group.append(await queue.get())
    try:
        async with asyncio.timeout(seconds):
            while len(group) < size:
                group.append(await queue.get())
    except TimeoutError:
        pass


def _first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    first = errors.exceptions[0]
    return _first_error(first) if isinstance(first, BaseExceptionGroup) else first
