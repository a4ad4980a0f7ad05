"""Network namespaces: made, entered, and always removed, whatever happens to their owner.

A set of namespaces is named ``r2cc-<pid>-<start time>-<random>-<part>`` after the process that owns
it. A small guard process deletes them when it sees its end of a pipe close, which is when the owner
closes them or dies, by any signal; what a killed guard leaves behind, the next set removes. Must
not know what a namespace is used for. Invariant: only namespaces of this naming whose owner is
gone, and processes inside them, are ever removed.
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

#: Deleting a namespace takes milliseconds; on a machine that takes longer something is stuck.
_CLOSE_TIMEOUT_S = 20.0
_COMMAND_TIMEOUT_S = 30.0

_TOOLS = ("ip", "tc", "bridge", "sh")

#: $1 is the directory, the rest are namespaces. What is already gone is no news.
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
    """The machine did not do what a lab needs; says which command failed and why."""


class NamespaceSet:
    """Network namespaces and a private directory that share one life.

    Parameters
    ----------
    parts : sequence of str
        One namespace each; letters and digits.

    Raises
    ------
    LabError
        Not allowed, or iproute2 is missing.
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
        """Kill what runs in the namespaces and remove them; a second call does nothing.

        Raises
        ------
        LabError
            They were not gone in time.
        """
        if self._guard.stdin is None or self._guard.stdin.closed:
            return
        # The line, because a forked child of the owner may hold the pipe open.
        with contextlib.suppress(BrokenPipeError), self._guard.stdin as pipe:
            pipe.write(b"\n")
            pipe.flush()
        try:
            status = self._guard.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired as exc:
            raise _not_removed(self.name) from exc
        if status:  # somebody has killed the guard
            _remove(self.name, list(self.namespaces.values()))


def clean() -> list[str]:
    """Remove the namespaces whose owner is gone; return the names of the sets removed.

    An owner counts as gone where this process cannot see it: processes that share ``/run`` must
    share their process ids as well.

    Raises
    ------
    LabError
        They were not gone in time.
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
    """Call `function` in a thread that sits in `namespace`; what it opens stays there.

    A socket belongs for life to the namespace of the thread that made it, so this is how one
    process holds sockets in many.

    Raises
    ------
    LabError
        The namespace does not exist or may not be entered.
    """

    def enter_and_call() -> _T:
        _enter(namespace)
        return function()

    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(enter_and_call).result()


def write_sysctls(values: dict[str, str]) -> None:
    """Write kernel settings in the calling thread's network namespace.

    Raises
    ------
    LabError
        One of them was refused.
    """
    for key, value in values.items():
        try:
            Path("/proc/sys", key).write_text(value)
        except OSError as exc:
            raise LabError(f"cannot set {key}={value}: {exc}") from exc


def run_batch(command: list[str], lines: Iterable[str]) -> None:
    """Feed `lines` to ``ip``, ``bridge`` or ``tc`` in batch mode.

    Raises
    ------
    LabError
        The tool is missing or refused a line; carries its words.
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
        raise LabError(f"cannot run {' '.join(argv)}: {exc}; netlab needs iproute2") from exc
    if done.returncode:
        raise LabError(f"{' '.join(argv)}: {done.stderr.strip()}{_line_named(done.stderr, text)}")


def _line_named(stderr: str, text: str) -> str:
    """Quote the line that iproute2 names by number."""
    match = re.search(r"Command failed -:(\d+)", stderr)
    return f" ({text.splitlines()[int(match[1]) - 1]})" if match else ""


def missing_tools() -> str:
    """Say which programs netlab needs and this machine lacks, and their packages; empty if none."""
    return describe_missing(_TOOLS)


def _enter(namespace: str) -> None:
    try:
        descriptor = os.open(_RUN / namespace, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        raise LabError(f"no network namespace {namespace}: {exc}") from exc
    try:
        # os.setns exists only from Python 3.12 on.
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
            # Ctrl-C is for the owner, and must not end the guard first.
            start_new_session=True,
        )
    except OSError as exc:
        directory.rmdir()
        raise LabError(f"cannot start netlab's guard: {exc}") from exc


def _guard_environment() -> dict[str, str]:
    """Return this process's environment with the administrator's folders in PATH.

    The guard's script calls ``ip`` by name.
    """
    return {**os.environ, "PATH": search_path()}


def _remove(name: str, namespaces: list[str]) -> None:
    argv = ["sh", "-c", _REMOVE, "netlab-clean", str(_directory(name)), *namespaces]
    try:
        subprocess.run(argv, env=_guard_environment(), timeout=_CLOSE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise _not_removed(name) from exc


def _not_removed(name: str) -> LabError:
    return LabError(
        f"namespaces {name}-* were not removed within {_CLOSE_TIMEOUT_S} s; "
        "try `r2ccl netlab --clean` after their owner ends"
    )


def _directory(name: str) -> Path:
    return Path(tempfile.gettempdir(), name)


def _start_time(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 where there is none.

    With the number it identifies a process for as long as the machine runs (proc(5), stat).
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    # The second field, the name, is in parentheses and may hold spaces; start time is the 22nd.
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
