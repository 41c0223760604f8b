"""What one rank writes of a checkpoint, as an order in plain words; and the process that carries one out.

An order is JSON:

    run, iteration, rank
    spaces      namespace -> boxes, as `shard_file.write` takes them, each with the place `at` of its values
    commit      on one rank of all: what `checkpoint_dir.commit` wants, what to keep, and what the new one
                supersedes; null on the others

The process is handed memory with the order and the values in it. It tells on stdout how far it is and, if the
commit is its own, is told on stdin whether all ranks are done. When the run that started it is gone it writes
no further. Python's own library alone, so that it starts in a few hundredths of a second.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mega_schema.checkpoint import checkpoint_dir, shard_file

Order = Mapping[str, Any]
COMMIT, DISCARD = "commit", "discard"  # what it is told
BYTES, NOTE, DONE, FAILED = "bytes", "note", "done", "failed"  # what it tells
_NICE = 5  # the run's own processes go first
# between two words of how far it is: nobody may be listening during a long step
_REPORT_SECONDS = 1.0


def write_shards(order: Order, payload: Callable[[str, int], memoryview]) -> Iterator[int]:
    """Write what the order says.

    Args:
        payload: the bytes of a namespace's box, by its number.

    Yields:
        bytes written since the last time, `shard_file.CHUNK` at most.

    Raises:
        OSError: the disk is full, or would not write for another reason.
    """
    folder = checkpoint_dir.partial_folder(Path(order["run"]), order["iteration"])
    folder.mkdir(exist_ok=True)  # over a network, what another host made may not be seen before one asks
    for space, boxes in order["spaces"].items():
        yield from shard_file.write_shard_file(folder, space, order["rank"], boxes, partial(payload, space))


def finish(order: Order, command: str) -> str:
    """Commit the order's checkpoint and remove those that are not to be kept, or discard what was written.

    Returns:
        why an earlier checkpoint could not be removed, which is no reason for this one not to be there.

    Raises:
        OSError: the disk is full, or would not write for another reason.
    """
    run, iteration, commit = Path(order["run"]), order["iteration"], order["commit"]
    if command == DISCARD:
        checkpoint_dir.discard(run, iteration)
        return ""
    tokenizer = Path(commit["tokenizer"]) if commit["tokenizer"] else None
    try:
        checkpoint_dir.commit(
            run, iteration, commit["described"], commit["texts"], tokenizer, replace=commit["replace"]
        )
    except OSError:
        checkpoint_dir.discard(run, iteration)
        raise
    try:
        checkpoint_dir.supersede(run, (old for old in commit["superseded"] if old != iteration))
        checkpoint_dir.remove_superseded(run, iteration)
        if commit["last"]:
            checkpoint_dir.prune(run, iteration, last=commit["last"], every=commit["every"])
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return ""


def main() -> None:
    """Carry out an order: `parent`, the memory's descriptor, and place and length of the order in it."""
    parent, descriptor, offset, length = (int(word) for word in sys.argv[1:5])
    os.nice(_NICE)
    memory = memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
    order = json.loads(bytes(memory[offset : offset + length]))

    def payload(space: str, number: int) -> memoryview:
        box = order["spaces"][space][number]
        return memory[box["at"] : box["at"] + box["bytes"]]

    try:
        written, last_report = 0, time.monotonic()
        for count in write_shards(order, payload):
            if os.getppid() != parent:
                os._exit(1)
            written += count
            if time.monotonic() > last_report + _REPORT_SECONDS:
                last_report = time.monotonic()
                _report(BYTES, written)
        _report(BYTES, written)
        _report(DONE)
    except OSError as error:
        _report(FAILED, error.errno or errno.EIO)
    if order["commit"] is not None and (command := sys.stdin.readline().strip()):
        try:
            if note := finish(order, command):
                _report(NOTE, note)
            _report(DONE)
        except OSError as error:
            _report(FAILED, error.errno or errno.EIO)
    os._exit(0)  # there is nothing to tidy, and whoever waits for the end waits the shorter


def _report(*words: object) -> None:
    line = " ".join(map(str, words)).replace("\n", " ")
    os.write(sys.stdout.fileno(), f"{line}\n".encode())
