"""Minimal client of routing netlink: messages, attributes, requests, dumps and acknowledgements.

The library has its own small client because a link event must reach the data loop within a
millisecond, and because importing a general netlink library takes longer than joining a
communicator. Invariant: no message is read beyond the length in its header.

References
----------
RFC 3549 (Linux Netlink as an IP Services Protocol); rtnetlink(7), netlink(7).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from r2ccl.clock import monotonic

# linux/netlink.h
NLMSG_ERROR = 2
NLMSG_DONE = 3
NLM_F_REQUEST = 0x1
NLM_F_ACK = 0x4
NLM_F_DUMP_INTR = 0x10
NLM_F_DUMP = 0x300
NLM_F_REPLACE = 0x100
NLM_F_CREATE = 0x400

# linux/rtnetlink.h
RTM_NEWLINK = 16
RTM_DELLINK = 17
RTM_GETLINK = 18
RTM_SETLINK = 19
RTM_NEWADDR = 20
RTM_DELADDR = 21
RTM_GETADDR = 22
RTM_GETROUTE = 26
RTM_NEWNEIGH = 28
RTM_DELNEIGH = 29
RTM_GETNEIGH = 30
RTMGRP_LINK = 0x1
RTMGRP_IPV4_IFADDR = 0x10
RTMGRP_IPV6_IFADDR = 0x100

# linux/if_link.h, linux/if_addr.h
IFLA_IFNAME = 3
IFA_ADDRESS = 1
IFA_LOCAL = 2

# linux/rtnetlink.h, linux/neighbour.h
RTA_DST = 1
RTA_OIF = 4
RTA_GATEWAY = 5
RTA_VIA = 18
RTN_LOCAL = 2
NDA_DST = 1
NDA_LLADDR = 2
#: Neighbor states in which the kernel sends at once: all except none, incomplete and failed.
NUD_VALID = 0xDE
#: Neighbor state in which the kernel never resolves or changes the link-layer address.
NUD_PERMANENT = 0x80

#: nlmsghdr: length, type, flags, sequence, port id.
HEADER = struct.Struct("=IHHII")
#: ifinfomsg: family, (pad), device type, index, flags, mask of flags to change.
IFINFO = struct.Struct("=BxHiII")
#: ifaddrmsg: family, prefix length, flags, scope, index.
IFADDR = struct.Struct("=BBBBI")
#: rtmsg: family, prefix lengths (destination, source), TOS, table, protocol, scope, type, flags.
RTMSG = struct.Struct("=BBBBBBBBI")
#: ndmsg: family, (pads), index, state, flags, type.
NDMSG = struct.Struct("=BxxxiHBB")
_ATTRIBUTE = struct.Struct("=HH")
_ERROR = struct.Struct("=i")

#: Buffer size of a read. The kernel writes a dump in pieces of up to 32 KiB if the buffer has room.
RECEIVE_NBYTES = 64 << 10
_DUMP_ATTEMPTS = 10
_TYPE_MASK = 0x3FFF  # the two top bits of an attribute's type are flags


class NetlinkMessage(NamedTuple):
    """One netlink message: its header without length and port id, and its body.

    ``kind`` is the message type (``RTM_*`` or ``NLMSG_*``), ``flags`` are ``NLM_F_*``.
    """

    kind: int
    flags: int
    sequence: int
    body: memoryview


def messages(data: bytes) -> Iterator[NetlinkMessage]:
    """Yield the netlink messages in a datagram; a truncated message ends the iteration."""
    view = memoryview(data)
    while len(view) >= HEADER.size:
        length, kind, flags, sequence, _ = HEADER.unpack_from(view)
        if not HEADER.size <= length <= len(view):
            return
        yield NetlinkMessage(kind, flags, sequence, view[HEADER.size : length])
        view = view[_aligned(length) :]


def attributes(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield (type, payload) of each netlink attribute in `data`, the last part of a message's body.

    A truncated attribute ends the iteration.
    """
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        if not _ATTRIBUTE.size <= length <= len(data):
            return
        yield kind & _TYPE_MASK, data[_ATTRIBUTE.size : length]
        data = data[_aligned(length) :]


def attribute(kind: int, payload: bytes) -> bytes:
    """Pack a netlink attribute of type `kind`, padded to the alignment of the next attribute."""
    length = _ATTRIBUTE.size + len(payload)
    return _ATTRIBUTE.pack(length, kind) + payload + bytes(_aligned(length) - length)


def request(kind: int, flags: int, sequence: int, body: bytes) -> bytes:
    """Pack a netlink request: a message of type `kind` with ``NLM_F_REQUEST`` and `flags`."""
    length = HEADER.size + len(body)
    return HEADER.pack(length, kind, NLM_F_REQUEST | flags, sequence, 0) + body


class RouteSocket:
    """Routing-netlink socket for one request to the kernel at a time, each with a timeout.

    In all methods, `kind` is the message type of the request (``RTM_*``), and `body` is the packed
    message without its netlink header. The socket always uses the network namespace of the thread
    that created it. Not thread-safe.

    Parameters
    ----------
    timeout_s : float
        Time in seconds to wait for the whole answer to a request. The kernel answers during the
        send call, so only a broken kernel causes a timeout.

    Raises
    ------
    OSError
        If the socket cannot be created.
    """

    def __init__(self, *, timeout_s: float = 5.0) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._timeout_s = timeout_s
        self._sequence = 0

    def transact(self, kind: int, body: bytes, *, flags: int = 0) -> None:
        """Send a request that changes kernel state, and wait for its acknowledgement.

        `flags` are further flags of the request (``NLM_F_*``).

        Raises
        ------
        OSError
            If the kernel refused the request (with the kernel's errno), or did not answer in time.
        """
        self._send(kind, NLM_F_ACK | flags, body)
        for message in self._answers():
            if message.kind == NLMSG_ERROR:
                return

    def ask(self, kind: int, body: bytes) -> NetlinkMessage:
        """Request and return one entry of a kernel table; `body` describes the entry.

        Raises
        ------
        OSError
            If the kernel refused the request (with the kernel's errno), or did not answer in time.
            If the entry does not exist, the errno depends on the table: ENOENT for a neighbor,
            ENETUNREACH for most routes.
        """
        self._send(kind, 0, body)
        return next(self._answers())

    def dump(self, kind: int, body: bytes) -> list[NetlinkMessage]:
        """Return a kernel table as one message per entry.

        Raises
        ------
        OSError
            If the kernel refused the request (with the kernel's errno) or did not answer in time,
            or if the table changed during each of 10 attempts (EAGAIN).
        """
        for _ in range(_DUMP_ATTEMPTS):
            self._send(kind, NLM_F_DUMP, body)
            found = []
            is_torn = False
            for message in self._answers():
                is_torn |= bool(message.flags & NLM_F_DUMP_INTR)
                if message.kind == NLMSG_DONE:
                    break
                found.append(message)
            if not is_torn:
                return found
        raise OSError(
            errno.EAGAIN,
            f"the kernel table of netlink request {kind} changed during all {_DUMP_ATTEMPTS} "
            "dumps; try again",
        )

    def close(self) -> None:
        """Close the socket; a second call does nothing."""
        self._socket.close()

    def _send(self, kind: int, flags: int, body: bytes) -> None:
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        self._socket.settimeout(self._timeout_s)
        self._socket.send(request(kind, flags, self._sequence, body))

    def _answers(self) -> Iterator[NetlinkMessage]:
        """Yield the answers to the last request; skip late answers to earlier requests."""
        until_s = monotonic() + self._timeout_s
        while (left_s := until_s - monotonic()) > 0:
            self._socket.settimeout(left_s)
            for message in messages(self._socket.recv(RECEIVE_NBYTES)):
                if message.sequence == self._sequence:
                    if message.kind == NLMSG_ERROR:
                        _raise_if_refused(message)
                    yield message
        raise OSError(
            errno.ETIMEDOUT,
            f"the kernel did not finish its answer to a netlink request within "
            f"{self._timeout_s:g} s",
        )


def _raise_if_refused(message: NetlinkMessage) -> None:
    (code,) = _ERROR.unpack_from(message.body)
    if code:
        raise OSError(-code, os.strerror(-code))


def _aligned(length: int) -> int:
    return (length + 3) & ~3


__all__ = [
    "HEADER",
    "IFADDR",
    "IFA_ADDRESS",
    "IFA_LOCAL",
    "IFINFO",
    "IFLA_IFNAME",
    "NDA_DST",
    "NDA_LLADDR",
    "NDMSG",
    "NLMSG_DONE",
    "NLMSG_ERROR",
    "NLM_F_CREATE",
    "NLM_F_DUMP_INTR",
    "NLM_F_REPLACE",
    "NUD_PERMANENT",
    "NUD_VALID",
    "RECEIVE_NBYTES",
    "RTA_DST",
    "RTA_GATEWAY",
    "RTA_OIF",
    "RTA_VIA",
    "RTMGRP_IPV4_IFADDR",
    "RTMGRP_IPV6_IFADDR",
    "RTMGRP_LINK",
    "RTMSG",
    "RTM_DELADDR",
    "RTM_DELLINK",
    "RTM_DELNEIGH",
    "RTM_GETADDR",
    "RTM_GETLINK",
    "RTM_GETNEIGH",
    "RTM_GETROUTE",
    "RTM_NEWADDR",
    "RTM_NEWLINK",
    "RTM_NEWNEIGH",
    "RTM_SETLINK",
    "RTN_LOCAL",
    "NetlinkMessage",
    "RouteSocket",
    "attribute",
    "attributes",
    "messages",
    "request",
]
