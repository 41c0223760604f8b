"""Check grammars of clients in a child process, each within a limit of CPU time.

llguidance does not bound the time of every grammar: `multipleOf` with large numbers or a?a?a?...aaa take
seconds inside one call. The child forks for each grammar, and a timer kills the fork. A crash ends the
fork only. The child imports llguidance and nothing of torch or the server, and a fork takes about 1 ms.

Run as a module it is the child: JSON lines on stdin and stdout; the first line is the vocabulary.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO, Any, Final

CPU_SECONDS: Final = 0.05
MEMORY_BYTES: Final = 1 << 30
# of one answer, on a machine whose cores are all busy
_WALL_SECONDS: Final = 10.0
_START_SECONDS: Final = 60.0
# steps of a text that are tried, for as much CPU time at most: later masks may cost more than the first
_PROBE_STEPS: Final = 8
_PROBE_SECONDS: Final = 0.02


class GrammarChecker:
    """Checks grammars for one vocabulary; may be used by several threads.

    The child starts with the first check, or by `start`.
    """

    def __init__(self, vocabulary: Mapping[str, Any]) -> None:
        """Create a checker.

        Args:
            vocabulary: "tokens", a list of latin-1 strings whose letters are the bytes of each id;
                "special_ids"; "eod".
        """
        self._vocabulary = json.dumps(vocabulary)
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the child and wait until it is ready."""
        with self._lock:
            self._running_child()

    def check(self, grammar: str) -> str:
        """Return why a grammar is refused; "" if it is accepted.

        Args:
            grammar: llguidance's own form.
        """
        with self._lock:
            child = self._running_child()
            try:
                answer = _ask(child, json.dumps({"grammar": grammar}), _WALL_SECONDS)
            except (OSError, EOFError):
                self._stop()
                return "cannot be checked at the moment"
        return str(answer["error"])

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._stop()

    def _running_child(self) -> subprocess.Popen[str]:
        if self._child is None or self._child.poll() is not None:
            self._stop()
            command = [sys.executable, "-m", "mega_serve.engine.grammar_checker"]
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
            )
            _ask(self._child, self._vocabulary, _START_SECONDS)
        return self._child

    def _stop(self) -> None:
        if self._child is None:
            return
        self._child.kill()
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout):
            if stream is not None:
                stream.close()
        self._child = None


def _ask(child: subprocess.Popen[str], line: str, seconds: float) -> dict[str, Any]:
    """Send a line and return the answer.

    Raises:
        OSError, EOFError: the child ended, or did not answer in time.
    """
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(line + "\n")
    child.stdin.flush()
    if not select.select([child.stdout], [], [], seconds)[0]:
        raise TimeoutError(f"no answer within {seconds} s")
    answer = child.stdout.readline()
    if not answer:
        raise EOFError
    return dict(json.loads(answer))


def _serve(requests: IO[str], answers: IO[str]) -> None:
    """Answer requests until the input ends."""
    from mega_serve.engine.grammar_matcher import open_matcher, open_vocabulary

    vocabulary = json.loads(requests.readline())
    tokens = [token.encode("latin-1") for token in vocabulary["tokens"]]
    tokenizer = open_vocabulary(tokens, vocabulary["special_ids"], vocabulary["eod"])

    def check(grammar: str) -> str:
        start = time.process_time()
        matcher, error = open_matcher(tokenizer, grammar)
        for step in range(_PROBE_STEPS):
            if error or matcher.is_stopped() or time.process_time() - start > _PROBE_SECONDS:
                break
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            # the lowest and the highest id in turn: a text without a random generator
            token_id = (mask if step % 2 else mask & -mask).bit_length() - 1
            if not mask or not matcher.consume_token(token_id):
                break
        return error

    answers.write(json.dumps({"error": ""}) + "\n")
    answers.flush()
    for line in requests:
        answers.write(json.dumps({"error": _check_in_fork(check, json.loads(line)["grammar"])}) + "\n")
        answers.flush()


def _check_in_fork(check: Callable[[str], str], grammar: str) -> str:
    """Return the result of a check in a fork of this process."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        os.write(write, check(grammar).encode()[:1000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        took_long = os.WTERMSIG(status) == signal.SIGPROF
        return f"takes more than {CPU_SECONDS * 1000:.0f} ms" if took_long else "cannot be compiled"
    return answer.decode("utf-8", "replace")


if __name__ == "__main__":
    _serve(sys.stdin, sys.stdout)
