"""Job: the resources that the communicators of one job share at a rank, and their cleanup.

The communicator that `r2ccl.init` returns and all communicators made from it share the control
plane, the transport, the data loop and the monitor of the NICs' carriers. A failure of one of these
communicators ends all of them.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from r2ccl.algos.neighbors import neighbors
from r2ccl.bootstrap.control import ControlPlane
from r2ccl.bootstrap.messages import PeerInfo
from r2ccl.clock import monotonic
from r2ccl.config import Config
from r2ccl.errors import CommunicatorRevoked, InvalidArgument, R2cclError, TransportError
from r2ccl.failover.context import RankContext
from r2ccl.failover.diagnosis.port_map import port_map_of
from r2ccl.failover.exclusion import declared
from r2ccl.failover.shrink.driver import EventQueue, Successor, regroup
from r2ccl.failover.shrink.protocol import Shrinking
from r2ccl.planning.cost_model import UNMEASURED, Fabric
from r2ccl.planning.plan_cache import CheckedSchedules
from r2ccl.runtime import forking
from r2ccl.runtime.announcement import announce
from r2ccl.runtime.ending import Ending
from r2ccl.runtime.engine import Engine
from r2ccl.runtime.executor import LandingPool
from r2ccl.runtime.participant import MakeDeviceCalls, Participant
from r2ccl.runtime.signal_dump import SignalDump, require_main_thread, write_line
from r2ccl.topology.monitor import LinkMonitor
from r2ccl.transport.base import Transport
from r2ccl.types import Nic

_log = logging.getLogger(__name__)


_S = TypeVar("_S", bound=Successor)


class Job:
    """Resources of one rank in a job, shared by its communicators, and their cleanup.

    Parameters
    ----------
    control : ControlPlane
        Owned: closed with the job.
    transport : Transport
        Owned: closed with the job.
    config : Config
    rails : sequence of Nic
        Local NIC of each rail; empty: the NICs of the control plane.
    sharing_obstacle : str
        Reason why this rank must not share memory if ``R2CC_SHM=auto``; empty if it may.

    Attributes
    ----------
    rank, nranks : int
    config : Config
    control : ControlPlane
    nrails : int
        Number of rails of the transport.
    rails : tuple of Nic
        Local NIC of each rail.
    homes : list of int
        Home rails.
    engine : Engine
        Engine of the job's first communicator.
    nodes : tuple of int
        Node of each rank; empty for a single node or one rank per node.
    pool : LandingPool
        Landing places of all communicators.
    event_queue : EventQueue
        Receives the events of the control plane.
    is_forked : bool
        True if this process was forked from the process that started the job.
    is_left : bool
        True once all ranks have left the job with all their data; then no rank needs to be notified
        of the end of this rank.

    Raises
    ------
    InvalidArgument
        If the excluded NICs leave a rank without a rail, or two ranks without a common rail.
    TransportError
        If compiled code cannot be used for calls over TCP although ``R2CC_COMPILED=1``.
    """

    def __init__(
        self,
        control: ControlPlane,
        transport: Transport,
        config: Config,
        rails: Sequence[Nic],
        *,
        sharing_obstacle: str = "",
    ) -> None:
        self.rank = control.rank
        self.nranks = control.nranks
        self.config = config
        self.control = control
        self.nrails = transport.nrails
        self.rails = tuple(rails) or control.nics
        self.nodes = _nodes_of(control.peers)
        self._sharing_obstacle = sharing_obstacle
        self.is_forked = False
        self.is_left = False
        self._monitor: LinkMonitor | None = None
        self._signal_dump: SignalDump | None = None
        self._participants: list[Participant] = []
        self._checked = CheckedSchedules()
        context = RankContext(
            self.rank,
            self.nranks,
            transport,
            control,
            config,
            monotonic,
            nwires=control.nwires,
            last_resorts=control.last_resorts,
            nodes=self.nodes,
            hosts=[info.hostname for info in control.peers],
            port_map=port_map_of(self.rank, control.peers, self.rails),
            neighbors=neighbors(self.rank, self.nranks, self.nodes),
            excluded=_excluded(self.rank, control.peers),
        )
        self.engine = Engine.of_job(context, control)
        self.homes = context.homes
        self.pool = LandingPool(transport.allocate, config.landing_depth)
        self.event_queue = EventQueue(self.rank, self.engine)
        self._ending = Ending(
            f"r2ccl-ending-{self.rank}",
            (self._end_calls, control.close, self._end_data),
        )

    # Communicators

    def add(self, engine: Engine, make_device_calls: MakeDeviceCalls) -> Participant:
        """Add a communicator and return its `Participant`; the first one must have all ranks.

        Parameters
        ----------
        engine : Engine
            Engine of the communicator: `Job.engine`, or one derived from it.
        make_device_calls : callable
            Makes the communicator's calls on device memory; see `MakeDeviceCalls`.
        """
        fabric = Fabric(
            self.homes,
            self.control.nwires,
            _nodes_of([self.control.peers[rank] for rank in engine.context.members]),
            self._participants[0].plans.fabric.rates if self._participants else UNMEASURED,
            self.control.is_loopback,
        )
        made = Participant(
            engine,
            control=self.control,
            rails=self.rails,
            pool=self.pool,
            fabric=fabric,
            checked=self._checked,
            make_device_calls=make_device_calls,
        )
        self._participants.append(made)
        return made

    @property
    def is_blocking(self) -> bool:
        """True if `Participant.is_blocking` is True for any communicator."""
        return any(participant.is_blocking for participant in tuple(self._participants))

    @property
    def is_below(self) -> bool:
        """True if the caller is a signal handler that interrupted a blocking call of its thread.

        It is True if `Participant.is_below` is True for any communicator of the job.
        """
        return any(participant.is_below for participant in tuple(self._participants))

    def refuse(self, refusal: Callable[[], R2cclError]) -> None:
        """Refuse all calls on all communicators from now on, each with an error from `refusal`."""
        for participant in tuple(self._participants):
            participant.refuse(refusal)

    def drain(self) -> None:
        """Wait until the asynchronous calls on all communicators have ended.

        Raises
        ------
        TransportTimeout
            If the calls of a communicator do not end within ``R2CC_INIT_TIMEOUT_S``.
        """
        for participant in tuple(self._participants):
            participant.drain()

    # Life

    def connect(self) -> None:
        """Start the control plane, connect the rails, measure the network, and share memory.

        See `Participant.calibrate` for the measurement. If this method raises, the job has been
        aborted.

        Raises
        ------
        TransportTimeout
            If there is no path to a peer after ``R2CC_INIT_TIMEOUT_S``, for example because the
            peer does not call this method.
        InvalidArgument
            As from `dump_on_signal`, if ``R2CC_DUMP_SIGNAL`` is set.
        R2cclError
            If the job fails.

        Notes
        -----
        *Collective*: all ranks.
        """
        try:
            self._start()
            self._participants[0].calibrate()
            self.share_memory(self._participants[0])
            self._announce()
        except BaseException as exc:
            self.abort_surely(f"init() failed: {exc!r}")
            raise

    def share_memory(self, participant: Participant) -> None:
        """Let a communicator use shared memory, if possible; see `Participant.share_memory`.

        Notes
        -----
        *Collective*: all ranks of the communicator.
        """
        nshared = sum(each.on_host.shares_memory for each in tuple(self._participants))
        participant.share_memory(nshared, self._sharing_obstacle)

    def _announce(self) -> None:
        is_shared = self._participants[0].on_host.shares_memory
        is_one_host = self.control.is_on_one_host
        announce(
            self.control,
            self.config,
            self.rails,
            is_local=is_shared and is_one_host,
            is_shared=is_shared,
        )

    def _start(self) -> None:
        self._ending.prepare()
        forking.hold(self, Job._descriptors, Job._disable)
        if self.config.dump_signal:
            self.dump_on_signal(signal.Signals[self.config.dump_signal])
        self.control.start(self.event_queue)
        self._monitor = self._watch_carriers()
        self.engine.start()

    def dump_on_signal(self, signum: int) -> None:
        """Write `Communicator.dump` of the first communicator each time that `signum` arrives.

        The output goes to ``R2CC_DUMP_FILE`` or, if that is empty or cannot be written, to stderr.
        The handler replaces the one of an earlier call of this method.

        Raises
        ------
        InvalidArgument
            If this is not the main thread, or the signal cannot be handled.
        """
        require_main_thread()
        path = self.config.dump_file.replace("{rank}", str(self.rank))
        first, old = self._participants[0], self._signal_dump
        if old is not None and old.signum == signum:
            old.close()  # first, because the new handler would call the old one
        self._signal_dump = SignalDump(signum, lambda: write_line(first.dump(), path))
        if old is not None:
            old.close()

    def close(self, participant: Participant) -> None:
        """Close a communicator, or all if it is the first one; see `Communicator.close`.

        Abort instead if a blocking collective is in progress on a communicator to close
        (`Participant.is_blocking`), or if the caller is a signal handler that interrupted a call or
        a function of `user_op` (`is_below`). Wait for asynchronous calls, for blocking calls that
        wait for them, and for a call of this method for the same communicator in another thread.
        In a forked process, do nothing, because a thread of the parent may have held any lock at
        the fork. During interpreter shutdown, only refuse calls and do not wait, because the
        control thread no longer runs.
        """
        if self.is_forked:
            return
        if sys.is_finalizing():
            is_awaited = self.nranks > 1 and self.engine.error is None
            if is_awaited and not participant.is_closed:
                _log.warning(
                    "rank %d: close() was called during interpreter shutdown, for example in a "
                    "__del__ method, so it did not wait for the other ranks, which may report this "
                    "rank as lost: call close() earlier, or register it with atexit",
                    self.rank,
                )
            participant.refuse(self.closed)
            return
        if self.is_below:  # the interrupted call may be the one that another thread's close awaits
            self._abort_for_close()
            return
        with participant.closing:
            is_first = participant is self._participants[0]
            if self.is_blocking if is_first else participant.is_blocking:
                self._abort_for_close()
            elif is_first:
                self._close_all()
            elif not participant.is_closed:
                self._close_one(participant)

    def _abort_for_close(self) -> None:
        self.abort("close() was called while another call was in progress")

    def _close_all(self) -> None:
        first = self._participants[0]
        if first.is_closed:
            self.event_queue.end("close() was called")
            self.free(_LEAVE_S)
            return
        self.refuse(self.closed)
        if _stays_blocking(self):
            self._abort_for_close()
            return
        try:
            self.drain()
            if self.engine.error is None:
                first.leave()
                self.is_left = True
                for participant in tuple(self._participants):
                    participant.require_same(is_last=True)
        finally:
            self.free(_LEAVE_S)
        for participant in tuple(self._participants):
            participant.require_seen()
        if not self.is_left:
            self.engine.check_unknown()

    def _close_one(self, participant: Participant) -> None:
        """Close a communicator other than the first one; the other communicators stay open.

        If the asynchronous calls of the communicator do not end, the whole job ends.
        """
        participant.refuse(self.closed)
        if _stays_blocking(participant):
            self._abort_for_close()
            return
        try:
            participant.drain()
            participant.require_same(is_last=False)
        finally:
            # A call that still runs must not write to its arrays after this method.
            try:
                participant.end_calls(_LEAVE_S)
            finally:
                self._remove(participant)
        participant.require_seen()

    def _remove(self, participant: Participant) -> None:
        """Remove a communicator whose calls have ended, and free its shared memory."""
        self._participants.remove(participant)
        try:
            participant.engine.messenger.finish()
        finally:
            participant.free_memory(_LEAVE_S)
        participant.engine.remove()

    def shrink(
        self,
        participant: Participant,
        quorum: str,
        make: Callable[[ControlPlane, tuple[int, ...]], _S],
    ) -> _S:
        """End the job, and return the communicator that `make` makes from the surviving ranks.

        See `Communicator.shrink` for `quorum` and the errors, and `regroup` for `make`.
        """
        if participant.is_closed:
            raise self.closed()
        if participant is not self._participants[0]:
            raise InvalidArgument(
                f"rank {self.rank}: shrink() was called on a communicator made from another one: "
                "call it on the communicator that r2ccl.init(), or the last shrink(), returned, "
                "and split the result again"
            )
        if self.config.dump_signal:
            require_main_thread()
        table = Shrinking(self.rank, self.nranks, quorum)
        if self.engine.error is None:
            self.engine.revoke("shrink() was called")
        self.refuse(self.closed)
        leave_s = _ABORT_S
        try:
            excluded = self.engine.exclusions.rails()
            successor = regroup(table, self.event_queue, self.control, make, excluded)
            leave_s = _LEAVE_S
        finally:
            self.free(leave_s)
        return successor

    def abort(self, why: str) -> None:
        """End all communicators on all ranks, for the reason `why`, and free all resources.

        Return within a second; a longer cleanup continues in the cleanup thread. In a forked
        process, only refuse calls.
        """
        self.refuse(self.forked if self.is_forked else self.closed)
        if not self.is_left and not self.is_forked:
            self.engine.revoke(why)
            self.event_queue.end(why)
        self.free(_ABORT_S)

    def abort_surely(self, why: str) -> None:
        """Abort; if Ctrl-C interrupts the abort, repeat it once, then pass Ctrl-C on."""
        try:
            self.abort(why)
        except KeyboardInterrupt:
            self.abort(why)
            raise

    def free(self, deadline_s: float) -> None:
        """Start the cleanup if necessary; wait for its end, at most `deadline_s` + `_BOUND_S`.

        If this call starts the cleanup, `deadline_s`, in seconds, is also the timeout of each step
        except the last one, which frees memory and connections and has its own, longer timeouts.
        Before the cleanup, end the dump on a signal and, unless `is_left`, send the other ranks the
        error that ended the job, if any. If `is_below`, wait only until the control plane is
        closed. Do nothing in a forked process or during interpreter shutdown, because the cleanup
        thread does not run there.
        """
        if self.is_forked or sys.is_finalizing():
            return
        if self._signal_dump is not None:
            self._signal_dump.close()
        if not self.is_left:
            self.engine.tell_why()
        self._ending.begin(deadline_s)
        # In a signal handler that interrupted a call, that call owns the data loop and cannot end:
        # wait only for the first two steps, up to the close of the control plane.
        self._ending.wait(deadline_s + _BOUND_S, nsteps=2 if self.is_below else None)

    def closed(self) -> CommunicatorRevoked:
        """Return the error that calls on a closed communicator raise."""
        return CommunicatorRevoked(f"rank {self.rank}: the communicator was closed")

    def forked(self) -> CommunicatorRevoked:
        """Return the error that calls in a forked process raise."""
        return CommunicatorRevoked(
            f"rank {self.rank}: this process was forked from the process that created the "
            "communicator, and only that process can use it: start workers with spawn, or create "
            "a communicator in each worker"
        )

    def rejections(self) -> dict[str, int]:
        """Return the number of rejected connections, frames and messages, by reason."""
        return dict(self.control.rejections())

    def _descriptors(self) -> list[int]:
        """Return the open file descriptors, which a forked child must replace."""
        monitor = [] if self._monitor is None else [self._monitor.fileno()]
        return [*monitor, *self.control.descriptors(), *self.engine.descriptors()]

    def _disable(self) -> None:
        """Make every later call raise `CommunicatorRevoked`; runs in a forked child."""
        self.is_forked = True
        self.refuse(self.forked)
        for participant in tuple(self._participants):
            participant.engine.messenger.disown_memory()
        self.control.disable()

    def _watch_carriers(self) -> LinkMonitor:
        """Return a monitor whose carrier events the control thread passes to the engine."""
        monitor = LinkMonitor()

        def read() -> None:
            for event in monitor.read():
                for rail, nic in enumerate(self.control.nics):
                    if event.concerns(nic):
                        self.engine.on_carrier(rail, event.is_up)

        self.control.add_reader(monitor.fileno(), read)
        return monitor

    def _end_calls(self, deadline_s: float) -> None:
        for participant in tuple(self._participants):
            try:
                participant.end_calls(deadline_s)
            except TransportError as exc:
                _log.error("rank %d: %s", self.rank, exc)
            except Exception:  # the calls of the other communicators must still end
                _log.exception(
                    "rank %d: the calls of a communicator did not end: please report it", self.rank
                )

    def _end_data(self, deadline_s: float) -> None:
        for participant in tuple(self._participants):
            try:
                participant.free_memory(_LAST_CALL_S)
            except Exception:  # the memory of the others, and the data loop, must still be freed
                _log.exception(
                    "rank %d: the memory of a communicator was not freed: please report it",
                    self.rank,
                )
        if self._monitor is not None:
            self._monitor.close()
        self.engine.close()


def _stays_blocking(calls: Job | Participant) -> bool:
    """Return whether a blocking call that began before calls were refused is still running.

    Wait up to `_REFUSED_S`, the time within which a call that is being refused ends.
    """
    give_up_s = monotonic() + _REFUSED_S
    while calls.is_blocking and monotonic() < give_up_s:
        time.sleep(_LOOK_S)
    return calls.is_blocking


def _excluded(rank: int, peers: Sequence[PeerInfo]) -> frozenset[tuple[int, int]]:
    """Return (rank, rail) of each NIC declared failed, or excluded before a shrink.

    Rank 0 logs the declared NICs that no rank has.
    """
    ports, unknown = declared(peers)
    if unknown and rank == 0:
        known = dict.fromkeys(f"{info.hostname}:{nic}" for info in peers for nic in info.nics)
        _log.warning(
            "R2CC_FAILED_NICS names %s, which no rank of this job uses; known are %s; correct the "
            "setting unless other jobs need it",
            ", ".join(unknown), ", ".join(known),
        )  # fmt: skip
    return ports


def _nodes_of(peers: Sequence[PeerInfo]) -> tuple[int, ...]:
    """Return the node number of each rank; () if there is one node, or one rank per node."""
    numbers: dict[str, int] = {}
    nodes = tuple(numbers.setdefault(info.host, len(numbers)) for info in peers)
    return nodes if 1 < len(numbers) < len(nodes) else ()


#: Timeout of the cleanup after `close`, in seconds.
_LEAVE_S = 5.0
#: Timeout of the cleanup after `abort`, in seconds.
_ABORT_S = 0.5
#: Longest wait in seconds for running calls to end, so that shared memory can be freed.
_LAST_CALL_S = 10.0
#: Longest time in seconds in which a call is refused, and pause between two looks for it.
_REFUSED_S, _LOOK_S = 0.05, 0.001
#: Time in seconds that `Job.free` waits beyond its timeout; then the cleanup thread runs on.
_BOUND_S = 0.4

__all__ = ["Job"]
