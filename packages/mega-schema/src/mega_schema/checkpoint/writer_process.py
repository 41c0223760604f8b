"""One rank's part of a checkpoint as an order in JSON (`WriteOrder`), and the process that carries it out.

The process inherits memory with the order and the values. It reports progress on stdout; if it has the
commit, stdin tells it whether all ranks are done. It stops writing when the run that started it has ended.
Uses Python's standard library only, so that it starts in a few hundredths of a second.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from mega_schema.checkpoint import checkpoint_dir, shard_file

COMMIT, DISCARD = "commit", "discard"  # commands on stdin
# reports on stdout
BYTES = "bytes"
NOTE = "note"
DONE = "done"
FAILED = "failed"
_NICE = 5  # the training processes have priority
# between two progress reports: the pipe must not fill up during a long step, when it is not read
_REPORT_SECONDS = 1.0


class CommitContents(TypedDict):
    """What a checkpoint has besides its tensors, and which checkpoints its run keeps.

    Attributes:
        header: the manifest's fields besides files and tensors.
        text_files: other files of the checkpoint, by name.
        tokenizer: folder whose files are copied into it.
        keep_last: number of newest checkpoints to keep; 0 keeps all.
        keep_every: also keep iterations that this divides.
    """

    header: Mapping[str, Any]
    text_files: Mapping[str, str]
    tokenizer: str | None
    keep_last: int
    keep_every: int | None


class CommitOrder(CommitContents):
    """How to commit a checkpoint.

    Attributes:
        replace: replace a checkpoint of this iteration.
        superseded: iterations of checkpoints that this one supersedes.
    """

    replace: bool
    superseded: Sequence[int]


class WriteOrder(TypedDict):
    """One rank's part of a checkpoint.

    Attributes:
        run: the run's folder.
        spaces: the boxes of each namespace.
        commit: on rank 0; None on the others.
    """

    run: str
    iteration: int
    rank: int
    spaces: Mapping[str, Sequence[shard_file.BoxRecord]]
    commit: CommitOrder | None


def write_shards(order: WriteOrder, payload: Callable[[str, int], memoryview]) -> Iterator[int]:
    """Write the order's shard files.

    Args:
        payload: returns the bytes of a namespace's box, by its number.

    Yields:
        bytes written since the last time, `shard_file.CHUNK` at most.

    Raises:
        OSError: the disk is full, or refused the write for another reason.
    """
    folder = checkpoint_dir.partial_folder(Path(order["run"]), order["iteration"])
    folder.mkdir(exist_ok=True)  # on a network file system another host's folder may not be visible yet
    for space, boxes in order["spaces"].items():
        yield from shard_file.write_shard_file(folder, space, order["rank"], boxes, partial(payload, space))


def finish(order: WriteOrder, command: str) -> str:
    """Commit the order's checkpoint and prune old ones, or discard what was written.

    Returns:
        why an earlier checkpoint could not be removed; the commit still succeeded.

    Raises:
        OSError: the disk is full, or refused the write for another reason.
    """
    run = Path(order["run"])
    iteration = order["iteration"]
    commit = order["commit"]
    if command == DISCARD:
        checkpoint_dir.discard(run, iteration)
        return ""
    assert commit is not None
    tokenizer = Path(commit["tokenizer"]) if commit["tokenizer"] else None
    try:
        checkpoint_dir.commit(
            run, iteration, commit["header"], commit["text_files"], tokenizer, replace=commit["replace"]
        )
    except OSError:
        checkpoint_dir.discard(run, iteration)
        raise
    try:
        checkpoint_dir.supersede(run, (old for old in commit["superseded"] if old != iteration))
        checkpoint_dir.remove_superseded(run, iteration)
        if commit["keep_last"]:
            checkpoint_dir.prune(run, iteration, last=commit["keep_last"], every=commit["keep_every"])
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return ""


def main() -> None:
    """Carry out an order.

    Arguments: the parent's id, the memory's descriptor, and offset and length of the order in it.
    """
    parent, descriptor, offset, length = (int(word) for word in sys.argv[1:5])
    os.nice(_NICE)
    memory = memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
    order: WriteOrder = json.loads(bytes(memory[offset : offset + length]))

    def payload(space: str, number: int) -> memoryview:
        box = order["spaces"][space][number]
        return memory[box["buffer_offset"] : box["buffer_offset"] + box["bytes"]]

    try:
        written = 0
        last_report = time.monotonic()
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
    os._exit(0)  # skip Python's cleanup: there is nothing to clean up, and the parent waits


def _report(*words: object) -> None:
    line = " ".join(map(str, words)).replace("\n", " ")
    os.write(sys.stdout.fileno(), f"{line}\n".encode())
