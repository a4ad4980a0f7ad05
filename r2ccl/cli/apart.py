"""Execution of Python code that may crash or never return, in a separate process with a timeout.

Invariant: when `run` returns, the process has ended, unless it is stuck in the kernel and cannot be
killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import NamedTuple

from r2ccl.bootstrap.launch import describe_exit

#: Beginning of the error of a process that was killed because it took too long.
NO_ANSWER = "no answer"
#: Longest wait for a killed process, which may be stuck in a system call of a driver.
_KILL_TIMEOUT_S = 5.0


class Ended(NamedTuple):
    """Outcome of `run`: the standard output of the process, and an error, empty if none."""

    said: str
    error: str


def run(code: str, *, timeout_s: float, is_inner: bool = False) -> Ended:
    """Run Python code in a new process, with the module search path of this process.

    Parameters
    ----------
    code : str
        Source of the code.
    timeout_s : float
        Time in seconds after which the process is killed; unless `is_inner`, the children in its
        process group are killed too.
    is_inner : bool
        True if the caller itself runs in a process started by `run`. The new process then stays in
        the caller's process group and is killed with it.

    Returns
    -------
    Ended
        Output and error. The output is the text that the process wrote to standard output before
        it ended, crashed or was killed. The error is empty if the exit status is 0. After a
        timeout, the error says that the process did not answer in time. If a signal ended the
        process, or standard error is empty, the error says how the process ended. Otherwise the
        error is the last line of standard error.
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
        return Ended(_rest(process), f"{NO_ANSWER} within {timeout_s:g} s")
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
        os.killpg(process.pid, signal.SIGKILL)  # not reaped yet: the process id was not reused


def _rest(process: subprocess.Popen[bytes]) -> str:
    """Reap a killed process; return what it wrote to standard output.

    If the process, or a child that has inherited its output, does not end within `_KILL_TIMEOUT_S`,
    the process is not reaped.
    """
    try:
        return _text(process.communicate(timeout=_KILL_TIMEOUT_S)[0])
    except subprocess.TimeoutExpired as exc:
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        return _text(exc.output or b"")


def _text(written: bytes) -> str:
    return written.decode(errors="replace")


__all__ = ["NO_ANSWER", "Ended", "run"]
