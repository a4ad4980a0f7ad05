"""Memory that is left on this host, so that an allocation that is too large can be refused.

If a cgroup is full, the kernel does not refuse pages of shared memory, but kills a process. The
files of both versions of cgroups are read (cgroups(7)).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

#: For each version of cgroups: controller in /proc/self/cgroup, mount, files of the limit and of
#: the use, and line of `memory.stat` with the cached pages that the kernel frees first.
_VERSIONS = (
    ("", "", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def room_nbytes(root: Path = Path("/")) -> int:
    """Return the memory in bytes that this process can use without swapping or being killed.

    The result is the smallest of the amounts that are left on the host and in each cgroup of the
    process; 2**62 if none of them can be read.

    Parameters
    ----------
    root : Path
        Directory with ``proc`` and ``sys``; tests pass another directory.
    """
    found = []
    with suppress(OSError, ValueError):
        found.append(_number(root / "proc/meminfo", "MemAvailable:") << 10)
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller, *version in _VERSIONS:
                if controller in controllers.split(","):
                    found += _left_in_cgroups(root, PurePosixPath(path), *version)
    return min(found, default=1 << 62)


def _left_in_cgroups(
    root: Path, path: PurePosixPath, mount: str, limit: str, use: str, cached: str
) -> Iterator[int]:
    """Yield the bytes left in each limited cgroup among the cgroup at `path` and its ancestors."""
    for each in (path, *path.parents):
        place = root / "sys/fs/cgroup" / mount / str(each).lstrip("/")
        with suppress(OSError, ValueError):  # no such file at the root, or no limit: "max"
            most, used = int((place / limit).read_text()), int((place / use).read_text())
            yield max(0, most - used + _number(place / "memory.stat", cached))


def _number(file: Path, name: str) -> int:
    """Return the number that follows `name` in a line of a file.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If the file has no such line.
    """
    for line in file.read_text().splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name:
            return int(words[1])
    raise ValueError(f"{file} has no {name}")


__all__ = ["room_nbytes"]
