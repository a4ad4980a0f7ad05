"""Selects the backends for collectives on GPU memory, the same on all ranks.

Scans, and calls that list the parts of the ranks (such as gather and alltoallv), always run in
`r2ccl.gpu.copied`, which is not selected here. The backends for all other calls are, in order of
preference:

1. Kernels access the memory of all GPUs of the node (`r2ccl.gpu.peer`). With several nodes, only
   allreduces use this backend: the kernels move data within each node, and backend 2 or 3 moves
   data between the nodes (`r2ccl.gpu.hierarchical`).
2. NICs read and write slices in GPU memory (`r2ccl.gpu.gpudirect`).
3. Data is copied through pinned host memory (`r2ccl.gpu.staged`). This backend supports all of
   these calls.

On one node, backend 2 is tried only if backend 1 does not work.

The ranks try a backend to find out whether it works, because device attributes do not show this
reliably.

Invariant: all ranks have the same backends, in the same order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol

from r2ccl.clock import monotonic
from r2ccl.config import Config
from r2ccl.device.base import Device, Event, Stream
from r2ccl.errors import TransportError
from r2ccl.failover.health.table import Health
from r2ccl.gpu.device_reduction import ReductionKernels
from r2ccl.gpu.gpudirect import GpuDirectBackend
from r2ccl.gpu.gpudirect_connect import connect_gpudirect
from r2ccl.gpu.hardware import Hardware
from r2ccl.gpu.hierarchical import HierarchicalBackend, InterNodeBackend
from r2ccl.gpu.host_signal import DeviceCall
from r2ccl.gpu.ipc_board import MOST_RANKS
from r2ccl.gpu.nic_affinity import NicAffinity, PxnRoute, common_homes, find_nic_affinity
from r2ccl.gpu.peer import PeerBackend, PeerKernels
from r2ccl.gpu.peer_connect import connect_peers
from r2ccl.gpu.peer_memory import PeerMemory
from r2ccl.gpu.plan_selector import EnterCall, PlanSelector
from r2ccl.gpu.pxn.routes import PxnRoutes
from r2ccl.gpu.pxn.transport import PxnTransport
from r2ccl.gpu.staged import HostRun, StagedBackend
from r2ccl.gpu.staged_windows import least_limit_nbytes
from r2ccl.kernels.cuda.machine import VECTORS
from r2ccl.runtime.engine import Engine
from r2ccl.types import AllgatherBytes

_log = logging.getLogger(__name__)

#: Number of slots of a PXN route. This is the largest number of slices in flight on the route, sent
#: and received together; further slices travel directly between the GPU and the distant NIC.
_NSLOTS = 16


class GpuKernels(PeerKernels, ReductionKernels, Protocol):
    """Loader and launcher of all backends' kernels, such as `r2ccl.kernels.cuda.Launcher`."""


class GpuBackend(Protocol):
    """Executor of collectives on GPU memory.

    `PeerBackend`, `HierarchicalBackend`, `GpuDirectBackend`, `StagedBackend` and `CopiedBackend`
    implement it.
    """

    def supports(self, call: DeviceCall) -> bool:
        """Return whether the backend can execute `call`; the answer is the same on all ranks."""
        ...

    def is_prepared(self, call: DeviceCall) -> bool:
        """Return whether `begin` can be called for `call` without calling `prepare` first."""
        ...

    def prepare(self, call: DeviceCall) -> None:
        """Load the kernels and allocate the memory that `call` needs; may wait for the device.

        The worker must have finished all earlier calls, so that no stream waits for the worker.

        Raises
        ------
        InvalidArgument
            If the GPU is too old for the kernels.
        TransportTimeout
            If the device is still busy with earlier calls after the timeout.
        TransportError
            If the device or a NIC failed, if memory is full, or if a kernel cannot be compiled.
        """
        ...

    def begin(self, call: DeviceCall, stream: Stream) -> Any:
        """Begin a prepared call that follows all work enqueued on `stream` so far.

        Return the `DeviceJob` of the call. The worker must pass each job to `finish`, in the order
        of `begin`. See `StagedBackend.begin` and `PeerBackend.begin` for the errors.
        """
        ...

    def finish(self, job: Any) -> None:
        """Execute the call of `job`; runs in the communicator's worker thread.

        The device may still work on the call afterwards. If the call fails before this method
        returns, raise its error; `examine` raises errors that occur later.
        """
        ...

    def hold(self, stream: Stream, number: int) -> None:
        """Make work enqueued on `stream` from now on wait until a call has ended.

        `number` is the `DeviceJob.number` of the call, which must have been submitted to the
        worker. Any thread may call this method.

        Raises
        ------
        TransportError
            If the device failed.
        """
        ...

    def examine(self, job: Any) -> None:
        """Raise the error of the call of `job`, if the call failed.

        The device must have finished the call.
        """
        ...

    def take_event(self) -> Event:
        """Return an unused event, which the caller gives back with `recycle`.

        Raises
        ------
        TransportError
            If the device failed.
        """
        ...

    def recycle(self, event: Event) -> None:
        """Return `event` to the pool of unused events."""
        ...

    def close(self, timeout_s: float) -> None:
        """Wait for the device, then free all resources; the worker must be idle.

        `timeout_s` limits each wait, in seconds.

        Raises
        ------
        TransportTimeout
            If the device is still busy; the memory that it uses was not freed.
        TransportError
            If the device failed; not all resources were freed.
        """
        ...


class BackendSelector:
    """Selector of the backends of one rank; all ranks select together, with the same result.

    Parameters
    ----------
    engine : Engine
    entry : PlanSelector
        Begins each collective and selects its plan.
    run : callable
        Runs a collective on host memory, given its plan, source and output.
    config : Config
    nodes : sequence of sequence of int
        Ranks of each node.
    allgather : callable
        See `AllgatherBytes`.
    labels : sequence of str
        RDMA ports of the home rails, in the order of rails; empty if the rails are sockets.
    hardware : Hardware
    pxn : PxnTransport or None
        Transport that can send slices through other GPUs; None if it is not available.
    """

    def __init__(
        self,
        engine: Engine,
        entry: PlanSelector,
        run: HostRun,
        *,
        config: Config,
        nodes: Sequence[Sequence[int]],
        allgather: AllgatherBytes,
        labels: Sequence[str],
        hardware: Hardware,
        pxn: PxnTransport | None = None,
    ) -> None:
        self._engine = engine
        self._rank = engine.rank
        self._nranks = engine.nranks
        self._entry = entry
        self._run = run
        self._config = config
        self._nodes = [tuple(node) for node in nodes]
        self._allgather = allgather
        self._labels = labels
        self._hardware = hardware
        self._pxn = pxn

    def select(self, device: Device, kernels: GpuKernels) -> tuple[GpuBackend, ...]:
        """Try backends on all ranks, and return the backends to use.

        Returns
        -------
        tuple of GpuBackend
            Backends in order of preference; the last one supports all calls that `CopiedBackend`
            does not execute. The caller must close them in this order.

        Raises
        ------
        InvalidArgument
            On all ranks, with several nodes and CUDA IPC: if the ranks have different numbers of
            RDMA rails, or more than 64 RDMA rails each.
        TransportError
            If streams of the GPU cannot wait for the host, if R2CC_IPC=1 is set and the GPUs cannot
            access each other's memory, or if the device failed or its memory is full.
        R2cclError
            If an allgather failed.

        Notes
        -----
        *Collective*: all ranks. *Cost*: up to seven allgathers, one of them with some kilobytes per
        rank, and some milliseconds.

        *After failure*: the method may have succeeded on other ranks, so the communicator must end.
        """
        if not device.waits_on_memory:
            raise TransportError(
                f"rank {self._rank}: GPU {device.ordinal} cannot make a stream wait for the host "
                "(CAN_USE_64_BIT_STREAM_MEM_OPS is 0): copy the arrays to the host",
                rank=self._rank,
                status="NO_STREAM_WAIT",
            )
        why = self._why_no_ipc()
        memory = why or connect_peers(
            device, kernels, self._rank, self._nodes, self._allgather, self._slot_nbytes()
        )
        if isinstance(memory, str) and self._config.ipc == "1":
            raise TransportError(
                f"rank {self._rank}: GPUs cannot access each other's memory ({memory}), and "
                "R2CC_IPC=1 allows no other backend; set R2CC_IPC=auto",
                rank=self._rank,
                status="NO_IPC",
            )
        if isinstance(memory, str):
            _log.info("rank %d: GPUs do not access each other's memory: %s", self._rank, memory)
            return self._rail_backends(device, kernels)
        _log.info("rank %d: GPUs of a node access each other's memory", self._rank)
        if len(self._nodes) > 1:
            group = tuple(sorted(node[memory.board.index] for node in self._nodes))
            affinity = self._find_affinity(device)
            homes = self._homes_of(group, affinity)
            backends = self._rail_backends(
                device, kernels, self._pxn_routes(device, affinity, group, homes)
            )
            try:
                enter = self._entry.among(group, homes)
                return self._hierarchical(device, kernels, memory, backends, enter), *backends
            except BaseException:
                # Closing the device does not deregister its memory from the NICs.
                for each in backends:
                    each.close(self._config.timeout_s)
                raise
        members = self._nodes[0]
        return PeerBackend(device, kernels, memory, members, **self._waiting()), self._staged(
            device
        )

    def _why_no_ipc(self) -> str:
        """Return the reason not to try CUDA IPC, the same on all ranks; empty if it is tried."""
        sizes = {len(node) for node in self._nodes}
        if self._config.ipc == "0":
            return "R2CC_IPC=0"
        if not 2 <= min(sizes) <= max(sizes) <= MOST_RANKS:
            counts = " to ".join(map(str, sorted({min(sizes), max(sizes)})))
            ranks = "rank" if sizes == {1} else "ranks"
            return f"{counts} {ranks} per host; CUDA IPC needs 2 to {MOST_RANKS}"
        if len(sizes) > 1:
            return "hosts have different numbers of ranks"
        return ""

    def _rail_backends(
        self, device: Device, kernels: GpuKernels, pxn_routes: PxnRoutes | None = None
    ) -> tuple[GpuDirectBackend | StagedBackend, ...]:
        """Return the backends that send data over the rails, in order of preference."""
        staged = self._staged(device)
        if self._nranks == 1:
            return (staged,)
        direct = connect_gpudirect(
            device,
            kernels,
            engine=self._engine,
            enter=self._entry,
            config=self._config,
            clock=monotonic,
            allgather=self._allgather,
            pxn_routes=pxn_routes,
        )
        if isinstance(direct, str):
            _log.info("rank %d: GPU data passes through host memory: %s", self._rank, direct)
            return (staged,)
        _log.info("rank %d: NICs access the GPU's memory directly", self._rank)
        return direct, staged

    def _hierarchical(
        self,
        device: Device,
        kernels: GpuKernels,
        memory: PeerMemory,
        backends: Sequence[InterNodeBackend],
        enter: EnterCall,
    ) -> HierarchicalBackend:
        members = next(node for node in self._nodes if self._rank in node)
        return HierarchicalBackend(
            device,
            kernels,
            memory,
            members,
            backends=backends,
            enter=enter,
            nnodes=len(self._nodes),
            **self._waiting(),
        )

    def _find_affinity(self, device: Device) -> NicAffinity | None:
        """Return the home rails of all ranks and the PXN routes of this rank.

        Return None if the rails are sockets.
        """
        if not self._labels:
            return None
        return find_nic_affinity(
            self._rank,
            self._nodes,
            bus_id=device.bus_id,
            labels=self._labels,
            read=self._hardware.read_machine,
            allgather=self._allgather,
        )

    def _homes_of(self, group: Sequence[int], affinity: NicAffinity | None) -> list[int]:
        """Return the rails that the ranks in `group` plan with, as rail numbers of the transport.

        These are the home rails of the ranks' GPUs. The list is empty if the rails are sockets.
        """
        if affinity is None:
            return []
        homes = self._engine.homes
        return [homes[at] for at in common_homes([affinity.homes[rank] for rank in group])]

    def _pxn_routes(
        self,
        device: Device,
        affinity: NicAffinity | None,
        group: Sequence[int],
        homes: Sequence[int],
    ) -> PxnRoutes | None:
        """Return this rank's PXN routes; None if it has none or cannot use them.

        A rank needs a `PxnTransport` and a health agreement to use its routes. The routes are
        opened when a rail in `homes` has lost bandwidth at a rank in `group`.
        """
        rails, known_health = self._engine.homes, self._engine.known_health
        if affinity is None or not affinity.pxn_routes or self._pxn is None:
            return None
        if known_health() is None:
            return None

        def health() -> Health:
            known = known_health()
            assert known is not None, "checked above; a health agreement exists always or never"
            return known.health

        return PxnRoutes(
            device,
            self._rank,
            [PxnRoute(rails[each.rail], each.via) for each in affinity.pxn_routes],
            group,
            homes,
            transport=self._pxn,
            register=self._engine.register_device,
            run_in_data_loop=self._engine.call,
            open_peer=self._hardware.open_peer,
            health=health,
            slot_nbytes=self._config.slice_nbytes,
            nslots=_NSLOTS,
        )

    def _staged(self, device: Device) -> StagedBackend:
        return StagedBackend(
            device,
            self._rank,
            self._nranks,
            slot_nbytes=self._slot_nbytes(),
            enter=self._entry,
            run=self._run,
            check=self._engine.check,
            clock=monotonic,
            timeout_s=self._config.timeout_s,
        )

    def _slot_nbytes(self) -> int:
        """Return the size in bytes of a `StagedBackend` slot and of half a `PeerMemory` area.

        The size is a multiple of the largest vector of the kernels, because the second half of an
        area begins at this offset, and a GPU fails on a vector at an address that is not aligned.
        """
        nbytes = max(least_limit_nbytes(self._nranks), self._config.staging_nbytes // 2)
        return -(-nbytes // max(VECTORS)) * max(VECTORS)

    def _waiting(self) -> dict[str, Any]:
        """Return the keyword arguments of `PeerBackend` that control how it waits."""
        return {
            "check": self._engine.check,
            "clock": monotonic,
            "sleep": time.sleep,
            "timeout_s": self._config.timeout_s,
        }


__all__ = ["BackendSelector", "GpuBackend", "GpuKernels"]
