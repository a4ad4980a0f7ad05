"""Scheduler of the fake GPU: streams, their queued operations, and the vector clocks of hosts.

Operations run one at a time, when a host polls (`Board.advance`) or waits (`Board.wait_until`), or
a test asks for it (`Board.run`). A seed chooses one of the orders that streams, events and words
allow. In this module a process is identified by its name and a card by its number.

A run depends only on the seed and on the sequence of calls, so a test with one thread is
reproducible.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice

from r2ccl.clock import Clock as Time
from r2ccl.testing.fakedevice.guard import Guard
from r2ccl.testing.fakedevice.memory import AddressSpace, MemoryPiece, Span
from r2ccl.testing.fakedevice.order import (
    Access,
    Clock,
    Misuse,
    Race,
    Shadow,
    Stamp,
    StillInUse,
    WrongOrder,
    join,
)
from r2ccl.testing.fakedevice.work import FakeOperation, Word

#: Probability that a poll runs one more operation.
_ONE_MORE = 0.7
#: Seconds for which a waiting host releases the lock before it polls again. Polling is needed
#: because a word that another thread writes to memory causes no notification.
_LOOK_AGAIN_S = 0.001


class Host:
    """CPU code of one process, or of all processes with ``are_hosts_one``.

    A host is an actor with a vector clock (`r2ccl.testing.fakedevice.order`).
    """

    def __init__(self, actor: int) -> None:
        self.actor = actor
        self.clock: Clock = {actor: 1}
        #: Number of the last NIC write that the host has seen, for each card that reorders NIC
        #: writes, by the actor of the host's NICs on that card. Work that the host enqueues sees
        #: such a write only if `clock` covers it as well.
        self.unflushed: Clock = {}

    @property
    def seen(self) -> Clock:
        """Clock of all steps that the host knows, with unflushed NIC writes; do not modify it."""
        if not self.unflushed:
            return self.clock
        known = dict(self.clock)
        join(known, self.unflushed)
        return known

    def release(self) -> Clock:
        """Begin a new step of the host; return a copy of its clock before that step."""
        known = dict(self.clock)
        self.clock[self.actor] += 1
        return known

    def step(self, what: str) -> Stamp:
        """Return a stamp for the current action of the host, described by `what`."""
        return Stamp(self.actor, self.clock[self.actor], what)


class FakeStream:
    """Stream of process `owner` on a card: a queue of operations that run in order."""

    def __init__(self, actor: int, owner: str, card: int, handle: int, *, is_callers: bool) -> None:
        self.actor = actor
        self.owner = owner
        self.card = card
        self.handle = handle
        #: True if the library's caller made it, False if the library did.
        self.is_callers = is_callers
        self.queue: deque[FakeOperation] = deque()
        self.clock: Clock = {}
        self.time = 0
        #: Stamp of the last operation that ran.
        self.last = Stamp(actor, 0, "nothing")

    def __str__(self) -> str:
        return f"stream {self.handle:#x} of {self.owner}"


class Board:
    """State shared by all cards of a machine: memory, streams, processes and their ordering.

    Parameters
    ----------
    seed : int
        Seed of the order in which operations run.
    are_hosts_one : bool
        True if all processes share one `Host`; see `FakeGpu`.
    clock : callable
        Returns the time in seconds, for the deadlines of waits.
    """

    def __init__(self, seed: int, *, are_hosts_one: bool, clock: Time) -> None:
        self.space = AddressSpace()
        #: Exported allocations, by handle.
        self.exports: dict[bytes, Span] = {}
        self._are_hosts_one = are_hosts_one
        self._random = random.Random(seed)
        self._time = clock
        self._changed = threading.Condition(threading.RLock())
        #: (card, process name) for each card that a process has open.
        self._names: set[tuple[int, str]] = set()
        self._hosts: dict[str, Host] = {}
        self._streams: list[FakeStream] = []
        self._guards: dict[FakeOperation, Guard] = {}
        #: Words by shadow and position. They are aligned, so two words share all bytes or none.
        self._words: dict[tuple[Shadow, int], Word] = {}
        self._ncards = 0
        self._nactors = 0
        self._nhandles = 0
        self._failure: WrongOrder | None = None

    # Cards, processes and streams

    def add_card(self) -> int:
        """Add a card and return its number."""
        self._ncards += 1
        return self._ncards

    def admit(self, name: str, card: int) -> Host:
        """Open a card for a process and return the process's host.

        Raises
        ------
        Misuse
            If a process of this name has the card open.
        """
        with self._changed:
            if (card, name) in self._names:
                raise Misuse.of(
                    f"two processes with the name {name} open the same GPU: give each process a "
                    "different name"
                )
            self._names.add((card, name))
            if name not in self._hosts:
                one = next(iter(self._hosts.values()), None) if self._are_hosts_one else None
                self._hosts[name] = one or Host(self.new_actor())
            return self._hosts[name]

    def leave(self, name: str, card: int) -> None:
        """Close a card for a process; another process of this name may then open the card."""
        self._names.remove((card, name))

    def add_stream(
        self, owner: str, card: int, handle: int | None = None, *, is_callers: bool
    ) -> FakeStream:
        """Make a stream of process `owner` on `card`, with a new handle unless one is given."""
        made = FakeStream(
            self.new_actor(), owner, card, handle or self.new_handle(), is_callers=is_callers
        )
        self._streams.append(made)
        return made

    def remove_stream(self, stream: FakeStream) -> None:
        """Remove a stream whose operations have all run."""
        self._streams.remove(stream)

    def new_handle(self) -> int:
        """Return a new handle for a stream, event or kernel."""
        self._nhandles += 1
        return 0x5000 + self._nhandles * 0x10

    def new_actor(self) -> int:
        """Return the number of a new actor: a host, a stream, or a host's NICs on one card."""
        self._nactors += 1
        return self._nactors

    # Calls of hosts

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Hold the board's lock during one call of a host.

        Raises
        ------
        WrongOrder
            If this call is wrong, or an earlier call was wrong. After the first error every call
            raises the same error, so that no other thread waits forever.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._see_words()
            try:
                yield
            except WrongOrder as exc:
                self._failure = exc
                raise
            finally:
                self._expose()
                self._changed.notify_all()

    def wait_until(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Run operations until `is_over()` is true; return False after `timeout_s` seconds.

        The time limit ends the wait only when no operation is ready. The caller must hold the lock
        (`entered`), which is released while the method sleeps.

        Raises
        ------
        WrongOrder
            If an operation that runs, or a call of another thread in the meantime, is wrong.
        """
        deadline = self._time() + timeout_s
        while not is_over():
            if self.step():
                continue
            left_s = deadline - self._time()
            if left_s <= 0:
                return False
            self._expose()
            self._changed.wait(min(left_s, _LOOK_AGAIN_S))
            if self._failure is not None:
                raise self._failure
            self._see_words()
        return True

    def _see_words(self) -> None:
        """Record the words that hosts have written since the last call.

        The board does not know which host wrote a word. It therefore orders the write after all
        steps known to any host that can write the word.
        """
        for word in self._words.values():
            if word.has_changed and word.piece.span.is_host:
                word.note(self._known_around(word.piece))

    def _known_around(self, piece: MemoryPiece) -> Clock:
        """Return the joined clocks of all hosts that can write to `piece`; begin a step of each."""
        known: Clock = {}
        for place in self.space.sharing(piece):
            join(known, self._hosts[place.span.owner].release())
        return known

    def word_at(self, piece: MemoryPiece) -> Word:
        """Return the word at `piece`; make it if it does not exist yet."""
        key = piece.span.shadow, piece.position
        if key not in self._words:
            self._words[key] = Word(piece, self._known_around(piece))
        return self._words[key]

    def remove(self, span: Span, why: str) -> None:
        """Remove a span, its exported handles, and its words, except words that other spans share.

        `why` describes the removal in the messages about later accesses to the span.
        """
        self.space.remove(span, why)
        self.exports = {each: known for each, known in self.exports.items() if known is not span}
        for key, word in tuple(self._words.items()):
            if word.piece.span is span:
                left = self.space.sharing(word.piece)
                if left:
                    word.move(left[0])
                else:
                    del self._words[key]

    # Work

    def enqueue(self, stream: FakeStream, operation: FakeOperation) -> None:
        """Append an operation to a stream, without running it."""
        stream.queue.append(operation)
        self._guards[operation] = Guard(operation)

    def run(self, limit: int | None = None) -> int:
        """Run up to `limit` operations (None: all that can run), and return their number."""
        with self.entered():
            count = 0
            while (limit is None or count < limit) and self.step():
                count += 1
            return count

    def advance(self) -> None:
        """Run a random number of operations, perhaps none; the caller must hold the lock."""
        while self._random.random() < _ONE_MORE and self.step():
            pass

    def step(self) -> bool:
        """Run one ready operation, chosen at random; return False if no operation is ready.

        The caller must hold the lock (`entered`).

        Raises
        ------
        WrongOrder
            If an access of the operation is wrong.
        """
        ready = [each for each in self._streams if each.queue and each.queue[0].is_ready()]
        if not ready:
            return False
        stream = self._random.choice(ready)
        operation = stream.queue[0]
        operation.learn(stream.clock)
        stream.time += 1
        stream.clock[stream.actor] = stream.time
        stream.last = Stamp(stream.actor, stream.time, operation.what)
        operation.touch(stream.last, stream.clock)
        self._guards[operation].check()
        operation.run(stream.last, stream.clock)
        operation.is_over = True
        stream.queue.popleft()
        del self._guards[operation]
        self._expose()
        return True

    def _expose(self) -> None:
        """Mark as exposed the operations that the GPU may be executing, and guard their memory.

        An operation that is queued behind an operation with undeclared accesses is marked only
        after that operation has run.
        """
        busy = [stream for stream in self._streams if stream.queue]
        found = bool(busy)
        while found:
            found = False
            for stream in busy:
                for operation in stream.queue:
                    if not operation.is_exposed:
                        if not operation.is_due():
                            break
                        operation.is_exposed = found = True
                    if operation.is_undeclared:
                        break
        for stream in busy:
            for place, operation in enumerate(stream.queue):
                if not operation.is_exposed:
                    break  # no later one is exposed either
                guard = self._guards[operation]
                if guard.is_wanted:
                    later = set(islice(stream.queue, place, None))
                    guard.take(other for other in self._pending() if other not in later)

    def _pending(self) -> Iterator[FakeOperation]:
        for stream in self._streams:
            yield from stream.queue

    def pending(self, owner: str | None = None, card: int | None = None) -> list[str]:
        """Return descriptions of the operations that have not run.

        Parameters
        ----------
        owner : str, optional
            Process; by default all.
        card : int, optional
            Card; by default all.
        """
        with self._changed:
            return [
                operation.what
                for stream in self._streams
                if owner in (None, stream.owner) and card in (None, stream.card)
                for operation in stream.queue
            ]

    def touch(self, access: Access, piece: MemoryPiece, host: Host, stamp: Stamp) -> None:
        """Record an access of a host, or of a NIC whose completion the host has seen.

        Raises
        ------
        Race
            If the access is not ordered with an earlier access, or with an operation that the GPU
            may be executing.
        """
        piece.touch(access, stamp, host.seen)
        for other in self._pending():
            if other.is_exposed:
                meets = other.writes if access is Access.READ else other.pieces
                if any(each.overlaps(piece) for each in meets):
                    raise Race.between(other.what, stamp.what)

    # Freeing

    def users(self, span: Span) -> list[FakeOperation]:
        """Return the operations that have not run and use a span.

        If the span owns its memory, this includes operations that reach it through another span.
        """
        return [
            each
            for each in self._pending()
            if any(piece.span is span for piece in each.pieces)
            or (span.has_memory and each.reaches(MemoryPiece(span, 0, span.nbytes)))
        ]

    def check_idle(self, span: Span, host: Host, doing: str) -> None:
        """Check that no process maps `span`, and `host` knows that all work on it has finished.

        `doing` describes the call that frees the span, for the message.

        Raises
        ------
        StillInUse
            If another process maps the span, or the host does not know that the work has finished.
        """
        if span.nmappings:
            raise StillInUse.by(doing, str(span), "is mapped by another process")
        for operation in self.users(span):
            raise StillInUse.by(doing, operation.what, "has not run")
        seen = host.seen
        for stamp in span.uses.values():
            if not stamp.is_known(seen):
                raise StillInUse.by(
                    doing, stamp.what, "may be in progress: the host does not know that it is over"
                )

    def learn_all(self, host: Host, owner: str, card: int) -> None:
        """Let `host` know of all work of process `owner` that has run on a card."""
        for stream in self._streams:
            if stream.owner == owner and stream.card == card:
                join(host.clock, stream.clock)


__all__ = ["Board", "FakeStream", "Host"]
