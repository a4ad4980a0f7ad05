"""Whether this process may build a lab, and how it may come to.

Must not build anything that outlives the question, and must not enter a namespace that a lab was
not seen to work in.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

from r2ccl.testing.netlab.lab import Lab
from r2ccl.testing.netlab.namespaces import LabError, missing_tools
from r2ccl.testing.programs import describe_missing, find_program

#: Set in the process that was started again, where a lab has been seen to work.
_MARK = "R2CC_NETLAB_UNSHARED"

_NAMESPACES = ("--user", "--map-root-user", "--net", "--mount")
#: iproute2 keeps its namespaces under /run, where only the real root may write. A new network
#: namespace starts with its loopback down, and the program may need that. $0 is ``ip``.
_PREPARE = 'mount -t tmpfs netlab /run && "$0" link set lo up && exec "$@"'
#: Prints why no lab works there; prints nothing where one does.
_PROBE = (
    "from r2ccl.testing.netlab import unavailable_reason; print(unavailable_reason() or '', end='')"
)
#: On one busy core the imports alone have taken 3 s.
_PROBE_TIMEOUT_S = 30.0


def unavailable_reason() -> str | None:
    """Return why no lab can be built by this process; None where one can.

    Builds the smallest one, runs a program in it and removes it, so that the answer holds for
    namespaces, veth, bridge, tbf and ``ip netns exec`` alike.
    """
    if not sys.platform.startswith("linux"):
        return f"netlab needs Linux network namespaces; this is {sys.platform}"
    missing = missing_tools()
    if missing:
        return f"netlab cannot run: {missing}"
    if os.geteuid() != 0:
        return (
            "netlab needs root: `r2ccl netlab --enter -- COMMAND` runs a command as root of a user "
            "namespace, or says why it cannot"
        )
    try:
        with Lab(nodes=1, rails=1) as lab:
            (ended,) = lab.run(["true"], timeout_s=_PROBE_TIMEOUT_S, sink=lambda line: None)
    except LabError as exc:
        return f"netlab is not possible here: {exc}"
    if ended.returncode:
        return f"netlab: no program can be run in a network namespace: {ended.output.strip()}"
    return None


def ensure_privileged() -> None:
    """Start the running command again inside a user namespace, where that is what it takes.

    Returns only where a lab can be built by this process; otherwise replaces the process by the
    same command line with root in its own user, network and mount namespaces, after another
    process has seen a lab work there. Call it first thing, before threads, children or open files
    matter.

    Raises
    ------
    LabError
        Neither is possible; says why. Nothing has been entered.
    """
    if _MARK in os.environ:
        return
    reason = unavailable_reason()
    if reason is None:
        return
    if missing_tools() or not sys.platform.startswith("linux"):
        raise LabError(reason)
    enter = _enter_command()
    refusal = _why_not_inside(enter)
    if refusal:
        raise LabError(f"netlab needs root or user namespaces, and here {refusal}")
    argv = [*enter, sys.executable, *sys.orig_argv[1:]]
    os.execve(argv[0], argv, {**os.environ, _MARK: "1"})


def _enter_command() -> list[str]:
    """Return the command that runs its arguments as root of new namespaces.

    Raises
    ------
    LabError
        ``unshare`` is missing.
    """
    unshare, ip = find_program("unshare"), find_program("ip")
    if unshare is None or ip is None:
        raise LabError(f"netlab cannot run: {describe_missing(['unshare', 'ip'])}")
    return [unshare, *_NAMESPACES, "--", "sh", "-c", _PREPARE, ip]


def _why_not_inside(enter: list[str]) -> str:
    """Return why no lab works in a user namespace, found out by a process that enters one."""
    argv = [*enter, sys.executable, "-c", _PROBE]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    try:
        done = subprocess.run(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        return f"{shlex.join(enter[:5])}: {exc}"
    if done.returncode:
        words = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return f"user namespaces are off or forbidden ({words})"
    return done.stdout.strip()


__all__ = ["ensure_privileged", "unavailable_reason"]
