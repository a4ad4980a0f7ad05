"""Selects the backends of collectives on GPU memory; all ranks agree.

In order of preference: kernels that access the memory of all GPUs of a node (`r2ccl.gpu.peer`),
with another backend between several such nodes (`r2ccl.gpu.hierarchical`); slices that NICs read
from and write to GPU memory (`r2ccl.gpu.gpudirect`); windows through pinned host memory
(`r2ccl.gpu.staged`), which always works. Each is tried, not inferred from attributes.

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
from r2ccl.gpu.ipc_board import IpcBoard
from r2ccl.gpu.nic_affinity import NicAffinity, PxnRoute, common_homes, find_nic_affinity
from r2ccl.gpu.peer import MOST_RANKS, PeerBackend, PeerKernels
from r2ccl.gpu.peer_connect import connect_peers
from r2ccl.gpu.plan_selector import EnterCall, PlanSelector
from r2ccl.gpu.pxn.routes import PxnRoutes
from r2ccl.gpu.pxn.transport import PxnTransport
from r2ccl.gpu.staged import DeviceCall, HostRun, StagedBackend
from r2ccl.runtime.engine import Engine
from r2ccl.types import AllgatherBytes

_log = logging.getLogger(__name__)

#: Slots of a PXN route: slices in flight, sent and received. Further slices go directly.
_NSLOTS = 16


class GpuKernels(PeerKernels, ReductionKernels, Protocol):
    """Loads and launches the kernels of every backend, as `r2ccl.kernels.cuda.Launcher` does."""


class GpuBackend(Protocol):
    """Carries out collectives on GPU memory: `PeerBackend`, `GpuDirectBackend`, `StagedBackend`."""

    def supports(self, call: DeviceCall) -> bool:
        """Return whether the backend can carry out `call`; the same on all ranks."""
        ...

    def is_prepared(self, call: DeviceCall) -> bool:
        """Return whether `prepare` has nothing to do."""
        ...

    def prepare(self, call: DeviceCall) -> None:
        """Load and allocate what `call` needs, which may wait for the device.

        No stream waits for the host meanwhile.
        """
        ...

    def begin(self, call: DeviceCall, stream: Stream) -> tuple[Any, Event]:
        """Enqueue the device's work of a prepared call; see `StagedBackend.begin`."""
        ...

    def finish(self, job: Any) -> None:
        """Do the host's work of a call."""
        ...

    def examine(self, job: Any) -> None:
        """Raise the error of a call that the device has finished, if it has one."""
        ...

    def mark(self) -> Event:
        """Return an event that is done when all calls begun so far are."""
        ...

    def take_event(self) -> Event:
        """Return an unused event, to be returned with `recycle`."""
        ...

    def recycle(self, event: Event) -> None:
        """Take an event back."""
        ...

    def close(self, timeout_s: float) -> None:
        """Wait for the device, then free everything."""
        ...


class BackendSelector:
    """Selects the backends of one rank.

    Parameters
    ----------
    engine : Engine
    entry : PlanSelector
    run : callable
        Runs a planned collective on host memory.
    config : Config
    nodes : sequence of sequence of int
        The ranks of each node.
    allgather : callable
        See `AllgatherBytes`.
    labels : sequence of str
        RDMA ports of the home rails, in the order of rails; empty if the rails are sockets.
    hardware : Hardware
    pxn : PxnTransport or None
        Carries slices through other GPUs; None: not available.
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
        """Try the backends, together with all ranks.

        Returns
        -------
        tuple of GpuBackend
            In order of preference; the last supports all calls. Close them in this order.

        Raises
        ------
        TransportError
            Streams of the GPU cannot wait for the host, or R2CC_IPC=1 cannot be met.

        Notes
        -----
        *Collective*: all ranks. *Cost*: up to seven small allgathers, and some milliseconds.
        """
        if not device.waits_on_memory:
            raise TransportError(
                f"rank {self._rank}: GPU {device.ordinal} cannot make a stream wait for the host "
                "(CAN_USE_64_BIT_STREAM_MEM_OPS is 0): copy the arrays to the host",
                rank=self._rank,
                status="NO_STREAM_WAIT",
            )
        why = self._why_no_ipc()
        board = why or connect_peers(device, self._rank, self._nodes, self._allgather)
        if isinstance(board, str) and self._config.ipc == "1":
            raise TransportError(
                f"rank {self._rank}: GPUs do not reach each other's memory ({board}), and "
                "R2CC_IPC=1 allows no other backend; set it to auto",
                rank=self._rank,
                status="NO_IPC",
            )
        if isinstance(board, str):
            _log.info("rank %d: GPUs do not work on each other's memory: %s", self._rank, board)
            return self._rail_backends(device, kernels)
        _log.info("rank %d: GPUs of a node work on each other's memory", self._rank)
        if len(self._nodes) > 1:
            group = tuple(sorted(node[board.index] for node in self._nodes))
            affinity = self._find_affinity(device)
            homes = self._homes_of(group, affinity)
            backends = self._rail_backends(
                device, kernels, self._pxn_routes(device, affinity, group, homes)
            )
            try:
                enter = self._entry.among(group, homes)
                return self._hierarchical(device, kernels, board, backends, enter), *backends
            except BaseException:
                # Closing the device does not end registrations with NICs.
                for each in backends:
                    each.close(self._config.timeout_s)
                raise
        members = self._nodes[0]
        return PeerBackend(device, kernels, board, members, **self._waiting()), self._staged(device)

    def _why_no_ipc(self) -> str:
        """Return why GPUs cannot access each other's memory, as far as all ranks know already."""
        sizes = {len(node) for node in self._nodes}
        if self._config.ipc == "0":
            return "R2CC_IPC=0"
        if not 2 <= min(sizes) <= max(sizes) <= MOST_RANKS:
            return f"{min(sizes)} to {max(sizes)} ranks on a host; 2 to {MOST_RANKS} can"
        if len(sizes) > 1:
            return "hosts have different numbers of ranks"
        return ""

    def _rail_backends(
        self, device: Device, kernels: GpuKernels, pxn_routes: PxnRoutes | None = None
    ) -> tuple[GpuDirectBackend | StagedBackend, ...]:
        """Return the backends that send data over the rails."""
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
            _log.info("rank %d: GPU memory passes through the host: %s", self._rank, direct)
            return (staged,)
        _log.info("rank %d: NICs reach the GPU's memory", self._rank)
        return direct, staged

    def _hierarchical(
        self,
        device: Device,
        kernels: GpuKernels,
        board: IpcBoard,
        backends: Sequence[InterNodeBackend],
        enter: EnterCall,
    ) -> HierarchicalBackend:
        members = next(node for node in self._nodes if self._rank in node)
        return HierarchicalBackend(
            device,
            kernels,
            board,
            members,
            backends=backends,
            enter=enter,
            nnodes=len(self._nodes),
            **self._waiting(),
        )

    def _find_affinity(self, device: Device) -> NicAffinity | None:
        """Return which rails are near which rank's GPU; None if the rails are sockets."""
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
        """Return the rails near the GPUs of a group; empty if that is not known."""
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
        """Return the PXN routes of this rank for `homes`, the rails its group uses; None: none."""
        rails, known_health = self._engine.homes, self._engine.known_health
        is_possible = affinity is not None and affinity.pxn_routes and self._pxn is not None
        if affinity is None or self._pxn is None or not is_possible or known_health() is None:
            return None

        def health() -> Health:
            known = known_health()
            assert known is not None, "asked above: it agrees from the start or never"
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
            slot_nbytes=max(1, self._config.bounce_nbytes // 2),
            enter=self._entry,
            run=self._run,
            check=self._engine.check,
            clock=monotonic,
            timeout_s=self._config.timeout_s,
        )

    def _waiting(self) -> dict[str, Any]:
        """Return the arguments with which `PeerBackend` waits."""
        return {
            "check": self._engine.check,
            "clock": monotonic,
            "sleep": time.sleep,
            "timeout_s": self._config.timeout_s,
        }


__all__ = ["BackendSelector", "GpuBackend", "GpuKernels"]
