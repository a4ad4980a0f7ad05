"""The job's secret in files: the user's own, and one that ranks of one host share by themselves.

Invariant: nothing is read from, or written to, a place that another user could have prepared: a
file must be a regular one of this user that nobody else may read; the runtime folder must be a
real folder of this user with mode 0700, opened once and used through its descriptor.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from r2ccl.bootstrap.auth import SECRET_NBYTES, Secret
from r2ccl.errors import InternalError, InvalidArgument

_MAX_FILE_NBYTES = 256


class SecretSource(Protocol):
    """Where a rank gets the secret from."""

    def current(self) -> Secret | None:
        """Return the secret, or None while there is none yet."""

    def publish(self) -> None:
        """Make it known to the other ranks; rank 0, once it owns the rendezvous port."""

    def retract(self) -> None:
        """Take back what `publish` left behind."""


class GivenSecret:
    """A secret that every rank got by other means; publishing it is nobody's business."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret

    def current(self) -> Secret | None:
        """Return it."""
        return self._secret

    def publish(self) -> None:
        """Do nothing: every rank has it."""

    def retract(self) -> None:
        """Do nothing."""


class RuntimeFileSecret:
    """A secret that rank 0 draws and leaves in the runtime folder for the other ranks of its host.

    Rank 0 owns the rendezvous port, which the name carries, before it writes: so two jobs cannot
    write the same file, and a file left by a crashed job is replaced. A rank that read the old
    one is turned away by the handshake and reads again.

    Parameters
    ----------
    env : mapping
        XDG_RUNTIME_DIR is read.
    address, port
        Of the rendezvous.
    is_leader : bool
        Whether this is rank 0.
    """

    def __init__(self, env: Mapping[str, str], address: str, port: int, is_leader: bool) -> None:
        self._folder = _runtime_folder(env)
        self._name = f"secret-{address.replace(':', '_').replace('/', '_')}-{port}"
        self._secret = Secret(secrets.token_bytes(SECRET_NBYTES)) if is_leader else None

    def current(self) -> Secret | None:
        """Return rank 0's own, or what the file holds now."""
        if self._secret is not None:
            return self._secret
        try:
            with _open_folder(self._folder) as folder:
                return _read_secret(self._name, folder, os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as exc:
            file = self._folder / self._name
            raise _untrusted(file, f"cannot be opened ({exc.strerror})") from exc

    def publish(self) -> None:
        """Write the file, whole or not at all.

        Raises
        ------
        InvalidArgument
            The runtime folder cannot be made, is not this user's alone, or is full.
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
            draft = f".{self._name}.{os.getpid()}.{secrets.token_hex(4)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(draft, flags, 0o600, dir_fd=folder), "w") as file:
                file.write(text)
            os.replace(draft, self._name, src_dir_fd=folder, dst_dir_fd=folder)

    def retract(self) -> None:
        """Remove the file, if it is still this job's."""
        with contextlib.suppress(FileNotFoundError), _open_folder(self._folder) as folder:
            found = _read_secret(self._name, folder, os.O_NOFOLLOW)
            if self._secret is not None and found.hex() == self._secret.hex():
                os.unlink(self._name, dir_fd=folder)


def read_secret_file(path: str) -> Secret:
    """Read the secret from a file of the user's choice.

    Raises
    ------
    InvalidArgument
        It cannot be read, belongs to someone else, others may read it, or it holds no secret.
    """
    try:
        return _read_secret(path, None, 0)
    except OSError as exc:
        raise InvalidArgument(
            f"R2CC_SECRET_FILE={path!r}: {exc.strerror}; make it with "
            f"`openssl rand -hex 32 > {path}; chmod 600 {path}`"
        ) from exc


def _read_secret(path: str, folder: int | None, flags: int) -> Secret:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags, dir_fd=folder)
    try:
        status = os.fstat(fd)
        is_private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
        if not stat.S_ISREG(status.st_mode) or not is_private:
            raise InvalidArgument(
                f"{path}: a secret must be in a regular file of this user with mode 0600; "
                f"this one has owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}: "
                f"`chmod 600 {path}`"
            )
        return Secret.from_hex(os.read(fd, _MAX_FILE_NBYTES).decode("ascii", "replace"))
    finally:
        os.close(fd)


def _runtime_folder(env: Mapping[str, str]) -> Path:
    base = env.get("XDG_RUNTIME_DIR", "")
    # Under sudo the variable may name another user's folder.
    if base and os.path.isdir(base) and os.stat(base).st_uid == os.geteuid():
        return Path(base) / "r2ccl"
    return Path(tempfile.gettempdir()) / f"r2ccl-{os.geteuid()}"


@contextlib.contextmanager
def _open_folder(path: Path) -> Iterator[int]:
    """Yield a descriptor of the runtime folder after checking that it is this user's alone.

    Raises
    ------
    FileNotFoundError
        There is none yet.
    InvalidArgument
        It is a link, another user's, or open to others.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (NotADirectoryError, PermissionError) as exc:
        raise _untrusted(path, "is no folder of this user") from exc
    except OSError as exc:
        if isinstance(exc, FileNotFoundError):
            raise
        raise _untrusted(path, f"cannot be opened ({exc.strerror})") from exc
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise _untrusted(path, "belongs to someone else or is open to others")
        yield fd
    finally:
        os.close(fd)


def _untrusted(path: Path, why: str) -> InvalidArgument:
    return InvalidArgument(
        f"{path} {why}, so it cannot carry the job's secret: remove it, "
        "or give the secret in R2CC_SECRET or R2CC_SECRET_FILE"
    )


__all__ = ["GivenSecret", "RuntimeFileSecret", "SecretSource", "read_secret_file"]
