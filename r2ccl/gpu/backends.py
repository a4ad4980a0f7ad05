"""BackendSelector: how collectives on device memory can be carried out here, found out by all ranks together.

From the best to the one that always works: kernels on the memory of all GPUs of a node
(`r2ccl.gpu.peer`), and the rails between several such nodes (`r2ccl.gpu.hierarchical`); slices from
and to memory that NICs reach (`r2ccl.gpu.gpudirect`); windows through pinned host memory
(`r2ccl.gpu.staged`). Nothing is believed of a machine, all is tried. Must not import links.

Invariant: all ranks have the same ways, in the same order.
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
from r2ccl.gpu.device_reduction import ReductionKernels
from r2ccl.gpu.gpudirect import GpuDirectBackend
from r2ccl.gpu.gpudirect_connect import connect_gpudirect
from r2ccl.gpu.hardware import Hardware
from r2ccl.gpu.hierarchical import HierarchicalBackend, InterNodeBackend
from r2ccl.gpu.ipc_board import IpcBoard
from r2ccl.gpu.nic_affinity import NicAffinity, PxnRoute, common_homes, find_nic_affinity
from r2ccl.gpu.peer import MOST_RANKS, PeerBackend, PeerKernels
from r2ccl.gpu.peer_connect import connect_peers
from r2ccl.gpu.pxn.routes import PxnRoutes
from r2ccl.gpu.pxn.transport import PxnTransport
from r2ccl.gpu.staged import DeviceCall, HostRun, StagedBackend
from r2ccl.runtime.engine import Engine
from r2ccl.runtime.entry import Enter, Entry
from r2ccl.types import AllgatherBytes

_log = logging.getLogger(__name__)

#: Slices that a pxn_route has under way at most, both ways together; others go directly.
_NSLOTS = 16


class GpuKernels(PeerKernels, ReductionKernels, Protocol):
    """What gives a device its kernels, for every way; `r2ccl.kernels.cuda.Launcher`."""


class GpuBackend(Protocol):
    """How collectives on device memory are carried out: `StagedBackend`, `PeerBackend`, `GpuDirectBackend`."""

    def supports(self, call: DeviceCall) -> bool:
        """Whether it carries out this call; alike on all ranks."""
        ...

    def is_prepared(self, call: DeviceCall) -> bool:
        """Whether `prepare` has nothing to do."""
        ...

    def prepare(self, call: DeviceCall) -> None:
        """Do what may wait for the device: no stream waits for the host meanwhile."""
        ...

    def begin(self, call: DeviceCall, stream: Stream) -> tuple[Any, Event]:
        """Give the device its part of a call that is prepared; see `StagedBackend.begin`."""
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


class BackendSelector:
    """Finds the ways of one rank.

    Parameters
    ----------
    engine : Engine
    entry : Entry
    run : callable
        Runs a collective on host memory that was entered.
    config : Config
    nodes : sequence of sequence of int
        Of every node its ranks.
    allgather : callable
        Tells all ranks something and returns what they say; collective.
    labels : sequence of str
        Names of the RDMA ports that channels are at home on, in the order of rails; none: sockets.
    hardware : Hardware
    pxn : PxnTransport or None
        The part of the transport that supports pxn_routes, if any.
    """

    def __init__(
        self,
        engine: Engine,
        entry: Entry,
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
        self._rank = engine.progress.rank
        self._nranks = engine.progress.nranks
        self._entry = entry
        self._run = run
        self._config = config
        self._nodes = [tuple(node) for node in nodes]
        self._allgather = allgather
        self._labels = labels
        self._hardware = hardware
        self._pxn = pxn

    def select(self, device: Device, kernels: GpuKernels) -> tuple[GpuBackend, ...]:
        """Find out with all ranks which ways their calls can take.

        Returns
        -------
        tuple of GpuBackend
            The best first; the last supports all calls. To be closed in this order.

        Raises
        ------
        TransportError
            The GPU cannot wait for the host, or not do what R2CC_IPC demands.

        Notes
        -----
        *Collective*: all ranks. *Cost*: up to seven messages to all, and some milliseconds.
        """
        if not device.waits_on_memory:
            raise TransportError(
                f"rank {self._rank}: GPU {device.ordinal} cannot make a stream wait for the host "
                "(CAN_USE_64_BIT_STREAM_MEM_OPS is 0): copy the arrays to the host",
                rank=self._rank,
                status="NO_STREAM_WAIT",
            )
        why = self._why_apart()
        board = why or connect_peers(device, self._rank, self._nodes, self._allgather)
        if isinstance(board, str) and self._config.ipc == "1":
            raise TransportError(
                f"rank {self._rank}: GPUs do not reach each other's memory ({board}), and "
                "R2CC_IPC=1 does without nothing else; set it to auto",
                rank=self._rank,
                status="NO_IPC",
            )
        if isinstance(board, str):
            _log.info("rank %d: GPUs do not work on each other's memory: %s", self._rank, board)
            return self._over_rails(device, kernels)
        _log.info("rank %d: GPUs of a node work on each other's memory", self._rank)
        if len(self._nodes) > 1:
            group = tuple(sorted(node[board.index] for node in self._nodes))
            affinity = self._find_affinity(device)
            homes = self._homes_of(group, affinity)
            rails = self._over_rails(
                device, kernels, self._pxn_routes(device, affinity, group, homes)
            )
            try:
                enter = self._entry.among(group, homes)
                return self._tiers(device, kernels, board, rails, enter), *rails
            except BaseException:
                # NICs hold what closing the device does not take from them.
                for each in rails:
                    each.close(self._config.timeout_s)
                raise
        members = self._nodes[0]
        return PeerBackend(device, kernels, board, members, **self._waiting()), self._bounce(device)

    def _why_apart(self) -> str:
        """Say what is known, alike on all ranks, to keep GPUs from each other's memory."""
        sizes = {len(node) for node in self._nodes}
        if self._config.ipc == "0":
            return "R2CC_IPC=0"
        if not 2 <= min(sizes) <= max(sizes) <= MOST_RANKS:
            return f"{min(sizes)} to {max(sizes)} ranks on a host; 2 to {MOST_RANKS} can"
        if len(sizes) > 1:
            return "hosts have different numbers of ranks"
        return ""

    def _over_rails(
        self, device: Device, kernels: GpuKernels, pxn_routes: PxnRoutes | None = None
    ) -> tuple[GpuDirectBackend | StagedBackend, ...]:
        """Return the ways of calls in which GPUs do not work on each other's memory."""
        bounce = self._bounce(device)
        if self._nranks == 1:
            return (bounce,)
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
            return (bounce,)
        _log.info("rank %d: NICs reach the GPU's memory", self._rank)
        return direct, bounce

    def _tiers(
        self,
        device: Device,
        kernels: GpuKernels,
        board: IpcBoard,
        rails: Sequence[InterNodeBackend],
        enter: Enter,
    ) -> HierarchicalBackend:
        members = next(node for node in self._nodes if self._rank in node)
        return HierarchicalBackend(
            device,
            kernels,
            board,
            members,
            rails=rails,
            enter=enter,
            nnodes=len(self._nodes),
            **self._waiting(),
        )

    def _find_affinity(self, device: Device) -> NicAffinity | None:
        """Find out which rails are affinity to whose GPU; None where the rails are sockets'."""
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
        """Return the rails affinity to the GPUs of a group; none where nothing is known of any."""
        if affinity is None:
            return []
        homes = self._engine.recovery.homes
        return [homes[at] for at in common_homes([affinity.homes[rank] for rank in group])]

    def _pxn_routes(
        self,
        device: Device,
        affinity: NicAffinity | None,
        group: Sequence[int],
        homes: Sequence[int],
    ) -> PxnRoutes | None:
        """Return the pxn_routes of a rank that meets a group on some rails, if there can be any."""
        council, rails = self._engine.recovery.council, self._engine.recovery.homes
        if affinity is None or not affinity.pxn_routes or self._pxn is None or council is None:
            return None
        return PxnRoutes(
            device,
            self._rank,
            [PxnRoute(rails[each.rail], each.via) for each in affinity.pxn_routes],
            group,
            homes,
            transport=self._pxn,
            register=self._engine.progress.transport.register_device,
            own=self._engine.call,
            open_peer=self._hardware.open_peer,
            health=lambda: council.known.health,
            slot_nbytes=self._config.slice_nbytes,
            nslots=_NSLOTS,
        )

    def _bounce(self, device: Device) -> StagedBackend:
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
        """Return how calls on the memory of others wait."""
        return {
            "check": self._engine.check,
            "clock": monotonic,
            "sleep": time.sleep,
            "timeout_s": self._config.timeout_s,
        }


__all__ = ["BackendSelector", "GpuBackend", "GpuKernels"]
