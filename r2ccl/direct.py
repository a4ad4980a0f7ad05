"""Collectives on device memory over RDMA NICs: slices travel from and to the memory itself.

Theory of operation
-------------------
A call goes the way of one on host memory: the same plan, lanes, links and repairs. What differs is
that its spaces are device memory which every NIC has registered, and that slices are reduced by
kernels (`r2ccl.offload`). All the device is given at the call is to wait, on a stream of this
room's own, for the gate: a word in pinned memory that counts calls. The host, in the communicator's
worker, waits for what the caller's stream was given before, runs the collective to the end of its
last kernel, and lets the gate go on. A call that fails opens the gate too: what is there then is
worthless, the communicator has ended, and no stream hangs.

*What NICs wrote* may be read by a kernel of the caller that was launched before they did, and waits
behind the gate. So the last work of every call is given to the device after the last completion was
polled, and the gate opens once that work is known to be done.

*Arrays that NICs do not reach* (of the stream-ordered pool, managed, not aligned to their elements)
are copied, in the device, to and from memory that they do: which way all ranks take cannot depend
on one rank's array. Partial sums and landing places are such memory too (`r2ccl.wired`). What a
call needs of it is made, and its kernels are loaded, in `Direct.begin` before the device is given
anything that waits, because either may wait for the device. What only the plan knows (scratch of
some schedules, more landing places than there ever were) is allocated in the worker instead.

*Small calls* are for another way: `Direct.takes`.

Must not import a transport but its interface. Invariants: memory is registered while slices of it
travel; the gate only goes up, in the order of calls.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from r2ccl.bounce import DeviceCall
from r2ccl.clock import Clock
from r2ccl.config import Config
from r2ccl.device.base import Device, Event, Stream
from r2ccl.dtypes import dtype_of
from r2ccl.engine import Engine
from r2ccl.errors import TransportError, TransportTimeout
from r2ccl.executor import LandingPool, LaneRun
from r2ccl.gate import LINE_NBYTES, Gated
from r2ccl.kernels.cuda.form import Form
from r2ccl.lowering import Layout, cleared
from r2ccl.offload import DeviceOperands, Kernels, Offload, forms_of
from r2ccl.plans import Plans
from r2ccl.resilience.health import Health
from r2ccl.transport.base import Registered
from r2ccl.types import CallSignature, Collective
from r2ccl.wired import Purpose, WiredMemory

_log = logging.getLogger(__name__)

#: Tells all ranks something and returns what they say, by rank; all say as many bytes.
Gather = Callable[[bytes], Sequence[bytes]]


class DirectJob(msgspec.Struct, eq=False):
    """The host's part of a call.

    ``before`` is done when the caller's earlier work is; ``number`` is the call's at the gate.
    ``error`` is what spoiled it, if anything did.
    """

    call: DeviceCall
    before: Event
    number: int
    error: BaseException | None = None


class _Array(NamedTuple):
    """An array of the caller's that slices travel from or to, and what stands in for it if need be.

    ``is_read`` and ``is_written`` say what the collective does to it.
    """

    address: int
    purpose: Purpose
    is_read: bool
    is_written: bool


class Direct(Gated):
    """Collectives of one rank on the memory of one device; a `r2ccl.devicecalls.Way`.

    Parameters
    ----------
    device : Device
    kernels : Kernels
    engine : Engine
        Runs the collectives.
    plans : Plans
    whole : Health
        Of a communicator that agrees on none.
    memory : WiredMemory
        Owned.
    config : Config
    clock : Clock
    """

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        *,
        engine: Engine,
        plans: Plans,
        whole: Health,
        memory: WiredMemory,
        config: Config,
        clock: Clock,
    ) -> None:
        super().__init__(device, engine.progress.rank, nlines=2)
        self._kernels = kernels
        self._engine = engine
        self._plans = plans
        self._whole = whole
        self._memory = memory
        self._config = config
        self._clock = clock
        self._nranks = engine.progress.nranks
        self._pool = LandingPool(memory.place)
        self._offload = Offload(device, kernels)
        #: A word that only gives the device something to do last.
        self._last_word = int(self._pinned.ctypes.data) + LINE_NBYTES
        self._number = 0
        self._prepared: set[Form] = set()
        #: By the number of its allocation: whether NICs reach it.
        self._reached: dict[int, bool] = {}
        #: Layouts of plans, and what they become here.
        self._cleared: dict[int, tuple[Layout, Layout]] = {}
        self._nunfinished = 0
        self._finished = threading.Condition()

    def takes(self, call: DeviceCall) -> bool:
        """Whether a call is large enough for this way; alike on all ranks.

        Where a rank's part is one eager slice, a window's two copies through pinned memory cost
        less than a kernel for each step does.
        """
        signature = call.signature
        nbytes = signature.count * dtype_of(signature.dtype).itemsize
        return nbytes > self._config.eager_nbytes * self._nranks

    def begin(self, call: DeviceCall, stream: Stream) -> tuple[DirectJob, Event]:
        """Have the device wait for the call's end; the caller's `stream` is not touched but read.

        Returns
        -------
        DirectJob
            For `finish`, which must follow, in the order of `begin`. Its ``error`` says what could
            not be given.
        Event
            Done when the result is there. To be given back with `recycle`.

        Notes
        -----
        *Cost*: the first call on an allocation, of a size or an operation waits, on the host, for
        the calls begun before it.
        """
        done = self.take_event()
        job = DirectJob(call, self.take_event(), self._number)
        try:
            self._prepare(call)
            self._follow(stream, job.before)
            self._number += 1
            job.number = self._number
            self._wait_at_gate(job.number)
            self._device.record(done, self._stream)
        except Exception as exc:
            job.error = exc
        with self._finished:
            self._nunfinished += 1
        return job, done

    def finish(self, job: DirectJob) -> None:
        """Run the collective, and let the device go on; in the worker.

        Raises
        ------
        TransportTimeout
            The device did not end the work that the caller had given it before, or a kernel.
        TransportError
            The device failed, or there is no memory.
        R2cclError
            What ended the collective.
        """
        try:
            self.examine(job)
            self._await(job.before)
            self._carry_out(job.call)
        except BaseException as exc:
            job.error = exc
            # Kernels under way still write; they wait for nothing. What failed first is told.
            with contextlib.suppress(TransportError):
                self._offload.drain(_FAILED_S)
            raise
        finally:
            self._open_gate(job.number)
            self._events.append(job.before)
            with self._finished:
                self._nunfinished -= 1
                self._finished.notify_all()

    def close(self, timeout_s: float) -> None:
        """Wait for the device, and free everything; no job is left.

        Raises
        ------
        TransportTimeout
            The device still works on it; nothing was freed.
        """
        # Of calls that nobody finished.
        self._open_gate(self._number)
        until_s = self._clock() + timeout_s
        is_over = self._is_idle_in(timeout_s)
        if not is_over or not self._offload.drain(max(0.0, until_s - self._clock())):
            raise self._still("reduces", timeout_s)
        self._offload.close()
        self._free()
        self._memory.close()

    # Before the device waits

    def _prepare(self, call: DeviceCall) -> None:
        """Load kernels and make memory, unless that was done for an earlier call."""
        forms = [form for form in forms_of(call.signature) if form not in self._prepared]
        arrays = [each for each in self._arrays(call) if self._is_unknown(each)]
        areas = [
            (purpose, nbytes)
            for purpose, nbytes in self._areas(call)
            if not self._memory.has(purpose, nbytes)
        ]
        if not forms and not arrays and not areas:
            return
        self._await_finished()
        self._memory.tidy()
        for form in forms:
            self._kernels.prepare(form)
            self._prepared.add(form)
        for each in arrays:
            self._try(each.address, call.signature)
        for purpose, nbytes in self._areas(call):
            self._memory.area(purpose, nbytes)

    def _await_finished(self) -> None:
        until_s = self._clock() + self._config.timeout_s
        with self._finished:
            while not self._finished.wait_for(lambda: not self._nunfinished, _LOOK_S):
                self._require_time(until_s, "collectives begun before are not over")

    def _is_unknown(self, array: _Array) -> bool:
        return self._device.buffer_id(array.address) not in self._reached

    def _try(self, address: int, call: CallSignature) -> None:
        """Find out whether NICs reach an array of the caller's."""
        if len(self._reached) >= _MOST_ALLOCATIONS:
            self._reached.clear()
        try:
            self._memory.release(self._memory.register(address, _nbytes(call)))
        except TransportError as exc:
            self._give_up(address, exc)
        else:
            self._reached[self._device.buffer_id(address)] = True

    def _give_up(self, address: int, why: TransportError) -> None:
        """Have copies stand in for an allocation of the caller's from now on."""
        _log.info("rank %d: an array on the GPU is copied for the NICs: %s", self._rank, why)
        self._reached[self._device.buffer_id(address)] = False

    def _areas(self, call: DeviceCall) -> list[tuple[Purpose, int]]:
        """List what memory of this room's own a call needs; its arrays are known."""
        nbytes = _nbytes(call.signature)
        found = [each.purpose for each in self._arrays(call) if not self._is_wired(each, call)]
        if self._sums_apart(call):
            found.append(Purpose.OUTPUT)
        return [(purpose, nbytes) for purpose in found]

    # What the host does

    def _carry_out(self, call: DeviceCall) -> None:
        signature = call.signature
        nbytes = _nbytes(signature)
        if not nbytes:
            self._run(call, 0, 0)
            return
        held: list[Registered] = []
        places: dict[Purpose, int] = {}
        try:
            for each in self._arrays(call):
                places[each.purpose] = self._place(each, call, held)
            self._fetch(call, places)
            source = places.get(Purpose.INPUT, places.get(Purpose.OUTPUT, 0))
            output = places.get(Purpose.OUTPUT, source)
            if self._sums_apart(call):
                output = self._memory.area(Purpose.OUTPUT, nbytes)
            self._run(call, source, output)
            self._store(call, places, output)
            self._offload.mark(self._last_word, 0)
            self._settle()
        finally:
            for registered in held:
                self._memory.release(registered)

    def _arrays(self, call: DeviceCall) -> list[_Array]:
        """List the caller's arrays that slices travel from or to; one that is both, once."""
        kind, nbytes = call.signature.collective, _nbytes(call.signature)
        if not nbytes:
            return []
        if kind == Collective.ALLGATHER:
            return [_Array(call.output, Purpose.OUTPUT, False, True)]
        if self._sums_apart(call):
            return [_Array(call.source, Purpose.INPUT, True, False)]
        if call.source == call.output:
            return [_Array(call.source, Purpose.INPUT, True, True)]
        return [
            _Array(call.source, Purpose.INPUT, True, False),
            _Array(call.output, Purpose.OUTPUT, False, True),
        ]

    def _sums_apart(self, call: DeviceCall) -> bool:
        """Whether partial sums go to memory of this room's own."""
        return call.signature.collective == Collective.REDUCE_SCATTER or not call.output

    def _is_wired(self, array: _Array, call: DeviceCall) -> bool:
        dtype = dtype_of(call.signature.dtype)
        is_aligned = array.address % dtype.itemsize == 0
        return is_aligned and self._reached.get(self._device.buffer_id(array.address), False)

    def _place(self, array: _Array, call: DeviceCall, held: list[Registered]) -> int:
        """Return where slices travel from or to: the array, registered, or what stands for it."""
        nbytes = _nbytes(call.signature)
        if self._is_wired(array, call):
            try:
                held.append(self._memory.register(array.address, nbytes))
            except TransportError as exc:  # no room any more
                self._give_up(array.address, exc)
            else:
                return array.address
        place = self._memory.area(array.purpose, nbytes)
        if array.is_read:
            self._offload.copy(place, array.address, nbytes)
        return place

    def _fetch(self, call: DeviceCall, places: dict[Purpose, int]) -> None:
        """Have what NICs will read be there."""
        if call.signature.collective == Collective.ALLGATHER:
            width = _nbytes(call.signature) // self._nranks
            own = places[Purpose.OUTPUT] + self._rank * width
            if own != call.source:
                self._offload.copy(own, call.source, width)
        self._settle()

    def _store(self, call: DeviceCall, places: dict[Purpose, int], output: int) -> None:
        """Copy results to where the caller wants them, unless they are there."""
        nbytes = _nbytes(call.signature)
        if call.signature.collective == Collective.REDUCE_SCATTER:
            width = nbytes // self._nranks
            self._offload.copy(call.output, output + self._rank * width, width)
        for each in self._arrays(call):
            if each.is_written and places[each.purpose] != each.address:
                self._offload.copy(each.address, places[each.purpose], nbytes)

    def _run(self, call: DeviceCall, source: int, output: int) -> None:
        engine, signature = self._engine, call.signature
        health = engine.enter() or self._whole
        plan = self._plans(signature, health, engine.progress.op, call.schedule)
        layout = self._cleared_of(plan.layout)
        scratch = 0
        if layout.uses_scratch:
            scratch = self._memory.area(Purpose.SCRATCH, _nbytes(signature))
        operands = DeviceOperands(
            layout,
            signature,
            (source, output, scratch),
            nranks=self._nranks,
            offload=self._offload,
            is_gauge=plan.is_gauge,
        )

        def make() -> list[LaneRun]:
            return [LaneRun(lane, operands, engine.progress, self._pool) for lane in layout.lanes]

        engine.run(plan.signature, make, layout.peers, self._offload)

    def _cleared_of(self, layout: Layout) -> Layout:
        # The key names the layout for as long as it is held here.
        found = self._cleared.get(id(layout))
        if found is None:
            if len(self._cleared) >= _MOST_LAYOUTS:
                self._cleared.pop(next(iter(self._cleared)))
            found = self._cleared[id(layout)] = (layout, cleared(layout))
        return found[1]

    def _await(self, event: Event) -> None:
        until_s = self._clock() + self._config.timeout_s
        while not self._device.synchronize(event, _LOOK_S):
            self._require_time(until_s, "the GPU has not done what its stream was given before")

    def _settle(self) -> None:
        """Wait for copies that nothing else waits for."""
        until_s = self._clock() + self._config.timeout_s
        while not self._offload.drain(_LOOK_S):
            self._require_time(until_s, "the GPU has not done its copies of a collective")

    def _require_time(self, until_s: float, what: str) -> None:
        self._engine.check()
        if self._clock() >= until_s:
            raise TransportTimeout(
                f"rank {self._rank}: {what} in {self._config.timeout_s:g} s; look for a kernel "
                "that hangs, or raise R2CC_TIMEOUT_S",
                rank=self._rank,
                status="TIMEOUT",
            )


def open_direct(
    device: Device,
    kernels: Kernels,
    *,
    engine: Engine,
    plans: Plans,
    whole: Health,
    config: Config,
    clock: Clock,
    gather: Gather,
) -> Direct | str:
    """Find out together whether all ranks' NICs reach their GPUs' memory.

    Nothing is believed: every rank registers the memory that its slices will land in.

    Returns
    -------
    Direct or str
        On all ranks the way, or on all of them why there is none.

    Notes
    -----
    *Collective*: all ranks. *Cost*: two small messages to all.
    """
    memory: WiredMemory | None = None
    why = ""
    try:
        memory = WiredMemory(
            device,
            engine.progress.transport.register_device,
            engine.call,
            config.bounce_nbytes,
        )
    except TransportError as exc:
        why = str(exc)
    said = gather(why.encode()[:_REASON_NBYTES].ljust(_REASON_NBYTES, b"\0"))
    for rank, answer in enumerate(said):
        reason = answer.rstrip(b"\0").decode(errors="replace")
        if reason:
            if memory is not None:
                memory.close()
            return f"rank {rank}: {reason}"
    assert memory is not None
    return Direct(
        device,
        kernels,
        engine=engine,
        plans=plans,
        whole=whole,
        memory=memory,
        config=config,
        clock=clock,
    )


def _nbytes(call: CallSignature) -> int:
    return call.count * dtype_of(call.dtype).itemsize


#: The communicator's end is looked for this often while the device is waited for.
_LOOK_S = 0.05
#: How long the kernels of a call that failed are waited for.
_FAILED_S = 5.0
_REASON_NBYTES = 400
_MOST_LAYOUTS = 256
_MOST_ALLOCATIONS = 4096

__all__ = ["Direct", "DirectJob", "Gather", "open_direct"]
