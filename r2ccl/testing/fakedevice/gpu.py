"""`FakeGpu`: one card, with its properties and its handling of writes by NICs.

The `Board` of the card runs its work; several cards may share a board. A host sees a NIC's write as
soon as it has polled the completion. On a card that reorders such writes, GPU work sees the write
only if the work was enqueued after a flush.
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
    """Fake GPU that several processes may share, each with a `FakeDevice`.

    Parameters
    ----------
    seed : int
        Seed of the order in which work runs.
    are_hosts_one : bool
        If True, each process immediately knows what any process knows. Use True if processes notify
        each other in ways that the fake cannot see, such as a control connection. If False, a
        process learns of the steps of other processes only by `FakeDevice.tell` and `hear`, or from
        its own work that waited for their words.
    uuid, bus_id : bytes and str, optional
        Unique identifier of 16 bytes, and PCI bus ID such as ``0000:1b:00.0``. By default both
        contain the card's number.
    capability : tuple of int
        Compute capability: major and minor version.
    nsms : int
        Number of streaming multiprocessors.
    waits_on_memory : bool
        True if streams can set words and wait for them.
    reorders_remote_writes : bool
        True if GPU work may miss a NIC's write (`FakeDevice.nic_write`) until the host has flushed
        the write. Some drivers report this property of their GPUs.
    queue_limit : int
        Number of operations that the queue of a stream can hold. A call that enqueues a further
        operation waits for room, as with the launch queue of a real GPU.
    is_blocking : bool
        True if every enqueuing call returns only when its operation has finished, as with
        CUDA_LAUNCH_BLOCKING=1 and under some profilers.
    is_serial : bool
        True if every call that manages memory or loads kernels waits for all work of its process on
        this card. (The documentation of the CUDA driver does not say which of these calls wait.)
        Other threads can enqueue work during the wait.
    patience_s : float
        Longest time in seconds of a wait caused by `queue_limit`, `is_blocking` or `is_serial`; the
        call then raises `WouldHang`.
    clock : callable, optional
        Returns the time in seconds, for the deadlines of waits.
    board : Board, optional
        Board of another card, to be shared; see `beside`. By default the card makes its own board
        from `seed`, `are_hosts_one` and `clock`. If a board is given, these three are ignored.

    Attributes
    ----------
    kernels : dict of str to FakeKernel
        Fake kernels by entry name, to be added before `FakeDevice.load`.
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
        queue_limit: int = 1024,
        is_blocking: bool = False,
        is_serial: bool = False,
        patience_s: float = 10.0,
        clock: Time = monotonic,
        board: Board | None = None,
    ) -> None:
        self.board = board or Board(seed, are_hosts_one=are_hosts_one, clock=clock)
        #: Number of the card on its board.
        self.number = self.board.add_card()
        self.uuid = uuid or b"fake GPU %7d" % self.number
        self.bus_id = bus_id or f"0000:{self.number:02x}:00.0"
        self.capability = capability
        self.nsms = nsms
        self.waits_on_memory = waits_on_memory
        self.reorders_remote_writes = reorders_remote_writes
        self.queue_limit = queue_limit
        self.is_blocking = is_blocking
        self.is_serial = is_serial
        self.patience_s = patience_s
        self.kernels: dict[str, FakeKernel] = {}
        #: Actor (see `order`) of each host's NICs that write to this card, by the host's actor.
        self._nics: dict[int, int] = {}

    def beside(self, **options: Any) -> FakeGpu:
        """Return another card of the same machine.

        `options` are parameters of the class. The new card uses the board of this card, so `board`
        is not allowed, and `seed`, `are_hosts_one` and `clock` have no effect.

        A process that uses both cards has one `FakeDevice` on each, with the same name. After
        `FakeDevice.reach`, work of one device can use memory of the other card.
        """
        return FakeGpu(board=self.board, **options)

    def run(self, limit: int | None = None) -> int:
        """Run operations of all cards of the board; see `Board.run`."""
        return self.board.run(limit)

    def pending(self) -> list[str]:
        """Return descriptions of all processes' operations on this card that have not run."""
        return self.board.pending(card=self.number)

    # Writes of NICs

    def touch_remotely(self, piece: MemoryPiece, host: Host, what: str) -> None:
        """Record a NIC's write whose completion `host` has seen; see `Board.touch`.

        On a card that reorders such writes, work that `host` enqueues is ordered after a write to
        the card's memory only after `flush`.
        """
        stamp = host.step(what)
        if self.reorders_remote_writes and not piece.span.is_host:
            if host.actor not in self._nics:
                self._nics[host.actor] = self.board.new_actor()
            nics = self._nics[host.actor]
            host.unflushed[nics] = host.unflushed.get(nics, 0) + 1
            stamp = Stamp(nics, host.unflushed[nics], what)
        self.board.touch(Access.WRITE, piece, host, stamp)

    def flush(self, host: Host) -> None:
        """Order later work of `host` after all NIC writes to this card that `host` has seen."""
        nics = self._nics.get(host.actor)
        if nics is not None:
            host.clock[nics] = host.unflushed[nics]


__all__ = ["FakeGpu"]
