"""One reliable, ordered message stream between two ranks over carriers that may all be lost.

Theory of operation. Each message gets a sequence number. Frames travel on *carriers* (TCP
connections, or anything else that moves a frame now and then); a carrier may lose, repeat,
reorder or cut frames. The receiver delivers in sequence, keeps what came early (bounded), drops
what came twice, and acknowledges cumulatively. The sender keeps every message until it is
acknowledged and sends it again: at once on a carrier that came up, at once on the others when a
carrier went down, and on all of them when a timer runs out (doubling while nothing comes back).
New frames ride the carrier heard from last. An idle carrier carries a heartbeat, which is an
acknowledgement without a message, so that silence means something.

====================  ==========================================================================
event                 effect (frames leave at the next `poll`)
====================  ==========================================================================
``post``              message gets the next number; leaves once the window reaches it
``receive`` (data)    in sequence: delivered, with what waited behind it; ahead: kept; else dropped
``receive`` (any)     acknowledged messages are forgotten; the carrier counts as alive
``carrier_up``        everything unacknowledged leaves again on it
``carrier_down``      everything unacknowledged leaves again on the carriers that remain
timer                 everything unacknowledged leaves again on all carriers
====================  ==========================================================================

This module sees no socket, thread, clock or random source: time is an argument. Invariant: what
`receive` returns over time is exactly what the other side posted, in order, each once.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from r2ccl.bootstrap.auth import PROTOCOL_VERSION
from r2ccl.errors import InternalError, InvalidArgument, R2cclError

#: Longest frame on any carrier; a longer one ends the carrier that brought it.
MAX_FRAME_NBYTES = 1 << 20

# length of the whole frame, version, kind, 2 spare bytes, sequence number, cumulative ack
_HEADER = struct.Struct("!IBBxxQQ")
_DATA = 1
_HEARTBEAT = 2

#: Longest message, encoded.
MAX_BODY_NBYTES = MAX_FRAME_NBYTES - _HEADER.size


class FrameError(R2cclError):
    """Bytes that are no frame; `reason` is short, fixed text fit for a counter."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class SessionFrame(NamedTuple):
    """What travels: a message (``seq`` from 1 on), or a heartbeat (``seq`` 0, empty ``body``)."""

    seq: int
    ack: int
    body: bytes

    def pack(self) -> bytes:
        """Return the wire form, its length first."""
        kind = _DATA if self.seq else _HEARTBEAT
        nbytes = _HEADER.size + len(self.body)
        return _HEADER.pack(nbytes, PROTOCOL_VERSION, kind, self.seq, self.ack) + self.body


class FrameReader:
    """Cut a byte stream into frames; holds at most one unfinished frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[SessionFrame]:
        """Take bytes, return the frames they complete.

        Raises
        ------
        FrameError
            Oversized, too short, of another version or kind. The stream is useless after that.
        """
        self._buffer += data
        frames = []
        at = 0
        while len(self._buffer) - at >= _HEADER.size:
            nbytes, version, kind, seq, ack = _HEADER.unpack_from(self._buffer, at)
            _check_header(nbytes, version, kind, seq)
            if len(self._buffer) - at < nbytes:
                break
            frames.append(
                SessionFrame(seq, ack, bytes(self._buffer[at + _HEADER.size : at + nbytes]))
            )
            at += nbytes
        del self._buffer[:at]
        return frames


def _check_header(nbytes: int, version: int, kind: int, seq: int) -> None:
    if version != PROTOCOL_VERSION:
        raise FrameError("wrong frame version")
    if nbytes > MAX_FRAME_NBYTES:
        raise FrameError("oversized frame")
    if kind == _DATA:
        if seq == 0 or nbytes < _HEADER.size:
            raise FrameError("malformed frame")
    elif kind != _HEARTBEAT or seq != 0 or nbytes != _HEADER.size:
        raise FrameError("malformed frame")


class SessionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds and bounds of a `Session`.

    ``heartbeat_s``: an idle carrier speaks this often. ``ack_s``: how long an acknowledgement
    waits for a frame to ride on. ``resend_s`` doubles to ``resend_max_s``. ``window``: messages
    under way and unacknowledged. ``early_nbytes``: memory for messages that came ahead of their
    turn; what does not fit is dropped and comes again.
    """

    heartbeat_s: float = 1.0
    ack_s: float = 0.005
    resend_s: float = 0.05
    resend_max_s: float = 1.0
    window: int = 256
    early_nbytes: int = 8 << 20


class _Carrier:
    __slots__ = ("heard_at", "is_behind", "spoke_at")

    def __init__(self, now: float) -> None:
        self.heard_at = now
        self.spoke_at = now
        #: Everything unacknowledged has to leave on it again.
        self.is_behind = True


class Session:
    """One end of a pair.

    Parameters
    ----------
    now : float
        Any monotonic clock; all later readings come from the same one.
    limits : SessionLimits
        `heartbeat_s` may differ between the ends, ``window`` too.
    """

    def __init__(self, now: float, limits: SessionLimits | None = None) -> None:
        self._limits = limits or SessionLimits()
        self._carriers: dict[int, _Carrier] = {}
        self._heard_at = now
        self._excused_s = 0.0
        # sender
        self._unacked: deque[bytes] = deque()  # messages _acked + 1 ... _posted
        self._posted = 0
        self._sent = 0
        self._acked = 0
        self._resend_at = float("inf")
        self._resend_s = self._limits.resend_s
        # receiver
        self._delivered = 0
        self._early: dict[int, bytes] = {}
        self._early_nbytes = 0
        self._ack_at = float("inf")

    # -- what the owner tells it ------------------------------------------------------------

    def post(self, body: bytes) -> None:
        """Queue a message; `poll` sends it.

        Raises
        ------
        InvalidArgument
            `body` is longer than `MAX_BODY_NBYTES`.
        """
        if len(body) > MAX_BODY_NBYTES:
            raise InvalidArgument(
                f"a control message of {len(body)} bytes; at most {MAX_BODY_NBYTES} are allowed"
            )
        self._posted += 1
        self._unacked.append(body)

    def carrier_up(self, carrier: int, now: float) -> None:
        """Use `carrier` (any number that names no present one) from now on."""
        if carrier in self._carriers:
            raise InternalError(f"carrier {carrier} is up already")
        self._carriers[carrier] = _Carrier(now)

    def carrier_down(self, carrier: int) -> None:
        """Forget `carrier`; what may have been lost with it leaves again on the others."""
        if self._carriers.pop(carrier, None) is not None:
            for other in self._carriers.values():
                other.is_behind = True

    def receive(self, carrier: int, frame: SessionFrame, now: float) -> list[bytes]:
        """Take a frame from `carrier`; return the messages it makes deliverable, in order.

        Raises
        ------
        FrameError
            The frame acknowledges what was never sent.
        """
        if frame.ack > self._sent:
            raise FrameError("acknowledgement of an unsent message")
        self._hear(carrier, now)
        self._take_ack(frame.ack, now)
        if frame.seq == 0:
            return []
        # Repeated messages are acknowledged too: the earlier acknowledgement may be what was lost.
        self._ack_at = min(self._ack_at, now + self._limits.ack_s)
        return self._take_message(frame)

    def ack_now(self) -> None:
        """Let the next `poll` acknowledge what was received, rather than wait for company."""
        self._ack_at = float("-inf")

    def excuse(self, gap_s: float) -> None:
        """Do not count `gap_s` as silence: this process itself did not run."""
        self._excused_s += gap_s

    # -- what it tells the owner ------------------------------------------------------------

    @property
    def unacknowledged(self) -> int:
        """How many posted messages the other side has not acknowledged."""
        return len(self._unacked)

    @property
    def last_heard(self) -> float:
        """When a frame came in last; when the session was made, if none did."""
        return self._heard_at

    def silence_s(self, now: float) -> float:
        """How long nothing was heard, less what `excuse` took off."""
        return max(0.0, now - self._heard_at - self._excused_s)

    def carrier_silence_s(self, carrier: int, now: float) -> float:
        """`silence_s` of one carrier."""
        return max(0.0, now - self._carriers[carrier].heard_at - self._excused_s)

    def deadline(self) -> float:
        """Clock reading at which `poll` has something to do again; infinity: after an event."""
        if not self._carriers:
            return float("inf")
        if self._sent < self._window_end() or any(c.is_behind for c in self._carriers.values()):
            return float("-inf")
        beat = min(c.spoke_at for c in self._carriers.values()) + self._limits.heartbeat_s
        return min(self._resend_at, self._ack_at, beat)

    def poll(self, now: float) -> list[tuple[int, bytes]]:
        """Return the frames to send now, as (carrier, packed frame).

        A frame that a carrier cannot take may be dropped: the timer sends it again.
        """
        if not self._carriers:
            return []
        frames: list[tuple[int, bytes]] = []
        if now >= self._resend_at:
            self._resend_s = min(2 * self._resend_s, self._limits.resend_max_s)
            self._resend_at = now + self._resend_s
            for carrier in self._carriers.values():
                carrier.is_behind = True
        self._resend(now, frames)
        self._send_new(now, frames)
        self._send_heartbeats(now, frames)
        return frames

    # -- sending ----------------------------------------------------------------------------

    def _window_end(self) -> int:
        return min(self._posted, self._acked + self._limits.window)

    def _resend(self, now: float, frames: list[tuple[int, bytes]]) -> None:
        for number, carrier in self._carriers.items():
            if carrier.is_behind:
                carrier.is_behind = False
                self._emit(number, range(self._acked + 1, self._sent + 1), now, frames)

    def _send_new(self, now: float, frames: list[tuple[int, bytes]]) -> None:
        end = self._window_end()
        if end == self._sent:
            return
        if self._resend_at == float("inf"):
            self._resend_at = now + self._resend_s
        self._emit(self._freshest(), range(self._sent + 1, end + 1), now, frames)
        self._sent = end

    def _send_heartbeats(self, now: float, frames: list[tuple[int, bytes]]) -> None:
        due = [
            number
            for number, carrier in self._carriers.items()
            if now >= carrier.spoke_at + self._limits.heartbeat_s
        ]
        if now >= self._ack_at and not due:
            due = [self._freshest()]
        for number in due:
            self._speak(number, SessionFrame(0, self._delivered, b""), now, frames)

    def _emit(
        self, number: int, seqs: Iterable[int], now: float, frames: list[tuple[int, bytes]]
    ) -> None:
        for seq in seqs:
            body = self._unacked[seq - self._acked - 1]
            self._speak(number, SessionFrame(seq, self._delivered, body), now, frames)

    def _speak(
        self, number: int, frame: SessionFrame, now: float, frames: list[tuple[int, bytes]]
    ) -> None:
        self._carriers[number].spoke_at = now
        self._ack_at = float("inf")  # every frame acknowledges
        frames.append((number, frame.pack()))

    def _freshest(self) -> int:
        return max(self._carriers, key=lambda number: self._carriers[number].heard_at)

    # -- receiving --------------------------------------------------------------------------

    def _hear(self, carrier: int, now: float) -> None:
        self._heard_at = now
        self._excused_s = 0.0
        if carrier in self._carriers:  # else: the last words of one that went down
            self._carriers[carrier].heard_at = now

    def _take_ack(self, ack: int, now: float) -> None:
        if ack <= self._acked:
            return
        for _ in range(ack - self._acked):
            self._unacked.popleft()
        self._acked = ack
        self._resend_s = self._limits.resend_s
        is_open = self._sent > self._acked
        self._resend_at = now + self._resend_s if is_open else float("inf")

    def _take_message(self, frame: SessionFrame) -> list[bytes]:
        if frame.seq != self._delivered + 1:
            self._keep_early(frame)
            return []
        ready = [frame.body]
        self._delivered += 1
        while (body := self._early.pop(self._delivered + 1, None)) is not None:
            self._early_nbytes -= _HEADER.size + len(body)
            self._delivered += 1
            ready.append(body)
        return ready

    def _keep_early(self, frame: SessionFrame) -> None:
        is_wanted = frame.seq > self._delivered and frame.seq not in self._early
        nbytes = _HEADER.size + len(frame.body)  # so that empty messages are bounded too
        if is_wanted and self._early_nbytes + nbytes <= self._limits.early_nbytes:
            self._early[frame.seq] = frame.body
            self._early_nbytes += nbytes


__all__ = [
    "MAX_BODY_NBYTES",
    "MAX_FRAME_NBYTES",
    "FrameError",
    "FrameReader",
    "Session",
    "SessionFrame",
    "SessionLimits",
]
