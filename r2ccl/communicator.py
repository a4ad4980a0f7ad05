"""Communicator: the collectives of a group of ranks, its state, and its end."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np

from r2ccl.algos.neighbors import neighbors
from r2ccl.bootstrap.control import ControlPlane
from r2ccl.bootstrap.messages import PeerInfo
from r2ccl.clock import monotonic
from r2ccl.config import Config
from r2ccl.device.base import Device
from r2ccl.errors import (
    CommunicatorRevoked,
    InvalidArgument,
    TransportError,
    TransportTimeout,
)
from r2ccl.failover.context import RankContext
from r2ccl.failover.diagnosis.port_map import port_map_of
from r2ccl.failover.diagnosis.verdict import Verdict
from r2ccl.failover.health.driver import Known
from r2ccl.failover.migration.repairs import Repair
from r2ccl.failover.shrink.driver import EventQueue, regroup
from r2ccl.failover.shrink.protocol import Shrinking
from r2ccl.gpu.collectives import DeviceCollectives
from r2ccl.gpu.hardware import Hardware
from r2ccl.gpu.plan_selector import PlanSelector
from r2ccl.planning.cost_model import Fabric
from r2ccl.planning.plan_cache import PlanCache
from r2ccl.planning.planner import Explanation
from r2ccl.runtime import arguments, forking, status
from r2ccl.runtime.arguments import as_buffer
from r2ccl.runtime.async_work import Worker
from r2ccl.runtime.collectives import Collectives
from r2ccl.runtime.ending import Ending
from r2ccl.runtime.engine import Engine, RegisteredMemory
from r2ccl.runtime.executor import LandingPool
from r2ccl.runtime.signal_dump import SignalDump, require_main_thread, write_line
from r2ccl.schedule.ir import Schedule
from r2ccl.topology.monitor import LinkMonitor
from r2ccl.transport.base import Transport
from r2ccl.types import Nic, ReduceOp

if TYPE_CHECKING:
    from r2ccl.gpu.backends import GpuBackend
    from r2ccl.gpu.pxn.transport import PxnTransport

_log = logging.getLogger(__name__)


class Communicator:
    """A group of ranks that run collectives together; made by `r2ccl.init`.

    Every method that is marked *collective* must be called by all ranks in the same order.

    Attributes
    ----------
    rank, nranks : int
        This process's number, from 0, and how many there are.
    members : tuple of int
        By rank, the rank it had in the communicator this one was shrunk from; its own in one
        that `r2ccl.init` made.
    config : Config
        The settings in force.
    """

    def __init__(
        self,
        control: ControlPlane,
        transport: Transport,
        config: Config,
        rails: Sequence[Nic] = (),
        *,
        members: tuple[int, ...],
        assemble: Assemble,
        hardware: Hardware,
        relayed: PxnTransport | None = None,
    ) -> None:
        self.rank = control.rank
        self.nranks = control.nranks
        self.members = members
        self.config = config
        self._assemble = assemble
        self._hardware = hardware
        self._relayed = relayed
        self._control = control
        self._nrails = transport.nrails
        #: The local ends of all rails; the control plane knows those of sockets.
        self._rails = tuple(rails) or control.nics
        #: This process is a child of the one that made it.
        self._is_forked = False
        #: All ranks have taken leave: there is nobody to be told of anything.
        self._is_left = False
        self._monitor: LinkMonitor | None = None
        self._signal_dump: SignalDump | None = None
        nodes = _nodes(control.peers)
        context = RankContext(
            self.rank,
            self.nranks,
            transport,
            control,
            config,
            monotonic,
            nwires=control.nwires,
            last_resorts=control.last_resorts,
            nodes=nodes,
            hosts=[info.hostname for info in control.peers],
            port_map=port_map_of(self.rank, control.peers, self._rails),
            neighbors=neighbors(self.rank, self.nranks, nodes),
        )
        self._engine = Engine(context, control)
        fabric = Fabric(context.homes, control.nwires, nodes)
        self._plans = PlanCache(self.rank, self.nranks, fabric, config)
        turn = threading.Lock()
        self._worker = Worker(f"r2ccl-worker-{self.rank}", turn, self._engine.fail_call)
        self._on_device = DeviceCollectives(
            self.rank,
            timeout_s=config.timeout_s,
            worker=self._worker,
            check=self._engine.check,
            open_device=hardware.open,
            select_backends=self._select_backends,
        )
        self._collectives = Collectives(
            self._engine,
            self._plans,
            LandingPool(transport.allocate, config.landing_depth),
            worker=self._worker,
            turn=turn,
            start_on_device=self._on_device.start,
        )
        self._ending = Ending(
            f"r2ccl-ending-{self.rank}",
            (self._end_calls, control.close, self._end_data),
        )
        self._event_queue = EventQueue(self._engine)

    def connect(self) -> None:
        """Start the control plane and connect every rail; `r2ccl.init` calls it."""
        try:
            self._ending.prepare()
            forking.hold(self, Communicator._descriptors, Communicator._disable)
            if self.config.dump_signal:
                self.dump_on_signal(signal.Signals[self.config.dump_signal])
            self._control.start(self._event_queue)
            self._monitor = self._watch_carriers()
            self._engine.start()
            if self._is_measured():
                rates = self._collectives.calibrate()
                self._plans.measured(rates)
                if len({info.host for info in self._control.peers}) == self.nranks:
                    self._engine.set_nominal_rate(rates.beta)
        except BaseException as exc:
            self._abort_surely(f"init() failed: {exc!r}")
            raise

    def allreduce(
        self,
        x: Any,
        out: Any = None,
        op: ReduceOp = ReduceOp.SUM,
        *,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce `x` over all ranks; every rank gets the result.

        Parameters
        ----------
        x : array_like, any shape
            In host memory on all ranks, or in device memory on all. C-contiguous, of the same
            dtype and number of elements. Borrowed until the call is done.
        out : array_like, optional
            Gets the result: the same memory as `x` or disjoint from it. Default: `x` itself.
        op : ReduceOp
            SUM, PROD, MIN, MAX or AVG (the sum divided by ``nranks``).
        stream : optional
            For device memory: the stream whose earlier work makes `x`, and whose later work sees
            the result. A handle, or a stream of CuPy, Numba, torch, or with ``__cuda_stream__``.
            Default: the current stream of the array's library.
        async_op : bool
            Return at once, with a `Work` to wait for.

        Returns
        -------
        array_like
            `out`, or `x` if there is none; with ``async_op`` a `Work` that gives it. On device
            memory the call returns at once in any case: what `stream` is given next sees the
            result. With ``async_op`` not even that waits for it, until `Work.order` says so.

        Raises
        ------
        InvalidArgument
            Wrong memory, dtype or op (before any byte moves), or ranks that disagree on the
            call; the latter revokes the communicator on every rank.
        NoHealthyRail, PeerLost, TransportTimeout
            See `r2ccl.errors`; they revoke the communicator. Of a call on device memory, and with
            ``async_op``, they are raised by `Work.wait` and by whatever is called next.
        CommunicatorRevoked
            It was revoked before.
        ConcurrentCalls
            Another thread is in a blocking call.

        Notes
        -----
        *Collective*: all ranks. *Cost*: up to one eager slice, log2(n) exchanges of the data;
        above, a ring that sends 2(n - 1)/n of the data per rank. *After failure*: a path that
        fails changes nothing in the result, bit for bit; later calls, planned for what is left,
        may round differently (docs/fault-model.md). If the call raises, `out` is undefined.
        Calls of one communicator are carried out in their order, whatever they are asynchronous to.
        """
        return self._collectives.start(stream, async_op, arguments.allreduce, x, out, op)

    def allgather(
        self, x: Any, out: Any = None, *, stream: Any = None, async_op: bool = False
    ) -> Any:
        """Collect every rank's `x` on every rank.

        Parameters
        ----------
        x : array_like, any shape
            As for `allreduce`; may be this rank's own part of `out`, which saves a copy.
        out : array_like, optional
            Gets all ranks' data in the order of their ranks: ``nranks`` times as many elements as
            `x`, of its dtype. Default: a new array of shape ``(nranks, *x.shape)``.
        stream, async_op
            As for `allreduce`.

        Returns
        -------
        array_like
            `out`, or the new array.

        Raises
        ------
        InvalidArgument
            As `allreduce`; or `out` has another size or overlaps `x` elsewhere than in place.
        NoHealthyRail, PeerLost, TransportTimeout, CommunicatorRevoked
            As `allreduce`.

        Notes
        -----
        *Collective*: all ranks. *Cost*: a ring that sends (n - 1)/n of `out` per rank.
        """
        make = arguments.allgather
        return self._collectives.start(stream, async_op, make, x, out, self.rank, self.nranks)

    def reduce_scatter(
        self,
        x: Any,
        out: Any = None,
        op: ReduceOp = ReduceOp.SUM,
        *,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce `x` over all ranks; each rank gets its part of the result.

        Parameters
        ----------
        x : array_like
            As for `allreduce`; its number of elements is a multiple of ``nranks``. Not changed,
            unless `out` is a part of it.
        out : array_like, optional
            Gets the part of this rank's number, an ``nranks``-th; it may be that part of `x`
            itself. Default: a new array, of shape ``(x.shape[0] / nranks, *x.shape[1:])`` where
            that is an integer, else flat.
        op : ReduceOp
            As for `allreduce`.
        stream, async_op
            As for `allreduce`.

        Returns
        -------
        array_like
            `out`, or the new array.

        Raises
        ------
        InvalidArgument
            As `allreduce`; or `x` is no multiple, `out` no part of that size, or it overlaps `x`
            elsewhere than in place.
        NoHealthyRail, PeerLost, TransportTimeout, CommunicatorRevoked
            As `allreduce`.

        Notes
        -----
        *Collective*: all ranks. *Cost*: a ring that sends (n - 1)/n of `x` per rank, and memory of
        the size of `x` for partial sums, kept from call to call.
        """
        make = arguments.reduce_scatter
        return self._collectives.start(stream, async_op, make, x, out, op, self.rank, self.nranks)

    def broadcast(
        self,
        x: Any,
        out: Any = None,
        root: int = 0,
        *,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Give every rank the data of rank `root`.

        Parameters
        ----------
        x : array_like, any shape
            On `root` the data, elsewhere what gets it unless there is an `out`. Of the same dtype
            and number of elements on all ranks.
        out : array_like, optional
            Gets the data: the same memory as `x` or disjoint from it. Default: `x` itself.
        root : int
        stream, async_op
            As for `allreduce`.

        Returns
        -------
        array_like
            `out`, or `x` if there is none.

        Raises
        ------
        InvalidArgument
            As `allreduce`; or there is no such root.
        NoHealthyRail, PeerLost, TransportTimeout, CommunicatorRevoked
            As `allreduce`.

        Notes
        -----
        *Collective*: all ranks. *Cost*: up to one eager slice, log2(n) messages one after another;
        above, a pipeline through all ranks in which each receives and sends the data once.
        """
        self._require_rank(root)
        return self._collectives.start(stream, async_op, arguments.broadcast, x, out, root)

    def reduce(
        self,
        x: Any,
        out: Any = None,
        op: ReduceOp = ReduceOp.SUM,
        root: int = 0,
        *,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce `x` over all ranks; rank `root` gets the result.

        Parameters
        ----------
        x : array_like, any shape
            As for `allreduce`. Not changed, except on `root` where there is no `out`.
        out : array_like, optional
            On `root`, gets the result; as for `allreduce`. Ignored elsewhere.
        op : ReduceOp
            As for `allreduce`.
        root : int
        stream, async_op
            As for `allreduce`.

        Returns
        -------
        array_like or None
            On `root` `out`, or `x` if there is none; None elsewhere.

        Raises
        ------
        InvalidArgument
            As `allreduce`; or there is no such root.
        NoHealthyRail, PeerLost, TransportTimeout, CommunicatorRevoked
            As `allreduce`.

        Notes
        -----
        *Collective*: all ranks. *Cost*: as `broadcast`, the other way; elsewhere than on `root`
        memory of the size of `x` for partial sums, kept from call to call.
        """
        self._require_rank(root)
        return self._collectives.start(
            stream, async_op, arguments.reduce, x, out, op, root, self.rank
        )

    def run_schedule(
        self,
        schedule: Schedule,
        x: Any,
        out: Any = None,
        op: ReduceOp = ReduceOp.SUM,
        *,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Run an allreduce by a schedule of your own, as resilient as any other.

        Parameters
        ----------
        schedule : Schedule
            An allreduce of `nranks` ranks, the same on all of them: of `r2ccl.algos`, or made with
            `r2ccl.schedule.build`. Its edges are spread over the rails, its chunks cut in slices.
        x, out, op, stream, async_op
            As for `allreduce`.

        Returns
        -------
        array_like
            `out`, or `x` if there is none.

        Raises
        ------
        ScheduleError
            The checker refuses it: it would not leave every contribution everywhere, once.
        InvalidArgument
            As `allreduce`; or it is another collective, or of another number of ranks.
        NoHealthyRail, PeerLost, TransportTimeout, CommunicatorRevoked
            As `allreduce`.

        Notes
        -----
        *Collective*: all ranks. *Cost*: `check`, once for a schedule, size and state of the rails.
        """
        if (schedule.collective, schedule.nranks) != ("allreduce", self.nranks):
            raise InvalidArgument(
                f"schedule of {schedule.collective} over {schedule.nranks} ranks; give an "
                f"allreduce over {self.nranks}"
            )
        return self._collectives.start(stream, async_op, arguments.allreduce, x, out, op, schedule)

    def explain(self, nbytes: int) -> Explanation:
        """Compare the schedules that an allreduce of `nbytes` could run; ``str()`` is a table.

        Notes
        -----
        *Local*, from the health of all ranks' rails that this one knows: what runs next is the
        same for all ranks, and this can be one change of health older.
        """
        if nbytes < 0:
            raise InvalidArgument(f"nbytes={nbytes}; allowed is 0 or more")
        return self._plans.explain(nbytes, self.known_health().health)

    @property
    def ncalls(self) -> int:
        """Collectives so far; `r2ccl.init` makes some too, where it measures the network."""
        return self._engine.op

    def register(self, x: Any) -> RegisteredMemory:
        """Have slices of `x` travel from and to its own memory, without a copy.

        Over RDMA, memory that is not registered passes through buffers that are; registering a
        buffer that is used again and again saves that copy. Over TCP there is nothing to save and
        the call does nothing.

        Parameters
        ----------
        x : array_like in host memory
            C-contiguous and writable. Not kept alive: the registration ends with it.

        Returns
        -------
        RegisteredMemory
            A context manager; leaving it (or ``close()``) ends the registration.

        Raises
        ------
        InvalidArgument
            Wrong memory.
        TransportError
            A NIC refused, or ``R2CC_REGISTRATION_LIMIT_NBYTES`` would be exceeded.

        Notes
        -----
        *Local*: ranks need not do it alike.
        """
        memory = as_buffer(x, writable=True).array.view(np.uint8)
        return self._engine.register(memory)

    def barrier(self) -> None:
        """Return when all ranks have called it.

        Notes
        -----
        *Collective*: all ranks. *Cost*: log2(n) empty messages.
        """
        self._collectives.barrier()

    def repairs(self) -> tuple[Repair, ...]:
        """Return what was repaired at this rank, oldest first: what moved where, when, why."""
        return self._engine.repairs()

    def health(self) -> status.HealthReport:
        """Return the state of this rank's rails: to which peer since when, and why not.

        Notes
        -----
        *Local*, in any thread, at once. ``str()`` of it is for people.
        """
        rails = self._engine.rails(self._rails)
        return status.HealthReport(self.rank, monotonic(), rails)

    def verdicts(self) -> tuple[Verdict, ...]:
        """Return what this rank last found to be wrong with each path; ``str()`` is for people.

        Empty with ``R2CC_MODE=failstop``, which looks into nothing.

        Notes
        -----
        *Local*, in any thread, at once.
        """
        return self._engine.verdicts()

    def known_health(self) -> Known:
        """Return the newest health of all ranks' rails this one has heard of, and since when.

        All ranks plan with it from an agreed collective on. Version 0 is whole; with
        ``R2CC_MODE=failstop`` there is no other.

        Notes
        -----
        *Local*, in any thread, at once.
        """
        return self._engine.known_health() or Known(self._engine.whole_health, 0.0)

    def pending(self) -> status.Pending:
        """Return what this rank waits for: which ranks have not called, which links wait for whom.

        Notes
        -----
        *Local*, at once; meant for another thread while a call blocks. ``str()`` of it is for
        people. A rank that has called is known as such once it sent something to this one, or
        answered: a call that stands still for ``R2CC_SUSPICION_TIMEOUT_S`` asks.
        """
        return self._engine.pending()

    def dump(self) -> str:
        """Return the whole status as one line of JSON.

        The call under way, what it waits for, every path, link, peer and repair: the fields are
        those of `r2ccl.runtime.status.RankStatus`.

        Notes
        -----
        *Local*, in any thread, at once.
        """
        peers = [info for info in self._control.peers if info.rank != self.rank]
        read = self._engine.status(peers, self._control.last_heard)
        return msgspec.json.encode(read).decode()

    def dump_on_signal(self, signum: int = signal.SIGUSR1) -> None:
        """Write `dump` to stderr, or to ``R2CC_DUMP_FILE``, whenever `signum` comes.

        Also while the main thread is inside a call. The handler that was there before is called
        after it, and put back by ``close()`` or ``abort()``. ``R2CC_DUMP_SIGNAL=SIGUSR1`` does it
        from the start.

        Raises
        ------
        InvalidArgument
            This is not the main thread, or `signum` cannot be handled.

        Notes
        -----
        *Local*.
        """
        path = self.config.dump_file.replace("{rank}", str(self.rank))
        if self._signal_dump is not None:
            self._signal_dump.close()
        self._signal_dump = SignalDump(signum, lambda: write_line(self.dump(), path))

    def rejections(self) -> dict[str, int]:
        """How many connections and frames of strangers were turned away, per reason."""
        return dict(self._control.rejections())

    def close(self) -> None:
        """Wait until every rank has all its data, then leave. Idempotent.

        If a blocking collective is under way in another thread, or below the signal handler that
        calls this, it is an `abort`. Asynchronous calls are waited for.

        Notes
        -----
        *Collective*: all ranks. A communicator that was revoked is left at once.

        Raises
        ------
        TransportTimeout
            Some rank did not call it within ``R2CC_INIT_TIMEOUT_S``; names it.
        CommunicatorRevoked
            An asynchronous call failed, and nobody waited for it or called after it.
        """
        if self._collectives.is_blocking and not self._is_forked:
            self.abort("close() was called while a collective was under way")
            return
        if self._collectives.is_closed:
            self._event_queue.end("close() was called")
            self._free(_LEAVE_S)
            return
        self._collectives.close(self._closed)
        try:
            if not self._worker.drain(self.config.init_timeout_s):
                raise TransportTimeout(
                    f"rank {self.rank}: close() waited {self.config.init_timeout_s:g} s for "
                    f"asynchronous calls: {self.pending()}; wait for them before, or raise "
                    "R2CC_INIT_TIMEOUT_S",
                    rank=self.rank,
                    status="TIMEOUT",
                )
            if self._engine.error is None:
                self._collectives.in_turn(self._engine.leave)
                self._is_left = True
        finally:
            self._free(_LEAVE_S)
        self._collectives.require_seen()

    def abort(self, why: str = "abort() was called") -> None:
        """Leave at once and revoke the communicator on every rank; returns within a second.

        Notes
        -----
        *Local*, in any thread and in a signal handler. Calls that are under way, here and
        elsewhere, end with `CommunicatorRevoked`. Idempotent.
        """
        self._collectives.close(self._forked if self._is_forked else self._closed)
        if not self._is_left and not self._is_forked:
            self._engine.revoke(why)
            self._event_queue.end(why)
        self._free(_ABORT_S)

    def revoke(self, why: str = "revoke() was called") -> None:
        """End the communicator on every rank, without leaving it: `shrink` can follow.

        Every call that is blocked, here or elsewhere, ends with `CommunicatorRevoked`, and so does
        every later one. A communicator that has ended keeps its first reason.

        Notes
        -----
        *Local*, in any thread and in a signal handler, at once.
        """
        if not self._collectives.is_closed:
            self._engine.revoke(why)

    def shrink(self, *, quorum: str = "majority") -> Communicator:
        """Go on without the ranks that are gone.

        Call it after `PeerLost`, or after `CommunicatorRevoked` because of it; a communicator that
        still works is revoked first. This one is left and closed, whatever comes of it.

        Parameters
        ----------
        quorum : {"majority", "any"}
            Who may go on: more than half of the ranks, or half of them with rank 0, so that of two
            sides that do not reach each other at most one does; or whoever is left, for those who
            know that no other side is alive.

        Returns
        -------
        Communicator
            Of the ranks that called it, numbered in their old order; its ``members`` are their old
            ranks. A rank that dies too late to be left out is lost in the new one: shrink again.

        Raises
        ------
        NoQuorum
            Too few are left.
        TransportTimeout
            A rank that is alive did not call, or could not be connected, within
            ``R2CC_INIT_TIMEOUT_S``; names it.
        TransportError
            There is no rail that all who are left could open again.
        CommunicatorRevoked
            This communicator was closed.

        Notes
        -----
        *Collective*: all ranks that are left. *Cost*: one message to each of them per death, then
        that of connecting. The ranks may have failed in different calls: what was done last
        everywhere is the minimum over the new communicator. Planned faults are not injected again.
        """
        if self._collectives.is_closed:
            raise self._closed()
        if self.config.dump_signal:
            require_main_thread()
        table = Shrinking(self.rank, self.nranks, quorum)
        if self._engine.error is None:
            self._engine.revoke("shrink() was called")
        self._collectives.close(self._closed)
        leave_s = _ABORT_S
        try:
            successor = regroup(table, self._event_queue, self._control, self._assemble)
            leave_s = _LEAVE_S
        finally:
            self._free(leave_s)
        return successor

    def _descriptors(self) -> list[int]:
        """List the open file descriptors, for the child of a fork."""
        monitor = [] if self._monitor is None else [self._monitor.fileno()]
        return [*monitor, *self._control.descriptors(), *self._engine.descriptors()]

    def _disable(self) -> None:
        """Make every later call raise; run in the child of a fork."""
        self._is_forked = True
        self._collectives.close(self._forked)
        self._control.disable()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if exc is None:
            self.close()
            return
        self._abort_surely(f"left with {exc!r}")

    def __repr__(self) -> str:
        return f"<r2ccl.Communicator rank {self.rank} of {self.nranks}, {self._nrails} rails>"

    def _watch_carriers(self) -> LinkMonitor:
        """Have carrier events of the rails' NICs reach the engine, in the control thread."""
        monitor = LinkMonitor()

        def read() -> None:
            for event in monitor.read():
                for rail, nic in enumerate(self._control.nics):
                    if event.concerns(nic):
                        self._engine.on_carrier(rail, event.is_up)

        self._control.add_reader(monitor.fileno(), read)
        return monitor

    def _abort_surely(self, why: str) -> None:
        """Abort, once more if Ctrl-C comes in between."""
        try:
            self.abort(why)
        except KeyboardInterrupt:
            self.abort(why)
            raise

    def _free(self, deadline_s: float) -> None:
        """Begin to free everything, if nobody has; wait `deadline_s` + `_BOUND_S` at most."""
        if self._is_forked:
            return
        if self._signal_dump is not None:
            self._signal_dump.close()
        if not self._is_left:
            self._engine.tell_why()
        self._ending.begin(deadline_s)
        # A call below the signal handler this runs in owns the data: wait for the goodbyes alone.
        nsteps = 2 if self._collectives.is_below else None
        self._ending.wait(deadline_s + _BOUND_S, nsteps=nsteps)

    def _end_calls(self, deadline_s: float) -> None:
        """Have what goes on asynchronously end, and free the devices."""
        if not self._worker.is_idle and self._engine.error is None:
            self._engine.revoke("left while asynchronous calls were under way")
        if not self._worker.close(deadline_s):
            _log.error("rank %d: an asynchronous call did not end; its memory is kept", self.rank)
            return
        try:
            self._on_device.close(deadline_s)
        except TransportError as exc:
            _log.error("rank %d: %s", self.rank, exc)

    def _end_data(self, deadline_s: float) -> None:
        if self._monitor is not None:
            self._monitor.close()
        self._engine.close()

    def _is_measured(self) -> bool:
        """Whether schedules are chosen by measured rates."""
        fabric = self._plans.fabric
        nnodes = len(set(fabric.nodes)) if fabric.nodes else self.nranks
        return fabric.nwires > 1 and nnodes > 1 and self.config.is_planned

    def _select_backends(self, device: Device, kernels: Any) -> tuple[GpuBackend, ...]:
        from r2ccl.gpu.backends import (
            BackendSelector,  # with the kernels, which take 18 ms to import
        )

        selector = BackendSelector(
            self._engine,
            PlanSelector(self._engine, self._plans),
            self._collectives.run_plan,
            config=self.config,
            nodes=_members(self._control.peers),
            allgather=self._collectives.allgather_bytes,
            labels=[self._rails[at].name for at in self._engine.joined],
            hardware=self._hardware,
            pxn=self._relayed,
        )
        return selector.select(device, kernels)

    def _closed(self) -> CommunicatorRevoked:
        return CommunicatorRevoked(f"rank {self.rank}: the communicator was closed")

    def _forked(self) -> CommunicatorRevoked:
        return CommunicatorRevoked(
            f"rank {self.rank}: this process was forked from the one that made the "
            "communicator, which alone can use it: start workers by spawn, or have them "
            "make one of their own"
        )

    def _require_rank(self, root: int) -> None:
        if not 0 <= root < self.nranks:
            raise InvalidArgument(f"root={root}; allowed is 0 to {self.nranks - 1}")


def _members(peers: Sequence[PeerInfo]) -> tuple[tuple[int, ...], ...]:
    """Of every host its ranks."""
    hosts: dict[str, list[int]] = {}
    for info in peers:
        hosts.setdefault(info.host, []).append(info.rank)
    return tuple(tuple(sorted(ranks)) for ranks in hosts.values())


def _nodes(peers: Sequence[PeerInfo]) -> tuple[int, ...]:
    """Number the nodes of all ranks; empty if each has its own, or all share one."""
    numbers: dict[str, int] = {}
    nodes = tuple(numbers.setdefault(info.host, len(numbers)) for info in peers)
    return nodes if 1 < len(numbers) < len(nodes) else ()


#: Puts together the communicator, not connected yet, of a control plane and its `members`. The
#: control plane is its own, even if it raises.
Assemble: TypeAlias = Callable[[ControlPlane, tuple[int, ...]], Communicator]

#: How long an orderly and a forced goodbye may take.
_LEAVE_S = 5.0
_ABORT_S = 0.5
#: Time that `_free` waits beyond that; the ending thread goes on afterwards.
_BOUND_S = 0.4

__all__ = ["Communicator"]
