"""What a lab needs from this machine, and how it is got: distribution packages, virtme-ng, pyverbs.

Installs only when asked, only what is missing, and says so in one line first. Must not boot
anything. Invariant: what cannot be had is named, with the command that would get it.
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

#: Where Debian and its kin keep it, for their own interpreter.
DISTRIBUTION_PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")

#: The distribution's interpreter, which that copy is built for.
DISTRIBUTION_PYTHON = "/usr/bin/python3"

QEMU = "qemu-system-x86_64"

_RXE = "kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko*"

#: About 100 MB to fetch and an initial ram disk to make (51 s on two cores, fetched before).
_INSTALL_TIMEOUT_S = 900.0


class Need(msgspec.Struct, frozen=True):
    """One thing a lab needs.

    ``package`` is Debian's, empty where it comes from the Python Package Index instead.
    """

    what: str
    package: str
    is_there: Callable[[], bool]


def needs() -> tuple[Need, ...]:
    """Return everything a lab needs, present or not."""
    # Debian's name; Ubuntu keeps rdma_rxe in its generic kernel.
    kernel = "linux-image-generic" if _distribution() == "ubuntu" else "linux-image-amd64"
    return (
        Need(QEMU, "qemu-system-x86", lambda: _has(QEMU)),
        Need("a kernel with rdma_rxe in /boot", kernel, lambda: find_kernel() is not None),
        Need("busybox, linked statically", "busybox-static", _has_static_busybox),
        Need("ip and rdma", "iproute2", lambda: _has("ip") and _has("rdma")),
        Need("modprobe", "kmod", lambda: _has("modprobe")),
        Need("the drivers of libibverbs", "ibverbs-providers", _has_provider),
        Need("perftest", "perftest", lambda: _has("ib_write_bw")),
        Need("pyverbs", "python3-pyverbs", DISTRIBUTION_PYVERBS.is_dir),
        Need("virtme-ng", "", lambda: virtme() is not None),
    )


def missing() -> tuple[Need, ...]:
    """Return what a lab needs and this machine does not have."""
    return tuple(need for need in needs() if not need.is_there())


def unavailable_reason() -> str | None:
    """Return why no lab can be booted here as things are, and what to do; None where one can."""
    if not _is_supported():
        return f"rdmalab needs Linux on x86_64; this is {sys.platform} on {platform.machine()}"
    lacks = missing()
    return lack_of(lacks) if lacks else None


def lack_of(lacks: Sequence[Need]) -> str:
    """Say what is missing and how to get it."""
    how = []
    if packages := _packages(lacks):
        how.append(f"as root: apt-get install --no-install-recommends {packages}")
    if any(not need.package for need in lacks):
        how.append(f"in a virtual environment: {sys.executable} -m pip install virtme-ng")
    return f"rdmalab lacks {', '.join(need.what for need in lacks)}; {'; '.join(how)}"


def prepare(say: Callable[[str], None]) -> None:
    """Install what a lab needs and this machine lacks, where that is possible.

    Distribution packages by apt-get, as root; virtme-ng by pip, into a virtual environment only.
    The distribution's pyverbs is linked into the running interpreter's virtual environment, where
    it is built for the same version of Python.

    Parameters
    ----------
    say : callable
        Takes one line before anything is changed.

    Raises
    ------
    RdmaLabError
        Something is missing and cannot be installed from here; says what and how to get it.
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
    """Return the newest kernel image under `root` whose modules include rdma_rxe, if any."""
    versions = [module.parents[5].name for module in root.glob(f"lib/modules/*/{_RXE}")]
    images = [root / "boot" / f"vmlinuz-{version}" for version in versions]
    readable = [image for image in images if os.access(image, os.R_OK)]
    return max(readable, key=lambda image: _version_key(image.name), default=None)


def virtme() -> list[str] | None:
    """Return the command that starts virtme-ng's runner; None where it is not installed.

    Not ``vng`` itself: that lays a RAM disk over ``/tmp``, where results would be lost, and passes
    its arguments through a shell.
    """
    if _can_import("virtme"):
        return [sys.executable, "-m", "virtme.commands.run"]
    found = find_program("virtme-run")
    return [found] if found else None


def fits(pyverbs: Path) -> bool:
    """Whether a copy of pyverbs is built for the running interpreter.

    Its modules are compiled for one minor version; the file names say which (PEP 3149).
    """
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    return (pyverbs / f"device{suffix}").exists()


def _link_pyverbs(say: Callable[[str], None]) -> None:
    link = Path(sysconfig.get_path("platlib"), "pyverbs")
    say(f"linking {DISTRIBUTION_PYVERBS} into {link.parent}")
    try:
        link.symlink_to(DISTRIBUTION_PYVERBS)
    except OSError as exc:
        raise RdmaLabError(
            f"cannot link {DISTRIBUTION_PYVERBS} to {link}: {exc.strerror}; make that link by "
            "hand, or use an environment you may write to"
        ) from exc


def _install_packages(packages: Iterable[str]) -> None:
    install = ["apt-get", "install", "--yes", "--quiet=2", "--no-install-recommends", *packages]
    try:
        _call(install)
    except RdmaLabError:
        # A machine made from an image has no lists of packages until it fetches them.
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
    """Whether there is one that needs no loader, for the boot starts before there are libraries."""
    found = next(filter(None, map(find_program, ("busybox-static", "busybox"))), None)
    # A program's loader is named in the ELF header's neighbourhood (elf(5), PT_INTERP).
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
    """Order 6.1.0-50 after 6.1.0-9."""
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
