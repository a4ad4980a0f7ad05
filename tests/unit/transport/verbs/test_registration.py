"""One cache of registrations for every NIC: what it answers, when that ends, who goes first."""

from __future__ import annotations

import array
import errno
import itertools
import logging
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support import interrupted
from support.slow import slow_but

from r2ccl.errors import InternalError, InvalidArgument, TransportError
from r2ccl.transport.verbs.lifetime import allocation_of
from r2ccl.transport.verbs.registration import Registration, RegistrationCache

LIMIT = 1 << 30


class Region:
    def __init__(self, nic: Nic, address: int, nbytes: int, key: int) -> None:
        self.nic, self.address, self.nbytes = nic, address, nbytes
        self.lkey = self.rkey = key
        self.iova_base = 0

    def close(self) -> None:
        if self.nic.is_gone:
            raise OSError(errno.EIO, "the device is gone")
        self.nic.open.remove(self)


class Nic:
    """A registrar that knows what is registered, and refuses on demand."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.open: list[Region] = []
        self.registered = 0
        self.refusals: list[Exception] = []
        self.room = LIMIT
        self.is_gone = False

    def register(self, address: int, nbytes: int) -> Region:
        if self.refusals:
            raise self.refusals.pop(0)
        if sum(each.nbytes for each in self.open) + nbytes > self.room:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        self.registered += 1
        region = Region(self, address, nbytes, self.registered)
        self.open.append(region)
        return region


class Owner:
    """Stands for a block of memory at an address of its own."""


class Exporter:
    """Memory of another library that NumPy views."""

    def __init__(self) -> None:
        self.memory = np.zeros(64, np.uint8)
        self.__array_interface__ = self.memory.__array_interface__


class Slotted:
    """An object that takes no weak references."""

    __slots__ = ()


class VerbsError(Exception):
    """Bears its number as pyverbs' exceptions do."""

    def __init__(self, error_code: int) -> None:
        super().__init__(f"Errno: {error_code}")
        self.error_code = error_code


@pytest.fixture
def nics() -> list[Nic]:
    return [Nic("rxe0"), Nic("rxe1"), Nic("rxe2")]


@pytest.fixture
def cache(nics: list[Nic]) -> RegistrationCache:
    return RegistrationCache(nics, LIMIT)


def address_of(x: Any) -> int:
    return int(np.asarray(x).ctypes.data)


def open_ranges(nic: Nic) -> list[tuple[int, int]]:
    return sorted((each.address, each.nbytes) for each in nic.open)


def assert_index_is_sound(cache: RegistrationCache) -> None:
    """No registration contains another, which is what one bisection needs."""
    index = cache._index
    assert [each.base for each in index] == cache._bases
    assert all(a.base < b.base and a.end < b.end for a, b in itertools.pairwise(index))


# What is registered


def test_an_array_is_registered_whole_on_every_nic(
    cache: RegistrationCache, nics: list[Nic]
) -> None:
    x = np.zeros(1000, np.float32)

    registration = cache.register(address_of(x[10:]), 40, x[10:20])

    assert (registration.base, registration.nbytes) == (address_of(x), 4000)
    assert all(open_ranges(nic) == [(address_of(x), 4000)] for nic in nics)
    assert [registration.keys(i) for i in range(3)] == [nic.open[0] for nic in nics]


def test_a_view_finds_the_registration_of_its_array(cache: RegistrationCache) -> None:
    x = np.zeros((10, 100), np.float32)
    registration = cache.register(address_of(x), x.nbytes, x)

    assert cache.register(address_of(x[5]), 400, x[5]) is registration
    assert cache.find(address_of(x[9]), 400) is registration
    assert cache.find(address_of(x[9]), 401) is None
    assert cache.find(address_of(x) - 1, 1) is None
    assert (cache.stats.hits, cache.stats.misses, cache.stats.registered) == (1, 2, 1)


def test_memory_of_another_library_is_registered_as_asked(cache: RegistrationCache) -> None:
    owner = Owner()

    registration = cache.register(4096, 100, owner)

    assert (registration.base, registration.end) == (4096, 4196)


def test_an_array_over_foreign_memory_lives_as_long_as_that(cache: RegistrationCache) -> None:
    export = Exporter()
    x = np.asarray(export)
    address = address_of(x)
    cache.register(address, 64, x)

    del x
    assert cache.find(address, 64) is not None

    del export
    assert cache.find(address, 64) is None


def test_of_an_array_above_the_limit_the_used_part_is_registered(nics: list[Nic]) -> None:
    cache = RegistrationCache(nics, 1000)
    x = np.zeros(4096, np.uint8)

    registration = cache.register(address_of(x[100:]), 500, x)

    assert (registration.base, registration.nbytes) == (address_of(x) + 100, 500)


@pytest.mark.parametrize(
    ("address", "nbytes", "owner"),
    [(4096, 0, Owner()), (0, 10, Owner()), (4096, 10, None), (4096, 10, np.zeros(4))],
)
def test_bytes_that_do_not_belong_to_the_owner_are_refused(
    cache: RegistrationCache, address: int, nbytes: int, owner: Any
) -> None:
    with pytest.raises(InvalidArgument, match=f"{nbytes} bytes at (address )?{address:#x}"):
        cache.register(address, nbytes, owner)

    assert len(cache) == 0


def test_a_cache_needs_a_nic() -> None:
    with pytest.raises(InvalidArgument, match="no NIC"):
        RegistrationCache([], LIMIT)


# Users


def test_a_registration_without_users_stays_cached(
    cache: RegistrationCache, nics: list[Nic]
) -> None:
    x = np.zeros(10)
    first = cache.register(address_of(x), x.nbytes, x)
    second = cache.register(address_of(x), x.nbytes, x)
    first.close()
    second.close()

    assert cache.find(address_of(x), x.nbytes) is first
    assert nics[0].registered == 1
    with pytest.raises(InternalError, match="closed more often than registered"):
        first.close()


@pytest.mark.parametrize(
    "owner", [bytearray(64), array.array("b", bytes(64)), Slotted()], ids=lambda x: type(x).__name__
)
def test_a_held_owner_ends_with_its_last_user(
    cache: RegistrationCache, nics: list[Nic], owner: Any
) -> None:
    address = 4096 if isinstance(owner, Slotted) else address_of(owner)
    first = cache.register(address, 64, owner)
    assert cache.register(address, 64, owner) is first
    assert first.is_owner_held

    first.close()
    assert first.is_open
    first.close()

    assert not first.is_open
    assert not nics[0].open
    assert cache.find(address, 64) is None


def test_an_owner_that_could_move_its_memory_cannot(cache: RegistrationCache) -> None:
    x = bytearray(64)
    registration = cache.register(address_of(x), 64, x)

    with pytest.raises(BufferError):
        x.extend(bytes(1 << 20))

    registration.close()
    x.extend(bytes(1 << 20))
    assert len(x) == 64 + (1 << 20)


def test_numpy_does_not_move_a_registered_array(cache: RegistrationCache) -> None:
    x = np.zeros(64)
    cache.register(address_of(x), x.nbytes, x)

    with pytest.raises(ValueError, match="resize"):
        x.resize(1 << 20, refcheck=False)


# The end of the owner


def test_a_freed_array_is_not_found_and_not_kept_alive(
    cache: RegistrationCache, nics: list[Nic]
) -> None:
    x = np.zeros(10)
    address = address_of(x)
    registration = cache.register(address, 80, x)
    assert not registration.is_owner_held

    del x

    assert cache.find(address, 80) is None
    assert not any(nic.open for nic in nics)
    assert (cache.stats.expired, cache.stats.nbytes) == (1, 0)
    registration.close()
    with pytest.raises(InternalError, match="has ended"):
        registration.keys(0)
    with pytest.raises(InternalError, match="cannot be pinned"):
        registration.pin()


def test_memory_mapped_again_at_an_address_is_registered_anew(
    cache: RegistrationCache, nics: list[Nic]
) -> None:
    old, new = Owner(), Owner()
    stale = cache.register(4096, 100, old)
    del old

    fresh = cache.register(4096, 200, new)

    assert fresh is not stale
    assert not stale.is_open
    assert cache.find(4096, 200) is fresh
    assert open_ranges(nics[0]) == [(4096, 200)]


def test_an_owner_may_die_in_any_thread(cache: RegistrationCache, nics: list[Nic]) -> None:
    owners = [Owner() for _ in range(50)]
    for i, owner in enumerate(owners):
        cache.register(4096 * (i + 1), 100, owner)
    del owner
    dying = threading.Thread(target=owners.clear)
    dying.start()
    dying.join(10)

    # The NICs are left alone by the other thread; lookups are wrong in none.
    assert len(nics[0].open) == 50
    assert all(cache.find(4096 * (i + 1), 100) is None for i in range(50))
    cache.drain()
    assert not any(nic.open for nic in nics)


def test_a_pin_keeps_owner_and_registration_until_work_is_done(
    cache: RegistrationCache, nics: list[Nic]
) -> None:
    x = np.zeros(10)
    address = address_of(x)
    registration = cache.register(address, 80, x)
    registration.pin()
    registration.pin()
    registration.unpin()

    del x
    cache.drain()
    assert cache.find(address, 80) is registration

    registration.unpin()
    assert not registration.is_open
    assert not nics[0].open
    with pytest.raises(InternalError, match="unpinned more often"):
        registration.unpin()


def test_a_held_owner_with_work_under_way_outlives_its_last_user(cache: RegistrationCache) -> None:
    registration = cache.register(4096, 64, Slotted())
    registration.pin()
    registration.close()
    assert registration.is_open

    registration.unpin()
    assert not registration.is_open


# Overlap


def test_a_larger_registration_replaces_those_it_contains(
    cache: RegistrationCache, nics: list[Nic]
) -> None:
    small, large = Owner(), Owner()
    used = cache.register(4096, 100, small)
    idle = cache.register(4296, 100, small)
    idle.close()

    whole = cache.register(4096, 1000, large)

    assert cache.find(4096, 100) is whole
    assert cache.find(4296, 100) is whole
    assert not idle.is_open
    assert used.is_open  # its user still has the keys
    used.close()
    assert open_ranges(nics[0]) == [(4096, 1000)]


def test_memory_covered_for_another_owner_is_registered_anew(
    cache: RegistrationCache,
) -> None:
    a, b, inner = Owner(), Owner(), Owner()
    cache.register(1000, 1000, a)
    cache.register(1500, 1000, b)

    mine = cache.register(1600, 100, inner)
    assert_index_is_sound(cache)
    del a, b

    assert cache.find(1600, 100) is mine


def test_partial_overlap_leaves_both(cache: RegistrationCache) -> None:
    owner = Owner()
    left = cache.register(1000, 1000, owner)
    right = cache.register(1500, 1000, owner)

    assert cache.find(1000, 900) is left
    assert cache.find(1600, 900) is right
    assert cache.find(1400, 1000) is None


def test_a_dead_overlapping_registration_hides_no_live_one(
    cache: RegistrationCache,
) -> None:
    living, dying = Owner(), Owner()
    left = cache.register(1000, 1000, living)
    cache.register(1500, 1000, dying)
    del dying

    assert cache.find(1600, 100) is left


# The limit


def test_the_least_recently_used_idle_registration_goes_first(nics: list[Nic]) -> None:
    cache = RegistrationCache(nics, 300)
    owner = Owner()
    made = [cache.register(4096 * i, 100, owner) for i in (1, 2, 3)]
    for each in made:
        each.close()
    assert cache.find(4096, 100) is made[0]

    cache.register(4096 * 4, 100, owner)

    assert [each.is_open for each in made] == [True, False, True]
    assert (cache.stats.evictions, cache.stats.nbytes) == (1, 300)


@pytest.mark.parametrize("use", ["user", "pin"])
def test_what_is_in_use_is_never_evicted(nics: list[Nic], use: str) -> None:
    cache = RegistrationCache(nics, 150)
    owner = Owner()
    registration = cache.register(4096, 100, owner)
    if use == "pin":
        registration.pin()
        registration.close()

    with pytest.raises(TransportError, match="R2CC_REGISTRATION_LIMIT_NBYTES") as caught:
        cache.register(8192, 100, owner)

    assert caught.value.status == "REGISTRATION_LIMIT"
    assert "locked memory" in str(caught.value)
    assert cache.find(4096, 100) is registration


def test_no_room_on_a_nic_evicts_until_there_is(cache: RegistrationCache, nics: list[Nic]) -> None:
    owner = Owner()
    for i in (1, 2, 3):
        cache.register(4096 * i, 100, owner).close()
    nics[1].room = 350

    cache.register(4096 * 4, 200, owner)

    assert cache.stats.evictions == 2
    assert [open_ranges(nic) for nic in nics] == [[(4096 * 3, 100), (4096 * 4, 200)]] * 3


# Refusals


@pytest.mark.parametrize(
    ("exc", "status", "hint"),
    [
        (OSError(errno.ENOMEM, "no"), "ENOMEM", "ulimit -l unlimited.*R2CC_REGISTRATION_LIMIT"),
        (VerbsError(errno.EPERM), "EPERM", "CAP_IPC_LOCK"),
        (VerbsError(errno.EFAULT), "EFAULT", "read-only"),
        (VerbsError(errno.EBUSY), "EBUSY", "r2ccl doctor"),
        (VerbsError(-1), "errno -1", "r2ccl doctor"),
    ],
)
def test_a_refusal_undoes_the_others_and_names_the_nic(
    cache: RegistrationCache, nics: list[Nic], exc: Exception, status: str, hint: str
) -> None:
    nics[1].refusals = [exc]

    with pytest.raises(TransportError, match=f"rxe1 cannot register 100 bytes.*{hint}") as caught:
        cache.register(4096, 100, Owner())

    assert caught.value.status == status
    assert caught.value.__cause__ is exc
    assert not any(nic.open for nic in nics)
    assert (len(cache), cache.stats.nbytes) == (0, 0)


@pytest.mark.parametrize(
    "exc", [TransportError("rxe2 is gone", status="DEVICE"), RuntimeError("bug")]
)
def test_other_errors_pass_unchanged_and_undo_as_well(
    cache: RegistrationCache, nics: list[Nic], exc: Exception
) -> None:
    nics[2].refusals = [exc]

    with pytest.raises(type(exc)) as caught:
        cache.register(4096, 100, Owner())

    assert caught.value is exc
    assert not any(nic.open for nic in nics)


def test_the_limit_of_locked_memory_is_told(
    cache: RegistrationCache, nics: list[Nic], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (65536, 65536))
    nics[0].refusals = [OSError(errno.ENOMEM, "no")]

    with pytest.raises(TransportError, match="the limit of locked memory is 65536 bytes"):
        cache.register(4096, 100, Owner())


def test_a_failed_registration_hides_nothing(cache: RegistrationCache, nics: list[Nic]) -> None:
    owner = Owner()
    small = cache.register(4096, 100, owner)
    nics[2].refusals = [OSError(errno.EPERM, "no")]

    with pytest.raises(TransportError):
        cache.register(4096, 1000, owner)

    assert cache.find(4096, 100) is small


def test_a_nic_that_is_gone_does_not_stop_others_deregistering(
    cache: RegistrationCache, nics: list[Nic], caplog: pytest.LogCaptureFixture
) -> None:
    cache.register(4096, 100, Owner())
    nics[0].is_gone = True

    with caplog.at_level(logging.WARNING, "r2ccl"):
        cache.close()

    assert not nics[1].open
    assert not nics[2].open
    assert "rxe0 cannot deregister memory" in caplog.text


# Close


def test_close_ends_everything(cache: RegistrationCache, nics: list[Nic]) -> None:
    owner, other = Owner(), Owner()
    used = cache.register(4096, 100, owner)
    cache.register(4096, 1000, other)  # takes the first one's place; both are used
    assert len(cache) == 2

    cache.close()

    assert not any(nic.open for nic in nics)
    assert (len(cache), cache.stats.nbytes) == (0, 0)
    used.close()
    with pytest.raises(InternalError, match="was closed"):
        cache.register(4096, 100, owner)


def test_close_ends_what_is_pinned(cache: RegistrationCache, nics: list[Nic]) -> None:
    """Ctrl-C can come between a pin and the work it is for; nobody takes such a pin away."""
    registration = cache.register(4096, 100, Slotted())
    registration.pin()

    cache.close()

    assert not any(nic.open for nic in nics)
    registration.unpin()
    registration.close()


class InterruptibleNic(Nic):
    """Knows the regions that something refers to; pyverbs deregisters the others."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.alive: weakref.WeakSet[Region] = weakref.WeakSet()

    def register(self, address: int, nbytes: int) -> Region:
        region = Region(self, address, nbytes, 1)
        region.close = lambda: None  # type: ignore[method-assign]
        self.alive.add(region)
        return region


def test_an_interrupted_cache_can_be_closed() -> None:
    """Ctrl-C before every line of a use in which registrations are made, displaced and evicted."""
    for line in itertools.count(1):
        nics = [InterruptibleNic("rxe0"), InterruptibleNic("rxe1")]
        cache = RegistrationCache(nics, 3000)
        owners = [Owner() for _ in range(4)]

        def use(cache: RegistrationCache = cache, owners: list[Owner] = owners) -> None:
            first = cache.register(4096, 1000, owners[0])
            cache.register(4096, 1500, owners[1])  # takes the first one's place
            first.pin()
            found = cache.find(4096, 1500)
            assert found is not None
            found.pin()
            cache.register(9000, 500, owners[2]).close()
            cache.register(12000, 400, owners[3])  # the one before is evicted
            first.unpin()
            first.close()

        came = interrupted.at_line(line, use)
        # And once more while it is closed.
        interrupted.at_line(line % 20 + 1, cache.close)
        cache.close()
        # One that was in the making is deregistered with the protection domain.
        assert all(len(nic.alive) <= 1 for nic in nics), f"line {line}"
        assert came or not any(nic.alive for nic in nics)
        assert (len(cache), cache.stats.nbytes) == (0, 0)
        if not came:
            break
    assert line > 100


def test_the_allocation_of_a_reversed_view_is_the_whole_array() -> None:
    x = np.arange(100, dtype=np.uint8)

    found = allocation_of(address_of(x), 100, x[::-1])

    assert (found.base, found.nbytes) == (address_of(x), 100)
    assert found.owner is x


# Any sequence of calls

PAGE = 64
PLACES = st.integers(1, 24)
SIZES = st.integers(1, 10)
MOST_PAGES = 12


class CacheMachine(RuleBasedStateMachine):
    """The cache against a list: memory is mapped, registered, pinned, freed, mapped again.

    The model of the truth: an address is mapped by at most one living owner. A lookup may miss, but
    what it answers covers the bytes, is of the owner that maps them now, and is registered on every
    NIC.
    """

    owners = Bundle("owners")
    users = Bundle("users")
    pins = Bundle("pins")

    def __init__(self) -> None:
        super().__init__()
        self.nics = [Nic("a"), Nic("b")]
        self.cache = RegistrationCache(self.nics, MOST_PAGES * PAGE)
        #: Owners by a number; the machine's bundles must not keep them alive.
        self.mapped: dict[int, tuple[Owner, int, int]] = {}
        self.owner_of: dict[Registration, int] = {}
        self.users_of: dict[Registration, int] = {}
        self.pins_of: dict[Registration, int] = {}
        self.count = 0

    def _is_free(self, at: int, pages: int) -> bool:
        return all(
            at + pages <= other or other + more <= at for _, other, more in self.mapped.values()
        )

    def _part(self, number: int, skip: int, pages: int) -> tuple[int, int]:
        """Return (first page, pages) of some part of what an owner keeps alive."""
        _, at, most = self.mapped[number]
        skip %= most
        return at + skip, 1 + pages % (most - skip)

    def _new_owner(self, at: int, pages: int) -> int:
        self.count += 1
        self.mapped[self.count] = (Owner(), at, pages)
        return self.count

    @rule(target=owners, at=PLACES, pages=SIZES)
    def map(self, at: int, pages: int) -> Any:
        return self._new_owner(at, pages) if self._is_free(at, pages) else multiple()

    @rule(target=owners, number=owners, skip=SIZES, pages=SIZES)
    def wrap(self, number: int, skip: int, pages: int) -> int:
        """Make another object that keeps a part of the memory alive."""
        return self._new_owner(*self._part(number, skip, pages))

    @rule(target=owners, number=consumes(owners))
    def free(self, number: int) -> Any:
        owner, at, pages = self.mapped.pop(number)
        watched = weakref.ref(owner)
        del owner
        if not any(self.owner_of[each] == number for each in self.pins_of):
            return multiple()
        # With work under way the memory stays, whatever the program lets go of.
        kept = watched()
        assert kept is not None
        self.mapped[number] = (kept, at, pages)
        return number

    @rule(target=users, number=owners, skip=SIZES, pages=SIZES)
    def register(self, number: int, skip: int, pages: int) -> Any:
        at, pages = self._part(number, skip, pages)
        begin, nbytes = at * PAGE, pages * PAGE
        try:
            registration = self.cache.register(begin, nbytes, self.mapped[number][0])
        except TransportError:
            in_use = sum(each.nbytes for each in self._in_use())
            assert in_use + nbytes > MOST_PAGES * PAGE
            return multiple()
        assert registration.base <= begin
        assert begin + nbytes <= registration.end
        assert self.owner_of.setdefault(registration, number) == number
        self.users_of[registration] = self.users_of.get(registration, 0) + 1
        assert self.cache.find(begin, nbytes) is registration
        return registration

    @rule(registration=consumes(users))
    def close(self, registration: Registration) -> None:
        self.users_of[registration] -= 1
        registration.close()

    @rule(target=pins, number=owners, skip=SIZES, pages=SIZES)
    def pin_what_is_found(self, number: int, skip: int, pages: int) -> Any:
        registration = self._find(*self._part(number, skip, pages))
        if registration is None:
            return multiple()
        registration.pin()
        self.pins_of[registration] = self.pins_of.get(registration, 0) + 1
        return registration

    @rule(registration=consumes(pins))
    def unpin(self, registration: Registration) -> None:
        self.pins_of[registration] -= 1
        if not self.pins_of[registration]:
            del self.pins_of[registration]
        registration.unpin()

    @rule(at=PLACES, pages=SIZES)
    def look_up(self, at: int, pages: int) -> None:
        self._find(at, pages)

    @precondition(lambda self: self.cache._dead)
    @rule()
    def drain(self) -> None:
        self.cache.drain()

    def _find(self, at: int, pages: int) -> Registration | None:
        begin, nbytes = at * PAGE, pages * PAGE
        found = self.cache.find(begin, nbytes)
        if found is None:
            return None
        assert found.base <= begin
        assert begin + nbytes <= found.end
        _, other, most = self.mapped[self.owner_of[found]]  # alive, and where it always was
        assert other * PAGE <= found.base
        assert found.end <= (other + most) * PAGE
        return found

    def _in_use(self) -> list[Registration]:
        living = {each for each, count in self.users_of.items() if count} | set(self.pins_of)
        return [each for each in living if self.owner_of[each] in self.mapped]

    @invariant()
    def what_is_in_use_is_registered_on_every_nic(self) -> None:
        for each in self._in_use():
            assert [each.keys(i) for i in range(2)] == [
                next(r for r in nic.open if r is each.keys(i)) for i, nic in enumerate(self.nics)
            ]

    @invariant()
    def nics_and_limit_agree(self) -> None:
        assert open_ranges(self.nics[0]) == open_ranges(self.nics[1])
        assert sum(each.nbytes for each in self.nics[0].open) == self.cache.stats.nbytes
        assert self.cache.stats.nbytes <= MOST_PAGES * PAGE
        assert len(self.nics[0].open) == len(self.cache)

    @invariant()
    def no_registration_of_the_index_contains_another(self) -> None:
        assert_index_is_sound(self.cache)

    def teardown(self) -> None:
        for registration, count in self.pins_of.items():
            for _ in range(count):
                registration.unpin()
        self.cache.close()
        assert not any(nic.open for nic in self.nics)


@pytest.mark.parametrize("nexamples", slow_but([50], [50, 150]))
def test_any_sequence_of_calls(nexamples: int) -> None:
    limits = settings(max_examples=nexamples, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(CacheMachine, settings=limits)
