"""Monitor that reports when a local NIC goes up or down, or gains or loses an address.

Netlink notifications are the fastest evidence of a failure at the local end of a rail. The module
only reports changes as values; `r2ccl.failover` decides what they mean. Invariant: each event
differs from the last reported state, even after the kernel dropped notifications.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import msgspec

from r2ccl.clock import Clock, monotonic
from r2ccl.topology import netlink
from r2ccl.types import Nic

# linux/if.h. LOWER_UP is the carrier, RUNNING the operational state derived from it: a NIC can
# carry data when it has all three.
_IFF_UP = 0x1
_IFF_RUNNING = 0x40
_IFF_LOWER_UP = 0x10000
_USABLE = _IFF_UP | _IFF_RUNNING | _IFF_LOWER_UP

_GROUPS = netlink.RTMGRP_LINK | netlink.RTMGRP_IPV4_IFADDR | netlink.RTMGRP_IPV6_IFADDR

_FAMILY_NBYTES = {socket.AF_INET: 4, socket.AF_INET6: 16}


class LinkEvent(msgspec.Struct, frozen=True, gc=False):
    """A change of a NIC: up or down, or one of its addresses added or removed.

    ``index`` is the kernel's number of the interface. ``name`` is its name, empty if an address
    changed after the interface was removed. ``address`` is the address added or removed, empty if
    the link itself changed. ``is_up`` is True if the link can now carry data and, if an address
    changed, the address was added. ``time`` is the time on the monitor's clock at which
    `LinkMonitor.read` read the change, in seconds.
    """

    index: int
    name: str
    is_up: bool
    time: float
    address: str = ""

    def concerns(self, nic: Nic) -> bool:
        """Return whether the event is about `nic`: its link, or the address that its rail binds."""
        return self.index == nic.index and self.address in ("", nic.address)


class LinkMonitor:
    """Monitor of the interfaces in the network namespace in which it is created.

    The descriptor `fileno` is readable when notifications wait for `read`, so it can be used with a
    selector or asyncio's ``add_reader``. The constructor blocks while it dumps the kernel's tables;
    `read` blocks for a dump only after the notification queue has overflowed. Not thread-safe.
    Usable as a context manager.

    Parameters
    ----------
    clock : Clock
        Source of the events' times.
    receive_buffer_nbytes : int
        Requested size of the kernel's queue of unread notifications; 0: the system's default.

    Raises
    ------
    OSError
        If a netlink socket cannot be created, or a dump of the kernel's tables failed.
    """

    def __init__(self, *, clock: Clock = monotonic, receive_buffer_nbytes: int = 0) -> None:
        self._clock = clock
        self._links: dict[int, tuple[str, bool]] = {}
        self._addresses: set[tuple[int, str]] = set()
        #: Events found by a `read` that raised; the next `read` returns them.
        self._found: list[LinkEvent] = []
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        try:
            # Opened now because `read` may run in a thread of another network namespace.
            self._tables = netlink.RouteSocket()
        except OSError:
            self._socket.close()
            raise
        try:
            self._socket.setblocking(False)
            if receive_buffer_nbytes:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_nbytes)
            # Bind before the first dump, so that changes during the dump are not lost.
            self._socket.bind((0, _GROUPS))
            self._reread()
        except OSError:
            self.close()
            raise

    def fileno(self) -> int:
        """Return the file descriptor that is readable when notifications wait for `read`."""
        return self._socket.fileno()

    def is_up(self, index: int) -> bool:
        """Return whether interface `index` could carry data at the last `read`.

        Before the first `read`, return its state at the creation of the monitor. Return False if
        there was no such interface.
        """
        return self._links.get(index, ("", False))[1]

    def read(self) -> list[LinkEvent]:
        """Return the changes since the last call, without waiting for new ones.

        The first call returns the changes since the monitor was created. Changes are in the order
        in which they happened, except changes found after the notification queue has overflowed.

        Raises
        ------
        OSError
            If the monitor is closed, or a dump of the kernel's tables failed.
        """
        events = self._found
        while True:
            try:
                data = self._socket.recv(netlink.RECEIVE_NBYTES)
            except BlockingIOError:
                self._found = []
                return events
            except OSError as exc:
                if exc.errno != errno.ENOBUFS:
                    raise
                # The kernel dropped notifications; compare the current state instead.
                events += self._reread()
                continue
            for message in netlink.messages(data):
                events += self._note(message)

    def close(self) -> None:
        """Close the monitor's sockets; a second call does nothing."""
        self._socket.close()
        self._tables.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _note(self, message: netlink.NetlinkMessage) -> Iterator[LinkEvent]:
        if message.kind in (netlink.RTM_NEWLINK, netlink.RTM_DELLINK):
            link = _parse_link(message)
            if link is not None:
                yield from self._note_link(*link, is_gone=message.kind == netlink.RTM_DELLINK)
        elif message.kind in (netlink.RTM_NEWADDR, netlink.RTM_DELADDR):
            pair = _parse_address(message)
            if pair is not None:
                yield from self._note_address(pair, message.kind == netlink.RTM_NEWADDR)

    def _note_link(
        self, index: int, name: str, is_up: bool, *, is_gone: bool
    ) -> Iterator[LinkEvent]:
        was_up = self.is_up(index)
        if is_gone:
            is_up = False
            self._links.pop(index, None)
        else:
            self._links[index] = (name, is_up)
        if is_up != was_up:
            yield LinkEvent(index, name, is_up, self._clock())

    def _note_address(self, pair: tuple[int, str], is_there: bool) -> Iterator[LinkEvent]:
        if (pair in self._addresses) == is_there:
            return
        if is_there:
            self._addresses.add(pair)
        else:
            self._addresses.remove(pair)
        index, address = pair
        name, is_up = self._links.get(index, ("", False))
        yield LinkEvent(index, name, is_there and is_up, self._clock(), address)

    def _reread(self) -> list[LinkEvent]:
        """Dump the kernel's tables and return the differences from the state reported so far."""
        events: list[LinkEvent] = []
        links = _dump_links(self._tables)
        addresses = _dump_addresses(self._tables)
        for index, (name, _) in list(self._links.items()):
            if index not in links:
                events += self._note_link(index, name, False, is_gone=True)
        for index, (name, is_up) in links.items():
            events += self._note_link(index, name, is_up, is_gone=False)
        for pair in self._addresses - addresses:
            events += self._note_address(pair, False)
        for pair in addresses - self._addresses:
            events += self._note_address(pair, True)
        return events


def _dump_links(tables: netlink.RouteSocket) -> dict[int, tuple[str, bool]]:
    body = netlink.IFINFO.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
    found = map(_parse_link, tables.dump(netlink.RTM_GETLINK, body))
    return {link[0]: link[1:] for link in found if link is not None}


def _dump_addresses(tables: netlink.RouteSocket) -> set[tuple[int, str]]:
    body = netlink.IFADDR.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
    found = map(_parse_address, tables.dump(netlink.RTM_GETADDR, body))
    return {pair for pair in found if pair is not None}


def _parse_link(message: netlink.NetlinkMessage) -> tuple[int, str, bool] | None:
    """Return (index, name, can carry data) of the interface that a link message is about.

    Return None for a truncated message, and for a bridge's message about one of its ports.
    """
    if len(message.body) < netlink.IFINFO.size:
        return None
    family, _, index, flags, _ = netlink.IFINFO.unpack_from(message.body)
    if family != socket.AF_UNSPEC:
        return None
    name = ""
    for kind, payload in netlink.attributes(message.body[netlink.IFINFO.size :]):
        if kind == netlink.IFLA_IFNAME:
            name = bytes(payload).rstrip(b"\0").decode(errors="replace")
            break  # the kernel writes the name first, followed by dozens of other attributes
    return index, name, flags & _USABLE == _USABLE


def _parse_address(message: netlink.NetlinkMessage) -> tuple[int, str] | None:
    """Return (index of the interface, address) of an address message.

    Return None for a truncated message, and for address families that no rail can use.
    """
    if len(message.body) < netlink.IFADDR.size:
        return None
    family, _, _, _, index = netlink.IFADDR.unpack_from(message.body)
    found = dict(netlink.attributes(message.body[netlink.IFADDR.size :]))
    # On a point-to-point link, IFA_ADDRESS is the peer's address and IFA_LOCAL the local one.
    raw = found.get(netlink.IFA_LOCAL, found.get(netlink.IFA_ADDRESS))
    if raw is None or _FAMILY_NBYTES.get(family) != len(raw):
        return None
    return index, socket.inet_ntop(family, raw)


__all__ = ["LinkEvent", "LinkMonitor"]
