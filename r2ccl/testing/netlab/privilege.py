"""Privileges to build a lab: the check for them, and the restart in a user namespace.

The check removes everything that it builds. `ensure_privileged` restarts the process in a user
namespace only after another process, the probe process, has built a working lab in such a
namespace.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

from r2ccl.testing.netlab.lab import Lab
from r2ccl.testing.netlab.namespaces import LabError, missing_tools
from r2ccl.testing.programs import describe_missing, find_program

#: Environment variable that marks a restarted process: the probe process found that a lab works.
_MARK = "R2CC_NETLAB_UNSHARED"

_NAMESPACES = ("--user", "--map-root-user", "--net", "--mount")
#: Shell script run in the new namespaces; $0 is ``ip``, the arguments are the command to run.
#: iproute2 keeps its namespaces under /run, where only the real root may write, so a tmpfs covers
#: it. The program may need the loopback interface, which is down in a new network namespace.
_PREPARE = 'mount -t tmpfs netlab /run && "$0" link set lo up && exec "$@"'
#: Python code of the probe process: prints why no lab works, or nothing if one does.
_PROBE = (
    "from r2ccl.testing.netlab import unavailable_reason; print(unavailable_reason() or '', end='')"
)
#: Longest time in seconds of a test of the lab; on one busy core the imports alone took 3 s.
_PROBE_TIMEOUT_S = 30.0


def unavailable_reason() -> str | None:
    """Return the reason why this process cannot build a lab; None if it can.

    If this process is root, the call builds the smallest lab, runs a program in the lab and removes
    the lab, to test namespaces, veth, bridge, tbf and ``ip netns exec``.
    """
    if not sys.platform.startswith("linux"):
        return f"netlab needs Linux network namespaces; this is {sys.platform}"
    missing = missing_tools()
    if missing:
        return f"netlab cannot run: {missing}"
    if os.geteuid() != 0:
        return (
            "netlab needs root: `r2ccl netlab --enter -- COMMAND` runs a command as root of a user "
            "namespace, or reports why it cannot"
        )
    try:
        with Lab(nodes=1, rails=1) as lab:
            (ended,) = lab.run(["true"], timeout_s=_PROBE_TIMEOUT_S, sink=lambda line: None)
    except LabError as exc:
        return f"netlab is not possible here: {exc}"
    if ended.returncode:
        return f"netlab cannot run a program in a network namespace: {ended.output.strip()}"
    return None


def ensure_privileged() -> None:
    """Restart the running command as root of a user namespace if this process cannot build a lab.

    Do nothing if this process can build a lab, or was restarted already. Otherwise start a probe
    process, which builds a lab in new user, network and mount namespaces. Then replace this process
    by a process with the same command line that runs as root in such namespaces. Call this function
    before creating threads, child processes or open files that the restart would lose.

    Raises
    ------
    LabError
        If a lab can be built neither in this process nor in new namespaces. The message gives the
        reason.
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
    if refusal and os.geteuid() == 0:
        raise LabError(f"{reason}; in a user namespace: {refusal}")
    if refusal:
        raise LabError(f"netlab needs root or working user namespaces: {refusal}")
    argv = [*enter, sys.executable, *sys.orig_argv[1:]]
    os.execve(argv[0], argv, {**os.environ, _MARK: "1"})


def _enter_command() -> list[str]:
    """Return the command that runs its arguments as root of new namespaces.

    Raises
    ------
    LabError
        If ``unshare`` or ``ip`` is missing.
    """
    unshare, ip = find_program("unshare"), find_program("ip")
    if unshare is None or ip is None:
        raise LabError(f"netlab cannot run: {describe_missing(['unshare', 'ip'])}")
    return [unshare, *_NAMESPACES, "--", "sh", "-c", _PREPARE, ip]


def _why_not_inside(enter: list[str]) -> str:
    """Return the reason why no lab works in a user namespace; empty if one works.

    A probe process enters the namespace and builds a lab there.
    """
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
        return f"the probe process in new namespaces failed ({words})"
    return done.stdout.strip()


__all__ = ["ensure_privileged", "unavailable_reason"]
