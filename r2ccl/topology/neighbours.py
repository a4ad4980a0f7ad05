"""Check whether the kernel knows a peer's link-layer address, before a queue pair connects to it.

Connecting a RoCE queue pair resolves the peer's link-layer address inside a system call, which can
take a second while Python's GIL is held. `Neighbours` therefore looks into the kernel's neighbor
table first. If the address is missing, `Neighbours` sends an empty datagram to the peer, which
makes the kernel resolve the address, and the caller tries again later. This module never waits for
the resolution. If a firewall drops the datagram, the system call must resolve the address.

References
----------
rtnetlink(7); Linux, drivers/infiniband/core/addr.c (a neighbor in a valid state is used at once).
"""

from __future__ import annotations

import errno
import functools
import ipaddress
import logging
import socket
import struct
from collections.abc import Callable

from r2ccl.errors import describe_os_error, is_exhaustion
from r2ccl.topology.netlink import (
    NDA_DST,
    NDMSG,
    NUD_VALID,
    RTA_DST,
    RTA_GATEWAY,
    RTA_OIF,
    RTA_VIA,
    RTM_GETNEIGH,
    RTM_GETROUTE,
    RTMSG,
    RTN_LOCAL,
    RouteSocket,
    attribute,
    attributes,
)

_log = logging.getLogger(__name__)

#: Discard protocol (RFC 863): the receiver drops the datagram.
_DISCARD_PORT = 9
#: From linux/in.h; Python's `socket` module has it from 3.12 on.
_IP_PKTINFO = 8
_INDEX = struct.Struct("=i")
#: in_pktinfo: interface, source, (destination); in6_pktinfo: source, interface.
_PKTINFO = struct.Struct("=i4s4x")
_PKTINFO6 = struct.Struct("=16si")

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Neighbours:
    """Lookup of the link-layer addresses of peers behind one interface. Not thread-safe.

    Parameters
    ----------
    find_index : callable
        ``find_index()`` returns the kernel's number of the interface, 0 if the interface was
        removed; for example `r2ccl.topology.hcas.GidFinder.interface`.

    Raises
    ------
    OSError
        If a netlink socket cannot be created.
    """

    def __init__(self, find_index: Callable[[], int]) -> None:
        self._find_index = find_index
        self._route = RouteSocket()
        #: Error numbers of failed lookups that were logged; each is logged once.
        self._said: set[int | None] = set()

    def knows(self, source: str, destination: str) -> bool:
        """Return whether the link-layer address of `destination` is known; if not, request it.

        Parameters
        ----------
        source, destination : str
            IP addresses of this machine and of the peer; an IPv4 address may be mapped to IPv6, as
            in GIDs.

        Returns
        -------
        bool
            True if the link-layer address is known, or if none has to be resolved (`destination` is
            an address of this machine or an IPv6 link-local address). Also True if only connecting
            can resolve it, because the kernel does not support the query (before Linux 5.0) or a
            firewall drops the datagram. False if the link-layer address is not known yet, or if the
            lookup failed for a reason that may pass: no route exists, the interface is down or was
            removed, the source address was removed, or no file descriptor or kernel memory is free.

        Raises
        ------
        OSError
            If the lookup failed for another reason.
        """
        to = _plain(destination)
        if to.version == 6 and to.is_link_local:
            return True  # RoCE derives the link-layer address from the link-local address
        try:
            index = self._find_index()
            if not index:
                return False
            hop = self._next_hop(to, index)
            if hop is None or self._is_valid(hop, index):
                return True
            _send_nothing(_plain(source), to, index)
        except OSError as exc:
            if exc.errno == errno.EOPNOTSUPP:
                return True
            if exc.errno == errno.EPERM:
                self._say_dropped(destination, exc)
                return True
            if exc.errno in _NO_WAY:
                return False
            if not is_exhaustion(exc.errno):
                raise
            self._say_exhausted(destination, exc)
        return False

    def close(self) -> None:
        """Close the netlink socket; `knows` must not be called afterwards."""
        self._route.close()

    def _say_exhausted(self, destination: str, exc: OSError) -> None:
        if self._is_new(exc):
            _log.warning(
                "cannot resolve the link-layer address of peer %s now: %s; retrying without "
                "logging this error again",
                destination, describe_os_error(exc),
            )  # fmt: skip

    def _say_dropped(self, destination: str, exc: OSError) -> None:
        if self._is_new(exc):
            _log.warning(
                "a firewall of this host drops the UDP datagram to port %d of peer %s (%s), which "
                "would have made the kernel resolve the peer's link-layer address; connecting a "
                "queue pair must now resolve it, which can block this process for a second; let "
                "UDP to this port pass on the interface of the RDMA NIC",
                _DISCARD_PORT, destination, describe_os_error(exc),
            )  # fmt: skip

    def _is_new(self, exc: OSError) -> bool:
        """Return True if no error with this errno was logged yet; count the errno as logged."""
        is_new = exc.errno not in self._said
        self._said.add(exc.errno)
        return is_new

    def _next_hop(self, to: _Address, index: int) -> _Address | None:
        """Return the next hop on the route to `to`; None if `to` is an address of this machine.

        The next hop is the gateway, or `to` itself if the route has no gateway. An IPv4 route may
        have an IPv6 gateway (RFC 8950).
        """
        body = RTMSG.pack(_family(to), to.max_prefixlen, 0, 0, 0, 0, 0, 0, 0)
        body += attribute(RTA_DST, to.packed) + attribute(RTA_OIF, _INDEX.pack(index))
        answer = self._route.ask(RTM_GETROUTE, body).body
        kind = RTMSG.unpack_from(answer)[7]
        if kind == RTN_LOCAL:
            return None
        found = dict(attributes(answer[RTMSG.size :]))
        gateway = found.get(RTA_GATEWAY)
        if RTA_VIA in found:
            gateway = found[RTA_VIA][2:]  # after the address family
        return to if gateway is None else ipaddress.ip_address(bytes(gateway))

    def _is_valid(self, hop: _Address, index: int) -> bool:
        body = NDMSG.pack(_family(hop), index, 0, 0, 0) + attribute(NDA_DST, hop.packed)
        try:
            answer = self._route.ask(RTM_GETNEIGH, body).body
        except OSError as exc:
            if exc.errno == errno.ENOENT:
                return False
            raise
        state = NDMSG.unpack_from(answer)[2]
        return bool(state & NUD_VALID)


#: Errors if there is no route, the interface is down or removed, or the source address is removed.
_NO_WAY = frozenset(
    (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENODEV, errno.EADDRNOTAVAIL,
     errno.EINVAL)
)  # fmt: skip


def _send_nothing(source: _Address, to: _Address, index: int) -> None:
    """Send an empty datagram to `to` through interface `index`, even if a better route exists."""
    if isinstance(source, ipaddress.IPv4Address):
        where = (socket.IPPROTO_IP, _IP_PKTINFO, _PKTINFO.pack(index, source.packed))
    else:
        where = (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, _PKTINFO6.pack(source.packed, index))
    with socket.socket(_family(to), socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.sendmsg([b""], [where], 0, (str(to), _DISCARD_PORT))


@functools.lru_cache(maxsize=4096)  # peers are looked up repeatedly
def _plain(address: str) -> _Address:
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return mapped or parsed


def _family(address: _Address) -> int:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


__all__ = ["Neighbours"]
