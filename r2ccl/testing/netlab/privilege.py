"""Whether this process may build a lab, and how it may come to.

Must not build anything that outlives the question.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from r2ccl.testing.netlab.lab import Lab
from r2ccl.testing.netlab.namespaces import LabError, missing_tools

#: Set in the process that was started again, so that it does not try a second time.
_MARK = "R2CC_NETLAB_UNSHARED"

#: iproute2 keeps its namespaces under /run, where only the real root may write.
_UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--mount", "--")
_PREPARE = ("sh", "-c", 'mount -t tmpfs netlab /run && exec "$@"', "netlab")
_PROBE_TIMEOUT_S = 10.0


def unavailable_reason() -> str | None:
    """Return why no lab can be built by this process; None where one can.

    Builds and removes the smallest one, so that the answer holds for namespaces, veth, bridge and
    tbf alike.
    """
    if not sys.platform.startswith("linux"):
        return f"netlab needs Linux network namespaces; this is {sys.platform}"
    missing = missing_tools()
    if missing:
        return f"netlab needs {', '.join(missing)}; install iproute2"
    if os.geteuid() != 0:
        return (
            "netlab needs root, or root in a user namespace: "
            "run under `unshare --user --map-root-user --net --mount` with a tmpfs on /run"
        )
    try:
        Lab(nodes=1, rails=1).close()
    except LabError as exc:
        return f"netlab is not allowed or not possible here: {exc}"
    return None


def ensure_privileged() -> None:
    """Start the running command again inside a user namespace, where that is what it takes.

    Returns only where a lab can be built by this process; otherwise replaces the process by the
    same command line with root in its own user, network and mount namespaces. Call it first thing,
    before threads, children or open files matter.

    Raises
    ------
    LabError
        Neither is possible; says why.
    """
    reason = unavailable_reason()
    if reason is None:
        return
    if _MARK in os.environ or shutil.which("unshare") is None or not _can_unshare():
        raise LabError(f"{reason}; user namespaces do not help here either")
    environment = {**os.environ, _MARK: "1"}
    argv = [*_UNSHARE, *_PREPARE, *sys.orig_argv]
    argv[len(_UNSHARE) + len(_PREPARE)] = sys.executable
    os.execvpe(argv[0], argv, environment)


def _can_unshare() -> bool:
    done = subprocess.run(
        [*_UNSHARE, *_PREPARE, "true"],
        capture_output=True,
        timeout=_PROBE_TIMEOUT_S,
        check=False,
    )
    return done.returncode == 0


__all__ = ["ensure_privileged", "unavailable_reason"]
