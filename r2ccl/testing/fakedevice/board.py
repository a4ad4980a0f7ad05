"""What runs: streams, the scheduler of what they were given, and what each host knows.

Operations run when a host polls (`Board.advance`) or when a test says so (`Board.run`), one at a
time, in an order drawn from a seed among all that streams, events and words allow. Must not know
the interface `Device`; processes are names here, and cards are numbers.

Invariant: what happens depends on the seed and on the calls, in their order; one thread's calls
alone are repeated exactly.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from r2ccl.clock import Clock as Time
from r2ccl.testing.fakedevice.guard import Guard
from r2ccl.testing.fakedevice.memory import AddressSpace, MemoryPiece, Span
from r2ccl.testing.fakedevice.order import (
    Access,
    Clock,
    Misuse,
    Race,
    Stamp,
    StillInUse,
    WrongOrder,
    join,
)
from r2ccl.testing.fakedevice.work import FakeOperation, Word

#: How likely a poll runs one operation more.
_ONE_MORE = 0.7
#: How long a host that waits leaves the lock to others before it looks again: words that another
#: thread writes to memory wake nobody.
_LOOK_AGAIN_S = 0.001


class Host:
    """A process as the order of things has it: an actor among the streams."""

    def __init__(self, actor: int) -> None:
        self.actor = actor
        self.clock: Clock = {actor: 1}
        #: What NICs wrote for it: it has seen that, but work that it gives need not.
        self.unflushed: Clock = {}

    @property
    def seen(self) -> Clock:
        """All that is over for the host itself, and for NICs; not to be changed."""
        if not self.unflushed:
            return self.clock
        known = dict(self.clock)
        join(known, self.unflushed)
        return known

    def release(self) -> Clock:
        """Return what is known until now; what the host does from now on is not."""
        known = dict(self.clock)
        self.clock[self.actor] += 1
        return known

    def step(self, what: str) -> Stamp:
        """Return a stamp for something the host does now."""
        return Stamp(self.actor, self.clock[self.actor], what)


class FakeStream:
    """A queue of operations."""

    def __init__(self, actor: int, owner: str, card: int, handle: int, *, is_callers: bool) -> None:
        self.actor = actor
        self.owner = owner
        self.card = card
        self.handle = handle
        self.is_callers = is_callers
        self.queue: deque[FakeOperation] = deque()
        self.clock: Clock = {}
        self.time = 0
        #: The last step it took.
        self.last = Stamp(actor, 0, "nothing")

    def __str__(self) -> str:
        return f"stream {self.handle:#x} of {self.owner}"


class Board:
    """What the cards that a process may open together share: memory, streams, and their order.

    Parameters
    ----------
    seed : int
    are_hosts_one : bool
    clock : Clock
        See `FakeGpu`.
    """

    def __init__(self, seed: int, *, are_hosts_one: bool, clock: Time) -> None:
        self.space = AddressSpace()
        #: Exported allocations by handle.
        self.exports: dict[bytes, Span] = {}
        self._are_hosts_one = are_hosts_one
        self._random = random.Random(seed)
        self._time = clock
        self._changed = threading.Condition(threading.RLock())
        #: Of what is open: the card and the process.
        self._names: set[tuple[int, str]] = set()
        self._hosts: dict[str, Host] = {}
        self._streams: list[FakeStream] = []
        self._guards: dict[FakeOperation, Guard] = {}
        self._words: list[Word] = []
        self._ncards = 0
        self._nactors = 0
        self._nhandles = 0
        self._failure: WrongOrder | None = None

    # Who is there

    def add_card(self) -> int:
        """Return the number of a new card."""
        self._ncards += 1
        return self._ncards

    def admit(self, name: str, card: int) -> Host:
        """Return the host of a process that opens a card."""
        with self._changed:
            if (card, name) in self._names:
                raise Misuse.of(f"there are two processes called {name}")
            self._names.add((card, name))
            if name not in self._hosts:
                one = next(iter(self._hosts.values()), None) if self._are_hosts_one else None
                self._hosts[name] = one or Host(self.new_actor())
            return self._hosts[name]

    def leave(self, name: str, card: int) -> None:
        """Let a process close a card; another may have its name."""
        self._names.remove((card, name))

    def add_stream(
        self, owner: str, card: int, handle: int | None = None, *, is_callers: bool
    ) -> FakeStream:
        """Make a stream."""
        made = FakeStream(
            self.new_actor(), owner, card, handle or self.new_handle(), is_callers=is_callers
        )
        self._streams.append(made)
        return made

    def remove_stream(self, stream: FakeStream) -> None:
        """Forget a stream."""
        self._streams.remove(stream)

    def new_handle(self) -> int:
        """Return a number that no stream, event or kernel has."""
        self._nhandles += 1
        return 0x5000 + self._nhandles * 0x10

    def new_actor(self) -> int:
        """Return a number that no host, stream or NIC has."""
        self._nactors += 1
        return self._nactors

    # Calls of hosts

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have the board for one call: nothing else happens meanwhile.

        Raises
        ------
        WrongOrder
            The call is wrong, or an earlier one was: then every call fails, so that no other
            thread waits for what will not come.
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
        """Run work until `is_over` is true; in a call. Others' calls go on meanwhile."""
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
        """Notice words that hosts wrote; what the hosts knew before this call is known by them."""
        for word in self._words:
            if word.piece.span.is_host and word.has_changed:
                word.note(self._known_around(word.piece))

    def _known_around(self, piece: MemoryPiece) -> Clock:
        """Return what the hosts know that reach some bytes."""
        known: Clock = {}
        for place in self.space.sharing(piece):
            join(known, self._hosts[place.span.owner].release())
        return known

    def word_at(self, piece: MemoryPiece) -> Word:
        """Return the word of four bytes."""
        for word in self._words:
            if word.piece.overlaps(piece):
                return word
        word = Word(piece, self._known_around(piece))
        self._words.append(word)
        return word

    def remove(self, span: Span, why: str) -> None:
        """Take memory away, and its handles; words in it that others reach too are theirs then."""
        self.space.remove(span, why)
        self.exports = {each: known for each, known in self.exports.items() if known is not span}
        for word in tuple(self._words):
            if word.piece.span is span:
                left = self.space.sharing(word.piece)
                if left:
                    word.piece = left[0]
                else:
                    self._words.remove(word)

    # Work

    def enqueue(self, stream: FakeStream, operation: FakeOperation) -> None:
        """Give a stream something to do."""
        stream.queue.append(operation)
        self._guards[operation] = Guard(operation)

    def run(self, limit: int | None = None) -> int:
        """Run what can run, at most `limit` operations; return how many there were."""
        with self.entered():
            count = 0
            while (limit is None or count < limit) and self.step():
                count += 1
            return count

    def advance(self) -> None:
        """Run some of what can run, perhaps nothing; in a call."""
        while self._random.random() < _ONE_MORE and self.step():
            pass

    def step(self) -> bool:
        """Run one operation; return whether there was one."""
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
        """Find what may be under way by now, and guard it."""
        found = True
        while found:
            found = False
            for stream in self._streams:
                for operation in stream.queue:
                    if not operation.is_exposed:
                        if not operation.is_due():
                            break
                        operation.is_exposed = found = True
                    if operation.is_undeclared:
                        break
        for stream in self._streams:
            queue = tuple(stream.queue)
            for place, operation in enumerate(queue):
                guard = self._guards[operation]
                if operation.is_exposed and guard.is_wanted:
                    later = set(queue[place:])
                    guard.take(other for other in self._pending() if other not in later)

    def _pending(self) -> Iterator[FakeOperation]:
        for stream in self._streams:
            yield from stream.queue

    def pending(self, owner: str | None = None, card: int | None = None) -> list[str]:
        """Say what has not run; None: of all processes, of all cards."""
        with self._changed:
            return [
                operation.what
                for stream in self._streams
                if owner in (None, stream.owner) and card in (None, stream.card)
                for operation in stream.queue
            ]

    def touch(self, access: Access, piece: MemoryPiece, host: Host, stamp: Stamp) -> None:
        """Note an access of a host, or of a NIC for it, which is over for it at once.

        Raises
        ------
        Race
            It is not ordered with what was run, or with what may be under way.
        """
        piece.touch(access, stamp, host.seen)
        for other in self._pending():
            if other.is_exposed:
                meets = other.writes if access is Access.READ else other.pieces
                if any(each.overlaps(piece) for each in meets):
                    raise Race.between(other.what, stamp.what)

    # The end of things

    def users(self, span: Span) -> list[FakeOperation]:
        """Return what has not run and reaches a span by its own addresses."""
        return [
            each
            for each in self._pending()
            if any(piece.span is span for piece in each.pieces)
            or (span.has_memory and each.reaches(MemoryPiece(span, 0, span.nbytes)))
        ]

    def check_idle(self, span: Span, host: Host, doing: str) -> None:
        """Hold that a host knows of all work on a span that it is over.

        Raises
        ------
        StillInUse
            It does not.
        """
        if span.nmappings:
            raise StillInUse.by(doing, str(span), "is mapped by another process")
        for operation in self.users(span):
            raise StillInUse.by(doing, operation.what, "has not run")
        seen = host.seen
        for stamp in span.uses.values():
            if not stamp.is_known(seen):
                raise StillInUse.by(doing, stamp.what, "may be under way: the host does not know")

    def learn_all(self, host: Host, card: int) -> None:
        """Have a host know of everything that a card has run: what a wait for all of it tells."""
        for stream in self._streams:
            if stream.card == card:
                join(host.clock, stream.clock)


__all__ = ["Board", "FakeStream", "Host"]
