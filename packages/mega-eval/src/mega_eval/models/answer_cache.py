"""A folder with the answers of a model, from which an interrupted run resumes.

    FOLDER/                  mode 0700
        KEY/                 `hash_model` of the model, 32 hexadecimal digits
            NAME.answers     the answers of one process

A file is `MAGIC` and then records, each appended by one write:

    length, crc32    two unsigned 32-bit integers, little-endian, of the bytes that follow
    digest           16 bytes, `hash_window` or `hash_request`
    seconds          float64, the time that the model took
    answer           of a window: K as unsigned 32-bit integer, one byte that tells whether the greedy tokens
                     are known, then K times ln P (float64), is_greedy (one byte) and, if known, the greedy
                     token (int64); of a prompt: the continuation in UTF-8

A process writes only its own file, so two can share a folder. A record that was cut or damaged ends the file
for its readers; its answer and the following ones are computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import orjson

from mega_eval.models.interface import GenerationRequest, ModelIdentity, WindowScores
from mega_eval.outputs import check_folder
from mega_eval.windows import Window
from mega_schema.errors import ConfigError

logger = logging.getLogger("mega.eval")

MAGIC = b"mega-eval answers 1\n"
SUFFIX = ".answers"
_FRAME = struct.Struct("<II")
_HEAD = struct.Struct("<16sd")
_SCORES = struct.Struct("<I?")
# fields of a model's identity that do not change its answers
_NEUTRAL_FIELDS = ("source", "iteration", "parameters", "tokens", "noise")


class AnswerCache:
    """Answers of one model, by the digests of the requests.

    Args:
        folder: of the caches of all models; created with the first answer.
        key: `hash_model` of the model.
        is_temporary: whether `finish` removes the answers.

    Raises:
        ConfigError: the folder is a file, or another user may write to it.
    """

    def __init__(self, folder: Path, key: str, *, is_temporary: bool = False) -> None:
        self.folder = folder
        self._is_temporary = is_temporary
        self._model_folder = folder / key
        _check_private(folder)
        self._answers: dict[bytes, bytes] = {}
        self._files = sorted(self._model_folder.glob(f"*{SUFFIX}"))
        for path in self._files:
            self._answers.update(_read_records(path))
        self._descriptor: int | None = None

    def __len__(self) -> int:
        return len(self._answers)

    def find_scores(self, digest: bytes) -> tuple[WindowScores, float] | None:
        """Return the scores of a window and the seconds that they took, if they are known."""
        answer = self._answers.get(digest)
        return None if answer is None else (_decode_scores(answer), _seconds(answer))

    def find_text(self, digest: bytes) -> tuple[str, float] | None:
        """Return a continuation and the seconds that it took, if it is known."""
        answer = self._answers.get(digest)
        return None if answer is None else (answer[_HEAD.size :].decode(), _seconds(answer))

    def add_scores(self, scores: Mapping[bytes, WindowScores], seconds: float) -> None:
        """Append the scores of a batch; `seconds` is the time that it took."""
        self._append({digest: _encode_scores(score) for digest, score in scores.items()}, seconds)

    def add_texts(self, texts: Mapping[bytes, str], seconds: float) -> None:
        """Append the continuations of a batch; `seconds` is the time that it took."""
        self._append({digest: text.encode() for digest, text in texts.items()}, seconds)

    def _append(self, bodies: Mapping[bytes, bytes], seconds: float) -> None:
        """Write records at once: the process may be killed before the next batch."""
        records = []
        for digest, body in bodies.items():
            answer = _HEAD.pack(digest, seconds / len(bodies)) + body
            self._answers[digest] = answer
            records.append(_FRAME.pack(len(answer), zlib.crc32(answer)) + answer)
        if self._descriptor is None:
            for folder in (self.folder, self._model_folder):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._model_folder / f"{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            self._files.append(path)
            records.insert(0, MAGIC)
        content = memoryview(b"".join(records))
        while content:
            content = content[os.write(self._descriptor, content) :]

    def finish(self) -> None:
        """Call once the result is written: remove the answers of a temporary cache."""
        self.close()
        if self._is_temporary:
            for path in self._files:
                path.unlink(missing_ok=True)
            for folder in (self._model_folder, self.folder, self.folder.parent):
                with contextlib.suppress(OSError):  # another process has files there
                    folder.rmdir()

    def close(self) -> None:
        """Close the file. Its answers stay."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def hash_model(identity: ModelIdentity, versions: Mapping[str, str], settings: Sequence[object]) -> str:
    """Return the key of a model: 32 hexadecimal digits.

    Args:
        versions: of the software that computes the answers.
        settings: vocabulary, context and mode of computation of the model.
    """
    fields = {name: value for name, value in asdict(identity).items() if name not in _NEUTRAL_FIELDS}
    content = orjson.dumps(
        [MAGIC.decode(), fields, dict(versions), list(settings)], option=orjson.OPT_SORT_KEYS
    )
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def hash_window(window: Window) -> bytes:
    """Return the digest of a window: 16 bytes."""
    head = b"window" + window.target_length.to_bytes(8, "little")
    return hashlib.blake2b(head + window.tokens.astype("<i8").tobytes(), digest_size=16).digest()


def hash_request(request: GenerationRequest) -> bytes:
    """Return the digest of a prompt to continue: 16 bytes."""
    content = orjson.dumps([request.prompt, request.max_tokens, request.stop])
    return hashlib.blake2b(b"request" + content, digest_size=16).digest()


def _check_private(folder: Path) -> None:
    """Refuse a folder that is a file, or below one, or to which others may write."""
    ancestor = next(path for path in (folder, *folder.parents) if path.exists())
    if not ancestor.is_dir():
        raise ConfigError("--cache", "is not a folder", found=ancestor, wanted="a folder of this command")
    check_folder("--cache", ancestor)
    if ancestor != folder:
        return
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        found = f"{folder}, mode {status.st_mode & 0o777:o} of user {status.st_uid}"
        wanted = f"a folder to which only user {os.geteuid()} may write"
        raise ConfigError("--cache", "is not private", found=found, wanted=wanted, hint=f"chmod 700 {folder}")


def _read_records(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield digest and answer of each record, up to one that is cut or damaged."""
    content = memoryview(path.read_bytes())
    if content[: len(MAGIC)] != MAGIC:
        logger.warning("%s: not a file of answers; ignored", path)
        return
    start = len(MAGIC)
    while start < len(content):
        begin = start + _FRAME.size
        if begin > len(content):
            return
        length, checksum = _FRAME.unpack_from(content, start)
        answer = content[begin : begin + length]
        if len(answer) < max(length, _HEAD.size):
            return
        if zlib.crc32(answer) != checksum:
            logger.warning("%s: damaged after %d bytes; the rest is ignored", path, start)
            return
        digest, _ = _HEAD.unpack_from(answer)
        yield digest, bytes(answer)
        start = begin + length


def _seconds(answer: bytes) -> float:
    return float(_HEAD.unpack_from(answer)[1])


def _encode_scores(score: WindowScores) -> bytes:
    columns = score.logprobs.astype("<f8"), score.is_greedy.astype("u1"), score.greedy_ids.astype("<i8")
    head = _SCORES.pack(len(score.logprobs), len(score.greedy_ids) > 0)
    return head + b"".join(column.tobytes() for column in columns)


def _decode_scores(answer: bytes) -> WindowScores:
    count, has_ids = _SCORES.unpack_from(answer, _HEAD.size)
    start = _HEAD.size + _SCORES.size
    logprobs = np.frombuffer(answer, "<f8", count, start)
    is_greedy = np.frombuffer(answer, "u1", count, start + 8 * count)
    ids = np.frombuffer(answer, "<i8", count if has_ids else 0, start + 9 * count if has_ids else 0)
    return WindowScores(logprobs.astype(np.float64), is_greedy.astype(np.bool_), ids.astype(np.int64))
