"""Runs code in a process of its own, for a bounded time: what it calls may crash, or never return.

Invariant: when `run` returns the process has ended; one that the kernel does not let be killed is
left to itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import NamedTuple

from r2ccl.bootstrap.launch import describe_exit

#: A killed process is gone in less, unless it is stuck in a system call of a driver.
_KILL_TIMEOUT_S = 5.0


class Ended(NamedTuple):
    """What a process wrote to its standard output, and what went wrong, empty where nothing did."""

    said: str
    error: str


def run(code: str, *, timeout_s: float, is_inner: bool = False) -> Ended:
    """Run Python code, with the modules that this process would import.

    Parameters
    ----------
    code : str
    timeout_s : float
        Then it is killed, with the processes it started.
    is_inner : bool
        Whether this process was started here itself, and is killed with those it started.

    Returns
    -------
    Ended
        Where it was killed, or crashed, with what it had written until then. The error is the last
        line of its standard error, or says how it ended.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        process_group=None if is_inner else 0,
    )
    try:
        said, complaint = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill(process, is_inner)
        return Ended(_rest(process), f"no answer within {timeout_s:g} s")
    except BaseException:
        _kill(process, is_inner)
        raise
    return Ended(_text(said), _failure(process.returncode, _text(complaint)))


def _failure(status: int, complaint: str) -> str:
    if status == 0:
        return ""
    lines = complaint.strip().splitlines()
    return lines[-1] if lines and status > 0 else describe_exit(status)


def _kill(process: subprocess.Popen[bytes], is_inner: bool) -> None:
    if is_inner:
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGKILL)  # not reaped yet: the number is still its own


def _rest(process: subprocess.Popen[bytes]) -> str:
    """Reap a killed process; return all it wrote."""
    try:
        return _text(process.communicate(timeout=_KILL_TIMEOUT_S)[0])
    except subprocess.TimeoutExpired as exc:
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        return _text(exc.output or b"")


def _text(written: bytes) -> str:
    return written.decode(errors="replace")


__all__ = ["Ended", "run"]
