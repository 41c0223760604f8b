"""Start Python programs as forks of a warm process: one that has imported what they import.

A new interpreter imports torch and the trainer in four seconds of CPU; a fork has them at once. A program
gets its own arguments, environment, folder and standard streams. Variables that an interpreter or a library
reads only as it starts have no effect on a fork: a test of those, or of what a program imports, starts an
interpreter.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
TRAINER = ("tests.parity.runs", "torch._dynamo", "torch.distributed.fsdp")
SERVER = (
    "mega_serve.http.serving",
    "mega_serve.api.routers",
    "mega_serve.execution.engine_factory",
    "mega_model.generate",
    "uvicorn",
)
REQUEST_BYTES = 1 << 17


def module_path() -> str:
    """Return PYTHONPATH for a program that imports the tests too: the repository, then what is set."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


class Program:
    """A running program, with the methods of `subprocess.Popen` that tests use.

    Attributes:
        returncode: its exit code, negative for a signal; None while it runs.
    """

    def __init__(self, status: int) -> None:
        self._status = status
        self.pid = int(self._read_number())
        self.returncode: int | None = None

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the program ends; of one that runs."""
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code.

        Raises:
            subprocess.TimeoutExpired: the program runs on.
        """
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                assert timeout is not None
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self.returncode = int(self._read_number())
            os.close(self._status)
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code of a program that has ended."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Send a signal to a program that runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _read_number(self) -> bytes:
        number = b""
        while not number.endswith(b"\n"):
            byte = os.read(self._status, 1)
            assert byte, "the warm process ended"
            number += byte
        return number


def start(
    target: str,
    words: Sequence[str],
    *,
    imports: tuple[str, ...] = TRAINER,
    hash_seed: int = 0,
    stdout: int | None = None,
    stderr: int | None = None,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
) -> Program:
    """Start a program.

    Args:
        target: a module, run as by `python -m`, or "module:function", called without arguments.
        words: the program's arguments, sys.argv[1:].
        imports: modules that the warm process has imported; there is a process for each choice.
        hash_seed: of that process. Sets have other orders under another seed: so ranks that must agree on an
            order should have different ones.
        stdout: a descriptor; by default that of this process.
        stderr: likewise.
        env: by default that of this process.
    """
    environment = dict(os.environ if env is None else env)
    read, write = os.pipe()
    request = json.dumps([target, [*words], str(cwd), environment]).encode()
    assert len(request) < REQUEST_BYTES
    streams = [1 if stdout is None else stdout, 2 if stderr is None else stderr]
    socket.send_fds(_warm(imports, hash_seed), [request], [*streams, write])
    os.close(write)
    return Program(read)


def run(
    target: str,
    words: Sequence[str],
    *,
    imports: tuple[str, ...] = TRAINER,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return what it wrote, as `subprocess.run` does.

    The other arguments are those of `start`.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        program = start(
            target, words, imports=imports, stdout=out.fileno(), stderr=err.fileno(), cwd=cwd, env=env
        )
        try:
            code = program.wait(timeout)
        finally:
            program.kill()
            program.wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess([target, *words], code, *texts)


@functools.cache
def _warm(imports: tuple[str, ...], hash_seed: int) -> socket.socket:
    """Start a warm process; it ends when this process does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", str(theirs.fileno()), *imports],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1"},
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _serve(requests: socket.socket, imports: Sequence[str]) -> NoReturn:
    """Fork a process for every request, until there is nobody left who could send one."""
    gc.disable()  # a million objects that stay: looking through them again and again takes a quarter longer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other people's modules
        for module in imports:
            importlib.import_module(module)
    gc.freeze()  # a collection in a fork would write to them, and so copy every page of them
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for the tests and for programs
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES, 3)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not request:
            os._exit(0)  # without taking all objects apart
        if os.fork() == 0:
            requests.close()
            _watch(json.loads(request), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _watch(request: list[Any], stdout: int, stderr: int, status: int) -> None:
    """Run the program in another fork, and write its process id and, at its end, its exit code."""
    program = os.fork()
    if program == 0:
        os.close(status)
        _run(*request, stdout, stderr)
    for descriptor in (stdout, stderr):
        os.close(descriptor)
    os.write(status, b"%d\n" % program)
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    os.write(status, b"%d\n" % code)
    os._exit(0)


def _run(
    target: str, words: list[str], cwd: str, environment: dict[str, str], stdout: int, stderr: int
) -> None:
    """Be the program, to the end of the process."""
    code = 1
    try:
        for stream, descriptor in ((1, stdout), (2, stderr)):
            os.dup2(descriptor, stream)
            os.close(descriptor)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[0] = cwd
        if torch := sys.modules.get("torch"):
            torch.seed()  # otherwise the random numbers of one fork would be those of every other
        sys.argv = [target, *words]
        module, _, function = target.partition(":")
        if function:
            getattr(importlib.import_module(module), function)()
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        if isinstance(left.code, str):
            sys.stderr.write(left.code + "\n")
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
