"""Calls on device memory: what happens to a GPU when they end."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from support.lookalikes import CUDA, Producer
from support.ranks import TIMEOUT_S

from r2ccl.errors import InvalidArgument, TransportError, TransportTimeout
from r2ccl.gpu.collectives import DeviceCollectives
from r2ccl.gpu.host_signal import SignalledStream
from r2ccl.runtime import arguments
from r2ccl.runtime.async_work import Worker
from r2ccl.testing.fakedevice import FakeDevice, FakeGpu
from r2ccl.testing.fakedevice.order import Misuse
from r2ccl.types import ReduceOp


class Ending(SignalledStream):
    """A backend that does nothing, and ends as it is told."""

    def __init__(self, device: FakeDevice, error: TransportError | None = None) -> None:
        super().__init__(device, 0)
        self._error = error
        self.error: BaseException | None = None
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

    def begin(self, call: Any, stream: Any) -> Any:
        self.log.append("begin")
        return self, self.mark()

    def finish(self, job: Any) -> None:
        assert self.may_finish.wait(TIMEOUT_S)
        self.log.append("finish")

    def close(self, timeout_s: float) -> None:
        if self._error is not None:
            raise self._error
        self.is_closed = True


def calls_of(device: FakeDevice, backends: Any, timeout_s: float = 5.0) -> DeviceCollectives:
    return DeviceCollectives(
        0,
        timeout_s=timeout_s,
        worker=Worker("worker", threading.Lock(), lambda error: None),
        check=lambda: None,
        open_device=lambda ordinal: (device, None),  # type: ignore[arg-type,return-value]
        select_backends=lambda device, kernels: backends,
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
