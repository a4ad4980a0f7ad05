"""Secret of a job in a file: the user's file, or one that rank 0 writes for the ranks on its host.

Invariant: no secret is read from or written to a file that another user may access. A file must be
a regular file of this user with no permissions for group and others. The runtime directory, which
has the file of rank 0, must be a directory of this user, not a link, with no permissions for group
and others. Each access to the file of rank 0 opens this directory once and uses it through the
descriptor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from r2ccl.bootstrap.auth import SECRET_NBYTES, Secret
from r2ccl.errors import InternalError, InvalidArgument

_log = logging.getLogger("r2ccl.bootstrap")

_MAX_FILE_NBYTES = 256
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


class SecretSource(Protocol):
    """Source of the secret of a job."""

    def current(self) -> Secret | None:
        """Return the secret; None if it is not available yet: the caller then asks again later."""

    def publish(self) -> None:
        """Make the secret available to the other ranks; rank 0 calls this when it owns the port."""

    def retract(self) -> None:
        """Undo `publish`; rank 0 calls this after the rendezvous."""


class GivenSecret:
    """Secret that every rank already has: from settings or MPI, or made for a job of one rank."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret

    def current(self) -> Secret | None:
        """Return the secret."""
        return self._secret

    def publish(self) -> None:
        """Do nothing: every rank has the secret."""

    def retract(self) -> None:
        """Do nothing: `publish` wrote no file."""


class RuntimeFileSecret:
    """Secret that rank 0 generates and writes to the runtime directory for ranks of its host.

    The file name contains the rendezvous address and port, and rank 0 owns that port before it
    writes. So two running jobs in one network namespace do not write the same file, and the file of
    a crashed job is replaced. A rank that read the old file fails the handshake and reads the file
    again.

    Parameters
    ----------
    env : mapping
        Environment of this process. The runtime directory is ``r2ccl`` in XDG_RUNTIME_DIR if this
        user owns that directory, otherwise ``r2ccl-UID`` in the directory of temporary files.
    address : str
        Address of the rendezvous.
    port : int
        Port of the rendezvous.
    is_leader : bool
        True on rank 0, which generates the secret.
    """

    def __init__(self, env: Mapping[str, str], address: str, port: int, is_leader: bool) -> None:
        self._folder = _runtime_folder(env)
        name = f"secret-{address.replace(':', '_').replace('/', '_')}-{port}"
        self._file = self._folder / name
        self._secret = Secret(secrets.token_bytes(SECRET_NBYTES)) if is_leader else None

    def current(self) -> Secret | None:
        """Return the secret: on rank 0 the generated secret, on other ranks the secret in the file.

        Return None if there is no file yet.

        Raises
        ------
        InvalidArgument
            If the file or its directory cannot be opened or is not private to this user, or the
            file has no secret.
        """
        if self._secret is not None:
            return self._secret
        try:
            with _open_folder(self._folder) as folder:
                return self._read(folder)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise _untrusted(self._file, f"cannot be opened ({exc.strerror})") from exc

    def _read(self, folder: int) -> Secret:
        fd = os.open(self._file.name, _READ_FLAGS | os.O_NOFOLLOW, dir_fd=folder)
        return _read_secret(fd, str(self._file))

    def publish(self) -> None:
        """Write the file atomically; only rank 0 may call this.

        Raises
        ------
        InvalidArgument
            If the runtime directory cannot be made or written, or is not private to this user.
        """
        if self._secret is None:
            raise InternalError("only rank 0 publishes the secret")
        try:
            with contextlib.suppress(FileExistsError):
                self._folder.mkdir(mode=0o700)
            self._write(self._secret.hex() + "\n")
        except OSError as exc:
            raise _untrusted(self._folder, f"cannot be written ({exc.strerror})") from exc

    def _write(self, text: str) -> None:
        with _open_folder(self._folder) as folder:
            draft = f".{self._file.name}.{os.getpid()}.{secrets.token_hex(4)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(draft, flags, 0o600, dir_fd=folder), "w") as file:
                file.write(text)
            os.replace(draft, self._file.name, src_dir_fd=folder, dst_dir_fd=folder)

    def retract(self) -> None:
        """Remove the file if it still holds this job's secret; log a warning if that fails."""
        try:
            with _open_folder(self._folder) as folder:
                found = self._read(folder)
                if self._secret is not None and found.hex() == self._secret.hex():
                    os.unlink(self._file.name, dir_fd=folder)
        except FileNotFoundError:
            return
        except (OSError, InvalidArgument) as exc:
            _log.warning(
                "rank 0: cannot remove %s, which may hold the secret of this job (%s): remove it",
                self._file, exc,
            )  # fmt: skip


def read_secret_file(path: str) -> Secret:
    """Read the secret from the file that ``R2CC_SECRET_FILE`` names.

    Raises
    ------
    InvalidArgument
        If the file cannot be read, is not a regular file, belongs to another user, is accessible to
        other users, or does not hold a secret.
    """
    try:
        return _read_secret(os.open(path, _READ_FLAGS), path)
    except OSError as exc:
        raise InvalidArgument(
            f"R2CC_SECRET_FILE={path!r} cannot be read: {exc.strerror}; check the path, or make "
            f"the file with `(umask 077; openssl rand -hex 32 > {path})` and copy it to all hosts"
        ) from exc


def _read_secret(fd: int, path: str) -> Secret:
    """Read the secret from the open file `fd`, and close it; `path` is its name in errors."""
    try:
        status = os.fstat(fd)
        is_private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
        if not stat.S_ISREG(status.st_mode) or not is_private:
            raise InvalidArgument(
                f"{path}: a secret must be in a regular file of this user, with no permissions for "
                "others, as with mode 0600 or 0400; "
                f"this one has owner {status.st_uid}, mode {stat.filemode(status.st_mode)}: "
                f"`chmod 600 {path}`, or use a regular file that this user owns"
            )
        return Secret.from_hex(os.read(fd, _MAX_FILE_NBYTES).decode("ascii", "replace"), path)
    finally:
        os.close(fd)


def _runtime_folder(env: Mapping[str, str]) -> Path:
    base = env.get("XDG_RUNTIME_DIR", "")
    # Under sudo the variable may name the directory of another user.
    if base and os.path.isdir(base) and os.stat(base).st_uid == os.geteuid():
        return Path(base) / "r2ccl"
    return Path(tempfile.gettempdir()) / f"r2ccl-{os.geteuid()}"


@contextlib.contextmanager
def _open_folder(path: Path) -> Iterator[int]:
    """Check that the runtime directory is private to this user; yield its descriptor.

    Raises
    ------
    FileNotFoundError
        If the directory does not exist yet.
    InvalidArgument
        If the path cannot be opened, is not a directory, belongs to another user, or is accessible
        to other users.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (NotADirectoryError, PermissionError) as exc:
        raise _untrusted(path, "is not a directory of this user") from exc
    except OSError as exc:
        if isinstance(exc, FileNotFoundError):
            raise
        raise _untrusted(path, f"cannot be opened ({exc.strerror})") from exc
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise _untrusted(path, "belongs to another user or is accessible to others")
        yield fd
    finally:
        os.close(fd)


def _untrusted(path: Path, why: str) -> InvalidArgument:
    return InvalidArgument(
        f"{path} {why}, so it cannot hold the job's secret: correct this or remove it, "
        "or give the secret in R2CC_SECRET or R2CC_SECRET_FILE"
    )


__all__ = ["GivenSecret", "RuntimeFileSecret", "SecretSource", "read_secret_file"]
