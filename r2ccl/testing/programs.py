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
        Such as ``tc is not in PATH or an sbin folder: install iproute2 (`apt-get install ...`)``.
    """
    missing = [name for name in names if find_program(name) is None]
    if not missing:
        return ""
    packages = " ".join(sorted({_PACKAGES[name] for name in missing}))
    verb = "is" if len(missing) == 1 else "are"
    return (
        f"{', '.join(missing)} {verb} not in PATH or an sbin folder: "
        f"install {packages} (`apt-get install {packages}`)"
    )


__all__ = ["describe_missing", "find_program", "search_path"]
