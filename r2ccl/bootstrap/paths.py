"""Connection of data sockets, one per (peer, rail, epoch).

The lower of two ranks dials a rail until it succeeds, since a failed rail may work again hours
later. For a bypass, it tries each way once, and uses the first that works
(`r2ccl.bootstrap.bypass`). The higher rank accepts exactly the (peer, rail, epoch) that it expects.
The data plane decides when a path gets a new socket. The code runs in the control thread.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import msgspec

from r2ccl.bootstrap import bypass, dialing, wire
from r2ccl.bootstrap.auth import Claim, HandshakeRejected, Purpose
from r2ccl.bootstrap.listener import Handover, Unneeded
from r2ccl.bootstrap.messages import PeerInfo
from r2ccl.bootstrap.peer import Setting
from r2ccl.types import BYPASS, BypassWay, PathKey

logger = logging.getLogger("r2ccl.bootstrap")

#: Maximum time that an authenticated connection waits for the accepting rank to expect it.
_EARLY_S = 1.0
_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 1.0
#: Long enough for one retransmission of a SYN, which Linux sends after 1 s.
_CONNECT_TIMEOUT_S = 2.0
#: A last-resort path waits while other paths to its peer are being dialed, at most `_GIVE_WAY_S`.
#: If these are all connected sooner, it is dialed `_QUIET_S` later. The other paths, which calls
#: prefer, are thus connected first.
_QUIET_S, _GIVE_WAY_S = 0.005, 0.02
#: Maximum number of connections of one rail that a rank dials and authenticates at a time. If ranks
#: of one machine started all handshakes at once, handshakes would not end in time.
_MAX_HANDSHAKES = 4

OnPath = Callable[[int, int, int, socket.socket], None]


class _Dial(msgspec.Struct):
    epoch: int
    on_failed: Callable[[str], None] | None
    task: asyncio.Task[None] | None = None
    #: Timer that starts the dial of a last-resort path; None once started, and for other paths.
    starter: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        for work in (self.task, self.starter):
            if work is not None:
                work.cancel()


class Paths:
    """Data connections that this rank dials or expects.

    Parameters
    ----------
    peers : sequence of PeerInfo
        One per rank.
    setting : Setting
    on_path : callable
        Called with (peer, rail, epoch, sock) for each new connection; takes ownership of the
        socket.
    """

    def __init__(self, peers: Sequence[PeerInfo], setting: Setting, on_path: OnPath) -> None:
        self._peers = peers
        self._setting = setting
        self._on_path = on_path
        self._dials: dict[PathKey, _Dial] = {}
        #: Error of the last attempt of each pending dial, and advice.
        self._failures: dict[PathKey, tuple[str, str]] = {}
        #: Epoch of the last accepted bypass, by peer.
        self._bypassed: dict[int, int] = {}
        self._room = asyncio.Semaphore(bypass.MAX_ATTEMPTS)
        #: One semaphore per rail, so that a rail that is down does not delay the others.
        self._slots = [asyncio.Semaphore(_MAX_HANDSHAKES) for _ in setting.nics]
        self._expected: dict[PathKey, int] = {}
        self._expectation_changed = asyncio.Event()

    # -- accepting --------------------------------------------------------------------------

    def accept(self, key: PathKey, epoch: int) -> None:
        """Accept one connection for path `key` with exactly this epoch, until `cancel`."""
        self._expected[key] = epoch
        self._announce_change()

    def admit(self, claim: Claim, listener: int) -> Handover | Coroutine[Any, Any, Handover]:
        """Decide whether to accept an authenticated DATA connection.

        This is the part of the listener's gate (`r2ccl.bootstrap.listener`) for data connections.

        Parameters
        ----------
        claim : Claim
        listener : int
            Index of the listening socket: the rail on which the connection arrived, or a number
            above all rails for a control listener.

        Returns
        -------
        Handover or coroutine
            Function that takes over the socket. If the connection is not expected yet, a coroutine
            that waits until it is expected and then returns the function.

        Raises
        ------
        HandshakeRejected
            If the connection is not a bypass, and did not arrive on the rail that it claims. The
            coroutine raises it if a later epoch is expected, or if the connection is not expected
            within `_EARLY_S`.
        Unneeded
            If another way of the same bypass connected first.
        """
        if claim.rail not in (listener, BYPASS):
            raise HandshakeRejected("path on the wrong rail")
        key = PathKey(claim.src, claim.rail)
        if key.is_bypass and claim.epoch <= self._bypassed.get(key.peer, -1):
            raise Unneeded  # another way connected first
        if self._expected.get(key) == claim.epoch:
            return partial(self._let_in, key, claim.epoch)
        return self._await_expected(key, claim)

    async def _await_expected(self, key: PathKey, claim: Claim) -> Handover:
        try:
            async with asyncio.timeout(_EARLY_S):
                while self._expected.get(key) != claim.epoch:
                    if self._expected.get(key, -1) > claim.epoch:
                        raise HandshakeRejected("path of an older epoch")
                    await self._expectation_changed.wait()
        except TimeoutError:
            raise HandshakeRejected("path not expected") from None
        return partial(self._let_in, key, claim.epoch)

    def _let_in(self, key: PathKey, epoch: int, sock: socket.socket) -> None:
        if self._expected.get(key) != epoch:  # changed since the connection was admitted
            sock.close()
            return
        del self._expected[key]
        if key.is_bypass:
            self._bypassed[key.peer] = epoch
            wire.limit_silence(sock, bypass.SILENCE_S)
        self._on_path(key.peer, key.rail, epoch, sock)

    def _announce_change(self) -> None:
        self._expectation_changed.set()
        self._expectation_changed = asyncio.Event()

    # -- dialing ----------------------------------------------------------------------------

    def dial(self, key: PathKey, epoch: int, on_failed: Callable[[str], None] | None) -> None:
        """Dial path `key` until it succeeds or `cancel` is called; replaces an earlier dial.

        `on_failed`, unless None, is called with the reason after each failed attempt.
        """
        self._stop_dial(key)
        entry = _Dial(epoch, on_failed)
        self._dials[key] = entry
        if self._is_last_resort(key) and self._is_dialing(key.peer):
            loop = asyncio.get_running_loop()
            entry.starter = loop.call_later(_GIVE_WAY_S, self._start_dial, key, entry)
        else:
            self._start_dial(key, entry)

    def dial_bypass(self, peer: int, epoch: int, ways: Sequence[BypassWay]) -> None:
        """Try each of `ways` to `peer` once; the first that works becomes the bypass.

        Replaces an earlier dial. A failure of all ways is only logged.
        """
        key = PathKey(peer, BYPASS)
        self._stop_dial(key)
        entry = self._dials[key] = _Dial(epoch, None)
        work = self._try_ways(key, entry, tuple(ways))
        entry.task = asyncio.get_running_loop().create_task(work)

    def kick(self, rail: int) -> None:
        """Try every pending dial of `rail` again now, without waiting for the end of its pause."""
        for key, entry in list(self._dials.items()):
            if key.rail == rail:
                entry.stop()
                self._start_dial(key, entry)

    def cancel(self, key: PathKey) -> None:
        """Stop dialing and expecting path `key`."""
        self._stop_dial(key)
        self._expected.pop(key, None)

    def obstacles(self, peer: int) -> list[str]:
        """Return the last error of each pending dial to `peer`, and then advice for the user.

        Any thread may call this. Empty if there is no pending dial that failed.
        """
        found = {key.rail: text for key, text in self._failures.copy().items() if key.peer == peer}
        causes = [f"rail {rail}: {why}" for rail, (why, _) in found.items()]
        # Usually all rails have the same advice: give it once.
        return causes + list(dict.fromkeys(hint for _, hint in found.values() if hint))

    def forget_peer(self, peer: int) -> None:
        """Cancel all dials and expectations of paths to `peer`."""
        for key in [key for key in (*self._dials, *self._expected) if key.peer == peer]:
            self.cancel(key)

    def close(self) -> None:
        """Cancel all dials and expectations."""
        for key in [*self._dials, *self._expected]:
            self.cancel(key)

    def _is_last_resort(self, key: PathKey) -> bool:
        return self._setting.nics[key.rail].is_last_resort

    def _is_dialing(self, peer: int) -> bool:
        """Return True if a dial to `peer` has been started and is pending."""
        return any(
            key.peer == peer and entry.task is not None for key, entry in self._dials.items()
        )

    def _start_dial(self, key: PathKey, entry: _Dial) -> None:
        entry.starter = None
        work = self._keep_dialing(key, entry)
        entry.task = asyncio.get_running_loop().create_task(work)

    def _stop_dial(self, key: PathKey) -> None:
        entry = self._dials.pop(key, None)
        self._failures.pop(key, None)
        if entry is not None:
            entry.stop()

    async def _keep_dialing(self, key: PathKey, entry: _Dial) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            try:
                async with self._slots[key.rail]:
                    sock = await self._dial_once(key, entry.epoch)
            except (OSError, HandshakeRejected) as exc:
                target = self._peers[key.peer].rails[key.rail]
                text = dialing.explain_failure(exc, target, _CONNECT_TIMEOUT_S)
                self._failures[key] = text
                if entry.on_failed is not None:
                    entry.on_failed(text[0])
            else:
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_S)
        del self._dials[key]
        self._failures.pop(key, None)
        self._on_path(key.peer, key.rail, entry.epoch, sock)
        self._start_waiting(key.peer)

    def _start_waiting(self, peer: int) -> None:
        """Start the waiting dials of last-resort paths to `peer` after `_QUIET_S`.

        Do nothing if a dial to `peer` that was started is still pending.
        """
        if not self._is_dialing(peer):
            loop = asyncio.get_running_loop()
            for key, entry in self._dials.items():
                if key.peer == peer and entry.starter is not None:
                    entry.starter.cancel()
                    entry.starter = loop.call_later(_QUIET_S, self._start_dial, key, entry)

    async def _try_ways(self, key: PathKey, entry: _Dial, ways: Sequence[BypassWay]) -> None:
        try:
            sock = await bypass.dial(self._peers, self._setting, key, entry.epoch, ways, self._room)
        except OSError as exc:
            logger.info("rank %d: no bypass to rank %d: %s", self._setting.rank, key.peer, exc)
            del self._dials[key]
        else:
            del self._dials[key]
            self._on_path(key.peer, key.rail, entry.epoch, sock)

    async def _dial_once(self, key: PathKey, epoch: int) -> socket.socket:
        setting = self._setting
        claim = Claim(
            Purpose.DATA, setting.communicator_id, setting.rank, key.peer, key.rail, epoch
        )
        return await dialing.dial(
            setting.secret,
            claim,
            self._peers[key.peer].rails[key.rail],
            source=setting.nics[key.rail].address,
            timeout_s=_CONNECT_TIMEOUT_S,
        )


__all__ = ["OnPath", "Paths"]
