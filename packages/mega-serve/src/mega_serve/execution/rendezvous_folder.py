"""The private folder in which the ranks of a model find each other.

It holds the file through which gloo's ranks exchange their addresses, the Unix socket of rank 0's commands,
and the token that a rank sends over that socket. Its mode is 0700: other users can neither connect to the
socket nor read the addresses.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mega_schema.errors import ConfigError

TOKEN_BYTES = 32
_TOKEN = "token"
_SOCKET = "commands"


@dataclass(frozen=True, slots=True)
class RendezvousFolder:
    """A folder of rank 0 with a token.

    Attributes:
        token: random, `TOKEN_BYTES` long; every other rank proves by it that it could read the folder.
    """

    path: Path
    token: bytes

    @classmethod
    def create(cls, path: Path | None = None) -> RendezvousFolder:
        """Create the folder and its token.

        Args:
            path: its name, which must be new; None: a new name in the folder of temporary files.

        Raises:
            ConfigError: the folder exists.
        """
        if path is None:
            path = Path(tempfile.mkdtemp(prefix="mega-serve-"))  # of mode 0700
        else:
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                hint = "TMPDIR=DIR of your own"
                raise ConfigError(path, "exists already", wanted="a new folder", hint=hint) from None
        token = secrets.token_bytes(TOKEN_BYTES)
        with open_private_folder(path) as folder:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            descriptor = os.open(_TOKEN, flags, mode=0o600, dir_fd=folder)
            with os.fdopen(descriptor, "wb") as file:
                file.write(token)
        return cls(path, token)

    @property
    def init_method(self) -> str:
        """torch.distributed's init_method."""
        return file_init_method(self.path)

    def remove(self) -> None:
        """Remove the folder: nobody can join any more. Ranks that have joined do not need it."""
        shutil.rmtree(self.path, ignore_errors=True)


def file_init_method(path: Path) -> str:
    """Return torch.distributed's init_method for the ranks of a folder."""
    return f"file://{path / 'rendezvous'}"


@contextlib.contextmanager
def open_private_folder(path: Path) -> Iterator[int]:
    """Open a folder and yield its descriptor, by which its files are reached whoever renames it.

    Raises:
        ConfigError: it belongs to another user, or others may enter it.
        FileNotFoundError: there is none.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        info = os.fstat(descriptor)
        mode = stat.S_IMODE(info.st_mode)
        if info.st_uid != os.geteuid() or mode & 0o077:
            found = f"mode {mode:o} of user {info.st_uid}"
            wanted = f"mode 700 of user {os.geteuid()}"
            raise ConfigError(
                path, "is not private", found=found, wanted=wanted, hint="TMPDIR=DIR of your own"
            )
        yield descriptor
    finally:
        os.close(descriptor)


def read_token(folder: int) -> bytes:
    """Return the token of an open folder.

    Raises:
        FileNotFoundError: rank 0 has not written it yet.
    """
    descriptor = os.open(_TOKEN, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
    with os.fdopen(descriptor, "rb") as file:
        token = file.read(TOKEN_BYTES)
    if len(token) < TOKEN_BYTES:
        raise FileNotFoundError(_TOKEN)
    return token


def socket_address(folder: int) -> str:
    """Return the address of the Unix socket in an open folder, whose own name may be too long for one."""
    return f"/proc/self/fd/{folder}/{_SOCKET}"
