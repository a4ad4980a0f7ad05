"""What the verbs transport says beside the slices: one header, then an eager payload if any.

Pure. Invariant: what `Message.read` returns fits the ring it was read from.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from r2ccl.transport.base import Frame
from r2ccl.transport.queuepair import ALIGN

#: kind, flags, channel, nbytes, seq, ack, op, signature, credit, number, address, rkey
_HEADER = struct.Struct("<BBHIQQQQIIQI")
HEADER_NBYTES = _HEADER.size
EAGER, CLEAR, CONFIRM = 1, 2, 3
_KINDS = frozenset((EAGER, CLEAR, CONFIRM))
_CREDIT_MASK = 0xFFFFFFFF

#: Where a peer lets a slice land: its number, address and key.
Token = tuple[int, int, int]


class Message(NamedTuple):
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
    def read(cls, ring: memoryview, offset: int, max_payload_nbytes: int) -> Message | None:
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


def write(kind: int, frame: Frame, nbytes: int, credit: int, token: Token = (0, 0, 0)) -> bytes:
    """Write a header; see `Message`."""
    number, address, rkey = token
    return _HEADER.pack(
        kind, 0, frame.channel, nbytes, frame.seq, frame.ack, frame.op, frame.signature,
        credit & _CREDIT_MASK, number, address, rkey,
    )  # fmt: skip


__all__ = ["CLEAR", "CONFIRM", "EAGER", "HEADER_NBYTES", "Message", "Token", "write"]
