"""Registration cache: which memory the NICs of this process may reach, and with which keys.

Theory of operation
-------------------
Registering memory pins its pages and fills the NIC's tables: milliseconds for a large array. So a
registration is made for the whole allocation, on every NIC at once (a slice that moves to another
rail finds its keys waiting), and kept for the next collective on the same array.

*Index.* Registrations are sorted by base, and none of them contains another: one that would is put
in place of those it contains. Then the ends are sorted as well, the last registration that begins
at or before an address reaches furthest of all that do, and one bisection answers `find`.

*End.* A registration ends in one of four ways, whichever comes first:

====================  =======================================================================
its owner is freed    the index stops answering with it at once, in whatever thread the owner
                      died; the NICs forget it in `RegistrationCache.drain`
its identity changed  `RegistrationCache.find` asks the driver, and drops it (device memory)
it is evicted         room is needed, nobody uses it and no work is under way on it: the least
                      recently used goes first
the cache is closed   the NICs have stopped: also if work seems to be under way
====================  =======================================================================

*Users and pins.* `RegistrationCache.register` adds a user and `Registration.close` takes one away;
without users a registration stays cached until one of the above. A registration whose owner has to
be held (`r2ccl.transport.verbs.lifetime`) ends with its last user: the cache must not keep memory
alive. A pin stands for work under way: it keeps the NICs' side and the owner alive, so that no work
request ever writes to memory that belongs to somebody else by now.

Sees no pyverbs and no CUDA. One thread at a time, except that owners may die in any. Invariants: a
pinned registration is registered on every NIC until the cache is closed; `find` never answers with
freed memory; `close` works after Ctrl-C in the midst of any other method, or of itself.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from r2ccl.errors import InternalError, InvalidArgument, TransportError
from r2ccl.transport.verbs.lifetime import Allocation, Lifetime
from r2ccl.transport.verbs.regions import (
    HostMemory,
    Memory,
    MemoryRegion,
    Registrar,
    close_all,
    locked_memory_limit,
)


class RegistrationStats(msgspec.Struct):
    """What a cache has done.

    Parameters
    ----------
    hits, misses : int
        What `RegistrationCache.find` answered, and could not.
    registered : int
        Registrations made.
    evictions : int
        Registrations ended to make room.
    expired : int
        Registrations ended because their memory was freed.
    nbytes : int
        Memory registered now, counted once however many NICs there are.
    """

    hits: int = 0
    misses: int = 0
    registered: int = 0
    evictions: int = 0
    expired: int = 0
    nbytes: int = 0


class Registration:
    """One allocation, registered on every NIC; made by `RegistrationCache.register`."""

    __slots__ = (
        "_cache", "_lifetime", "_owner", "_pins", "_regions", "_users", "base", "end", "identity",
        "is_expired", "is_indexed", "last_used",
    )  # fmt: skip

    def __init__(
        self, cache: RegistrationCache, allocation: Allocation, regions: tuple[MemoryRegion, ...]
    ) -> None:
        self.base = allocation.base
        self.end = allocation.base + allocation.nbytes
        self.identity = allocation.identity
        #: Its memory was freed.
        self.is_expired = False
        #: `find` can answer with it.
        self.is_indexed = False
        self.last_used = 0
        self._cache = cache
        self._regions = regions
        self._users = 0
        self._pins = 0
        #: The owner, while pinned.
        self._owner: Any = None
        self._lifetime = Lifetime(allocation.owner, functools.partial(cache._owner_died, self))

    @property
    def nbytes(self) -> int:
        """Size of the allocation."""
        return self.end - self.base

    @property
    def is_open(self) -> bool:
        """Whether the NICs can still reach it."""
        return bool(self._regions)

    @property
    def is_idle(self) -> bool:
        """Whether nobody uses it and no work is under way on it."""
        return not self._users and not self._pins

    @property
    def is_owner_held(self) -> bool:
        """Whether it keeps its owner alive, and therefore ends with its last user."""
        return self._lifetime.is_held

    def keys(self, nic: int) -> MemoryRegion:
        """Return the keys of NIC number `nic`.

        Raises
        ------
        InternalError
            The registration has ended.
        """
        if not self._regions:
            raise InternalError(f"{self} has ended: it must be pinned while work is under way")
        return self._regions[nic]

    def pin(self) -> None:
        """Keep the registration and its owner until `unpin`: work on it is under way.

        Raises
        ------
        InternalError
            Its memory was freed, or it has ended.
        """
        if not self._pins:
            self._owner = self._lifetime.owner()
            is_gone = self._owner is None and not self.identity
            if not self._regions or self.is_expired or is_gone:
                raise InternalError(f"{self} has ended and cannot be pinned: register it again")
        self._pins += 1

    def unpin(self) -> None:
        """Undo one `pin`."""
        if not self._pins:
            raise InternalError(f"{self} was unpinned more often than pinned")
        self._pins -= 1
        if not self._pins:
            self._owner = None
            self._cache._settle(self)

    def share(self) -> Registration:
        """Add a user, who must `close` it; return the registration itself."""
        self._users += 1
        return self

    def close(self) -> None:
        """Take one user away; the last one's leaving lets the cache end it.

        Raises
        ------
        InternalError
            There is no user left to take away.
        """
        if not self._users:
            raise InternalError(f"{self} was closed more often than registered")
        self._users -= 1
        self._cache._settle(self)

    def is_of(self, allocation: Allocation) -> bool:
        """Whether it covers `allocation` and lives as long."""
        return (
            self.base <= allocation.base
            and allocation.base + allocation.nbytes <= self.end
            and self.identity == allocation.identity
            and not self.is_expired
            and self._lifetime.is_of(allocation.owner)
        )

    def __repr__(self) -> str:
        return f"registration of {self.nbytes} bytes at {self.base:#x}"


class RegistrationCache:
    """Registrations of every allocation in use, on every NIC of the process.

    Parameters
    ----------
    registrars : sequence of Registrar
        One a NIC; `Registration.keys` counts them in this order. Borrowed.
    limit_nbytes : int
        Most memory to keep registered, counted once: every NIC pins it, and counts it against the
        limit of locked memory, for itself.
    memory : Memory, optional
        Kind of memory; the host's by default.
    """

    def __init__(
        self,
        registrars: Sequence[Registrar],
        limit_nbytes: int,
        *,
        memory: Memory | None = None,
    ) -> None:
        if not registrars:
            raise InvalidArgument("a cache of registrations was given no NIC to register with")
        self.stats = RegistrationStats()
        self._registrars = registrars
        self._limit_nbytes = limit_nbytes
        self._memory: Memory = HostMemory() if memory is None else memory
        #: Sorted by base and by end; `_bases` repeats the bases for the bisection.
        self._index: list[Registration] = []
        self._bases: list[int] = []
        #: Ended for new lookups; the NICs keep them until their users or their work are done.
        self._leaving: list[Registration] = []
        #: Registrations whose owner died. Appending is atomic: owners die in any thread.
        self._dead: deque[Registration] = deque()
        self._ticks = 0
        self._is_closed = False

    def beside(self, memory: Memory) -> RegistrationCache:
        """Return a cache over the same NICs, with as high a limit, of another kind of memory."""
        return RegistrationCache(self._registrars, self._limit_nbytes, memory=memory)

    def find(self, address: int, nbytes: int) -> Registration | None:
        """Return the registration that covers ``[address, address + nbytes)``.

        Notes
        -----
        *Cost*: one bisection, under 1 us on the host. Device memory adds one driver call.
        """
        while True:
            at = bisect_right(self._bases, address) - 1
            if at < 0:
                break
            found = self._index[at]
            if found.is_expired:
                self.drain()
                continue
            if address + nbytes > found.end:
                break
            if found.identity and self._memory.identity(address) != found.identity:
                self._expire(found)
                continue
            self._ticks += 1
            found.last_used = self._ticks
            self.stats.hits += 1
            return found
        self.stats.misses += 1
        return None

    def register(self, address: int, nbytes: int, owner: Any) -> Registration:
        """Register the allocation behind `nbytes` bytes at `address`, as one more user of it.

        Parameters
        ----------
        address, nbytes : int
        owner : object
            Whose life keeps the memory alive. It is watched with a weak reference; one that could
            lose its memory while it lives, or takes no weak references, is held until the last
            user has closed the registration (`Registration.is_owner_held`).

        Returns
        -------
        Registration
            `Registration.close` it when it is no longer needed.

        Raises
        ------
        InvalidArgument
            The owner does not own these bytes.
        TransportError
            A NIC refused, and is named, or the limit would be exceeded; nothing stays registered.
        InternalError
            The cache is closed.
        """
        if self._is_closed:
            raise InternalError("register() after the cache of registrations was closed")
        self.drain()
        allocation = self._memory.locate(address, nbytes, owner)
        if allocation.nbytes > self._limit_nbytes and not allocation.identity:
            # Of an array larger than the limit, the part in use may still fit.
            allocation = Allocation(address, nbytes, allocation.owner)
        at = bisect_right(self._bases, allocation.base) - 1
        if at >= 0 and self._index[at].is_of(allocation):
            found = self._index[at]
        else:
            found = self._make(allocation)
        self._ticks += 1
        found.last_used = self._ticks
        return found.share()

    def drain(self) -> None:
        """End the registrations whose owners have died; cheap when there are none."""
        while self._dead:
            self._expire(self._dead.popleft())

    def close(self) -> None:
        """End every registration, in use or not; the NICs must have stopped.

        A pin may be left over: Ctrl-C can come between a pin and the work it is for. What Ctrl-C
        left in no list is deregistered with its NIC's protection domain.
        """
        self._is_closed = True
        for kept in (self._index, self._leaving):
            while kept:
                self._release(kept.pop())
        self._bases.clear()
        self._dead.clear()
        self.stats.nbytes = 0

    def __len__(self) -> int:
        """Count the registrations the NICs hold."""
        return len(self._index) + len(self._leaving)

    def _make(self, allocation: Allocation) -> Registration:
        """Register `allocation` on every NIC, ending idle registrations where that makes room."""
        self._make_room(allocation)
        while True:
            try:
                regions = self._memory.register(self._registrars, allocation)
                break
            except TransportError as exc:
                if exc.status != "ENOMEM" or not self._evict():
                    raise
        self._displace(allocation)
        made = Registration(self, allocation, regions)
        at = bisect_left(self._bases, made.base)
        self._bases.insert(at, made.base)
        self._index.insert(at, made)
        made.is_indexed = True
        self.stats.registered += 1
        self.stats.nbytes += made.nbytes
        return made

    def _make_room(self, allocation: Allocation) -> None:
        """Evict until `allocation` fits under the limit."""
        while self.stats.nbytes + allocation.nbytes > self._limit_nbytes:
            if not self._evict():
                raise TransportError(
                    f"cannot register {allocation.nbytes} bytes: {self.stats.nbytes} bytes are "
                    f"registered and in use, and R2CC_REGISTRATION_LIMIT_NBYTES allows "
                    f"{self._limit_nbytes}; raise it, with the limit of locked memory "
                    f"({locked_memory_limit()}), or close registrations that are no longer needed",
                    status="REGISTRATION_LIMIT",
                )

    def _evict(self) -> bool:
        """End the idle registration used longest ago; False if there is none."""
        idle = [each for each in self._index if each.is_idle]
        if not idle:
            return False
        self._end(min(idle, key=lambda each: each.last_used))
        self.stats.evictions += 1
        return True

    def _displace(self, allocation: Allocation) -> None:
        """Take registrations that `allocation` contains, or is contained in, out of the index."""
        at = bisect_left(self._bases, allocation.base)
        end = allocation.base + allocation.nbytes
        while at < len(self._index) and self._index[at].end <= end:
            self._retire(self._index[at])
        # Those that cover it belong to another owner, and may end before this one.
        at = bisect_right(self._bases, allocation.base) - 1
        while at >= 0 and self._index[at].end >= end:
            self._retire(self._index[at])
            at -= 1

    def _retire(self, registration: Registration) -> None:
        """Take it out of the index; it ends with its users and its work."""
        if registration.is_indexed:
            self._unindex(registration)
            self._leaving.append(registration)
        self._settle(registration)

    def _unindex(self, registration: Registration) -> None:
        at = bisect_left(self._bases, registration.base)
        del self._index[at], self._bases[at]
        registration.is_indexed = False

    def _expire(self, registration: Registration) -> None:
        """End a registration whose memory was freed, at once unless work is under way."""
        if registration.is_open:
            registration.is_expired = True
            self._retire(registration)

    def _settle(self, registration: Registration) -> None:
        """End a registration that nothing needs any more."""
        if not registration.is_open or registration._pins:
            return
        is_kept = registration.is_indexed and not registration.is_owner_held
        if registration.is_expired or (not registration._users and not is_kept):
            self._end(registration)

    def _end(self, registration: Registration) -> None:
        """Deregister on every NIC."""
        if registration.is_indexed:
            self._unindex(registration)
        else:
            self._leaving.remove(registration)
        self._release(registration)

    def _release(self, registration: Registration) -> None:
        regions, registration._regions = registration._regions, ()
        self.stats.nbytes -= registration.nbytes
        self.stats.expired += registration.is_expired
        close_all(self._registrars, regions)
        registration._lifetime.end()

    def _owner_died(self, registration: Registration) -> None:
        # In any thread, possibly inside the garbage collector: no lock, nothing that can fail. The
        # queue first, the flag second: who sees the flag finds the registration in the queue.
        self._dead.append(registration)
        registration.is_expired = True


__all__ = [
    "Registration",
    "RegistrationCache",
    "RegistrationStats",
]
