"""The card: what a GPU is and can do, and how it takes what NICs write to its memory.

Its work is run by the `Board` it is on, alone or beside others. Must not know the interface
`Device`.

Invariant: what a NIC wrote is known to its host at once, and to work on a card that reorders such
writes only if it was given after a flush.
"""

from __future__ import annotations

from typing import Any

from r2ccl.clock import Clock as Time
from r2ccl.clock import monotonic
from r2ccl.testing.fakedevice.board import Board, Host
from r2ccl.testing.fakedevice.kernels import FakeKernel
from r2ccl.testing.fakedevice.memory import MemoryPiece
from r2ccl.testing.fakedevice.order import Access, Stamp


class FakeGpu:
    """A card that several processes may share, each with a `FakeDevice`.

    Parameters
    ----------
    seed : int
        Of the order in which work is run.
    are_hosts_one : bool
        Whether each process is taken to know at once what any of them knows: right where they tell
        each other by means the fake does not see, as a control connection. False: only what
        `FakeDevice.tell` says is known.
    uuid : bytes, optional
    bus_id : str, optional
        By default made of the card's number.
    capability : tuple of int
    nsms : int
    waits_on_memory : bool
    reorders_remote_writes : bool
        Whether work may miss what a NIC wrote (`FakeDevice.nic_write`) if its host has not flushed
        it, as on GPUs whose driver says so.
    clock : Clock, optional
        Seconds, for the deadlines of waits.
    board : Board, optional
        What the card runs on, of another card: see `beside`. By default it has its own, made of
        `seed`, `are_hosts_one` and `clock`, which count only there.

    Attributes
    ----------
    kernels : dict of str to FakeKernel
        What stands for each entry that is loaded.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        are_hosts_one: bool = True,
        uuid: bytes | None = None,
        bus_id: str | None = None,
        capability: tuple[int, int] = (9, 0),
        nsms: int = 4,
        waits_on_memory: bool = True,
        reorders_remote_writes: bool = False,
        clock: Time = monotonic,
        board: Board | None = None,
    ) -> None:
        self.board = board or Board(seed, are_hosts_one=are_hosts_one, clock=clock)
        #: Among the cards of the board.
        self.number = self.board.add_card()
        self.uuid = uuid or b"fake GPU %7d" % self.number
        self.bus_id = bus_id or f"0000:{self.number:02x}:00.0"
        self.capability = capability
        self.nsms = nsms
        self.waits_on_memory = waits_on_memory
        self.reorders_remote_writes = reorders_remote_writes
        self.kernels: dict[str, FakeKernel] = {}
        #: The NICs that write for a host are an actor, by that of the host.
        self._nics: dict[int, int] = {}

    def beside(self, **options: Any) -> FakeGpu:
        """Return another card, whose memory `FakeDevice.reach` lets this one use, and the reverse.

        A process may open both, by the same name. Its options are those of the class.
        """
        return FakeGpu(board=self.board, **options)

    def run(self, limit: int | None = None) -> int:
        """Run what can run, here and beside it; see `Board.run`."""
        return self.board.run(limit)

    def pending(self) -> list[str]:
        """Say what has not run here, of all processes."""
        return self.board.pending(card=self.number)

    # What NICs write

    def touch_remotely(self, piece: MemoryPiece, host: Host, what: str) -> None:
        """Note a write of a NIC, whose completion a host has seen; see `Board.touch`."""
        stamp = host.step(what)
        if self.reorders_remote_writes and not piece.span.is_host:
            if host.actor not in self._nics:
                self._nics[host.actor] = self.board.new_actor()
            nics = self._nics[host.actor]
            host.unflushed[nics] = host.unflushed.get(nics, 0) + 1
            stamp = Stamp(nics, host.unflushed[nics], what)
        self.board.touch(Access.WRITE, piece, host, stamp)

    def flush(self, host: Host) -> None:
        """Have the work that a host gives from now on come after what NICs wrote here for it."""
        nics = self._nics.get(host.actor)
        if nics is not None:
            host.clock[nics] = host.unflushed[nics]


__all__ = ["FakeGpu"]
