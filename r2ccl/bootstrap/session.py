"""Control session: a reliable, ordered message stream between two ranks over unreliable carriers.

Each message has a sequence number. Frames are sent on *carriers*: TCP connections, or anything else
that can move a frame. A carrier may lose, repeat, reorder or cut frames. The receiver delivers
messages in sequence, keeps those that arrive early (up to a bound), drops duplicates, and
acknowledges cumulatively. The sender keeps every message until it is acknowledged and resends it:
on a carrier that comes up, and on the others when a carrier goes down. When the resend timer
expires (its timeout doubles until an acknowledgement arrives), the oldest message is resent on all
carriers; if the acknowledgement then shows that later ones are missing too, these follow. So a rank
that is only slow is not sent everything again. New messages are sent on the carrier that received a
frame last. Heartbeats, which are acknowledgements without a message, are sent on idle carriers, so
that a silent carrier is known to have failed.

====================  ==========================================================================
event                 effect (the next `poll` returns the frames)
====================  ==========================================================================
``post``              message gets the next number; sent when the window reaches it
``receive`` (data)    in sequence: delivered, with its kept successors; early: kept; else dropped
``receive`` (any)     acknowledged messages are deleted; the carrier counts as alive
``carrier_up``        all unacknowledged messages are resent on the new carrier
``carrier_down``      all unacknowledged messages are resent on the remaining carriers
timer                 the oldest unacknowledged message is resent on all carriers; all others
                      follow if the next acknowledgement does not cover them
====================  ==========================================================================

This module does no I/O and reads no clock: time is an argument. Invariant: `receive` returns the
messages of the other end in the order in which they were posted, each once and without gaps.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from r2ccl.bootstrap.auth import PROTOCOL_VERSION
from r2ccl.errors import InternalError, InvalidArgument, R2cclError

#: Maximum size of a frame in bytes; a carrier that delivers a larger one is closed.
MAX_FRAME_NBYTES = 1 << 20

# length of the whole frame, version, kind, 2 spare bytes, sequence number, cumulative ack
_HEADER = struct.Struct("!IBBxxQQ")
_DATA = 1
_HEARTBEAT = 2

#: Maximum size in bytes of a frame's body, which is one encoded message.
MAX_BODY_NBYTES = MAX_FRAME_NBYTES - _HEADER.size


class FrameError(R2cclError):
    """Malformed or unexpected frame.

    ``reason`` is a short, fixed text, by which such frames are counted.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class SessionFrame(NamedTuple):
    """Frame with a message (``seq`` from 1 on), or a heartbeat (``seq`` 0, empty ``body``).

    ``ack`` acknowledges messages of the other direction: all with numbers up to ``ack`` have been
    received.
    """

    seq: int
    ack: int
    body: bytes

    def pack(self) -> bytes:
        """Return the encoded frame, which begins with its length."""
        kind = _DATA if self.seq else _HEARTBEAT
        nbytes = _HEADER.size + len(self.body)
        return _HEADER.pack(nbytes, PROTOCOL_VERSION, kind, self.seq, self.ack) + self.body


class FrameReader:
    """Splitter of a byte stream into frames; keeps at most one incomplete frame between calls."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[SessionFrame]:
        """Add received bytes and return the frames that they complete.

        Raises
        ------
        FrameError
            If a frame is too long or too short, has another version or kind, or has a sequence
            number that its kind does not allow. The rest of the stream cannot be read.
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
    """Timers in seconds and bounds of a `Session`.

    Parameters
    ----------
    heartbeat_s : float
        Interval of heartbeats on an idle carrier.
    ack_s : float
        Longest time that an acknowledgement waits for a frame that can carry it.
    resend_s, resend_max_s : float
        First resend timeout, and the maximum up to which it doubles.
    window : int
        Maximum number of messages that are sent and not acknowledged.
    early_nbytes : int
        Memory in bytes for messages that arrived before their predecessors. Messages that do not
        fit are dropped; the sender resends them.
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
        #: True if all unacknowledged messages must be resent on this carrier.
        self.is_behind = True


class Session:
    """One end of a control session, without I/O.

    The owner reports received frames by `receive` and sends the frames that `poll` returns, over
    connections (*carriers*) that it identifies by numbers.

    Parameters
    ----------
    now : float
        Current time of a monotonic clock; all later times must be of the same clock.
    limits : SessionLimits, optional
        May differ between the ends. If ``ack_s`` is not well below the ``resend_s`` of the other
        end, messages are sent twice.
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
        self._doubted = 0  # if the next acknowledgement is below this number, all is resent
        # receiver
        self._delivered = 0
        self._early: dict[int, bytes] = {}
        self._early_nbytes = 0
        self._ack_at = float("inf")

    # -- events from the owner --------------------------------------------------------------

    def post(self, body: bytes) -> None:
        """Queue a message for `poll` to send.

        Raises
        ------
        InvalidArgument
            If `body` is longer than `MAX_BODY_NBYTES`.
        """
        if len(body) > MAX_BODY_NBYTES:
            raise InvalidArgument(
                f"the body of a control message has {len(body)} bytes; at most {MAX_BODY_NBYTES} "
                "are allowed"
            )
        self._posted += 1
        self._unacked.append(body)

    def carrier_up(self, carrier: int, now: float) -> None:
        """Add a carrier with number `carrier`, which no current carrier has."""
        if carrier in self._carriers:
            raise InternalError(f"carrier {carrier} is up already")
        self._carriers[carrier] = _Carrier(now)

    def carrier_down(self, carrier: int) -> None:
        """Remove the carrier with number `carrier`, if there is one.

        Unacknowledged messages are resent on the other carriers.
        """
        if self._carriers.pop(carrier, None) is not None:
            for other in self._carriers.values():
                other.is_behind = True

    def receive(self, carrier: int, frame: SessionFrame, now: float) -> list[bytes]:
        """Handle a frame that arrived on `carrier`; return the messages to deliver now, in order.

        Raises
        ------
        FrameError
            If the frame acknowledges a message that was never sent.
        """
        if frame.ack > self._sent:
            raise FrameError("acknowledgement of an unsent message")
        self._hear(carrier, now)
        self._take_ack(frame.ack, now)
        if frame.seq == 0:
            return []
        # Duplicates are acknowledged, too: the earlier acknowledgement may have been lost.
        self._ack_at = min(self._ack_at, now + self._limits.ack_s)
        return self._take_message(frame)

    def ack_now(self) -> None:
        """Make the next `poll` send an acknowledgement, alone if no message can carry it."""
        self._ack_at = float("-inf")

    def excuse(self, gap_s: float) -> None:
        """Exclude `gap_s` seconds, in which no frame could arrive, from the current silence."""
        self._excused_s += gap_s

    # -- state and output -------------------------------------------------------------------

    @property
    def unacknowledged(self) -> int:
        """Number of posted messages that the other end has not acknowledged."""
        return len(self._unacked)

    @property
    def last_heard(self) -> float:
        """Time of the last received frame, or of the creation of the session."""
        return self._heard_at

    def silence_s(self, now: float) -> float:
        """Return the seconds since `last_heard`, less the seconds excluded by `excuse`."""
        return max(0.0, now - self._heard_at - self._excused_s)

    def carrier_silence_s(self, carrier: int, now: float) -> float:
        """Return the seconds since the last frame on `carrier`, if any, else since `carrier_up`.

        Seconds excluded by `excuse` since the last frame of the session do not count.
        """
        return max(0.0, now - self._carriers[carrier].heard_at - self._excused_s)

    def deadline(self) -> float:
        """Return the time at which `poll` must be called next; minus infinity means now.

        Infinity means that `poll` need not be called until another call has changed the session.
        """
        if not self._carriers:
            return float("inf")
        if self._sent < self._window_end() or any(c.is_behind for c in self._carriers.values()):
            return float("-inf")
        beat = min(c.spoke_at for c in self._carriers.values()) + self._limits.heartbeat_s
        return min(self._resend_at, self._ack_at, beat)

    def poll(self, now: float) -> list[tuple[int, bytes]]:
        """Return the frames to send now, as (number of the carrier, encoded frame).

        The caller may drop a frame that the carrier does not accept now, because unacknowledged
        messages are sent again.
        """
        if not self._carriers:
            return []
        frames: list[tuple[int, bytes]] = []
        if now >= self._resend_at:
            self._resend_s = min(2 * self._resend_s, self._limits.resend_max_s)
            self._resend_at = now + self._resend_s
            self._doubted = self._sent
            for number in self._carriers:
                self._emit(number, [self._acked + 1], now, frames)
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
        self._ack_at = float("inf")  # every frame carries an acknowledgement
        frames.append((number, frame.pack()))

    def _freshest(self) -> int:
        return max(self._carriers, key=lambda number: self._carriers[number].heard_at)

    # -- receiving --------------------------------------------------------------------------

    def _hear(self, carrier: int, now: float) -> None:
        self._heard_at = now
        self._excused_s = 0.0
        if carrier in self._carriers:  # else: a late frame of a carrier that went down
            self._carriers[carrier].heard_at = now

    def _take_ack(self, ack: int, now: float) -> None:
        if ack <= self._acked:
            return
        for _ in range(ack - self._acked):
            self._unacked.popleft()
        self._acked = ack
        if ack < self._doubted:
            for carrier in self._carriers.values():
                carrier.is_behind = True
        self._doubted = 0
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
        nbytes = _HEADER.size + len(frame.body)  # counts empty messages, too
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
