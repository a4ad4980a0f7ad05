"""Connection: the socket of one TCP path, with its partly read and partly written frames."""

from __future__ import annotations

import socket
import struct
from collections import deque

from r2ccl.transport.aligned import aligned_memory
from r2ccl.transport.base import Frame
from r2ccl.types import PathKey

#: Frame header: kind, channel, nbytes, seq, ack, op, signature. Its size is that of a cache line,
#: see `r2ccl.transport.aligned`.
HEADER = struct.Struct("<7Q8x")
HEADER_NBYTES = HEADER.size
DATA, CLEAR, CONFIRM = 1, 2, 3

#: Largest fragment of a cleared slice, in bytes: a replay waits for one fragment of a slice that is
#: being written, not for the whole slice. On loopback a slice is one fragment (`_WHOLE`): no line
#: rate delays a replay there, and each fragment costs a header.
_FRAGMENT_NBYTES = 64 << 10
_WHOLE = 1 << 62


class QueuedSlice:
    """Cleared slice in a send queue; ``rest`` holds the bytes not yet moved to a fragment."""

    __slots__ = ("frame", "rest")

    def __init__(self, frame: Frame, view: memoryview) -> None:
        self.frame = frame
        self.rest = view


class NamedPlace:
    """Landing place that was announced to the peer.

    ``rest`` is the part after the last fragment whose header has been read.
    """

    __slots__ = ("ack", "began_s", "is_confirmed", "rest")

    def __init__(self, region: memoryview, ack: int) -> None:
        self.rest = region
        #: Time of the transport's clock at which the first fragment began, in seconds; 0 before.
        self.began_s = 0.0
        #: `ack` of `Transport.irecv`: the confirmation that may be queued before the slice is read;
        #: 0 if there is none or it was queued.
        self.ack = ack
        #: True if that confirmation was queued.
        self.is_confirmed = False


class Connection:
    """Socket of one path, with its partly read and partly written frames.

    Parameters
    ----------
    path : PathKey
    sock : socket.socket
        Connected and non-blocking; owned by the transport.
    buffer_nbytes : int
        Size of the receive buffer.
    is_loopback : bool
        True if the socket has a loopback address; each slice is then sent as one fragment.
    """

    __slots__ = (
        "buffer", "buffer_address", "bulk", "fd", "filled", "fragment_nbytes", "frame", "is_dirty",
        "is_loopback", "is_waiting", "parsed", "path", "place", "places", "replays", "sending",
        "sent", "small", "sock", "target",
    )  # fmt: skip

    def __init__(
        self, path: PathKey, sock: socket.socket, buffer_nbytes: int, *, is_loopback: bool
    ) -> None:
        self.is_loopback = is_loopback
        self.fragment_nbytes = _WHOLE if is_loopback else _FRAGMENT_NBYTES
        self.path = path
        self.sock = sock
        self.fd = sock.fileno()
        #: Not initialized: the kernel provides only pages in use, and most paths use one or two.
        buffer = aligned_memory(buffer_nbytes)
        self.buffer = buffer.data
        self.buffer_address = int(buffer.ctypes.data)
        #: Bytes ``parsed .. filled`` of the buffer are read but not parsed yet.
        self.parsed = 0
        self.filled = 0
        #: Unread rest of the current fragment (None between fragments), the frame of its slice, and
        #: the landing place of its slice.
        self.target: memoryview | None = None
        self.frame: Frame | None = None
        self.place: NamedPlace | None = None
        #: Landing places announced on the path whose slices are not complete yet, by channel and
        #: number of the slice.
        self.places: dict[tuple[int, int], NamedPlace] = {}
        #: Send queues in order of priority: small frames, replays, other cleared slices.
        self.small: deque[bytes | memoryview] = deque()
        self.replays: deque[QueuedSlice] = deque()
        self.bulk: deque[QueuedSlice] = deque()
        #: Buffers of the frames being written.
        self.sending: deque[bytes | memoryview] = deque()
        #: Frame of the slice to report as `Sent` once ``sending`` is empty.
        self.sent: Frame | None = None
        #: True while the socket is full and the transport waits until it accepts data.
        self.is_waiting = False
        #: True while the transport's list of connections to flush contains this one.
        self.is_dirty = False

    def ask(self, frame: Frame, region: memoryview, ack: int) -> None:
        """Queue a clear-to-send frame that announces `region` for slice ``frame.seq``.

        `ack` is the parameter of `Transport.irecv`.
        """
        self.places[frame.channel, frame.seq] = NamedPlace(region, ack)
        self.small.append(pack(CLEAR, frame, len(region)))


def pack(kind: int, frame: Frame, nbytes: int) -> bytes:
    """Return the encoded header of a DATA or CLEAR frame.

    `nbytes` is the size of the payload (DATA), or of the landing place (CLEAR).
    """
    return HEADER.pack(kind, frame.channel, nbytes, frame.seq, frame.ack, frame.op, frame.signature)


def buffer_nbytes(eager_nbytes: int) -> int:
    """Return the size in bytes of a receive buffer for eager slices of at most `eager_nbytes`."""
    return 2 * (HEADER_NBYTES + eager_nbytes)


def pack_data(frame: Frame, nbytes: int) -> bytes:
    """Return the encoded header of a slice, or of a fragment of a slice, of `nbytes` bytes."""
    return pack(DATA, frame, nbytes)


__all__ = [
    "CLEAR",
    "CONFIRM",
    "DATA",
    "HEADER",
    "HEADER_NBYTES",
    "Connection",
    "NamedPlace",
    "QueuedSlice",
    "buffer_nbytes",
    "pack",
    "pack_data",
]
