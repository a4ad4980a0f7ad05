"""What the verbs transport says beside the slices: one header, then an eager payload if any.

A message may wait for room in the peer's ring while the peer waits for credits of this end. So a
header is written when its message is queued, but for the credit, which is stamped into it when it
leaves.

Pure. Invariant: what `VerbsMessage.read` returns fits the ring it was read from.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from r2ccl.transport.base import Frame
from r2ccl.transport.verbs.ring import ALIGN

#: kind, flags, channel, nbytes, seq, ack, op, signature, credit, number, address, rkey
_HEADER = struct.Struct("<BBHIQQQQIIQI")
HEADER_NBYTES = _HEADER.size
_CREDIT = struct.Struct("<I")
_CREDIT_OFFSET = struct.calcsize("<BBHIQQQQ")
EAGER, CLEAR, CONFIRM = 1, 2, 3
_KINDS = frozenset((EAGER, CLEAR, CONFIRM))
_CREDIT_MASK = 0xFFFFFFFF

#: Where a peer lets a slice land: its number, address and key.
Token = tuple[int, int, int]


class VerbsMessage(NamedTuple):
    """A header, read.

    ``nbytes`` is the slice's length: of the payload behind the header if the kind is EAGER, of
    the landing place `token` names if it is CLEAR, 0 if it is CONFIRM. ``credit`` counts the
    messages its sender has consumed; ``size`` is what the message takes of the ring.
    """

    kind: int
    frame: Frame
    nbytes: int
    credit: int
    token: Token
    size: int

    @classmethod
    def read(cls, ring: memoryview, offset: int, max_payload_nbytes: int) -> VerbsMessage | None:
        """Read the message at `offset` of `ring`; None if it makes no sense."""
        if offset + HEADER_NBYTES > len(ring):
            return None
        (kind, _, channel, nbytes, seq, ack, op, signature, credit, number, address,
         rkey) = _HEADER.unpack_from(ring, offset)  # fmt: skip
        payload_nbytes = nbytes if kind == EAGER else 0
        end = offset + HEADER_NBYTES + payload_nbytes
        if kind not in _KINDS or payload_nbytes > max_payload_nbytes or end > len(ring):
            return None
        size = -(-(HEADER_NBYTES + payload_nbytes) // ALIGN) * ALIGN
        frame = Frame(channel, seq, ack, op, signature)
        return cls(kind, frame, nbytes, credit, (number, address, rkey), size)


def write(kind: int, frame: Frame, nbytes: int, token: Token) -> bytearray:
    """Write a header, without its credit; see `VerbsMessage`."""
    number, address, rkey = token
    header = bytearray(HEADER_NBYTES)
    _HEADER.pack_into(
        header, 0, kind, 0, frame.channel, nbytes, frame.seq, frame.ack, frame.op,
        frame.signature, 0, number, address, rkey,
    )  # fmt: skip
    return header


def stamp(header: bytearray, credit: int) -> None:
    """Put the count of messages consumed so far into a header, in place of an earlier one."""
    _CREDIT.pack_into(header, _CREDIT_OFFSET, credit & _CREDIT_MASK)


__all__ = ["CLEAR", "CONFIRM", "EAGER", "HEADER_NBYTES", "Token", "VerbsMessage", "stamp", "write"]
