"""Programs of the operating system: where they are, and which package brings one that is missing.

Debian gives an ordinary user a PATH without the administrator's folders, where ``tc`` and
``bridge`` are; they run there all the same. Must not run anything.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable

#: Searched after PATH.
_ADMINISTRATOR_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")

#: Debian's package of each program that the labs start.
_PACKAGES = {
    "bridge": "iproute2",
    "ip": "iproute2",
    "rdma": "iproute2",
    "sh": "dash",
    "tc": "iproute2",
    "unshare": "util-linux",
}


def search_path() -> str:
    """Return PATH, followed by the administrator's folders."""
    return os.pathsep.join([os.environ.get("PATH") or os.defpath, *_ADMINISTRATOR_FOLDERS])


def find_program(name: str) -> str | None:
    """Return the path of a program, or None where this machine does not have it."""
    return shutil.which(name, path=search_path())


def describe_missing(names: Iterable[str]) -> str:
    """Say which of `names` are missing and how to install them; empty where none is.

    Returns
    -------
    str
        Such as ``tc, bridge not found: apt-get install iproute2 (or your system's package)``.
    """
    missing = [name for name in names if find_program(name) is None]
    if not missing:
        return ""
    packages = sorted({_PACKAGES[name] for name in missing})
    return (
        f"{', '.join(missing)} not found in {search_path()}: install {' and '.join(packages)} "
        f"(`apt-get install {' '.join(packages)}`)"
    )


__all__ = ["describe_missing", "find_program", "search_path"]
