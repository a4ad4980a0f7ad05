"""Diagnosis of verbs on a machine: each check is a pure function from `Facts` to a finding.

`r2ccl.cli.doctor_report` collects the facts. The checks do not access the machine, so the facts of
one machine can be examined on another.

Invariant: a finding that is a warning or an error has a fix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from r2ccl.cli.apart import NO_ANSWER
from r2ccl.errors import InvalidArgument
from r2ccl.testing.rdmalab.packages import DISTRIBUTION_PYTHON, DISTRIBUTION_PYVERBS
from r2ccl.topology.hcas import Hca, choose_gid
from r2ccl.topology.interfaces import Interface

#: Locked memory for one buffer of medium size. Default limits are 64 KiB to 8 MiB.
_ENOUGH_MEMLOCK_NBYTES = 64 << 20

_START_SUBNET_MANAGER = "start the InfiniBand fabric's subnet manager (opensm)"

Level = Literal["ok", "skipped", "warning", "error"]


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """State of a machine that the checks of verbs and rails examine.

    ``platform`` is ``sys.platform``, ``kernel`` the release of the kernel, and ``python`` the path
    and version of the interpreter. ``pyverbs_error`` is the error message of an attempt to list the
    RDMA devices with pyverbs, empty if it succeeded; ``verbs_devices`` are the listed devices.
    ``is_distribution_pyverbs`` is True if the distribution's pyverbs is installed, and
    ``is_pyverbs_fitting`` is True if it is built for this Python.

    ``has_rdma_class`` is True if ``/sys/class/infiniband`` exists. ``rdma_modules`` are the loaded
    kernel modules whose names begin with ``ib_`` or end with ``_ib`` or ``_rxe``. ``hcas`` are the
    RDMA ports that the kernel has. ``uverbs`` has the path of each ``/dev/infiniband/uverbs*`` and
    the reason why it cannot be opened, empty if it can.

    ``memlock_nbytes`` is the soft limit of locked memory, -1 if there is none. ``may_lock`` is True
    if the limit does not apply to this process. ``interfaces`` are the network interfaces, and
    ``cards`` the names of those that are physical devices. ``hostname`` is the name of the host.
    """

    platform: str
    kernel: str
    python: str
    pyverbs_error: str = ""
    verbs_devices: tuple[str, ...] = ()
    is_distribution_pyverbs: bool = False
    is_pyverbs_fitting: bool = False
    has_rdma_class: bool = False
    rdma_modules: tuple[str, ...] = ()
    hcas: tuple[Hca, ...] = ()
    uverbs: tuple[tuple[str, str], ...] = ()
    memlock_nbytes: int = -1
    may_lock: bool = False
    interfaces: tuple[Interface, ...] = ()
    cards: tuple[str, ...] = ()
    hostname: str = ""


class DoctorFinding(msgspec.Struct, frozen=True):
    """Result of one check.

    ``check`` is the name of the check. ``level`` is ``skipped`` if the check does not apply, if it
    depends on another check that failed, or if the finding is only a remark. ``says`` is the result
    in words. ``fix`` says what to do; it is empty if ``level`` is ``ok`` or ``skipped``.
    """

    check: str
    level: Level
    says: str
    fix: str = ""


def check_pyverbs(facts: Facts) -> DoctorFinding:
    """Check that pyverbs can be imported, and does not crash or hang; if not, name the cause."""
    error = facts.pyverbs_error
    if not _is_import_failure(error):
        return DoctorFinding("pyverbs", "ok", f"imports in {facts.python}")
    if "IBVERBS_PRIVATE" in error or "undefined symbol" in error:
        return DoctorFinding(
            "pyverbs",
            "error",
            f"belongs to another rdma-core than libibverbs: {error}",
            "pip uninstall pyverbs, and install the distribution's package, which matches its "
            "libibverbs: apt-get install python3-pyverbs",
        )
    if "No module named" in error:
        return _absent_pyverbs(facts)
    if "cannot open shared object" in error:
        return DoctorFinding(
            "pyverbs",
            "error",
            f"lacks a library: {error}",
            "apt-get install libibverbs1 ibverbs-providers librdmacm1",
        )
    if error.startswith(NO_ANSWER):
        return DoctorFinding(
            "pyverbs",
            "error",
            f"does not list the devices: {error}",
            "try again; if that fails too, look at `dmesg`: a driver may hang",
        )
    return DoctorFinding(
        "pyverbs",
        "error",
        f"cannot be imported, or crashes: {error}",
        "reinstall the distribution's: apt-get install --reinstall python3-pyverbs",
    )


def _absent_pyverbs(facts: Facts) -> DoctorFinding:
    if not facts.is_distribution_pyverbs:
        return DoctorFinding(
            "pyverbs",
            "error",
            "is not installed",
            "apt-get install python3-pyverbs ibverbs-providers (not pip: pyverbs must be of the "
            "same rdma-core as libibverbs)",
        )
    if facts.is_pyverbs_fitting:
        return DoctorFinding(
            "pyverbs",
            "error",
            f"is installed, but {facts.python} does not find it",
            f"ln -sf {DISTRIBUTION_PYVERBS} into this environment's site-packages",
        )
    return DoctorFinding(
        "pyverbs",
        "error",
        f"is installed, but for another Python than {facts.python}",
        f"create the environment with {DISTRIBUTION_PYTHON} -m venv --system-site-packages",
    )


def check_kernel(facts: Facts) -> DoctorFinding:
    """Check that the kernel supports RDMA and gives user programs access to it."""
    if facts.platform != "linux":
        return DoctorFinding(
            "kernel", "error", f"is {facts.platform}, which has no verbs", "use Linux"
        )
    if not facts.has_rdma_class:
        return DoctorFinding(
            "kernel",
            "error",
            f"{facts.kernel} has no RDMA, or its module is not loaded: no /sys/class/infiniband",
            "modprobe ib_uverbs; if there is no such module, boot the distribution's own "
            "kernel, or use r2ccl rdmalab, which boots one in a virtual machine",
        )
    if "ib_uverbs" not in facts.rdma_modules and not facts.uverbs:
        return DoctorFinding(
            "kernel",
            "error",
            f"{facts.kernel} has RDMA, but programs cannot use it: ib_uverbs is not loaded",
            "modprobe ib_uverbs",
        )
    return DoctorFinding("kernel", "ok", f"{facts.kernel} has RDMA")


def check_devices(facts: Facts) -> DoctorFinding:
    """Check that the machine has an RDMA device."""
    if not facts.hcas:
        return DoctorFinding(
            "devices",
            "error",
            "none found",
            "load the NIC's driver (modprobe mlx5_ib, irdma, bnxt_re, ...); in a container, pass "
            "in /dev/infiniband and /sys; without an RDMA NIC, use Soft-RoCE: modprobe rdma_rxe "
            "&& rdma link add rxe0 type rxe netdev eth0",
        )
    return DoctorFinding("devices", "ok", ", ".join(_describe(hca) for hca in facts.hcas))


def check_ports(facts: Facts) -> DoctorFinding:
    """Check that all ports are ACTIVE; report an error if none is, a warning if only some are."""
    if not facts.hcas:
        return DoctorFinding("ports", "skipped", "there is no device")
    down = [hca for hca in facts.hcas if hca.state != "ACTIVE"]
    if not down:
        return DoctorFinding("ports", "ok", "every port is ACTIVE")
    says = ", ".join(f"{hca.label} is {hca.state}" for hca in down)
    up = " && ".join(f"ip link set {hca.netdev} up" for hca in down if hca.netdev)
    subnet = any(hca.link_layer == "InfiniBand" for hca in down)
    fixes = [
        *([f"{up}, and check the cable and the switch port"] if up else []),
        *([_START_SUBNET_MANAGER] if subnet else []),
    ]
    level: Level = "error" if len(down) == len(facts.hcas) else "warning"
    return DoctorFinding("ports", level, says, "; ".join(fixes) or "check the cable")


def check_gids(facts: Facts) -> DoctorFinding:
    """Check that all ACTIVE ports have a GID from which queue pairs can send."""
    active = [hca for hca in facts.hcas if hca.state == "ACTIVE"]
    if not active:
        return DoctorFinding("gids", "skipped", "there is no ACTIVE port")
    lacking = [hca for hca in active if not _has_gid(hca)]
    if not lacking:
        return DoctorFinding("gids", "ok", "every ACTIVE port has a GID to send from")
    level: Level = "error" if len(lacking) == len(active) else "warning"
    roce = [hca for hca in lacking if hca.link_layer != "InfiniBand"]
    adds = " && ".join(f"ip address add ADDRESS/24 dev {hca.netdev or 'NETDEV'}" for hca in roce)
    fixes = [
        *([f"assign an address to the interface: {adds}"] if roce else []),
        *([_START_SUBNET_MANAGER] if len(roce) < len(lacking) else []),
        "show_gids or /sys/class/infiniband/*/ports/*/gids shows the GID table",
    ]
    says = ", ".join(
        f"{hca.label} has no {'RoCE v2 GID' if hca in roce else 'GID at index 0'}"
        for hca in lacking
    )
    return DoctorFinding("gids", level, says, "; ".join(fixes))


def check_permission(facts: Facts) -> DoctorFinding:
    """Check that this user may open the files ``/dev/infiniband/uverbs*``."""
    refused = [f"{path} ({why})" for path, why in facts.uverbs if why]
    if refused:
        return DoctorFinding(
            "permission",
            "error",
            f"this user cannot open {', '.join(refused)}",
            "chmod 0666 the devices, or install rdma-core's udev rules, which do so; in a "
            "container: --device=/dev/infiniband",
        )
    if not facts.hcas:
        return DoctorFinding("permission", "skipped", "there is no device")
    if not facts.uverbs:
        return DoctorFinding(
            "permission",
            "error",
            "there are devices, but no /dev/infiniband/uverbs*",
            "modprobe ib_uverbs; in a container: --device=/dev/infiniband",
        )
    return DoctorFinding(
        "permission", "ok", f"this user can open {', '.join(path for path, _ in facts.uverbs)}"
    )


def check_memlock(facts: Facts) -> DoctorFinding:
    """Check that this process may lock enough memory to register buffers with NICs."""
    if facts.may_lock or facts.memlock_nbytes < 0:
        return DoctorFinding("memlock", "ok", "no limit")
    size = f"{facts.memlock_nbytes >> 10} KiB may be locked"
    if facts.memlock_nbytes >= _ENOUGH_MEMLOCK_NBYTES:
        return DoctorFinding("memlock", "ok", size)
    return DoctorFinding(
        "memlock",
        "error",
        f"only {size}: registering larger buffers will fail (ENOMEM)",
        "ulimit -l unlimited; permanently: '* - memlock unlimited' in /etc/security/limits.conf; "
        "in a container: --ulimit memlock=-1",
    )


def check_listing(facts: Facts) -> DoctorFinding:
    """Check that libibverbs lists all RDMA devices that the kernel has."""
    names = {hca.name for hca in facts.hcas}
    unlisted = sorted(names - set(facts.verbs_devices))
    if _is_import_failure(facts.pyverbs_error):
        return DoctorFinding("listing", "skipped", "pyverbs does not work")
    if not names:
        return DoctorFinding("listing", "skipped", "there is no device")
    if not unlisted:
        return DoctorFinding("listing", "ok", f"libibverbs lists {', '.join(facts.verbs_devices)}")
    level: Level = "error" if len(unlisted) == len(names) else "warning"
    return DoctorFinding(
        "listing",
        level,
        f"libibverbs does not list {', '.join(unlisted)}"
        + (f": {facts.pyverbs_error}" if facts.pyverbs_error else ""),
        "apt-get install ibverbs-providers: libibverbs lacks drivers for these devices",
    )


CHECKS: tuple[Callable[[Facts], DoctorFinding], ...] = (
    check_pyverbs,
    check_kernel,
    check_devices,
    check_ports,
    check_gids,
    check_permission,
    check_memlock,
    check_listing,
)


def examine(facts: Facts, *, is_required: bool = False) -> tuple[DoctorFinding, ...]:
    """Run all checks of verbs and return their findings, one per check.

    If the kernel has neither an RDMA port nor a file ``/dev/infiniband/uverbs*``, and `is_required`
    is False, return a single remark instead: most machines have no RDMA NIC, and use TCP.
    """
    if is_required or facts.hcas or facts.uverbs:
        return tuple(check(facts) for check in CHECKS)
    return (
        DoctorFinding(
            "devices",
            "skipped",
            "not present: the kernel has no RDMA device, and TCP rails need none; if this machine "
            "has an RDMA NIC, r2ccl doctor --require rdma says what it lacks",
        ),
    )


def is_usable(findings: tuple[DoctorFinding, ...]) -> bool:
    """Return True if at least one finding is ``ok`` and none is an error; warnings may remain."""
    levels = {finding.level for finding in findings}
    return "ok" in levels and "error" not in levels


def _is_import_failure(error: str) -> bool:
    """Return True if `error` says that pyverbs cannot be imported, crashes or does not answer.

    Return False if `error` is empty or an exception that pyverbs raised after its import. Such an
    exception has Pyverbs in its class name.
    """
    return bool(error) and "Pyverbs" not in error.partition(":")[0]


def _has_gid(hca: Hca) -> bool:
    try:
        choose_gid(hca)
    except InvalidArgument:
        return False
    return True


def _describe(hca: Hca) -> str:
    return f"{hca.label} ({hca.link_layer}, {hca.netdev or 'no interface'}, {hca.state})"


__all__ = ["CHECKS", "DoctorFinding", "Facts", "Level", "examine", "is_usable"]
