"""RDMA devices and their GIDs, read from sysfs, and the choice of ports and GIDs that carry data.

`list_hcas` and `GidFinder` read sysfs; `select_hcas` and `choose_gid` are pure functions. This
module does not use verbs, so it works on machines without verbs and opens no RDMA device. It does
not give the active MTU, which sysfs does not have. Invariant: the same sysfs tree and settings
give the same ports in the same order, because the order depends only on names.

References
----------
Linux, Documentation/ABI/stable/sysfs-class-infiniband; Annex A17 (RoCEv2) of the InfiniBand
specification for GIDs that are IP addresses.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from r2ccl.errors import InvalidArgument
from r2ccl.topology.names import NameFilter, natural

SYSFS = Path("/sys/class/infiniband")

#: `Gid.kind` of a RoCE v2 GID, whose packets travel in UDP over IP; other GIDs: ``IB/RoCE v1``.
ROCE_V2 = "RoCE v2"

#: Value of ``R2CC_HCA`` that turns RDMA off.
NO_HCA = "none"

# Errors of reading an attribute that has no value: EINVAL for an empty slot of the GID table and
# for an entry of another network namespace, the others if there is no such attribute or device.
_ABSENT = frozenset((errno.EINVAL, errno.ENOENT, errno.ENODEV))

#: The kernel limits an attribute to one page and returns all of it in one read.
_ATTRIBUTE_NBYTES = 4096

_RATE = re.compile(r"([0-9.]+) Gb/sec")


class Gid(msgspec.Struct, frozen=True):
    """One entry of a port's GID table: an address that the port can send from.

    ``index`` is the slot of the entry in the table. ``kind`` is sysfs's value, ``RoCE v2`` or
    ``IB/RoCE v1`` (also on InfiniBand). ``address`` is an IPv6 address as text; an IPv4 address is
    mapped (``::ffff:10.0.0.1``). ``netdev`` is the interface that owns the GID, possibly a VLAN;
    empty on InfiniBand, and if sysfs names no owner.
    """

    index: int
    kind: str
    address: str
    netdev: str = ""


class Hca(msgspec.Struct, frozen=True):
    """One port of an RDMA device.

    ``netdev`` is the port's Ethernet interface; empty on InfiniBand, and if none is found.
    ``index`` is the kernel's number of that interface, 0 if this network namespace has no such
    interface. ``link_layer`` is ``Ethernet`` or ``InfiniBand``; ``state`` is sysfs's name of the
    state, such as ``ACTIVE`` or ``DOWN``. If unknown, ``speed_mbps`` is 0 and ``numa_node`` is -1.
    ``gids`` are the GID table entries in use, by index.
    """

    name: str
    port: int
    netdev: str
    link_layer: str
    state: str
    speed_mbps: int
    numa_node: int
    gids: tuple[Gid, ...]
    index: int = 0

    @property
    def label(self) -> str:
        """Name of the port for people and in ``R2CC_HCA``: ``mlx5_0:1``."""
        return f"{self.name}:{self.port}"


def list_hcas(root: Path = SYSFS) -> tuple[Hca, ...]:
    """Read every port of every RDMA device.

    Parameters
    ----------
    root : Path
        Directory ``class/infiniband`` of sysfs. The numbers of interfaces are read from the
        directory ``net`` beside it.

    Returns
    -------
    tuple of Hca
        Ports in natural order of device names (``mlx5_2`` before ``mlx5_10``), then by port number.
        Empty if the kernel has no RDMA.

    Raises
    ------
    OSError
        If an attribute exists but cannot be read, or cannot be parsed (EIO).
    """
    found = [
        _read_port(root, device, port)
        for device in _children(root)
        for port in _children(device / "ports")
    ]
    # A port without a state was removed while its attributes were read.
    return tuple(
        sorted((each for each in found if each.state), key=lambda x: (natural(x.name), x.port))
    )


class GidFinder:
    """Callable that looks up the current GID of an RDMA port.

    A call is cheap while the GID stays in its slot of the port's GID table. The first call, and any
    call after the GID has moved, read the whole table.

    Parameters
    ----------
    name : str
        Name of the RDMA device.
    port : int
        Port number, from 1.
    index : int
        Slot of the GID in the port's table; -1: the slot of the best GID, see `choose_gid`.
    root : Path
        Directory ``class/infiniband`` of sysfs.
    """

    def __init__(self, name: str, port: int, index: int = -1, root: Path = SYSFS) -> None:
        self._name = name
        self._port = port
        self._index = index
        self._root = root
        self._last: Gid | None = None
        #: Interface of the port, as `Hca.netdev`.
        self._netdev = ""

    def __call__(self) -> tuple[int, str]:
        """Return the slot of the port's GID in its table, and the address of the GID.

        Raises
        ------
        InvalidArgument
            If the port no longer exists, or has no usable GID.
        OSError
            If an attribute of the port exists but cannot be read, or cannot be parsed (EIO).
        """
        device = self._root / self._name
        port = device / "ports" / str(self._port)
        last = self._last
        if last is None or _read_gid(port, str(last.index)) != last:
            found = _read_port(self._root, device, port)
            if not found.state:
                raise InvalidArgument(
                    f"port {self._port} of RDMA NIC {self._name} no longer exists; leave it out "
                    "with R2CC_HCA"
                )
            self._last = last = choose_gid(found, self._index)
            self._netdev = found.netdev
        return last.index, last.address

    def interface(self) -> int:
        """Return the kernel's number of the interface that owns the GID of the last call.

        The interface may be a VLAN on the port's interface. If sysfs names no owner, return the
        number of the port's interface. Return 0 if there was no call, or if this network namespace
        has no such interface.

        Raises
        ------
        OSError
            If the number of the interface exists but cannot be read.
        """
        owner = self._last.netdev if self._last is not None else ""
        return _index_of(self._root, owner or self._netdev)


def select_hcas(hcas: Sequence[Hca], pattern: str) -> tuple[Hca, ...]:
    """Choose the ACTIVE ports that carry data.

    Parameters
    ----------
    hcas : sequence of Hca
        Ports of the machine; the result keeps their order.
    pattern : str
        Value of ``R2CC_HCA``, in the syntax of `NameFilter`. If it is empty or an exclusion, every
        ACTIVE port is chosen that is not excluded and has a RoCE v2 GID or, on InfiniBand, a GID at
        index 0. If it is ``none``, no port is chosen.

    Returns
    -------
    tuple of Hca
        Chosen ports. May be empty unless `pattern` selects ports by name.

    Raises
    ------
    InvalidArgument
        If `pattern` does not parse, or selects ports by name and no ACTIVE port has such a name; in
        the second case the message lists all ports.
    """
    if pattern.strip() == NO_HCA:
        return ()
    names = NameFilter(pattern, variable="R2CC_HCA")
    active = [each for each in hcas if each.state == "ACTIVE"]
    if not names.is_selection:
        return tuple(
            each for each in active if not names.lists(each.name, each.port) and _preferred(each)
        )
    chosen = tuple(each for each in active if names.lists(each.name, each.port))
    if not chosen:
        raise InvalidArgument(
            f"R2CC_HCA={pattern!r} names no ACTIVE RDMA port; ports of this machine: "
            f"{_describe(hcas)}; name other ports, or set R2CC_HCA={NO_HCA} to run without RDMA"
        )
    return chosen


def choose_gid(hca: Hca, index: int = -1) -> Gid:
    """Choose the GID that a queue pair on `hca` sends from.

    On Ethernet, the GID is a RoCE v2 entry. IPv4 addresses are preferred to global IPv6 addresses,
    and global IPv6 addresses to link-local ones. Among GIDs with the same kind of address, those of
    the port's own interface are preferred to those of a VLAN on this interface. Ties go to the
    lowest index. On InfiniBand, the GID is entry 0.

    Parameters
    ----------
    hca : Hca
        The port.
    index : int
        Index of the entry to use, of any kind (``R2CC_GID_INDEX``); -1: choose by the rules above.

    Raises
    ------
    InvalidArgument
        If no entry fits; the message lists all entries.
    """
    is_chosen = index >= 0
    candidates = [x for x in hca.gids if x.index == index] if is_chosen else _preferred(hca)
    if not candidates:
        raise _no_gid(hca, index)
    return candidates[0]


@contextmanager
def _parsing(port: Path) -> Iterator[None]:
    """Convert a ValueError in the block, which parses attributes of `port`, to an OSError."""
    try:
        yield
    except ValueError as exc:
        raise OSError(errno.EIO, f"cannot parse the attributes of {port}: {exc}") from exc


def _read_port(root: Path, device: Path, port: Path) -> Hca:
    with _parsing(port):
        return _parse_port(root, device, port)


def _parse_port(root: Path, device: Path, port: Path) -> Hca:
    number = int(port.name)
    link_layer = _read(port / "link_layer")
    gids = _read_gids(port)
    netdev = "" if link_layer == "InfiniBand" else _netdev_of(device, number, gids)
    rate = _RATE.match(_read(port / "rate"))
    return Hca(
        name=device.name,
        port=number,
        netdev=netdev,
        link_layer=link_layer,
        state=_read(port / "state").rpartition(": ")[2],
        speed_mbps=round(float(rate[1]) * 1000) if rate else 0,
        numa_node=int(_read(device / "device" / "numa_node") or -1),
        gids=gids,
        index=_index_of(root, netdev),
    )


def _index_of(root: Path, netdev: str) -> int:
    interface = root.parent / "net" / netdev
    with _parsing(interface):
        return int(_read(interface / "ifindex") or 0) if netdev else 0


def _read_gids(port: Path) -> tuple[Gid, ...]:
    """Read the slots of the GID table that are in use.

    An empty slot reads as zeros, has no type, or both. A table has up to 1024 slots, nearly all of
    them empty, so reading an empty slot must be cheap.
    """
    slots = sorted(_names(port / "gids"), key=int)
    return tuple(gid for slot in slots if (gid := _read_gid(port, slot)))


def _read_gid(port: Path, slot: str) -> Gid | None:
    text = _read(f"{port}/gids/{slot}")
    if not text.strip(":0"):
        return None
    attributes = port / "gid_attrs"
    kind = _read(attributes / "types" / slot)
    if not kind:
        return None
    with _parsing(port):
        # str() of an IPv6Address spells mapped addresses differently in different Python versions.
        address = socket.inet_ntop(socket.AF_INET6, ipaddress.IPv6Address(text).packed)
        return Gid(int(slot), kind, address, _read(attributes / "ndevs" / slot))


def _netdev_of(device: Path, port: int, gids: Iterable[Gid]) -> str:
    """Return the interface of an Ethernet port; empty if none is found.

    The first of these that exists is returned: the first interface in the GID table, the interface
    that Soft-RoCE uses, the interface of the same PCI function with the same port number.
    """
    named = [gid.netdev for gid in gids if gid.netdev]
    if named:
        return named[0]
    if parent := _read(device / "parent"):
        return parent
    for interface in _children(device / "device" / "net"):
        if _read(interface / "dev_port") == str(port - 1):  # dev_port counts from 0
            return interface.name
    return ""


def _preferred(hca: Hca) -> list[Gid]:
    """Return the entries that `choose_gid` may choose without an index, best first."""
    if hca.link_layer == "InfiniBand":
        return [gid for gid in hca.gids if gid.index == 0]

    def rank(gid: Gid) -> tuple[int, bool, int]:
        address = ipaddress.IPv6Address(gid.address)
        family = 0 if address.ipv4_mapped else 2 if address.is_link_local else 1
        return family, gid.netdev != hca.netdev, gid.index

    return sorted((gid for gid in hca.gids if gid.kind == ROCE_V2), key=rank)


def _read(path: Path | str) -> str:
    """Return the text of an attribute; empty if it has no value or does not exist."""
    try:
        attribute = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.fsdecode(os.read(attribute, _ATTRIBUTE_NBYTES)).strip()
        finally:
            os.close(attribute)
    except OSError as exc:
        if exc.errno not in _ABSENT:
            raise
        return ""


def _names(path: Path) -> list[str]:
    """Return the sorted names in a directory; an empty list if it does not exist."""
    try:
        return sorted(os.listdir(path))
    except OSError as exc:
        if exc.errno not in _ABSENT:
            raise
        return []


def _children(path: Path) -> list[Path]:
    return [path / name for name in _names(path)]


def _no_gid(hca: Hca, index: int) -> InvalidArgument:
    if index >= 0:
        asked, remedy = f"GID at index {index} (R2CC_GID_INDEX)", "give another index"
    elif hca.link_layer == "InfiniBand":
        asked, remedy = "GID at index 0", "check that its subnet manager runs"
    else:
        asked, remedy = f"{ROCE_V2} GID", f"give {hca.netdev or 'its interface'} an IP address"
    there = ", ".join(
        f"{gid.index}: {gid.address} ({gid.kind}{f', {gid.netdev}' if gid.netdev else ''})"
        for gid in hca.gids
    )
    return InvalidArgument(
        f"RDMA port {hca.label} has no {asked}; its GIDs: {there or 'none'}; {remedy}, or leave "
        "the port out with R2CC_HCA"
    )


def _describe(hcas: Iterable[Hca]) -> str:
    return (
        ", ".join(
            f"{each.label} ({each.state}, {each.link_layer}, {each.netdev or 'no interface'})"
            for each in hcas
        )
        or "none"
    )


__all__ = [
    "NO_HCA",
    "ROCE_V2",
    "SYSFS",
    "Gid",
    "GidFinder",
    "Hca",
    "choose_gid",
    "list_hcas",
    "select_hcas",
]
