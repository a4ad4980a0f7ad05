"""Collectives on GPU tensors are ordered on the caller's streams, in whichever thread they run.

`FakeCuda` stands in for ``torch.cuda``: one current stream per thread, and events.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch.distributed", reason="torch is not installed: make test-torch")

import torch
from torch._C import _distributed_c10d as c10d

from r2ccl.interop.torch.call_queue import QueuedCall
from r2ccl.interop.torch.methods import GroupMethods, GroupState

GPU = torch.device("cuda", 1)


class GpuTensor(torch.Tensor):  # type: ignore[misc]
    """Tensor that says that it is on a GPU."""

    is_cuda = True
    device = GPU


class FakeStream:
    """Stream with the events that it has waited for, and the streams that these recorded."""

    device = GPU

    def __init__(self) -> None:
        self.waited: list[FakeStream] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.waited.append(event.stream)


class FakeEvent:
    def record(self, stream: FakeStream) -> None:
        self.stream = stream


class FakeCuda:
    """The part of ``torch.cuda`` that knows streams."""

    Event = FakeEvent

    def __init__(self) -> None:
        self.default, self._local = FakeStream(), threading.local()

    def current_stream(self, device: Any) -> FakeStream:
        assert device == GPU
        return getattr(self._local, "stream", self.default)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream(GPU)
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before


class FakeCommunicator:
    """Communicator that notes the thread and the current stream of each call."""

    rank, nranks = 0, 1
    config = SimpleNamespace(timeout_s=10.0)

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.ran_on: list[tuple[int, FakeStream]] = []

    def allreduce(self, x: Any, op: Any) -> None:
        self.ran_on.append((threading.get_ident(), self._cuda.current_stream(GPU)))

    def close(self) -> None:
        pass


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    for name in ("Event", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    return made


@pytest.fixture
def group(cuda: FakeCuda) -> Iterator[GroupMethods]:
    comm: Any = FakeCommunicator(cuda)
    made = GroupMethods(GroupState(comm, None, timedelta(seconds=10), lambda: None))
    yield made
    made.shutdown()


def allreduce(group: GroupMethods, *, is_async: bool, timeout_s: float = 10) -> Any:
    opts = c10d.AllreduceOptions()
    opts.asyncOp, opts.timeout = is_async, timedelta(seconds=timeout_s)
    return group.allreduce([torch.ones(3).as_subclass(GpuTensor)], opts)


@pytest.mark.parametrize("is_async", [True, False])
def test_another_thread_uses_the_stream_of_the_caller(
    cuda: FakeCuda, group: GroupMethods, is_async: bool
) -> None:
    mine = FakeStream()
    with cuda.stream(mine):
        # A blocking call with a shorter timeout than the communicator's runs in another thread.
        allreduce(group, is_async=is_async, timeout_s=5).wait()
    ((thread, stream),) = group.communicator.ran_on  # type: ignore[attr-defined]
    assert thread != threading.get_ident()
    assert stream is mine


def test_the_stream_of_a_wait_waits_for_the_collective(cuda: FakeCuda, group: GroupMethods) -> None:
    mine, later = FakeStream(), FakeStream()
    with cuda.stream(mine):
        work = allreduce(group, is_async=True)
    with cuda.stream(later):
        assert work.wait()
    assert later.waited == [mine]


def test_callbacks_run_on_the_stream_of_the_call(cuda: FakeCuda, group: GroupMethods) -> None:
    mine, begin = FakeStream(), threading.Event()
    group._state.queue.add(QueuedCall(begin.wait, []))  # type: ignore[arg-type]
    with cuda.stream(mine):
        work = allreduce(group, is_async=True)
    future = work.get_future().then(lambda _: cuda.current_stream(GPU))
    begin.set()
    assert future.wait() is mine
