"""Calls on device memory: what happens to a GPU when they end."""

from __future__ import annotations

from typing import Any

import pytest
from lookalikes import CUDA, Producer

from r2ccl import requests
from r2ccl.errors import TransportError, TransportTimeout
from r2ccl.gpu.calls import DeviceCalls
from r2ccl.gpu.gate import Gated
from r2ccl.testing.fakedevice import FakeDevice, FakeGpu
from r2ccl.testing.fakedevice.order import Misuse
from r2ccl.types import ReduceOp
from r2ccl.work import Worker


class Ending(Gated):
    """A way that does nothing, and ends as it is told."""

    def __init__(self, device: FakeDevice, error: TransportError | None = None) -> None:
        super().__init__(device, 0)
        self._error = error
        self.error: BaseException | None = None
        self.is_closed = False

    def takes(self, call: Any) -> bool:
        return True

    def begin(self, call: Any, stream: Any) -> Any:
        return self, self.mark()

    def finish(self, job: Any) -> None:
        pass

    def close(self, timeout_s: float) -> None:
        if self._error is not None:
            raise self._error
        self.is_closed = True


def used(error: TransportError) -> tuple[DeviceCalls, FakeDevice, Ending]:
    """Return calls of which one was made, their GPU, and the second of their ways."""
    device = FakeDevice(FakeGpu())
    ways: Any = [Ending(device, error), Ending(device)]
    calls = DeviceCalls(
        0,
        timeout_s=5.0,
        worker=Worker("worker", lambda error: None),
        check=lambda: None,
        open_device=lambda ordinal: (device, None),  # type: ignore[arg-type,return-value]
        find_ways=lambda device, kernels: ways,
    )
    x = Producer(device.caller_memory(80), (10,), dtype=(0, 64, 1), device=(CUDA, 0))
    stream = device.caller_stream()
    calls.start(requests.allreduce(x, None, ReduceOp.SUM), stream, False)
    return calls, device, ways[1]


def test_one_way_that_cannot_be_closed_does_not_keep_the_others() -> None:
    refused = TransportError("no", status="CUDA_ERROR_MAP_FAILED")
    calls, device, other = used(refused)
    with pytest.raises(TransportError) as caught:
        calls.close(1.0)
    assert caught.value is refused
    assert other.is_closed
    with pytest.raises(Misuse, match="closed"):
        device.make_event()


def test_what_still_works_keeps_everything_it_may_work_on() -> None:
    calls, device, other = used(TransportTimeout("still works", status="TIMEOUT"))
    with pytest.raises(TransportTimeout):
        calls.close(1.0)
    assert not other.is_closed
    device.make_event()
