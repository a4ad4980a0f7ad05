"""Message format of the verbs transport: a header, followed by the payload of an eager slice.

A message is a clear-to-send, a confirmation or an eager slice. Each also carries a credit: the
number of messages that its sender has consumed. The header is written when the message is queued,
but the message may then wait for room in the peer's ring while the peer waits for credits from this
end. So the credit is written into the header only when the message is sent (`stamp`).

Invariant: header and payload of a message that `VerbsMessage.read` returns lie inside the ring.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from r2ccl.transport.base import Frame
from r2ccl.transport.verbs.ring import ALIGN

#: kind, channel, nbytes, seq, ack, op, signature, credit, number, address, rkey
_HEADER = struct.Struct("<B3xIIQQQQIIQI")
HEADER_NBYTES = _HEADER.size
_CREDIT = struct.Struct("<I")
_CREDIT_OFFSET = struct.calcsize("<B3xIIQQQQ")
EAGER, CLEAR, CONFIRM = 1, 2, 3
_KINDS = frozenset((EAGER, CLEAR, CONFIRM))
_CREDIT_MASK = 0xFFFFFFFF

#: Landing place in a clear-to-send: number, I/O address and rkey.
Token = tuple[int, int, int]


class VerbsMessage(NamedTuple):
    """Parsed header of a message.

    ``nbytes`` is the size of the payload after the header if ``kind`` is EAGER, the size of the
    landing place ``token`` if it is CLEAR, and 0 if it is CONFIRM. ``credit`` is the number of
    messages that the sender has consumed, modulo 2^32. ``size`` is the number of ring bytes that
    the message occupies.
    """

    kind: int
    frame: Frame
    nbytes: int
    credit: int
    token: Token
    size: int

    @classmethod
    def read(cls, ring: memoryview, offset: int, max_payload_nbytes: int) -> VerbsMessage | None:
        """Return the header of the message at `offset` of `ring`.

        Return None if it is malformed, reaches beyond the ring, or belongs to an eager slice of
        more than `max_payload_nbytes` bytes.
        """
        if offset + HEADER_NBYTES > len(ring):
            return None
        (kind, channel, nbytes, seq, ack, op, signature, credit, number, address,
         rkey) = _HEADER.unpack_from(ring, offset)  # fmt: skip
        payload_nbytes = nbytes if kind == EAGER else 0
        end = offset + HEADER_NBYTES + payload_nbytes
        if kind not in _KINDS or payload_nbytes > max_payload_nbytes or end > len(ring):
            return None
        size = -(-(HEADER_NBYTES + payload_nbytes) // ALIGN) * ALIGN
        frame = Frame(channel, seq, ack, op, signature)
        return cls(kind, frame, nbytes, credit, (number, address, rkey), size)


def write(kind: int, frame: Frame, nbytes: int, token: Token) -> bytearray:
    """Return a new encoded header with credit 0, which `stamp` replaces.

    The parameters are the fields of `VerbsMessage`.
    """
    number, address, rkey = token
    header = bytearray(HEADER_NBYTES)
    _HEADER.pack_into(
        header, 0, kind, frame.channel, nbytes, frame.seq, frame.ack, frame.op,
        frame.signature, 0, number, address, rkey,
    )  # fmt: skip
    return header


def stamp(header: bytearray, credit: int) -> None:
    """Set the credit of a header: the number of messages consumed so far."""
    _CREDIT.pack_into(header, _CREDIT_OFFSET, credit & _CREDIT_MASK)


__all__ = ["CLEAR", "CONFIRM", "EAGER", "HEADER_NBYTES", "Token", "VerbsMessage", "stamp", "write"]
