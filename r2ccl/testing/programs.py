"""Search for programs of the operating system, with the Debian packages that provide them.

On Debian an ordinary user's PATH lacks the sbin folders, which hold ``tc``. Such a user can still
run ``tc``, so the search includes these folders.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable

#: Folders searched after PATH.
_ADMINISTRATOR_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")

#: Debian package of each program that `describe_missing` accepts.
_PACKAGES = {
    "ip": "iproute2",
    "rdma": "iproute2",
    "sh": "dash",
    "tc": "iproute2",
    "unshare": "util-linux",
}


def search_path() -> str:
    """Return PATH (`os.defpath` if it is empty or not set), followed by the sbin folders."""
    return os.pathsep.join([os.environ.get("PATH") or os.defpath, *_ADMINISTRATOR_FOLDERS])


def find_program(name: str) -> str | None:
    """Return the file path of a program, or None if no folder of `search_path` contains it."""
    return shutil.which(name, path=search_path())


def describe_missing(names: Iterable[str]) -> str:
    """Describe the programs of `names` that are missing, and how to install them.

    Parameters
    ----------
    names : iterable of str
        Names of programs; only ip, rdma, sh, tc and unshare are known.

    Returns
    -------
    str
        Empty if no program is missing; otherwise for example
        ``tc is not in PATH or an sbin folder: install iproute2 (`apt-get install ...`)``.
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
