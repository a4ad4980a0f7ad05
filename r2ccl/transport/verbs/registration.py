"""Registration cache: the memory that is registered with all NICs of a transport.

Theory of operation
-------------------
Registering memory pins its pages and fills the NIC's tables, which takes milliseconds for a large
array. So the whole allocation is registered if the limit permits, with every NIC at once (a slice
that migrates to another rail needs no new registration), and stays registered for the next
collective on the array.

*Index.* The registrations that `find` can return are sorted by base address. None of them contains
another: a new one replaces those that it contains or that contain it. So they are sorted by end as
well: the last registration that begins at or before an address extends further than all before it,
and `find` needs one bisection.

*End.* A registration ends in one of six ways, whichever comes first:

====================  =======================================================================
its owner is freed    `find` stops returning it at once, in whatever thread the owner died; the
                      NICs deregister it in `RegistrationCache.drain`
its identity changed  `find` compares the identity with the driver's (device memory only)
its last user closed  applies only if it holds its owner (`r2ccl.transport.verbs.lifetime`): the
                      cache itself must not keep memory alive
it is replaced        a new registration contains it or lies inside it; `find` stops returning it
                      at once, and it ends when it has neither users nor pins
it is evicted         space is needed; the least recently used registration without users and
                      pins is evicted first
the cache is closed   the NICs have stopped; users and pins are ignored
====================  =======================================================================

*Users and pins.* `RegistrationCache.register` adds a user and `Registration.close` removes one; a
registration without users stays cached until it ends in one of these ways. A pin stands for work in
flight: it keeps the registration and the owner, if any, alive, so that no work request writes to
host memory that was freed and allocated for something else. While a registration is pinned, only
closing the cache ends it.

Only one thread at a time may use the cache, but owners may die in any thread. Invariants: while the
cache is open, a pinned registration is registered with every NIC; `find` never returns freed
memory; `close` works after Ctrl-C interrupted any method, including `close`.
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
    """Counters of a registration cache since its start.

    Parameters
    ----------
    hits, misses : int
        Number of calls of `RegistrationCache.find` that returned a registration (hits), and that
        returned None (misses).
    registered : int
        Number of registrations made, including those that have ended.
    evictions : int
        Number of registrations ended to make space for others.
    expired : int
        Number of registrations ended because their memory was freed.
    nbytes : int
        Total size of the present registrations in bytes, not multiplied by the number of NICs.
    """

    hits: int = 0
    misses: int = 0
    registered: int = 0
    evictions: int = 0
    expired: int = 0
    nbytes: int = 0


class Registration:
    """Memory that is registered with every NIC; made by `RegistrationCache.register`.

    Its *users* are the calls of `RegistrationCache.register` and `share` without a matching
    `close`. Its *pins* stand for work requests in flight; while it is pinned, only
    `RegistrationCache.close` ends it.
    """

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
        #: True once it is known that its memory was freed.
        self.is_expired = False
        #: True while `RegistrationCache.find` can return it.
        self.is_indexed = False
        #: Number of the call of `find` or `register` that last returned this registration; the one
        #: with the lowest number is evicted first.
        self.last_used = 0
        self._cache = cache
        self._regions = regions
        self._users = 0
        self._pins = 0
        #: Strong reference to the owner, while pinned.
        self._owner: Any = None
        self._lifetime = Lifetime(allocation.owner, functools.partial(cache._owner_died, self))

    @property
    def nbytes(self) -> int:
        """Size of the memory in bytes."""
        return self.end - self.base

    @property
    def is_open(self) -> bool:
        """True while the memory is registered with the NICs."""
        return bool(self._regions)

    @property
    def is_idle(self) -> bool:
        """True while the registration has neither users nor pins."""
        return not self._users and not self._pins

    @property
    def is_owner_held(self) -> bool:
        """True if the registration keeps its memory's owner alive, and so ends with its last user.

        False if it watches the owner with a weak reference, or the memory has no owner.
        """
        return self._lifetime.is_held

    def keys(self, nic: int) -> MemoryRegion:
        """Return the memory region, with lkey and rkey, that the NIC with index `nic` registered.

        Raises
        ------
        InternalError
            If the registration has ended.
        """
        if not self._regions:
            raise InternalError(f"{self} has ended: it must be pinned while work is in flight")
        return self._regions[nic]

    def pin(self) -> None:
        """Keep the registration and its memory's owner alive until `unpin`, for work in flight.

        Raises
        ------
        InternalError
            If the memory was freed, or the registration has ended.
        """
        if not self._pins:
            self._owner = self._lifetime.owner()
            is_gone = self._owner is None and not self.identity
            if not self._regions or self.is_expired or is_gone:
                raise InternalError(f"{self} has ended and cannot be pinned: register it again")
        self._pins += 1

    def unpin(self) -> None:
        """Remove one pin.

        Raises
        ------
        InternalError
            If there is no pin.
        """
        if not self._pins:
            raise InternalError(f"{self} was unpinned more often than pinned")
        self._pins -= 1
        if not self._pins:
            self._owner = None
            self._cache._settle(self)

    def share(self) -> Registration:
        """Add a user, who must call `close`; return the registration itself."""
        self._users += 1
        return self

    def close(self) -> None:
        """Remove one user; once there are none, the cache may end the registration.

        Raises
        ------
        InternalError
            If there is no user.
        """
        if not self._users:
            raise InternalError(f"{self} was closed more often than registered")
        self._users -= 1
        self._cache._settle(self)

    def is_of(self, allocation: Allocation) -> bool:
        """Return True if the registration covers `allocation`, with the same owner and identity.

        Return False once it is known that the memory of the registration was freed.
        """
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
    """Cache of registrations of one kind of memory, each with every NIC.

    Parameters
    ----------
    registrars : sequence of Registrar
        One per NIC, in the order of the indices of `Registration.keys`. Borrowed.
    limit_nbytes : int
        Maximum of `RegistrationStats.nbytes`. The kernel counts each byte of host memory against
        the limit of locked memory once per NIC.
    memory : Memory, optional
        Kind of memory; host memory by default.

    Raises
    ------
    InvalidArgument
        If `registrars` is empty.
    """

    def __init__(
        self,
        registrars: Sequence[Registrar],
        limit_nbytes: int,
        *,
        memory: Memory | None = None,
    ) -> None:
        if not registrars:
            raise InvalidArgument("the registration cache was given no NIC: pass at least one")
        self.stats = RegistrationStats()
        self._registrars = registrars
        self._limit_nbytes = limit_nbytes
        self._memory: Memory = HostMemory() if memory is None else memory
        #: Registrations sorted by base and by end; `_bases` has their bases, for the bisection.
        self._index: list[Registration] = []
        self._bases: list[int] = []
        #: Registrations that `find` no longer returns, but which still have users or pins.
        self._leaving: list[Registration] = []
        #: Registrations whose owner died. Owners die in any thread, but appending is atomic.
        self._dead: deque[Registration] = deque()
        self._ticks = 0
        self._is_closed = False

    def beside(self, memory: Memory) -> RegistrationCache:
        """Return a new cache for another kind of memory, with the same NICs.

        Each of the two caches may register up to the limit.
        """
        return RegistrationCache(self._registrars, self._limit_nbytes, memory=memory)

    def find(self, address: int, nbytes: int) -> Registration | None:
        """Return the registration that covers ``[address, address + nbytes)``, or None.

        Raises
        ------
        TransportError
            If the CUDA driver cannot identify device memory at `address`.

        Notes
        -----
        *Cost*: one bisection, under 1 us for host memory. Device memory adds one driver call.
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
        """Register the allocation around `nbytes` bytes at `address`, unless it is registered.

        The registration gets one more user. If a host allocation exceeds the limit, only the
        `nbytes` bytes are registered.

        Parameters
        ----------
        address, nbytes : int
        owner : object
            Object that keeps the memory alive; None for device memory. The cache has a weak
            reference to the owner, and ends the registration when the owner dies. An owner that can
            free its memory earlier, or accepts no weak reference, is kept alive instead, until the
            last user has closed the registration (`Registration.is_owner_held`).

        Returns
        -------
        Registration
            The caller must call `Registration.close` when it no longer needs the memory registered.

        Raises
        ------
        InvalidArgument
            If there are no bytes, the owner does not own them, or they are not part of one device
            allocation.
        TransportError
            If a NIC refuses (the message names it), memory of this kind cannot be registered, or
            the limit would be exceeded. No NIC registers the memory then.
        InternalError
            If the cache is closed.
        """
        if self._is_closed:
            raise InternalError("register() was called after the registration cache was closed")
        self.drain()
        allocation = self._memory.locate(address, nbytes, owner)
        if allocation.nbytes > self._limit_nbytes and not allocation.identity:
            # The allocation exceeds the limit, but the part in use may fit.
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
        """End the registrations whose owners have died; fast if there are none."""
        while self._dead:
            self._expire(self._dead.popleft())

    def close(self) -> None:
        """End every registration, even with users or pins; the NICs must have stopped.

        Pins can remain if Ctrl-C came between a pin and its work request. A registration that
        Ctrl-C left in no list ends when its protection domains are closed.
        """
        self._is_closed = True
        for kept in (self._index, self._leaving):
            while kept:
                self._release(kept.pop())
        self._bases.clear()
        self._dead.clear()
        self.stats.nbytes = 0

    def __len__(self) -> int:
        """Return the number of registrations that the NICs hold."""
        return len(self._index) + len(self._leaving)

    def _make(self, allocation: Allocation) -> Registration:
        """Register `allocation` with every NIC; evict idle registrations if space is needed."""
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
        """Evict idle registrations until `allocation` fits under the limit."""
        while self.stats.nbytes + allocation.nbytes > self._limit_nbytes:
            if not self._evict():
                raise TransportError(
                    f"cannot register {allocation.nbytes} bytes: {self.stats.nbytes} bytes are "
                    f"registered and in use, and R2CC_REGISTRATION_LIMIT_NBYTES allows "
                    f"{self._limit_nbytes}: raise this limit and, if needed, the limit of locked "
                    f"memory ({locked_memory_limit()}), or close registrations that are not needed",
                    status="REGISTRATION_LIMIT",
                )

    def _evict(self) -> bool:
        """End the least recently used idle registration; return False if there is none."""
        idle = [each for each in self._index if each.is_idle]
        if not idle:
            return False
        self._end(min(idle, key=lambda each: each.last_used))
        self.stats.evictions += 1
        return True

    def _displace(self, allocation: Allocation) -> None:
        """Remove registrations from the index that `allocation` contains or that contain it."""
        at = bisect_left(self._bases, allocation.base)
        end = allocation.base + allocation.nbytes
        while at < len(self._index) and self._index[at].end <= end:
            self._retire(self._index[at])
        # A registration that contains `allocation` has another owner or identity, so that
        # registration may end before the new one.
        at = bisect_right(self._bases, allocation.base) - 1
        while at >= 0 and self._index[at].end >= end:
            self._retire(self._index[at])
            at -= 1

    def _retire(self, registration: Registration) -> None:
        """Remove a registration from the index, and end it as soon as nothing needs it."""
        if registration.is_indexed:
            self._unindex(registration)
            self._leaving.append(registration)
        self._settle(registration)

    def _unindex(self, registration: Registration) -> None:
        at = bisect_left(self._bases, registration.base)
        del self._index[at], self._bases[at]
        registration.is_indexed = False

    def _expire(self, registration: Registration) -> None:
        """End a registration whose memory was freed; if it is pinned, its last unpin ends it."""
        if registration.is_open:
            registration.is_expired = True
            self._retire(registration)

    def _settle(self, registration: Registration) -> None:
        """End a registration without pins if its memory was freed, or if nothing keeps it.

        Users keep a registration. The index keeps it too, unless the registration holds its owner.
        """
        if not registration.is_open or registration._pins:
            return
        is_kept = registration.is_indexed and not registration.is_owner_held
        if registration.is_expired or (not registration._users and not is_kept):
            self._end(registration)

    def _end(self, registration: Registration) -> None:
        """Remove a registration from its list and deregister it with every NIC."""
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
        # Runs in any thread, possibly inside the garbage collector, so it takes no lock and cannot
        # fail. The queue comes first: code that sees the flag finds the registration in the queue.
        self._dead.append(registration)
        registration.is_expired = True


__all__ = [
    "Registration",
    "RegistrationCache",
    "RegistrationStats",
]
