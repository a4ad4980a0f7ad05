"""The user's object: validate, plan, run.

Nothing is decided here: `planner` chooses the schedule, `executor` walks it, `engine` waits.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeAlias

import msgspec
import numpy as np

from r2ccl import kernels, ledger
from r2ccl.bootstrap.control import ControlPlane
from r2ccl.bootstrap.messages import PeerInfo
from r2ccl.buffers import Array, as_buffer, as_buffers, is_in_place, like, like_part, part_of
from r2ccl.calibration import calibrate
from r2ccl.clock import monotonic
from r2ccl.config import Config
from r2ccl.council import Known
from r2ccl.detector import places_of
from r2ccl.dumping import SignalDump, require_main_thread, write_line
from r2ccl.engine import Engine
from r2ccl.errors import CommunicatorRevoked, InvalidArgument
from r2ccl.executor import Call, LandingPool, LaneRun
from r2ccl.memory import RegisteredMemory
from r2ccl.planner import Explanation
from r2ccl.plans import Plan, Plans
from r2ccl.prediction import Fabric, Rates
from r2ccl.regroup import Tidings, regroup
from r2ccl.repair import Repair
from r2ccl.resilience.health import Health
from r2ccl.resilience.shrinking import Shrinking
from r2ccl.resilience.verdict import Verdict
from r2ccl.schedule.ir import Schedule
from r2ccl.topology.monitor import LinkMonitor
from r2ccl.transport.base import Transport
from r2ccl.types import CallSignature, Collective, Nic, ReduceOp


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
    ) -> None:
        self.rank = control.rank
        self.nranks = control.nranks
        self.members = members
        self.config = config
        self._assemble = assemble
        self._control = control
        self._nrails = transport.nrails
        #: The local ends of all rails; the control plane knows those of sockets.
        self._rails = tuple(rails) or control.nics
        self._pool = LandingPool(transport.allocate)
        #: Where partial sums go that are no result of this rank's.
        self._scratch = np.empty(0, np.uint8)
        self._quiet = kernels.quiet_context()
        self._nothing = as_buffer(np.empty(0, np.uint8), writable=True)
        self._is_closed = False
        self._monitor: LinkMonitor | None = None
        self._signal_dump: SignalDump | None = None
        self._engine = Engine(
            self.rank,
            self.nranks,
            transport=transport,
            control=control,
            config=config,
            clock=monotonic,
            nwires=control.nwires,
        )
        self._whole = Health.whole(self.nranks, self._nrails, config.digest())
        self._engine.recovery.nodes = _nodes(control.peers)
        fabric = Fabric(self._engine.recovery.homes, control.nwires, self._engine.recovery.nodes)
        self._plans = Plans(self.rank, self.nranks, fabric, config)
        self._tidings = Tidings(self._engine)
        self._engine.recovery.hosts = [info.hostname for info in control.peers]
        if self._engine.recovery.detector is not None:
            places = places_of(self.rank, control.peers, self._rails)
            self._engine.recovery.detector.places = places

    def connect(self) -> None:
        """Start the control plane and connect every rail; `r2ccl.init` calls it."""
        try:
            if self.config.dump_signal:
                self.dump_on_signal(signal.Signals[self.config.dump_signal])
            self._control.start(self._tidings)
            self._monitor = self._watch_carriers()
            self._engine.start()
            if self._is_measured():
                self._plans.measured(self._calibrate())
        except BaseException:
            self._is_closed = True
            self._free(_ABORT_S)
            raise

    def allreduce(self, x: Any, out: Any = None, op: ReduceOp = ReduceOp.SUM) -> Any:
        """Reduce `x` over all ranks; every rank gets the result.

        Parameters
        ----------
        x : array_like in host memory, any shape
            C-contiguous, of the same dtype and number of elements on all ranks. Borrowed until
            the call returns.
        out : array_like, optional
            Gets the result: the same memory as `x` or disjoint from it. Default: `x` itself.
        op : ReduceOp
            SUM, PROD, MIN, MAX or AVG (the sum divided by ``nranks``).

        Returns
        -------
        array_like
            `out`, or `x` if there is none.

        Raises
        ------
        InvalidArgument
            Wrong memory, dtype or op (before any byte moves), or ranks that disagree on the
            call; the latter revokes the communicator on every rank.
        NoHealthyRail, PeerLost, TransportTimeout
            See `r2ccl.errors`; they revoke the communicator.
        CommunicatorRevoked
            It was revoked before.

        Notes
        -----
        *Collective*: all ranks. *Cost*: up to one eager slice, log2(n) exchanges of the data;
        above, a ring that sends 2(n - 1)/n of the data per rank. *After failure*: a path that
        fails changes nothing in the result, bit for bit. If the call raises, `out` is undefined.
        """
        source, output = as_buffers(x, out)
        call = CallSignature(Collective.ALLREDUCE, source.dtype_code, op, source.count)
        self._run(call, source.array, output.array)
        return x if out is None else out

    def allgather(self, x: Any, out: Any = None) -> Any:
        """Collect every rank's `x` on every rank.

        Parameters
        ----------
        x : array_like in host memory, any shape
            As for `allreduce`; may be this rank's own part of `out`, which saves a copy.
        out : array_like, optional
            Gets all ranks' data in the order of their ranks: ``nranks`` times as many elements as
            `x`, of its dtype. Default: a new array of shape ``(nranks, *x.shape)``.

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
        source = as_buffer(x, writable=False)
        result = like(x, self.nranks) if out is None else out
        output = as_buffer(result, writable=True)
        own = part_of(output, self.rank, self.nranks)
        if not is_in_place(source, own, output):
            own.array[:] = source.array
        call = CallSignature(Collective.ALLGATHER, output.dtype_code, ReduceOp.SUM, output.count)
        self._run(call, output.array, output.array)
        return result

    def reduce_scatter(self, x: Any, out: Any = None, op: ReduceOp = ReduceOp.SUM) -> Any:
        """Reduce `x` over all ranks; each rank gets its part of the result.

        Parameters
        ----------
        x : array_like in host memory
            As for `allreduce`; its number of elements is a multiple of ``nranks``. Not changed,
            unless `out` is a part of it.
        out : array_like, optional
            Gets the part of this rank's number, an ``nranks``-th; it may be that part of `x`
            itself. Default: a new array, of shape ``(x.shape[0] / nranks, *x.shape[1:])`` where
            that is an integer, else flat.
        op : ReduceOp
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
        source = as_buffer(x, writable=False)
        own = part_of(source, self.rank, self.nranks)
        result = like_part(x, self.nranks) if out is None else out
        output = as_buffer(result, writable=True)
        is_in_place(output, own, source)
        sums = self._scratch_like(source.array)
        call = CallSignature(Collective.REDUCE_SCATTER, source.dtype_code, op, source.count)
        self._run(call, source.array, sums)
        output.array[:] = sums[self.rank * output.count : (self.rank + 1) * output.count]
        return result

    def broadcast(self, x: Any, out: Any = None, root: int = 0) -> Any:
        """Give every rank the data of rank `root`.

        Parameters
        ----------
        x : array_like in host memory, any shape
            On `root` the data, elsewhere what gets it unless there is an `out`. Of the same dtype
            and number of elements on all ranks.
        out : array_like, optional
            Gets the data: the same memory as `x` or disjoint from it. Default: `x` itself.
        root : int

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
        source, output = as_buffers(x, out)
        call = CallSignature(
            Collective.BROADCAST, source.dtype_code, ReduceOp.SUM, source.count, root
        )
        self._run(call, source.array, output.array)
        return x if out is None else out

    def reduce(self, x: Any, out: Any = None, op: ReduceOp = ReduceOp.SUM, root: int = 0) -> Any:
        """Reduce `x` over all ranks; rank `root` gets the result.

        Parameters
        ----------
        x : array_like in host memory, any shape
            As for `allreduce`. Not changed, except on `root` where there is no `out`.
        out : array_like, optional
            On `root`, gets the result; as for `allreduce`. Ignored elsewhere.
        op : ReduceOp
            As for `allreduce`.
        root : int

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
        if self.rank == root:
            source, output = as_buffers(x, out)
            target = output.array
        else:
            source = as_buffer(x, writable=False)
            target = self._scratch_like(source.array)
        call = CallSignature(Collective.REDUCE, source.dtype_code, op, source.count, root)
        self._run(call, source.array, target)
        if self.rank != root:
            return None
        return x if out is None else out

    def run_schedule(
        self, schedule: Schedule, x: Any, out: Any = None, op: ReduceOp = ReduceOp.SUM
    ) -> Any:
        """Run an allreduce by a schedule of your own, as resilient as any other.

        Parameters
        ----------
        schedule : Schedule
            An allreduce of `nranks` ranks, the same on all of them: of `r2ccl.algos`, or made with
            `r2ccl.schedule.build`. Its edges are spread over the rails, its chunks cut in slices.
        x, out, op
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
        source, output = as_buffers(x, out)
        call = CallSignature(Collective.ALLREDUCE, source.dtype_code, op, source.count)
        self._run(call, source.array, output.array, schedule)
        return x if out is None else out

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
        return self._engine.progress.op

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
        return RegisteredMemory(self._engine, self._engine.register(memory))

    def barrier(self) -> None:
        """Return when all ranks have called it.

        Notes
        -----
        *Collective*: all ranks. *Cost*: log2(n) empty messages.
        """
        nothing = self._nothing
        call = CallSignature(Collective.BARRIER, nothing.dtype_code, ReduceOp.SUM, 0)
        self._run(call, nothing.array, nothing.array)

    def repairs(self) -> tuple[Repair, ...]:
        """Return what was repaired at this rank, oldest first: what moved where, when, why."""
        return tuple(self._engine.recovery.log.repairs)

    def health(self) -> ledger.HealthReport:
        """Return the state of this rank's rails: to which peer since when, and why not.

        Notes
        -----
        *Local*, in any thread, at once. ``str()`` of it is for people.
        """
        recovery = self._engine.recovery
        return ledger.HealthReport(self.rank, monotonic(), ledger.rails(recovery, self._rails))

    def verdicts(self) -> tuple[Verdict, ...]:
        """Return what this rank last found to be wrong with each path; ``str()`` is for people.

        Empty with ``R2CC_MODE=0``, which looks into nothing.

        Notes
        -----
        *Local*, in any thread, at once.
        """
        detector = self._engine.recovery.detector
        return () if detector is None else detector.verdicts()

    def known_health(self) -> Known:
        """Return the newest health of all ranks' rails this one has heard of, and since when.

        All ranks plan with it from an agreed collective on. Version 0 is whole; with
        ``R2CC_MODE=0`` there is no other.

        Notes
        -----
        *Local*, in any thread, at once.
        """
        council = self._engine.recovery.council
        if council is None:
            return Known(self._whole, 0.0)
        return council.known

    def pending(self) -> ledger.Pending:
        """Return what this rank waits for: which ranks have not called, which links wait for whom.

        Notes
        -----
        *Local*, at once; meant for another thread while a call blocks. ``str()`` of it is for
        people. A rank that has called is known as such once it sent something to this one, or
        answered: a call that stands still for ``R2CC_SUSPICION_TIMEOUT_S`` asks.
        """
        return self._engine.pending()

    def dump(self) -> str:
        """Return the whole ledger as one line of JSON.

        The call under way, what it waits for, every path, link, peer and repair: the fields are
        those of `r2ccl.ledger.Ledger`.

        Notes
        -----
        *Local*, in any thread, at once.
        """
        engine, control = self._engine, self._control
        peers = [info for info in control.peers if info.rank != self.rank]
        read = ledger.read(
            engine.pending(), engine.progress, engine.runs, engine.roll, peers, control.last_heard
        )
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

        Notes
        -----
        *Collective*: all ranks. A communicator that was revoked is left at once.

        Raises
        ------
        TransportTimeout
            Some rank did not call it within ``R2CC_INIT_TIMEOUT_S``; names it.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._engine.recovery.error is None:
                self._engine.leave()
        finally:
            self._free(_LEAVE_S)

    def abort(self, why: str = "abort() was called") -> None:
        """Leave at once and revoke the communicator on every rank; returns in bounded time."""
        if not self._is_closed:
            self._is_closed = True
            self._engine.revoke(why)
            self._free(_ABORT_S)

    def revoke(self, why: str = "revoke() was called") -> None:
        """End the communicator on every rank, without leaving it: `shrink` can follow.

        Every call that is blocked, here or elsewhere, ends with `CommunicatorRevoked`, and so does
        every later one. A communicator that has ended keeps its first reason.

        Notes
        -----
        *Local*, in any thread, at once.
        """
        if not self._is_closed:
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
        self._require_open()
        if self.config.dump_signal:
            require_main_thread()
        table = Shrinking(self.rank, self.nranks, quorum)
        if self._engine.recovery.error is None:
            self._engine.revoke("shrink() was called")
        self._is_closed = True
        leave_s = _ABORT_S
        try:
            successor = regroup(table, self._tidings, self._control, self._assemble)
            leave_s = _LEAVE_S
        finally:
            self._free(leave_s)
        return successor

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
        else:
            self.abort(f"left with {exc!r}")

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

    def _free(self, deadline_s: float) -> None:
        if self._signal_dump is not None:
            self._signal_dump.close()
        self._control.close(deadline_s)
        if self._monitor is not None:
            self._monitor.close()
        self._engine.close()

    def _is_measured(self) -> bool:
        """Whether there is anything to choose by what the network gives."""
        fabric = self._plans.fabric
        nnodes = len(set(fabric.nodes)) if fabric.nodes else self.nranks
        return fabric.nwires > 1 and nnodes > 1 and self.config.is_planned

    def _calibrate(self) -> Rates:
        def time_ns(nbytes: int, ntimes: int) -> int:
            data = np.zeros(nbytes, np.uint8)
            took_ns = []
            for _ in range(max(2, ntimes)):
                begun_s = monotonic()
                self.allreduce(data)
                took_ns.append(int((monotonic() - begun_s) * 1e9))
            agreed = np.array([min(took_ns[1:])])
            return int(self.allreduce(agreed, op=ReduceOp.MAX)[0])

        return calibrate(time_ns, lambda nbytes: self._plans.choose(nbytes, self._whole))

    def _run(
        self, call: CallSignature, source: Any, output: Any, own: Schedule | None = None
    ) -> None:
        self._require_open()
        health = self._engine.enter() or self._whole
        plan = self._plans(call, health, self._engine.progress.op, own)
        self._quiet.run(self._run_quietly, plan, source, output)

    def _require_open(self) -> None:
        if self._is_closed:
            raise CommunicatorRevoked(f"rank {self.rank}: the communicator was closed")

    def _run_quietly(self, plan: Plan, source: Any, output: Any) -> None:
        layout = plan.layout
        call = Call(layout, source, output, plan.reduce, plan.finish, is_gauge=plan.is_gauge)
        progress = self._engine.progress

        def make() -> list[LaneRun]:
            return [LaneRun(lane, call, progress, self._pool) for lane in layout.lanes]

        self._engine.run(plan.signature, make, layout.peers)

    def _scratch_like(self, array: Array) -> Array:
        """Return memory of this size and dtype; valid until the next call that needs some."""
        if self._scratch.nbytes < array.nbytes:
            self._scratch = np.empty(array.nbytes, np.uint8)
        return self._scratch[: array.nbytes].view(array.dtype)

    def _require_rank(self, root: int) -> None:
        if not 0 <= root < self.nranks:
            raise InvalidArgument(f"root={root}; allowed is 0 to {self.nranks - 1}")


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

__all__ = ["Communicator"]
