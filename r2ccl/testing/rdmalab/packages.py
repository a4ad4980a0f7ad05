"""Requirements of rdmalab on this machine: distribution packages, virtme-ng and pyverbs.

`missing` checks the requirements without changing anything. `prepare` installs the missing ones,
and reports each change before making it. If it cannot install a requirement, it raises an error
that names the command to run.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from r2ccl.testing.programs import find_program
from r2ccl.testing.rdmalab.shape import RdmaLabError

#: Directory in which Debian and its derivatives install pyverbs.
DISTRIBUTION_PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")

#: The distribution's Python interpreter, for which `DISTRIBUTION_PYVERBS` is built.
DISTRIBUTION_PYTHON = "/usr/bin/python3"

QEMU = "qemu-system-x86_64"

_RXE = "kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko*"

#: Longest time in seconds of one command of an installer. The packages are about 100 MB, and
#: installing a kernel makes an initial RAM disk; that took 51 s on two cores without the download.
_INSTALL_TIMEOUT_S = 900.0


class Need(msgspec.Struct, frozen=True):
    """One requirement of rdmalab.

    Attributes
    ----------
    what : str
        Description of the requirement, for messages.
    package : str
        Debian package that meets the requirement; empty if a package of the Python Package Index
        meets it.
    is_there : callable
        Returns True if this machine meets the requirement.
    """

    what: str
    package: str
    is_there: Callable[[], bool]


def needs() -> tuple[Need, ...]:
    """Return all requirements of rdmalab, both met and missing."""
    # On Ubuntu the generic kernel package has rdma_rxe; otherwise use Debian's package name.
    kernel = "linux-image-generic" if _distribution() == "ubuntu" else "linux-image-amd64"
    return (
        Need(QEMU, "qemu-system-x86", lambda: _has(QEMU)),
        Need("a kernel with rdma_rxe in /boot", kernel, lambda: find_kernel() is not None),
        Need("statically linked busybox", "busybox-static", _has_static_busybox),
        Need("ip and rdma", "iproute2", lambda: _has("ip") and _has("rdma")),
        Need("modprobe", "kmod", lambda: _has("modprobe")),
        Need("the drivers of libibverbs", "ibverbs-providers", _has_provider),
        Need("perftest", "perftest", lambda: _has("ib_write_bw")),
        Need("pyverbs", "python3-pyverbs", DISTRIBUTION_PYVERBS.is_dir),
        Need("virtme-ng", "", lambda: virtme() is not None),
    )


def missing() -> tuple[Need, ...]:
    """Return the requirements that this machine does not meet."""
    return tuple(need for need in needs() if not need.is_there())


def unavailable_reason() -> str | None:
    """Return why this machine cannot boot a lab, with a remedy if there is one; None if it can."""
    if not _is_supported():
        return f"rdmalab needs Linux on x86_64; this is {sys.platform} on {platform.machine()}"
    lacks = missing()
    return lack_of(lacks) if lacks else None


def lack_of(lacks: Sequence[Need]) -> str:
    """Return a message that names the requirements `lacks` and says how to install them."""
    how = []
    if packages := _packages(lacks):
        how.append(f"as root: apt-get install --no-install-recommends {packages}")
    if any(not need.package for need in lacks):
        how.append(f"in a virtual environment: {sys.executable} -m pip install virtme-ng")
    return f"rdmalab lacks {', '.join(need.what for need in lacks)}; {'; '.join(how)}"


def prepare(say: Callable[[str], None]) -> None:
    """Install the missing requirements that this process can install.

    apt-get installs distribution packages if the process is root, and pip installs virtme-ng if
    the process runs in a virtual environment. If this process cannot import pyverbs, the pyverbs of
    the distribution is linked into the virtual environment, provided that it is built for the
    running version of Python.

    Parameters
    ----------
    say : callable
        Called with a line of text before each change.

    Raises
    ------
    RdmaLabError
        If this machine is not Linux on x86_64, if a requirement is missing and cannot be installed
        (the message names it and the remedy), or if an installer fails or the link cannot be made
        (the message gives the cause).
    """
    lacks = missing() if _is_supported() else ()
    if _packages(lacks) and os.geteuid() == 0 and _has("apt-get"):
        say(f"installing {_packages(lacks)}")
        _install_packages([need.package for need in lacks if need.package])
    if any(not need.package for need in lacks) and _is_venv() and _can_import("pip"):
        say(f"installing virtme-ng into {sys.prefix}")
        _call([sys.executable, "-m", "pip", "install", "--quiet", "virtme-ng"])
        importlib.invalidate_caches()
    reason = unavailable_reason()
    if reason is not None:
        raise RdmaLabError(reason)
    if not _can_import("pyverbs") and _is_venv() and fits(DISTRIBUTION_PYVERBS):
        _link_pyverbs(say)


def find_kernel(root: Path = Path("/")) -> Path | None:
    """Return the newest readable kernel image in ``boot`` that has an rdma_rxe module.

    `root` is the directory that contains ``boot`` and ``lib``. The result is None if there is no
    such image.
    """
    versions = [module.parents[5].name for module in root.glob(f"lib/modules/*/{_RXE}")]
    images = [root / "boot" / f"vmlinuz-{version}" for version in versions]
    readable = [image for image in images if os.access(image, os.R_OK)]
    return max(readable, key=lambda image: _version_key(image.name), default=None)


def virtme() -> list[str] | None:
    """Return the command that starts virtme-ng's runner; None if it is not installed.

    The command ``vng`` is not used, because it mounts a RAM disk over ``/tmp``, where results would
    be lost, and passes its arguments through a shell.
    """
    if _can_import("virtme"):
        return [sys.executable, "-m", "virtme.commands.run"]
    found = find_program("virtme-run")
    return [found] if found else None


def fits(pyverbs: Path) -> bool:
    """Return True if the pyverbs in this directory is built for the running interpreter.

    The modules of pyverbs are compiled for one minor version of Python, which their file names
    contain (PEP 3149).
    """
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    return (pyverbs / f"device{suffix}").exists()


def _link_pyverbs(say: Callable[[str], None]) -> None:
    link = Path(sysconfig.get_path("platlib"), "pyverbs")
    say(f"linking {DISTRIBUTION_PYVERBS} into {link.parent}")
    try:
        if link.is_symlink():  # a dangling link: otherwise pyverbs could be imported
            link.unlink()
        link.symlink_to(DISTRIBUTION_PYVERBS)
    except OSError as exc:
        raise RdmaLabError(
            f"cannot create {link}, a symbolic link to {DISTRIBUTION_PYVERBS}: {exc.strerror}; "
            "create it by hand, or use a virtual environment that you can write to"
        ) from exc


def _install_packages(packages: Iterable[str]) -> None:
    install = ["apt-get", "install", "--yes", "--quiet=2", "--no-install-recommends", *packages]
    try:
        _call(install)
    except RdmaLabError:
        # A machine made from an image may have no package lists until it fetches them.
        _call(["apt-get", "update", "--quiet=2"])
        _call(install)


def _call(argv: Sequence[str]) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_INSTALL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise RdmaLabError(f"cannot run {' '.join(argv)}: {exc}") from exc
    if done.returncode:
        said = "; ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise RdmaLabError(f"{' '.join(argv)} failed ({done.returncode}): {said}")


def _packages(lacks: Iterable[Need]) -> str:
    return " ".join(need.package for need in lacks if need.package)


def _has(program: str) -> bool:
    return find_program(program) is not None


def _has_provider() -> bool:
    return any(Path("/usr").glob("lib*/*/libibverbs/librxe-rdmav*.so")) or any(
        Path("/usr").glob("lib*/libibverbs/librxe-rdmav*.so")
    )


def _has_static_busybox() -> bool:
    """Return True if busybox is installed and statically linked: early boot has no libraries."""
    found = next(filter(None, map(find_program, ("busybox-static", "busybox"))), None)
    # The path of a program's loader stands close to its ELF header (elf(5), PT_INTERP).
    return found is not None and b"/ld-linux" not in Path(found).read_bytes()[:4096]


def _can_import(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _is_supported() -> bool:
    return (sys.platform, platform.machine()) == ("linux", "x86_64")


def _is_venv() -> bool:
    return sys.prefix != sys.base_prefix


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release()["ID"]
    except OSError:
        return ""


def _version_key(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that compares numbers in versions: 6.1.0-50 comes after 6.1.0-9."""
    return [
        (part.isdigit(), int(part) if part.isdigit() else 0, part)
        for part in re.findall(r"\d+|\D+", name)
    ]


__all__ = [
    "DISTRIBUTION_PYTHON",
    "DISTRIBUTION_PYVERBS",
    "Need",
    "find_kernel",
    "fits",
    "lack_of",
    "missing",
    "needs",
    "prepare",
    "unavailable_reason",
    "virtme",
]
