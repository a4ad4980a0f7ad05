"""Collectives on device memory: what is given to the device at the call, what the host does later.

The caller's thread gives the device everything at once and goes on; the communicator's worker does
the host's part. Where the GPUs of a node reach each other's memory, kernels work on it directly
(`r2ccl.nodecalls`, and among several nodes `r2ccl.tiers`); else, where NICs reach it, slices travel
from and to it (`r2ccl.direct`); else windows pass through pinned host memory (`r2ccl.bounce`). The
caller's stream waits for the result unless a `Work` was asked for, which can order any stream after
it.

Must not import links. Invariants: all ranks take the same way; arrays are kept alive until the
device is done with them, whatever the caller does with its own references.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from r2ccl.bounce import Bounce, DeviceCall, HostCall
from r2ccl.clock import monotonic
from r2ccl.config import Config
from r2ccl.device.arrays import DeviceBuffer, streams_of
from r2ccl.device.base import Device, Event, Stream
from r2ccl.device.streams import stream_of
from r2ccl.errors import InvalidArgument, TransportError
from r2ccl.gate import HostPart
from r2ccl.nodecalls import MOST_RANKS, Kernels, NodeCalls
from r2ccl.nodejoin import Gather, join
from r2ccl.noticeboard import NoticeBoard
from r2ccl.requests import Request
from r2ccl.schedule.ir import Schedule
from r2ccl.tiers import TieredCalls
from r2ccl.types import CallSignature
from r2ccl.work import Task, Work, Worker

_log = logging.getLogger(__name__)

Array = npt.NDArray[np.generic]

#: Runs an allreduce of some ranks: which, the call, what it reads, what it writes.
GroupCall = Callable[[tuple[int, ...], CallSignature, Array, Array], None]
#: Gives the GPU of a number, and its kernels.
OpenDevice = Callable[[int], tuple[Device, Kernels]]
#: Gives the way on which NICs reach the GPU's memory, or says why there is none.
OpenDirect = Callable[[Device, Kernels], "Way | str"]


class Way(Protocol):
    """How collectives on device memory are carried out: `Bounce`, `NodeCalls`, `Direct`."""

    def takes(self, call: DeviceCall) -> bool:
        """Whether it carries out this call; alike on all ranks."""
        ...

    def begin(self, call: DeviceCall, stream: Stream) -> tuple[Any, Event]:
        """Give the device its part; see `Bounce.begin`."""
        ...

    def finish(self, job: Any) -> None:
        """Do the host's part."""
        ...

    def examine(self, job: Any) -> None:
        """Raise what spoiled a call that the device is done with, if anything did."""
        ...

    def mark(self) -> Event:
        """Return an event that is done when all that was begun so far is."""
        ...

    def take_event(self) -> Event:
        """Return an event that nothing waits for; to be given back."""
        ...

    def recycle(self, event: Event) -> None:
        """Take an event back."""
        ...

    def close(self, timeout_s: float) -> None:
        """Wait, and free everything."""
        ...


class Outcome:
    """What a call does to device memory; `r2ccl.work.Effects`."""

    def __init__(
        self, device: Device, job: HostPart, done: Event, stream: Stream, way: Way
    ) -> None:
        self._device = device
        self._job = job
        self._way = way
        self._done = done
        self._stream = stream
        weakref.finalize(self, way.recycle, done)

    def is_done(self) -> bool:
        """See `Effects`."""
        return self._device.is_done(self._done)

    def synchronize(self, timeout_s: float) -> bool:
        """See `Effects`."""
        is_over = self._device.synchronize(self._done, timeout_s)
        if is_over:
            self._way.examine(self._job)
        return is_over

    def order(self, stream: Any) -> None:
        """See `Effects`; by default it is the stream that was current at the call."""
        self._device.wait(stream_of(stream, self._stream), self._done)


class _Loan(NamedTuple):
    """Arrays that the device works on until `done`."""

    done: Event
    request: Request
    way: Way


class _Card(NamedTuple):
    """The GPU in use, the way of its calls, and the arrays it still works on."""

    device: Device
    way: Way
    #: The other way, for what the first cannot do.
    bounce: Bounce
    borrowed: deque[_Loan]


class DeviceCalls:
    """Device memory's part of a communicator.

    Parameters
    ----------
    rank, nranks : int
    config : Config
    worker : Worker
        Does the host's part, in the order of the calls.
    run : callable
        Runs a collective on host memory, in the worker.
    gather : callable
        Tells all ranks something and returns what they say; collective.
    check : callable
        Raises what ended the communicator, if anything did.
    run_among : callable
        Runs an allreduce among some ranks, in the worker.
    nodes : sequence of sequence of int
        Of every node its ranks.
    open_device : callable
        Gives the GPU of a number.
    open_direct : callable
        Finds out with all ranks whether NICs reach the GPUs' memory.
    """

    def __init__(
        self,
        rank: int,
        nranks: int,
        *,
        config: Config,
        worker: Worker,
        run: HostCall,
        gather: Gather,
        check: Callable[[], None],
        run_among: GroupCall,
        nodes: Sequence[Sequence[int]],
        open_device: OpenDevice,
        open_direct: OpenDirect,
    ) -> None:
        self._rank = rank
        self._nranks = nranks
        self._config = config
        self._worker = worker
        self._run = run
        self._gather = gather
        self._check = check
        self._run_among = run_among
        self._nodes = [tuple(node) for node in nodes]
        self._open_device = open_device
        self._open_direct = open_direct
        self._card: _Card | None = None

    def start(self, request: Request, stream: Any, is_async: bool) -> Any:
        """Begin a collective; return its result, or a `Work`.

        Parameters
        ----------
        request : Request
            On device memory.
        stream : object or None
            As callers pass it.
        is_async : bool
            Whether a `Work` is returned, and the stream goes on without the result.

        Raises
        ------
        InvalidArgument
            Another GPU than before, or no stream.
        TransportError
            The device failed; the communicator ends.
        R2cclError
            What ended the communicator before.
        """
        source, output = request.source, request.output
        assert isinstance(source, DeviceBuffer)
        buffers = (source,) if output is None else (source, output)
        given, others = streams_of(stream, *buffers)
        self._check()
        card = self._open(source.ordinal)
        self._let_go(card)
        call = _call_of(request)
        way = card.way if card.way.takes(call) else card.bounce
        for other in others:
            self._order(card.device, given, other, way)
        task, job, done = self._begin(way, call, given)
        if not is_async:
            for each in (given, *others):
                card.device.wait(each, done)
        card.borrowed.append(_Loan(done, request, way))
        if not is_async:
            return request.result
        outcome = Outcome(card.device, job, way.mark(), given, way)
        return Work(task, request.result, self._config.timeout_s, outcome)

    def close(self, timeout_s: float) -> None:
        """Wait for the device and free everything; the worker has nothing left to do.

        Raises
        ------
        TransportTimeout
            The device still works.
        """
        card, self._card = self._card, None
        if card is None:
            return
        for way in dict.fromkeys((card.way, card.bounce)):
            way.close(timeout_s)
        card.borrowed.clear()
        card.device.close()

    def _begin(self, way: Way, call: DeviceCall, stream: Stream) -> tuple[Task, HostPart, Event]:
        """Give the device its part, and the worker the host's."""
        job, done = way.begin(call, stream)
        # Also of a call that could not be begun: what was begun of it must end.
        task = self._worker.submit(lambda: way.finish(job))
        if job.error is not None:
            task.wait()
            way.recycle(done)
            task.succeed()
        return task, job, done

    @staticmethod
    def _order(device: Device, later: Stream, earlier: Stream, way: Way) -> None:
        event = way.take_event()
        device.record(event, earlier)
        device.wait(later, event)
        way.recycle(event)

    def _open(self, ordinal: int) -> _Card:
        card = self._card
        if card is None:
            card = self._card = self._make(ordinal)
        if card.device.ordinal != ordinal:
            raise InvalidArgument(
                f"rank {self._rank}: an array on GPU {ordinal}, but this communicator works on GPU "
                f"{card.device.ordinal}, where its first one was: copy it, or make another "
                "communicator"
            )
        return card

    def _make(self, ordinal: int) -> _Card:
        device, kernels = self._open_device(ordinal)
        try:
            return self._choose(device, kernels)
        except BaseException:
            device.close()
            raise

    def _choose(self, device: Device, kernels: Kernels) -> _Card:
        """Find out with all ranks which way calls can take, the best first."""
        if not device.waits_on_memory:
            raise TransportError(
                f"rank {self._rank}: GPU {device.ordinal} cannot make a stream wait for the host "
                "(CAN_USE_64_BIT_STREAM_MEM_OPS is 0): copy the arrays to the host",
                rank=self._rank,
                status="NO_STREAM_WAIT",
            )
        bounce = self._bounce(device, self._run)
        why = self._why_not_direct()
        board = why or join(device, self._rank, self._nodes, self._gather)
        if isinstance(board, str):
            if self._config.ipc == "1":
                raise TransportError(
                    f"rank {self._rank}: GPUs do not reach each other's memory ({board}), and "
                    "R2CC_IPC=1 does without nothing else; set it to auto",
                    rank=self._rank,
                    status="NO_IPC",
                )
            return _Card(device, self._over_rails(device, kernels, bounce, board), bounce, deque())
        _log.info("rank %d: GPUs work on each other's memory", self._rank)
        return _Card(device, self._node_calls(device, kernels, board), bounce, deque())

    def _over_rails(self, device: Device, kernels: Kernels, bounce: Bounce, why: str) -> Way:
        """Return the way of calls in which GPUs do not work on each other's memory."""
        if self._nranks > 1:
            direct = self._open_direct(device, kernels)
            if not isinstance(direct, str):
                _log.info("rank %d: NICs reach the GPU's memory; %s", self._rank, why)
                return direct
            why = f"{why}; {direct}"
        _log.info("rank %d: GPU memory passes through the host: %s", self._rank, why)
        return bounce

    def _bounce(self, device: Device, run: HostCall) -> Bounce:
        return Bounce(
            device,
            self._rank,
            self._nranks,
            slot_nbytes=max(1, self._config.bounce_nbytes // 2),
            run=run,
            check=self._check,
            clock=monotonic,
            timeout_s=self._config.timeout_s,
        )

    def _node_calls(self, device: Device, kernels: Kernels, board: NoticeBoard) -> NodeCalls:
        members = next(node for node in self._nodes if self._rank in node)
        settings: dict[str, Any] = {
            "check": self._check,
            "clock": monotonic,
            "sleep": time.sleep,
            "timeout_s": self._config.timeout_s,
        }
        if len(self._nodes) == 1:
            return NodeCalls(device, kernels, board, members, **settings)
        group = tuple(sorted(node[board.index] for node in self._nodes))

        def run(call: CallSignature, source: Array, output: Array, own: Schedule | None) -> None:
            self._run_among(group, call, source, output)

        rails = self._bounce(device, run)
        return TieredCalls(device, kernels, board, members, rails=rails, **settings)

    def _why_not_direct(self) -> str:
        """Say what is known, alike on all ranks, to keep GPUs from each other's memory."""
        sizes = {len(node) for node in self._nodes}
        if self._config.ipc == "0":
            return "R2CC_IPC=0"
        if not 2 <= min(sizes) <= max(sizes) <= MOST_RANKS:
            return f"{min(sizes)} to {max(sizes)} ranks on a host; 2 to {MOST_RANKS} can"
        if len(sizes) > 1:
            return "hosts have different numbers of ranks"
        return ""

    def _let_go(self, card: _Card) -> None:
        """Let go of arrays the device is done with."""
        while card.borrowed and card.device.is_done(card.borrowed[0].done):
            loan = card.borrowed.popleft()
            loan.way.recycle(loan.done)


def _call_of(request: Request) -> DeviceCall:
    output = request.output
    return DeviceCall(
        request.signature,
        request.source.address,
        0 if output is None else output.address,
        request.schedule,
    )


__all__ = ["DeviceCalls", "OpenDevice", "OpenDirect", "Outcome", "Way"]
