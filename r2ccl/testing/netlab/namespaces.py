"""Sets of network namespaces that are removed even if their owner is killed.

The namespaces of a set are named ``r2cc-<pid>-<start time>-<random>-<part>``, after the process
that owns the set. A guard process, connected to the owner by a pipe, deletes them when the owner
closes the set or dies. If the guard is killed too, the next `NamespaceSet` or `clean` deletes them.
`clean` never deletes namespaces with other names, or namespaces whose owner it sees in /proc.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from r2ccl.errors import R2cclError
from r2ccl.testing.programs import describe_missing, find_program, search_path

_T = TypeVar("_T")

_RUN = Path("/run/netns")
_NAME = re.compile(r"(?P<set>r2cc-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]+)-\w+")
_CLONE_NEWNET = 0x40000000

#: Seconds until the removal of a set counts as failed. Deleting a namespace takes milliseconds.
_CLOSE_TIMEOUT_S = 20.0
_COMMAND_TIMEOUT_S = 30.0

_TOOLS = ("ip", "tc", "sh")

#: Shell script that removes a set: $1 is its directory, the other arguments are its namespaces.
#: Errors are ignored, as some of these may be gone already.
_REMOVE = """
directory=$1; shift
for namespace in "$@"; do
    for pid in $(ip netns pids "$namespace"); do kill -KILL "$pid"; done
    ip netns delete "$namespace"
done 2>/dev/null
rm -rf -- "$directory"
"""
_GUARD = "read -r _\n" + _REMOVE


class LabError(R2cclError):
    """Error raised when a lab cannot be built or run; the message says what failed and why."""


class NamespaceSet:
    """Network namespaces and a private directory that are created and removed together.

    Parameters
    ----------
    parts : sequence of str
        Last part of the name of each namespace; a part has letters and digits only.

    Raises
    ------
    LabError
        If this process may not create namespaces, iproute2 or ``sh`` is missing, or the remains of
        a set whose owner has died are not removed in time.

    Attributes
    ----------
    name : str
        Name of the set. The names of all its namespaces begin with it.
    namespaces : dict of str to str
        Name of each namespace by its part.
    directory : Path
        Private directory of the set, which only this user can read.
    """

    def __init__(self, parts: Sequence[str]) -> None:
        clean()
        pid = os.getpid()
        token = secrets.token_hex(4)
        self.name = f"r2cc-{pid}-{_start_time(pid)}-{token}"
        self.namespaces = {part: f"{self.name}-{part}" for part in parts}
        self.directory = _directory(self.name)
        self.directory.mkdir(mode=0o700)
        names = list(self.namespaces.values())
        self._guard = _start_guard(self.directory, names)
        try:
            run_batch(["ip"], (f"netns add {name}" for name in names))
        except LabError:
            self.close()
            raise

    def close(self) -> None:
        """Kill all processes in the namespaces, then remove the namespaces and the directory.

        A second call does nothing.

        Raises
        ------
        LabError
            If the namespaces are not removed in time, or the guard was killed and the command that
            removes them in its place cannot be run.
        """
        if self._guard.stdin is None or self._guard.stdin.closed:
            return
        # Closing the pipe is not enough: a forked child of the owner may hold it open. The line
        # makes the guard act in any case.
        with contextlib.suppress(BrokenPipeError), self._guard.stdin as pipe:
            pipe.write(b"\n")
            pipe.flush()
        try:
            status = self._guard.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired as exc:
            raise _not_removed(self.name) from exc
        if status:  # the guard was killed
            _remove(self.name, list(self.namespaces.values()))


def clean() -> list[str]:
    """Remove the namespaces and directories of sets whose owner has died; return the sets' names.

    An owner that this process does not see in /proc counts as dead, so processes that share
    ``/run`` must also share a PID namespace. A set is found by its namespaces: if none is left, its
    directory is not removed.

    Raises
    ------
    LabError
        If the namespaces are not removed in time, or the command that removes them cannot be run.
    """
    if not _RUN.is_dir():
        return []
    stale: dict[str, list[str]] = {}
    for entry in sorted(_RUN.iterdir()):
        match = _NAME.fullmatch(entry.name)
        if match and _start_time(int(match["pid"])) != int(match["start"]):
            stale.setdefault(match["set"], []).append(entry.name)
    for name, namespaces in stale.items():
        _remove(name, namespaces)
    return list(stale)


def inside(namespace: str, function: Callable[[], _T]) -> _T:
    """Call `function` in a new thread inside `namespace`; return its result or raise its exception.

    A socket belongs for its whole life to the namespace of the thread that created it, so one
    process can have sockets in several namespaces.

    Raises
    ------
    LabError
        If the namespace does not exist or this process may not enter it.
    """

    def enter_and_call() -> _T:
        _enter(namespace)
        return function()

    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(enter_and_call).result()


def write_sysctls(values: dict[str, str]) -> None:
    """Write kernel settings in the calling thread's network namespace.

    `values` maps paths under ``/proc/sys`` to values.

    Raises
    ------
    LabError
        If the kernel refuses a setting; the settings written before stay in force.
    """
    for key, value in values.items():
        try:
            Path("/proc/sys", key).write_text(value)
        except OSError as exc:
            raise LabError(f"cannot set {key}={value}: {exc}") from exc


def run_batch(command: list[str], lines: Iterable[str]) -> None:
    """Run `lines` as commands of ``ip`` or ``tc`` in batch mode.

    `command` is the program and its options, without ``-batch``; each line is one command, without
    the name of the program.

    Raises
    ------
    LabError
        If the program is missing, takes too long or refuses a line. The message quotes the error.
    """
    text = "\n".join(lines)
    argv = [find_program(command[0]) or command[0], *command[1:], "-batch", "-"]
    try:
        done = subprocess.run(
            argv,
            input=text + "\n",
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise LabError(
            f"cannot run {' '.join(argv)}: {exc}; install iproute2 if it is missing"
        ) from exc
    if done.returncode:
        raise LabError(f"{' '.join(argv)}: {done.stderr.strip()}{_line_named(done.stderr, text)}")


def _line_named(stderr: str, text: str) -> str:
    """Return the line whose number is in iproute2's error `stderr`; empty if there is no number."""
    match = re.search(r"Command failed -:(\d+)", stderr)
    return f" ({text.splitlines()[int(match[1]) - 1]})" if match else ""


def missing_tools() -> str:
    """Describe the programs that netlab needs and this machine lacks; empty if none is missing."""
    return describe_missing(_TOOLS)


def _enter(namespace: str) -> None:
    try:
        descriptor = os.open(_RUN / namespace, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        raise LabError(f"cannot open network namespace {namespace}: {exc}") from exc
    try:
        # os.setns exists only since Python 3.12.
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, _CLONE_NEWNET):
            code = ctypes.get_errno()
            raise LabError(f"cannot enter network namespace {namespace}: {os.strerror(code)}")
    finally:
        os.close(descriptor)


def _start_guard(directory: Path, names: list[str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            ["sh", "-c", _GUARD, "netlab-guard", str(directory), *names],
            stdin=subprocess.PIPE,
            env=_guard_environment(),
            # Keep Ctrl-C from ending the guard before the owner.
            start_new_session=True,
        )
    except OSError as exc:
        directory.rmdir()
        raise LabError(f"cannot start netlab's guard: {exc}") from exc


def _guard_environment() -> dict[str, str]:
    """Return this process's environment with the sbin folders in PATH.

    The guard's script calls ``ip`` by name.
    """
    return {**os.environ, "PATH": search_path()}


def _remove(name: str, namespaces: list[str]) -> None:
    argv = ["sh", "-c", _REMOVE, "netlab-clean", str(_directory(name)), *namespaces]
    try:
        subprocess.run(argv, env=_guard_environment(), timeout=_CLOSE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as exc:
        raise _not_removed(name) from exc
    except OSError as exc:
        raise LabError(
            f"cannot remove namespaces {name}-*: {exc}; run `r2ccl netlab --clean` after the "
            "process that owns them has ended"
        ) from exc


def _not_removed(name: str) -> LabError:
    return LabError(
        f"namespaces {name}-* were not removed within {_CLOSE_TIMEOUT_S} s; "
        "run `r2ccl netlab --clean` after the process that owns them has ended"
    )


def _directory(name: str) -> Path:
    return Path(tempfile.gettempdir(), name)


def _start_time(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; 0 if there is no such process.

    The pid and the start time identify a process until the next boot (proc(5), stat).
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    # The second field, the name, is in parentheses and may contain spaces. Start time is the 22nd.
    return int(text.rpartition(")")[2].split()[19])


__all__ = [
    "LabError",
    "NamespaceSet",
    "clean",
    "inside",
    "missing_tools",
    "run_batch",
    "write_sysctls",
]
