"""Calls on device memory: what happens to a GPU when they end."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.hostgroup import HostGroup
from support.lookalikes import CUDA, Interface, Producer
from support.ranks import TIMEOUT_S, Gathering, PlainKernels, get, put, together
from support.slow import slow_but

from r2ccl.clock import monotonic
from r2ccl.device.base import Stream
from r2ccl.errors import InvalidArgument, PeerLost, TransportError, TransportTimeout
from r2ccl.gpu.collectives import DeviceCollectives
from r2ccl.gpu.copied import CopiedBackend
from r2ccl.gpu.host_signal import DeviceCall, DeviceJob, SignalledStream
from r2ccl.gpu.peer import PeerBackend
from r2ccl.gpu.peer_connect import connect_peers
from r2ccl.gpu.peer_memory import PeerMemory
from r2ccl.gpu.staged import StagedBackend
from r2ccl.runtime import arguments
from r2ccl.runtime.arrays.streams import PER_THREAD
from r2ccl.runtime.async_work import Worker
from r2ccl.testing.fakedevice import FakeDevice, FakeGpu, MemoryKind
from r2ccl.testing.fakedevice.order import Misuse
from r2ccl.types import CallSignature, Collective, ReduceOp


class Ending(SignalledStream):
    """A backend that does nothing, and ends as it is told."""

    def __init__(self, device: FakeDevice, error: TransportError | None = None) -> None:
        super().__init__(device, 0, check=lambda: None, clock=monotonic, timeout_s=TIMEOUT_S)
        self._error = error
        self.is_closed = False
        #: What was asked of it, in order; the worker's part waits for `may_finish`.
        self.log: list[str] = []
        self.may_finish = threading.Event()
        self.may_finish.set()
        self.sizes: set[int] = set()
        self.refusal: InvalidArgument | None = None

    def supports(self, call: Any) -> bool:
        return True

    def is_prepared(self, call: Any) -> bool:
        return call.signature.count in self.sizes

    def prepare(self, call: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.log.append("prepare")
        self.sizes.add(call.signature.count)

    def begin(self, call: Any, stream: Any) -> DeviceJob:
        self.log.append("begin")
        return DeviceJob(
            call=call, before=self._recorded(stream), done=self.take_event(),
            number=self._next_number(),
        )  # fmt: skip

    def finish(self, job: Any) -> None:
        assert self.may_finish.wait(TIMEOUT_S)
        self.log.append("finish")
        self._end(job)

    def close(self, timeout_s: float) -> None:
        if isinstance(self._error, TransportTimeout):
            raise self._error
        assert self._let_go(TIMEOUT_S)
        if self._error is not None:
            raise self._error
        self.is_closed = True


def copy_on_host(request: arguments.Request) -> None:
    """Do what a scan or an alltoall of one rank does."""
    request.output.array[:] = request.source.array  # type: ignore[union-attr]


def calls_of(device: FakeDevice, backends: Any, timeout_s: float = 5.0) -> DeviceCollectives:
    return DeviceCollectives(
        0,
        timeout_s=timeout_s,
        worker=Worker("worker", threading.Lock(), lambda error: None),
        check=lambda: None,
        open_device=lambda ordinal: (device, None),  # type: ignore[arg-type,return-value]
        select_backends=lambda device, kernels: backends,
        run=copy_on_host,
    )


def call(calls: DeviceCollectives, device: FakeDevice, count: int = 10) -> Producer:
    """Call with an array of so many elements; return it, to be kept as long as its capsules are."""
    x = Producer(device.caller_memory(8 * count), (count,), dtype=(0, 64, 1), device=(CUDA, 0))
    calls.start(arguments.allreduce(x, None, ReduceOp.SUM), device.caller_stream(), False)
    return x


def used(error: TransportError) -> tuple[DeviceCollectives, FakeDevice, Ending, Producer]:
    """Return calls after a first one, their GPU, the second of their backends, and the array."""
    device = FakeDevice(FakeGpu())
    backends = [Ending(device, error), Ending(device)]
    calls = calls_of(device, backends)
    return calls, device, backends[1], call(calls, device)


def test_waits_for_the_device_come_after_all_earlier_calls() -> None:
    """A call of another size is prepared once no stream waits for the worker any more."""
    device = FakeDevice(FakeGpu())
    backend = Ending(device)
    calls = calls_of(device, [backend])
    kept = [call(calls, device)]
    assert calls._worker.drain(TIMEOUT_S)
    backend.may_finish.clear()
    kept.append(call(calls, device))  # of a size that is known: begun at once
    later = threading.Thread(target=lambda: kept.append(call(calls, device, 20)))
    later.start()
    later.join(0.02)
    assert later.is_alive()
    assert backend.log == ["prepare", "begin", "finish", "begin"]
    backend.may_finish.set()
    later.join(TIMEOUT_S)
    assert backend.log[4:7] == ["finish", "prepare", "begin"]
    assert len(kept) == 3


def test_a_gpu_that_is_too_old_ends_the_communicator() -> None:
    """`Collectives.start` takes an InvalidArgument for one that all ranks raise."""
    device = FakeDevice(FakeGpu())
    backend = Ending(device)
    backend.refusal = InvalidArgument("GPU of compute capability 7.0")
    with pytest.raises(TransportError, match=r"^rank 0: GPU of compute capability 7\.0") as caught:
        call(calls_of(device, [backend]), device)
    assert caught.value.status == "GPU_TOO_OLD"


def test_a_call_that_is_never_over_is_not_waited_for_without_end() -> None:
    device = FakeDevice(FakeGpu())
    backend = Ending(device)
    calls = calls_of(device, [backend], timeout_s=0.05)
    backend.may_finish.clear()
    x = call(calls, device)
    with pytest.raises(TransportTimeout, match=r"earlier collectives did not finish in 0\.05 s"):
        call(calls, device, 20)
    backend.may_finish.set()
    assert calls._worker.drain(TIMEOUT_S)
    assert x.asked


def test_a_backend_that_cannot_be_closed_keeps_no_other() -> None:
    refused = TransportError("no", status="CUDA_ERROR_MAP_FAILED")
    calls, device, other, _x = used(refused)
    with pytest.raises(TransportError) as caught:
        calls.close(1.0)
    assert caught.value is refused
    assert other.is_closed
    with pytest.raises(Misuse, match="closed"):
        device.make_event()


def test_what_still_works_keeps_everything_it_may_work_on() -> None:
    calls, device, other, _x = used(TransportTimeout("still works", status="TIMEOUT"))
    with pytest.raises(TransportTimeout):
        calls.close(1.0)
    assert not other.is_closed
    device.make_event()


def test_arrays_of_work_that_never_ends_stay_referenced() -> None:
    device = FakeDevice(FakeGpu())
    error = TransportTimeout("still works", status="TIMEOUT")
    calls = calls_of(device, [Ending(device, error)])
    x = Producer(device.caller_memory(80), (10,), dtype=(0, 64, 1), device=(CUDA, 0))
    given = arguments.allreduce(x, None, ReduceOp.SUM)
    owner = threading.Event()  # a Producer is referenced by itself
    given = replace(given, source=replace(given.source, owner=owner))
    calls.start(given, device.caller_stream(), False)
    is_referenced = weakref.ref(owner)
    with pytest.raises(TransportTimeout):
        calls.close(1.0)
    error.__traceback__ = None
    del calls, given, owner
    gc.collect()
    assert is_referenced()


def test_a_stream_that_captures_is_refused_before_anything() -> None:
    device = FakeDevice(FakeGpu())
    backend, stream = Ending(device), device.caller_stream()
    device.close = lambda: None  # type: ignore[method-assign]
    calls = calls_of(device, [backend])
    x = Producer(device.caller_memory(80), (10,), dtype=(0, 64, 1), device=(CUDA, 0))
    device.capture(stream)
    for is_first in (True, False):
        with pytest.raises(InvalidArgument, match="captures a CUDA graph"):
            calls.start(arguments.allreduce(x, None, ReduceOp.SUM), stream, False)
        assert (calls._active is None) is is_first
        assert backend.log == ([] if is_first else ["prepare", "begin", "finish"])
        if is_first:
            work = calls.start(
                arguments.allreduce(x, None, ReduceOp.SUM), device.caller_stream(), True
            )
            work.wait()
    with pytest.raises(InvalidArgument, match="captures a CUDA graph"):
        work.order(stream)


def test_calls_in_progress_are_limited() -> None:
    """A launch queue behind a parked stream is finite: the next call waits for the first."""
    device = FakeDevice(FakeGpu())
    backend = Ending(device)
    calls = calls_of(device, [backend])
    kept = [call(calls, device)]
    assert calls._worker.drain(TIMEOUT_S)
    backend.may_finish.clear()
    kept += [call(calls, device) for _ in range(64)]
    later = threading.Thread(target=lambda: kept.append(call(calls, device)))
    later.start()
    later.join(0.05)
    assert later.is_alive()
    backend.may_finish.set()
    later.join(TIMEOUT_S)
    assert len(kept) == 66
    assert calls._worker.drain(TIMEOUT_S)


class Third(FakeDevice):
    """The GPU with the number 3 of its process."""

    @property
    def ordinal(self) -> int:
        return 3


def test_an_array_without_memory_is_on_any_gpu() -> None:
    """Its address is null, so the driver cannot tell; the other ranks' calls are not refused."""
    device = Third(FakeGpu())
    opened: list[int] = []
    calls = calls_of(device, [Ending(device)])
    calls._open_device = lambda ordinal: (opened.append(ordinal), (device, None))[1]  # type: ignore
    empty = Interface(shape=(0,), typestr="<i8", data=(0, False))
    out = Producer(shape=(0,), dtype=(0, 64, 1), device=(CUDA, 3))
    for x, y in ((empty, out), (out, empty), (empty, None)):
        calls.start(arguments.allreduce(x, y, ReduceOp.SUM), device.caller_stream(), True).wait()
    assert opened == [3]
    elsewhere = Producer(shape=(0,), dtype=(0, 64, 1), device=(CUDA, 1))
    with pytest.raises(InvalidArgument, match="on GPU 1, the output on GPU 3: both must be"):
        arguments.allreduce(elsewhere, out, ReduceOp.SUM)
    with pytest.raises(InvalidArgument, match="on GPU 1, but this communicator uses GPU 3"):
        calls.start(
            arguments.allreduce(elsewhere, empty, ReduceOp.SUM), device.caller_stream(), True
        )


def test_the_default_stream_of_every_thread_is_waited_for() -> None:
    """They have the same handle; the memory that each waits on must not be freed before."""
    device = FakeDevice(FakeGpu())
    backend, gate = Ending(device), device.allocate_pinned(64)
    before = DeviceCall(CallSignature(Collective.ALLREDUCE, 0, ReduceOp.SUM, 1), 0, 0)
    job = backend.begin(before, device.caller_stream())
    backend.finish(job)

    def late() -> None:
        device.wait_word(PER_THREAD, int(gate.ctypes.data), 1)
        backend.hold(PER_THREAD, job.number)

    thread = threading.Thread(target=late)
    thread.start()
    thread.join(TIMEOUT_S)
    backend.hold(PER_THREAD, job.number)
    assert not backend._let_go(0.05)
    gate.view(np.uint32)[0] = 1
    assert backend._let_go(TIMEOUT_S)


# On GPUs that wait where the interface allows it


#: Arrays whose capsules must not outlive them.
KEPT: list[Producer] = []
HARD = [
    pytest.param({"is_blocking": True}, id="blocking launches"),
    pytest.param({"is_serial": True}, id="memory waits"),
    pytest.param({"is_blocking": True, "is_serial": True, "queue_limit": 48}, id="all"),
    pytest.param({"queue_limit": 48}, id="short queues"),
]


def run_calls(calls: DeviceCollectives, device: FakeDevice, count: int, value: int) -> list[Any]:
    """Run calls on memory of all kinds, used once and again; return the results."""
    stream, results = device.caller_stream(), []
    kinds = (MemoryKind.DEVICE, MemoryKind.POOLED)
    again = [device.caller_memory(8 * count, kind) for kind in kinds]
    for turn in range(4):
        once = [device.caller_memory(8 * count, kind) for kind in kinds]
        for place in (*again, *once):
            pinned = device.allocate_pinned(8 * count)
            pinned.view(np.int64)[:] = value + turn
            device.copy(place, int(pinned.ctypes.data), 8 * count, stream)
            x = Producer(place, (count,), dtype=(0, 64, 1), device=(CUDA, 0))
            KEPT.append(x)
            calls.start(arguments.allreduce(x, None, ReduceOp.SUM), stream, False)
        results += [get(device, stream, place, count) for place in (*again, *once)]
        assert calls._worker.drain(TIMEOUT_S)
    return results


@pytest.mark.parametrize("seed", slow_but([1], range(3)))
@pytest.mark.parametrize("options", HARD)
def test_calls_of_a_node_hang_on_no_gpu(options: dict[str, Any], seed: int) -> None:
    gpu, nranks, gathering = FakeGpu(seed, **options), 2, Gathering(2)
    devices = [FakeDevice(gpu, f"rank {rank}") for rank in range(nranks)]

    def body(rank: int) -> list[Any]:
        device = devices[rank]
        kernels = PlainKernels(device)

        def select(_: Any, __: Any) -> Any:
            memory = connect_peers(
                device, kernels, rank, [range(2)], lambda mine: gathering(rank, mine), 400
            )
            assert isinstance(memory, PeerMemory), memory
            return [PeerBackend(
                device, kernels, memory, range(2), check=lambda: None, clock=monotonic,
                sleep=time.sleep, timeout_s=TIMEOUT_S,
            )]  # fmt: skip

        calls = calls_of(device, None, TIMEOUT_S)
        calls._select_backends = select
        results = run_calls(calls, device, 130, rank + 1)
        calls.close(TIMEOUT_S)
        return results

    for results in together(nranks, body):
        for at, result in enumerate(results):
            np.testing.assert_array_equal(result, np.full(130, 3 + 2 * (at // 4)))


@pytest.mark.parametrize("options", HARD)
def test_staged_calls_hang_on_no_gpu(options: dict[str, Any]) -> None:
    device, group = FakeDevice(FakeGpu(1, **options)), HostGroup(1)
    backend = StagedBackend(
        device, 0, 1, slot_nbytes=80, enter=lambda call, own: call,
        run=lambda call, source, output: group.run(0, call, source, output),
        check=lambda: None, clock=monotonic, timeout_s=TIMEOUT_S,
    )  # fmt: skip
    calls = calls_of(device, [backend], TIMEOUT_S)
    for at, result in enumerate(run_calls(calls, device, 250, 5)):
        np.testing.assert_array_equal(result, np.full(250, 5 + at // 4))
    calls.close(TIMEOUT_S)


# On copies in host memory


def array_of(device: FakeDevice, stream: Stream, values: Any) -> tuple[Producer, int]:
    """Copy values into device memory on a stream; return the array and its address."""
    place = put(device, stream, values)
    x = Producer(place, values.shape, dtype=(0, 64, 1), device=(CUDA, 0))
    KEPT.append(x)
    return x, place


@pytest.mark.parametrize("options", HARD)
def test_copied_calls_hang_on_no_gpu(options: dict[str, Any]) -> None:
    """Their memory grows between calls, and calls follow one another without a wait."""
    device = FakeDevice(FakeGpu(1, **options))
    calls, places = calls_of(device, [], TIMEOUT_S), []
    stream = device.caller_stream()
    for count in (10, 10, 0, 4000, 7, 4000):
        x, _ = array_of(device, stream, np.arange(count))
        out, place = array_of(device, stream, np.full(count, -1))
        calls.start(arguments.alltoall(x, out, 0, 1), stream, False)
        calls.start(arguments.scan(out, None, ReduceOp.SUM, False), stream, False)
        places.append((place, count))
    for place, count in places:
        np.testing.assert_array_equal(get(device, stream, place, count), np.arange(count))
    calls.close(TIMEOUT_S)


def test_memory_is_replaced_after_the_copies_from_it() -> None:
    device = FakeDevice(FakeGpu())
    stream = device.caller_stream()
    backend = CopiedBackend(
        device, 0, run=copy_on_host, check=lambda: None, clock=monotonic, timeout_s=TIMEOUT_S
    )
    for count in (10, 1000):
        (x, source), (out, place) = (
            array_of(device, stream, np.full(count, each)) for each in (5, -1)
        )
        request = arguments.alltoall(x, out, 0, 1)
        call = DeviceCall(request.signature, source, place, request=request)
        assert not backend.is_prepared(call)
        backend.prepare(call)
        assert backend.is_prepared(call)
        backend.finish(backend.begin(call, stream))
    backend.close(TIMEOUT_S)


def test_elements_outside_of_all_parts_stay() -> None:
    device = FakeDevice(FakeGpu())
    calls = calls_of(device, [])

    def run(request: arguments.Request) -> None:
        request.output.array[2:5] = request.source.array  # type: ignore[union-attr]

    calls._run = run
    stream = device.caller_stream()
    x, _ = array_of(device, stream, np.arange(3))
    out, place = array_of(device, stream, np.full(9, 7))
    calls.start(arguments.gatherv(x, out, 0, (3,), (2,), 0, 1), stream, False)
    found = get(device, stream, place, 9)
    np.testing.assert_array_equal(found, [7, 7, 0, 1, 2, 7, 7, 7, 7])
    calls.close(TIMEOUT_S)


def test_a_copied_call_that_fails_lets_the_stream_go_and_says_so() -> None:
    device = FakeDevice(FakeGpu())
    calls = calls_of(device, [])

    def fail(request: arguments.Request) -> None:
        raise PeerLost(rank=0, peer=1, last_heard_s=None, why="for a test")

    calls._run = fail
    stream = device.caller_stream()
    x, _ = array_of(device, stream, np.arange(3))
    out, place = array_of(device, stream, np.full(3, 7))
    work = calls.start(arguments.alltoall(x, out, 0, 1), stream, True)
    with pytest.raises(PeerLost):
        work.wait(TIMEOUT_S)
    work.order(stream)
    np.testing.assert_array_equal(get(device, stream, place, 3), [7, 7, 7])
    calls.close(TIMEOUT_S)


def test_a_copied_call_behind_endless_work_ends_with_a_timeout() -> None:
    device = FakeDevice(FakeGpu())
    calls, word = calls_of(device, [], 0.1), device.allocate_pinned(64)
    stream = device.caller_stream()
    x, _ = array_of(device, stream, np.arange(3))
    out, _ = array_of(device, stream, np.full(3, 7))
    calls.start(arguments.alltoall(x, out, 0, 1), stream, True).wait(TIMEOUT_S)
    device.wait_word(stream, int(word.ctypes.data), 1)
    work = calls.start(arguments.alltoall(x, out, 0, 1), stream, True)
    what = "copies of this collective, or the work that precedes it on its stream, in"
    with pytest.raises(TransportTimeout, match=what):
        work.wait(TIMEOUT_S)
    word.view(np.uint32)[0] = 1
    calls.close(TIMEOUT_S)


def test_input_and_output_in_different_places_are_refused() -> None:
    device = FakeDevice(FakeGpu())
    x, _ = array_of(device, device.caller_stream(), np.arange(6))
    host = np.arange(6)
    for make in (
        lambda a, b: arguments.gather(a, b, 0, 0, 1),
        lambda a, b: arguments.scatter(a, b, 0, 0, 1),
        lambda a, b: arguments.alltoall(a, b, 0, 1),
        lambda a, b: arguments.alltoallv(a, b, (6,), None, (6,), None, 0, 1),
        lambda a, b: arguments.allgatherv(a, b, (3, 6), None, 1, 2),
        lambda a, b: arguments.reduce_scatterv(a, b, ReduceOp.SUM, [2, 4], 1, 2),
        lambda a, b: arguments.scan(a, b, ReduceOp.SUM, True),
    ):
        for pair in ((x, host), (host, x)):
            with pytest.raises(InvalidArgument, match="both on the same GPU"):
                make(*pair)
