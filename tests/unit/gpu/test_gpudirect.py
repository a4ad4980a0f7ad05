"""Collectives on device memory over NICs that reach it: right, in order, and hanging no stream.

Ranks are threads with engines of their own, on one simulated network; their GPUs are fakes that run
work late, in any order that streams, events and words allow.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from support.engines import Group
from support.ranks import KINDS, TIMEOUT_S, meant, together

from r2ccl.dtypes import CODES
from r2ccl.errors import CommunicatorRevoked, InvalidArgument, TransportError, TransportTimeout
from r2ccl.failover.migration.path import PathState
from r2ccl.gpu.host_signal import DeviceCall
from r2ccl.gpu.registered_memory import AreaPurpose
from r2ccl.types import CallSignature, Collective, ReduceOp


def data_of(rank: int, count: int, dtype: str) -> Any:
    return np.random.default_rng(rank).integers(-1000, 1000, count).astype(dtype)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", [0, 3, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_every_collective_of_any_size(kind: Collective, count: int, seed: int) -> None:
    nranks, root = 3, 1
    group = Group(nranks, seed)
    group.open()
    dtype = "int64" if seed else "float32"
    op = ReduceOp.SUM if seed % 2 else ReduceOp.MAX
    xs = [data_of(rank, count, dtype) for rank in range(nranks)]

    def body(rank: int) -> Any:
        return group.ranks[rank].run(kind, xs[rank], op, root, in_place=seed > 1)

    for rank, result in enumerate(together(nranks, body)):
        np.testing.assert_array_equal(result, meant(kind, xs, op, root, rank))
    group.close()


def test_a_mean_is_divided_once() -> None:
    group = Group(3)
    group.open()
    xs = [data_of(rank, 100, "float32") for rank in range(3)]

    def body(rank: int) -> Any:
        mine = group.ranks[rank]
        return mine.run(Collective.ALLREDUCE, xs[rank], ReduceOp.AVG, 0, in_place=True)

    total = np.sum(xs, axis=0)
    for result in together(3, body):
        np.testing.assert_array_equal(result, total / np.float32(3))
    group.close()


@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_place", [True, False])
def test_arrays_that_nics_do_not_reach_are_copied(
    kind: Collective, in_place: bool, offset: int
) -> None:
    """One rank's are refused, or do not begin at an element: the others' go as they are."""
    nranks, root = 3, 1
    group = Group(nranks, 5)
    group.open()
    xs = [data_of(rank, 90, "int64") for rank in range(nranks)]
    odd = group.ranks[1]
    if not offset:
        odd.transport.refuses = lambda address: address in odd.arrays

    def body(rank: int) -> Any:
        shift = offset * (rank == 1)
        mine = group.ranks[rank]
        return mine.run(kind, xs[rank], ReduceOp.SUM, root, in_place=in_place, offset=shift)

    for rank, result in enumerate(together(nranks, body)):
        np.testing.assert_array_equal(result, meant(kind, xs, ReduceOp.SUM, root, rank))
    group.close()


@pytest.mark.parametrize("is_told", [True, False])
def test_an_array_of_two_allocations_is_copied_but_no_other(is_told: bool) -> None:
    """The first 80 of 200 elements of rank 0 are in one allocation, the others in another one.

    If the driver gives both the same number, all arrays in them may be copied.
    """
    group = Group(2)
    group.open()
    xs = [data_of(rank, 200, "int64") for rank in range(2)]
    places = [mine.put(x) for mine, x in zip(group.ranks, xs, strict=True)]
    odd, border = group.ranks[0], places[0] + 8 * 80
    number, register, taken = odd.device.buffer_id, odd.transport.register_device, []

    def register_device(address: int, nbytes: int) -> Any:
        if address < border < address + nbytes:
            raise InvalidArgument("they reach beyond their allocation")
        taken.append((address, nbytes))
        return register(address, nbytes)

    if is_told:
        odd.device.buffer_id = lambda address: number(address) + 10**6 * (address >= border)
    odd.transport.register_device = register_device
    for first, end in ((0, 80), (0, 200), (80, 200), (20, 60)):
        call = CallSignature(Collective.ALLREDUCE, CODES[xs[0].dtype], ReduceOp.MAX, end - first)

        def body(rank: int, call: Any = call, first: int = first) -> Any:
            mine, at = group.ranks[rank], places[rank] + 8 * first
            mine.direct.finish(mine.begin(call, at, at))
            return mine.get(at, xs[rank][first : first + call.count])

        for result in together(2, body):
            np.testing.assert_array_equal(result, np.maximum(*xs)[first:end])
        if is_told:
            assert ((places[0] + 8 * first, 8 * (end - first)) in taken) == (end - first < 200)
    group.close()


def test_an_array_that_is_refused_when_it_is_used_is_copied_too() -> None:
    """There was room for it at the call, and is none any more."""
    group = Group(2)
    group.open()
    xs = [data_of(rank, 200, "int64") for rank in range(2)]
    call = CallSignature(Collective.ALLREDUCE, CODES[xs[0].dtype], ReduceOp.SUM, 200)

    def body(rank: int) -> Any:
        mine = group.ranks[rank]
        place = mine.put(xs[rank])
        job = mine.begin(call, place, place)
        if rank == 0:
            mine.transport.refuses = lambda address: address in mine.arrays
        mine.direct.finish(job)
        return mine.get(place, xs[rank])

    for result in together(2, body):
        np.testing.assert_array_equal(result, xs[0] + xs[1])
    group.close()


def test_calls_back_to_back_keep_their_order() -> None:
    """All are given to the device before the first is carried out, on one array."""
    nranks, ncalls = 2, 6
    group = Group(nranks)
    group.open()
    call = CallSignature(Collective.ALLREDUCE, CODES[np.dtype(np.int64)], ReduceOp.SUM, 60)

    def body(rank: int) -> Any:
        mine = group.ranks[rank]
        data = np.full(60, rank + 1)
        place = mine.put(data)
        first = mine.begin(call, place, place)
        mine.direct.finish(first)
        jobs = [mine.begin(call, place, place) for _ in range(ncalls - 1)]
        for job in jobs:
            mine.direct.finish(job)
        return mine.get(place, data)

    for result in together(nranks, body):
        np.testing.assert_array_equal(result, np.full(60, 3 * nranks ** (ncalls - 1)))
    group.close()


def begun_by_rank_0() -> tuple[Group, Any, int, Any]:
    """Return two ranks, of which rank 0 has begun an allreduce in place: rank 0, place and job."""
    group = Group(2)
    group.open()
    call = CallSignature(Collective.ALLREDUCE, CODES[np.dtype(np.int64)], ReduceOp.SUM, 300)
    mine = group.ranks[0]
    place = mine.put(np.arange(300))
    job = mine.begin(call, place, place)
    return group, mine, place, job


def test_a_call_that_fails_lets_the_stream_go_on() -> None:
    group, mine, place, job = begun_by_rank_0()
    mine.engine.revoke("for a test")
    with pytest.raises(CommunicatorRevoked, match="for a test"):
        mine.direct.finish(job)
    with pytest.raises(CommunicatorRevoked, match="for a test"):
        mine.direct.examine(job)
    mine.get(place, np.arange(300))
    group.close()


def test_copies_that_cannot_be_waited_for_hide_no_error() -> None:
    group, mine, _, job = begun_by_rank_0()

    def drain(timeout_s: float) -> bool:
        raise TransportTimeout("the data loop is busy", rank=0)

    mine.direct._pxn_routes = SimpleNamespace(drain=drain, close=lambda timeout_s: True)
    mine.engine.revoke("for a test")
    with pytest.raises(CommunicatorRevoked, match="for a test"):
        mine.direct.finish(job)
    group.close()


@pytest.mark.parametrize("method", ["record", "destroy_stream", "free"])
def test_a_failed_device_leaves_no_memory_with_the_nics(method: str) -> None:
    group = Group(2)
    group.open()
    mine = group.ranks[0]
    mine.direct._memory.area(AreaPurpose.SCRATCH, 100)
    assert mine.transport.nheld == 2
    mine.device.refusals[method] = "CUDA_ERROR_ILLEGAL_ADDRESS"
    with pytest.raises(TransportError, match="ILLEGAL_ADDRESS"):
        mine.direct.close(TIMEOUT_S)
    assert mine.transport.nheld == 0
    group.ranks[1].direct.close(TIMEOUT_S)


def test_a_caller_whose_stream_hangs_is_told() -> None:
    group = Group(2, timeout_s=0.2)
    group.open()
    mine = group.ranks[0]
    call = CallSignature(Collective.ALLREDUCE, CODES[np.dtype(np.int64)], ReduceOp.SUM, 300)
    place = mine.put(np.arange(300))
    word = mine.device.allocate_pinned(64)
    mine.device.wait_word(mine.stream, int(word.ctypes.data), 1)
    job = mine.begin(call, place, place)
    with pytest.raises(TransportTimeout, match="work that precedes this collective on its stream"):
        mine.direct.finish(job)
    word.view(np.uint32)[0] = 1
    group.close()  # which frees events of work that nobody else asked for


def test_kernels_of_a_failed_call_end_before_the_stream_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = Group(2, 3)
    group.open()
    mine = group.ranks[0]
    call = CallSignature(Collective.ALLREDUCE, CODES[np.dtype(np.int64)], ReduceOp.SUM, 300)
    place, other = mine.put(np.arange(300)), mine.put(np.zeros(300, np.int64))

    def run(*given: Any) -> None:
        for _ in range(8):
            mine.direct._reductions.copy(place, other, 2400)
        raise CommunicatorRevoked("for a test")

    monkeypatch.setattr(mine.engine, "run", run)
    job = mine.begin(call, place, place)
    with pytest.raises(CommunicatorRevoked, match="for a test"):
        mine.direct.finish(job)
    mine.device.write(place, np.zeros(300, np.int64))  # the caller has it back
    group.close()


def test_a_refusal_of_the_device_is_raised_and_harms_no_more() -> None:
    group = Group(2)
    group.open()
    xs = [data_of(rank, 60, "int64") for rank in range(2)]
    call = CallSignature(Collective.ALLREDUCE, CODES[xs[0].dtype], ReduceOp.SUM, 60)

    def body(rank: int) -> Any:
        mine = group.ranks[rank]
        place = mine.put(xs[rank])
        mine.direct.prepare(DeviceCall(call, place, place))
        mine.device.refusals["record"] = "CUDA_ERROR_UNKNOWN"
        with pytest.raises(TransportError, match="CUDA_ERROR_UNKNOWN"):
            mine.direct.begin(DeviceCall(call, place, place), mine.stream)
        del mine.device.refusals["record"]
        mine.direct.finish(mine.begin(call, place, place))
        return mine.get(place, xs[rank])

    for result in together(2, body):
        np.testing.assert_array_equal(result, xs[0] + xs[1])
    group.close()


def test_all_ranks_get_the_backend_or_none_does() -> None:
    group = Group(3)
    group.ranks[1].transport.refuses = lambda address: True
    found = together(3, lambda rank: group.ranks[rank].open())
    assert found == ["rank 1: this memory moves"] * 3
    for each in group.ranks:
        each.device.close()


def test_small_calls_and_those_without_kernels_are_left() -> None:
    group = Group(2, eager_nbytes=64)
    group.open()
    direct = group.ranks[0].direct

    def call(count: int) -> CallSignature:
        return CallSignature(Collective.ALLREDUCE, CODES[np.dtype(np.int64)], ReduceOp.SUM, count)

    assert not direct.supports(DeviceCall(call(0), 0, 0))
    assert not direct.supports(DeviceCall(call(16), 0, 0))
    assert direct.supports(DeviceCall(call(17), 0, 0))
    without_kernels = msgspec.structs.replace(call(17), op=ReduceOp.BXOR)
    assert not direct.supports(DeviceCall(without_kernels, 0, 0))
    moved = msgspec.structs.replace(call(999), collective=Collective.ALLGATHER, dtype=20)
    assert direct.supports(DeviceCall(moved, 0, 0))
    group.close()


@pytest.mark.parametrize("slice_nbytes", [100, 6])
def test_slices_need_not_be_whole_elements(slice_nbytes: int) -> None:
    group = Group(2, slice_nbytes=slice_nbytes)
    group.open()
    xs = [data_of(rank, 60, "int64") for rank in range(2)]

    def body(rank: int) -> Any:
        mine = group.ranks[rank]
        return mine.run(Collective.ALLREDUCE, xs[rank], ReduceOp.SUM, 0, in_place=True)

    for result in together(2, body):
        np.testing.assert_array_equal(result, xs[0] + xs[1])
    group.close()


@pytest.mark.parametrize("is_reached", [True, False])
@pytest.mark.parametrize("kind", [Collective.ALLGATHER, Collective.REDUCE_SCATTER])
def test_the_smaller_array_may_be_the_own_part_of_the_larger(
    kind: Collective, is_reached: bool
) -> None:
    nranks, width = 3, 40
    group = Group(nranks, 2)
    group.open()
    is_gather = kind == Collective.ALLGATHER
    count = width if is_gather else width * nranks
    xs = [data_of(rank, count, "int64") for rank in range(nranks)]
    call = CallSignature(kind, CODES[xs[0].dtype], ReduceOp.SUM, width * nranks)

    def body(rank: int) -> Any:
        mine = group.ranks[rank]
        own = slice(rank * width, (rank + 1) * width)
        data = np.full(width * nranks, 77)
        data[own if is_gather else slice(None)] = xs[rank]
        whole = mine.put(data)
        part = whole + 8 * own.start
        if not is_reached:
            mine.transport.refuses = lambda address: address == whole
        mine.direct.finish(mine.begin(call, *((part, whole) if is_gather else (whole, part))))
        found = mine.get(whole, data)
        if is_gather:
            return found
        data[own] = found[own]
        np.testing.assert_array_equal(found, data)
        return found[own]

    for rank, result in enumerate(together(nranks, body)):
        np.testing.assert_array_equal(result, meant(kind, xs, ReduceOp.SUM, 0, rank))
    group.close()


def test_a_call_without_its_places_leaves_no_registration() -> None:
    """The second of its arrays is refused, and there is no memory to stand in for it."""
    group = Group(2)
    group.open()
    mine = group.ranks[0]
    call = CallSignature(Collective.BROADCAST, CODES[np.dtype(np.int64)], ReduceOp.SUM, 300)
    source, output = mine.put(np.arange(300)), mine.put(np.zeros(300, np.int64))
    job = mine.begin(call, source, output)
    nheld = mine.transport.nheld
    mine.transport.refuses = lambda address: address == output
    mine.device.refusals["allocate"] = "CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(TransportError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        mine.direct.finish(job)
    assert mine.transport.nheld == nheld
    mine.get(output, np.arange(300))
    group.close()


class LateDetours:
    """PxnRoutes that become due at some time."""

    is_open_needed = False
    nopened = 0

    def open(self) -> None:
        self.is_open_needed = False
        self.nopened += 1

    def drain(self, timeout_s: float) -> bool:
        return True

    def close(self, timeout_s: float) -> bool:
        return True


def test_a_call_that_was_prepared_waits_for_the_device_no_more() -> None:
    """It is part of one whose stream waits for the host already, and rails are lost meanwhile."""
    group = Group(2)
    group.open()
    xs = [data_of(rank, 60, "int64") for rank in range(2)]
    call = CallSignature(Collective.ALLREDUCE, CODES[xs[0].dtype], ReduceOp.SUM, 60)
    pxn_routes: list[Any] = [LateDetours(), LateDetours()]

    def body(rank: int) -> Any:
        mine = group.ranks[rank]
        mine.direct._pxn_routes = pxn_routes[rank]
        place = mine.put(xs[rank])
        given = DeviceCall(call, place, place)
        mine.direct.prepare(given)
        pxn_routes[rank].is_open_needed, pxn_routes[rank].nopened = True, 0
        job = mine.direct.begin_part(given, mine.stream, mine.entry, 0)
        assert not pxn_routes[rank].nopened
        mine.direct.finish(job)
        mine.device.wait(mine.stream, job.done)
        mine.direct.finish(mine.begin(call, place, place))
        assert pxn_routes[rank].nopened == 1
        return mine.get(place, xs[rank])

    for result in together(2, body):
        np.testing.assert_array_equal(result, 2 * (xs[0] + xs[1]))
    group.close()


def test_many_allocations_are_forgotten_but_not_a_calls_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("r2ccl.gpu.staging._MOST_ALLOCATIONS", 2)
    group = Group(2)
    group.open()
    mine = group.ranks[0]
    code = CODES[np.dtype(np.int64)]
    places = [mine.put(np.arange(60)) for _ in range(3)]
    mine.direct.prepare(
        DeviceCall(CallSignature(Collective.ALLREDUCE, code, 0, 60), places[0], places[1])
    )
    call = DeviceCall(CallSignature(Collective.BROADCAST, code, 0, 60), places[1], places[2])
    mine.direct.prepare(call)
    with mine.direct._arrays.hold(call, mine.direct._reductions) as lent:
        assert lent == (places[1], places[2])
    mine.get(places[2], np.arange(60))
    group.close()


def test_ranks_that_do_not_hear_of_each_other_keep_nothing() -> None:
    group = Group(2)
    mine = group.ranks[0]

    def gather(said: bytes) -> Any:
        raise CommunicatorRevoked("for a test")

    mine.gather = gather  # type: ignore[method-assign]
    with pytest.raises(CommunicatorRevoked, match="for a test"):
        mine.open()
    assert mine.transport.nheld == 0
    for each in group.ranks:
        each.device.close()


def test_copies_of_a_failed_call_end_before_the_stream_goes_on() -> None:
    group = Group(2)
    group.open()
    mine = group.ranks[0]
    call = CallSignature(Collective.ALLREDUCE, CODES[np.dtype(np.int64)], ReduceOp.SUM, 300)
    place = mine.put(np.arange(300))
    waited: list[bool] = []

    class Copying(LateDetours):
        def drain(self, timeout_s: float) -> bool:
            waited.append(job.is_over)
            return True

    mine.direct._pxn_routes = Copying()  # type: ignore[assignment]
    job = mine.begin(call, place, place)
    mine.engine.revoke("for a test")
    with pytest.raises(CommunicatorRevoked, match="for a test"):
        mine.direct.finish(job)
    assert waited == [False]
    mine.get(place, np.arange(300))
    group.close()


def test_memory_that_another_gpu_copies_to_is_kept() -> None:
    group = Group(2)
    group.open()
    mine = group.ranks[0]

    class Hanging(LateDetours):
        def close(self, timeout_s: float) -> bool:
            return False

    mine.direct._pxn_routes = Hanging()  # type: ignore[assignment]
    nheld = mine.transport.nheld
    with pytest.raises(TransportTimeout, match="which frees the memory that the GPU uses"):
        mine.direct.close(TIMEOUT_S)
    assert mine.transport.nheld == nheld
    group.ranks[1].direct.close(TIMEOUT_S)
    for each in group.ranks:
        each.device.close()


def test_a_call_without_memory_on_its_way_ends_the_communicator() -> None:
    """Its landing places are made in the loop: before anything is waited for, paths are fenced."""
    group = Group(2, staging_nbytes=64)
    group.open()
    mine = group.ranks[0]
    call = CallSignature(Collective.ALLREDUCE, CODES[np.dtype(np.int64)], ReduceOp.SUM, 300)
    place = mine.put(np.arange(300))
    job = mine.begin(call, place, place)
    mine.device.refusals["allocate"] = "CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(TransportError, match="OUT_OF_MEMORY"):
        mine.direct.finish(job)
    assert mine.engine.error is not None
    assert all(path.state is not PathState.UP for path in mine.engine._links.paths.values())
    with pytest.raises(CommunicatorRevoked, match="OUT_OF_MEMORY"):
        mine.engine.check()
