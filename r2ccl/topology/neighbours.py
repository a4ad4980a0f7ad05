"""Asks the kernel whether it can reach a neighbour, before a call that would wait for it.

Connecting a RoCE queue pair resolves the peer's link-layer address inside a system call, for as
long as a second, and Python holds its lock meanwhile. So the kernel's tables are looked at first;
where they do not know the neighbour, an empty datagram has the kernel ask for it, and the caller
comes again. Must not wait for an answer itself.

References
----------
rtnetlink(7); Linux, drivers/infiniband/core/addr.c (a neighbour in a valid state is used at once).
"""

from __future__ import annotations

import errno
import functools
import ipaddress
import logging
import socket
import struct

from r2ccl.errors import describe_os_error, is_exhaustion
from r2ccl.topology.netlink import (
    NDA_DST,
    NDMSG,
    NUD_VALID,
    RTA_DST,
    RTA_GATEWAY,
    RTA_OIF,
    RTM_GETNEIGH,
    RTM_GETROUTE,
    RTMSG,
    RTN_LOCAL,
    RouteSocket,
    attribute,
    attributes,
)

_log = logging.getLogger(__name__)

#: RFC 863: whoever receives it throws it away.
_DISCARD_PORT = 9
#: linux/in.h; Python names it from 3.12 on.
_IP_PKTINFO = 8
_INDEX = struct.Struct("=i")
#: in_pktinfo: interface, the source, (destination); in6_pktinfo: source, interface.
_PKTINFO = struct.Struct("=i4s4x")
_PKTINFO6 = struct.Struct("=16si")

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Neighbours:
    """Asks about neighbours beyond one interface. Not thread-safe.

    Parameters
    ----------
    index : int
        The interface.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._route = RouteSocket()
        #: Error numbers of questions that could not be put; each is logged once.
        self._said: set[int | None] = set()

    def knows(self, source: str, destination: str) -> bool:
        """Return whether a packet to `destination` could leave now; if not, have it resolved.

        Both are IP addresses, IPv4 also in its form within IPv6, as GIDs spell them. True as well
        where the kernel need not ask (the machine's own and link-local addresses), and where it
        cannot tell (before Linux 5.0). False where this process has no descriptor, or the kernel no
        memory, to ask with: the caller comes again.
        """
        to = _plain(destination)
        if to.version == 6 and to.is_link_local:
            return True  # RoCE takes the link-layer address out of the address itself
        try:
            hop = self._next_hop(to)
            if hop is None or self._is_valid(hop):
                return True
            _send_nothing(_plain(source), to, self._index)
        except OSError as exc:
            if exc.errno == errno.EOPNOTSUPP:
                return True
            if exc.errno in _NO_WAY:
                return False
            if not is_exhaustion(exc.errno):
                raise
            self._say_exhausted(destination, exc)
        return False

    def close(self) -> None:
        """Close the socket."""
        self._route.close()

    def _say_exhausted(self, destination: str, exc: OSError) -> None:
        if exc.errno not in self._said:
            self._said.add(exc.errno)
            _log.warning(
                "the link-layer address of %s cannot be asked for now: %s; it is asked for again, "
                "and this is not logged again",
                destination, describe_os_error(exc),
            )  # fmt: skip

    def _next_hop(self, to: _Address) -> _Address | None:
        """Return the gateway, `to` itself if it is on the link, None if it is this machine."""
        body = RTMSG.pack(_family(to), to.max_prefixlen, 0, 0, 0, 0, 0, 0, 0)
        body += attribute(RTA_DST, to.packed) + attribute(RTA_OIF, _INDEX.pack(self._index))
        answer = self._route.ask(RTM_GETROUTE, body).body
        kind = RTMSG.unpack_from(answer)[7]
        if kind == RTN_LOCAL:
            return None
        found = dict(attributes(answer[RTMSG.size :]))
        gateway = found.get(RTA_GATEWAY)
        return to if gateway is None else ipaddress.ip_address(bytes(gateway))

    def _is_valid(self, hop: _Address) -> bool:
        body = NDMSG.pack(_family(hop), self._index, 0, 0, 0) + attribute(NDA_DST, hop.packed)
        try:
            answer = self._route.ask(RTM_GETNEIGH, body).body
        except OSError as exc:
            if exc.errno == errno.ENOENT:
                return False
            raise
        state = NDMSG.unpack_from(answer)[2]
        return bool(state & NUD_VALID)


#: No route, the interface is down or gone, the source address is.
_NO_WAY = frozenset(
    (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENODEV, errno.EADDRNOTAVAIL,
     errno.EINVAL)
)  # fmt: skip


def _send_nothing(source: _Address, to: _Address, index: int) -> None:
    """Send an empty datagram through the interface, whatever the routes of sockets say."""
    if isinstance(source, ipaddress.IPv4Address):
        where = (socket.IPPROTO_IP, _IP_PKTINFO, _PKTINFO.pack(index, source.packed))
    else:
        where = (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, _PKTINFO6.pack(source.packed, index))
    with socket.socket(_family(to), socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.sendmsg([b""], [where], 0, (str(to), _DISCARD_PORT))


@functools.lru_cache(maxsize=4096)  # peers are asked about again and again
def _plain(address: str) -> _Address:
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return mapped or parsed


def _family(address: _Address) -> int:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


__all__ = ["Neighbours"]
