"""One RDMA NIC port, opened: context, protection domain, completion queue, async events.

With `r2ccl.transport.verbs.queuepair` and `r2ccl.transport.verbs.probe` the only module that sees
pyverbs. pyverbs holds the GIL in every call, so nothing here is called that could block:
descriptors are polled first, and neighbours are known before queue pairs are connected to them.
Completions are taken, and requests posted, by compiled code instead
(`r2ccl.transport.verbs.fastpath`), if what that needs is found and verified.

Invariant: what was opened is closed in the order verbs wants (queue pairs before the completion
queue, memory regions before the domain), by `close`.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import select
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from r2ccl.errors import InvalidArgument, TransportError, describe_os_error
from r2ccl.transport.verbs.dmabuf import PdRegistrar
from r2ccl.transport.verbs.layout import ProviderNic, locate_nic, locate_qp
from r2ccl.transport.verbs.mappings import keep_from_children
from r2ccl.transport.verbs.queue_depths import NCOMPLETIONS, completions, most_peers

if TYPE_CHECKING:
    from r2ccl.transport.verbs.fastpath import Poller, Poster

_log = logging.getLogger(__name__)


@contextmanager
def _quiet_root_logger() -> Iterator[None]:
    """Undo pyverbs' ``logging.basicConfig``: the root logger is the application's."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in [each for each in root.handlers if each not in handlers]:
        root.removeHandler(handler)
    root.setLevel(level)


with _quiet_root_logger():
    from pyverbs.addr import GID, AHAttr, GlobalRoute
    from pyverbs.cq import CQ, CompChannel
    from pyverbs.device import Context
    from pyverbs.pd import PD
    from pyverbs.pyverbs_error import PyverbsError

    try:
        import pyverbs.enums as e
    except ImportError:  # rdma-core 50 and later
        import pyverbs.libibverbs_enums as e

#: A peer may write into a registered landing place, and only that.
_ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
#: Peers of a device whose user does not say how many there are: benches, tests and the doctor.
_NPEERS = 32
#: Completions taken at once: a batch costs one call.
BATCH = 256


#: What is read of an ``ibv_wc``: wr_id, status, opcode, vendor_err, imm_data (in network byte
#: order), qp_num. If the status is not 0, opcode and imm_data have no meaning.
Completion = tuple[int, int, int, int, int, int]


class EndpointInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the peer must know of an end to connect a queue pair to the one it has."""

    qp_num: int
    psn: int
    gid: str
    lid: int
    mtu: int


_AnyInfo = TypeVar("_AnyInfo", bound=EndpointInfo)


class NeighbourTable(Protocol):
    """What the kernel knows of the neighbours beyond an interface."""

    def knows(self, source: str, destination: str) -> bool:
        """Whether a packet could leave for `destination` now; if not, have the kernel ask."""
        ...

    def close(self) -> None:
        """Free what it took."""
        ...


class RdmaDevice:
    """An open port of an RDMA NIC.

    Parameters
    ----------
    name : str
        As the kernel spells it: ``mlx5_0``.
    port : int
    find_gid : callable
        Returns (index, GID) under which peers address the port; asked again after its events.
    neighbours : NeighbourTable, optional
        Of the port's interface. Owned. None on InfiniBand, where the subnet manager knows them.
    fastpath : str
        ``"1"``: polls and posts by compiled code. ``"auto"``: unless the kernel plays the NIC,
        whose work is so much that loading Numba would not pay. ``"0"``: by pyverbs.
    npeers : int
        Ranks its queue pairs lead to, for which its completion queue has room.

    Raises
    ------
    TransportError
        The NIC cannot be opened, or has no completion queue for so many peers; says why.
    """

    def __init__(
        self, name: str, port: int, find_gid: Callable[[], tuple[int, str]],
        neighbours: NeighbourTable | None = None, fastpath: str = "auto", npeers: int = _NPEERS,
    ) -> None:  # fmt: skip
        self.name = name
        self.port = port
        self._find_gid = find_gid
        self._neighbours = neighbours
        self._npeers = npeers
        #: Something happened to the port: its GIDs may have moved.
        self._is_stale = False
        with ExitStack() as opened:
            if neighbours is not None:
                opened.callback(neighbours.close)
            self.gid_index, self.gid = find_gid()
            self._open(opened)
            #: What libibverbs calls this device, if the compiled path is taken.
            self._nic = self._find_nic(fastpath)
            self._poller = self._make_poller()
            self._opened = opened.pop_all()

    def descriptors(self) -> list[int]:
        """File descriptors of the open device."""
        return list(self._descriptors)

    def _open(self, opened: ExitStack) -> None:
        before = _device_fds()
        keep_from_children()
        with _openable(self.name):
            self.context, self.async_fd = _with_new_fd(lambda: Context(name=self.name))
            opened.callback(self.context.close)
            os.set_blocking(self.async_fd, False)
            self._require_completions()
            self.pd = PD(self.context)
            opened.callback(self.pd.close)
            #: Registers memory with this NIC; regions must be closed before the device is.
            self.registrar = PdRegistrar(self.name, self.pd, _ACCESS)
            self.channel, self.channel_fd = _with_new_fd(lambda: CompChannel(self.context))
            opened.callback(self.channel.close)
            self.cq = CQ(self.context, completions(self._npeers), None, self.channel)
            opened.callback(self.cq.close)
        self._descriptors = _device_fds() - before

    def _require_completions(self) -> None:
        most = self.context.query_device().max_cqe
        needed = completions(self._npeers)
        if needed > most:
            raise TransportError(
                f"{self.name} has completion queues of {most} entries, and {self._npeers} peers "
                f"need {needed}, {NCOMPLETIONS} each: use at most {most_peers(most) + 1} ranks, or "
                f"leave the NIC out with R2CC_HCA=^={self.name}",
                status="CQ_ENTRIES",
            )

    def _find_nic(self, fastpath: str) -> ProviderNic | None:
        if fastpath == "0":
            return None
        try:
            nic = locate_nic(
                self.context, self.pd, self.cq, async_fd=self.async_fd, channel_fd=self.channel_fd
            )
        except TransportError as exc:
            _log.info("%s: pyverbs polls and posts, not compiled code: %s", self.name, exc)
            return None
        if fastpath == "auto" and nic.is_software:
            _log.info("%s: pyverbs polls and posts: the kernel plays the NIC", self.name)
            return None
        return nic

    def _make_poller(self) -> Poller | None:
        if self._nic is None:
            return None
        from r2ccl.transport.verbs.fastpath import Poller  # loads Numba: 0.7 s

        return Poller(self._nic, BATCH)

    def poster(self, qp: Any, nothing: tuple[int, int, int], nreceives: int) -> Poster | None:
        """Return what posts to a new queue pair by compiled code; None: pyverbs must.

        Parameters
        ----------
        qp : pyverbs.qp.QP
        nothing, nreceives
            See `Poster`.
        """
        if self._nic is None:
            return None
        try:
            address = locate_qp(self._nic, qp)
        except TransportError as exc:
            _log.info("%s: pyverbs posts to queue pair %d: %s", self.name, qp.qp_num, exc)
            return None
        from r2ccl.transport.verbs.fastpath import Poster

        return Poster(self._nic, address, nothing, nreceives)

    def completions(self) -> list[Completion]:
        """Take what has completed, up to one batch.

        Of requests flushed with one number on one queue pair it may tell only the first.

        Raises
        ------
        OSError, PyverbsError
            The device cannot be polled any more.
        """
        if self._poller is not None:
            return self._poller.poll()
        _, found = self.cq.poll(BATCH)
        return [
            (each.wr_id, each.status, each.opcode, each.vendor_err, each.imm_data, each.qp_num)
            for each in _without_repeats(found)
        ]

    def arm(self) -> None:
        """Have the channel's descriptor become readable at the next completion."""
        self.cq.req_notify()

    def disarm(self) -> None:
        """Take the notification that made the descriptor readable."""
        self.channel.get_cq_event(self.cq)
        self.cq.ack_events(1)

    def port_events(self) -> list[int]:
        """Take pending async events of the device; each is acknowledged."""
        found = []
        poll = select.poll()  # `select.select` takes no descriptor above 1023
        poll.register(self.async_fd, select.POLLIN)
        while poll.poll(0):
            event = self.context.get_async_event()
            found.append(event.event_type)
            self._is_stale = True
            event.ack()
        return found

    def refresh(self) -> None:
        """Look the GID up again if the port had an event: a flap may move or take it.

        Raises
        ------
        TransportError
            There is none that can be used now.
        """
        if not self._is_stale:
            return
        try:
            self.gid_index, self.gid = self._find_gid()
        except InvalidArgument as exc:
            raise TransportError(str(exc), status="NO_GID") from exc
        except OSError as exc:
            raise TransportError(
                f"the address of {self.name} cannot be read now: {describe_os_error(exc)}",
                status="NO_GID",
            ) from exc
        self._is_stale = False

    def query(self) -> Any:
        """Return verbs' port attributes as they are now: ``state``, ``lid``, ``active_mtu``."""
        return self.context.query_port(self.port)

    def is_active(self) -> bool:
        """Whether the port is up."""
        return bool(self.query().state == e.IBV_PORT_ACTIVE)

    def read_endpoint_info(self, info: bytes, kind: type[_AnyInfo]) -> _AnyInfo:
        """Decode a peer's endpoint info and require that a connection to it would not block.

        Raises
        ------
        TransportError
            The endpoint info makes no sense; or the kernel does not know the peer's link-layer
            address yet, and asks for it now (status ``NO_NEIGHBOUR``).
        """
        try:
            remote = msgspec.msgpack.decode(info, type=kind)
        except (msgspec.DecodeError, ValueError) as exc:
            raise TransportError(
                f"the peer's endpoint info makes no sense: {exc}", status="ENDPOINT_INFO"
            ) from exc
        if self._neighbours is not None and not self._neighbours.knows(self.gid, remote.gid):
            raise TransportError(
                f"{self.name}: {remote.gid} has not told its link-layer address yet",
                status="NO_NEIGHBOUR",
            )
        return remote

    def address(self, remote: EndpointInfo) -> Any:
        """Return the way from this port to that of `remote`, for a queue pair's attributes."""
        gid = ipaddress.IPv6Address(remote.gid).exploded  # pyverbs takes no shorthand
        route = GlobalRoute(dgid=GID(gid), sgid_index=self.gid_index)
        return AHAttr(dlid=remote.lid, is_global=1, gr=route, port_num=self.port)

    def refusal(self, what: str, exc: Exception) -> TransportError:
        """Return the error that says that the device refused to do `what`."""
        return TransportError(f"{self.name} refused to {what}: {exc}", status="DEVICE")

    def close(self) -> None:
        """Free everything; queue pairs and memory regions must be closed."""
        self._poller = self._nic = None
        self._opened.close()


def room(name: str) -> int:
    """Return how many peers the completion queue of a NIC can serve.

    Raises
    ------
    TransportError
        The NIC cannot be opened.
    """
    with _openable(name):
        context = Context(name=name)
        try:
            return most_peers(context.query_device().max_cqe)
        finally:
            context.close()


@contextmanager
def _openable(name: str) -> Iterator[None]:
    """Have a refusal by the driver name the NIC."""
    try:
        yield
    except PyverbsError as exc:
        raise TransportError(
            f"RDMA NIC {name} cannot be opened: {exc}; `r2ccl doctor` says more",
            status="DEVICE",
        ) from exc


def _without_repeats(completions: Iterable[Any]) -> Iterator[Any]:
    """Leave out flushed requests of a number and a queue pair that one was told of already.

    A queue pair that failed flushes dozens of receive requests, and each is read at a price.
    """
    told: set[tuple[int, int]] = set()
    for each in completions:
        if each.status == e.IBV_WC_WR_FLUSH_ERR:
            which = (each.wr_id, each.qp_num)
            if which in told:
                continue
            told.add(which)
        yield each


def _with_new_fd(make: Any) -> tuple[Any, int]:
    """Return what `make` made and the event descriptor it opened, which pyverbs does not show."""
    before = _event_fds()
    made = make()
    (fd,) = _event_fds() - before
    return made, fd


def _event_fds() -> set[int]:
    return {fd for fd, target in _open_files() if target == _EVENTS}


def _device_fds() -> set[int]:
    return {fd for fd, target in _open_files() if target == _EVENTS or target.startswith(_DEVICES)}


def _open_files() -> Iterator[tuple[int, str]]:
    """Find this process's descriptors, and what each is of."""
    for name in os.listdir("/proc/self/fd"):
        try:
            yield int(name), os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own
            continue


_EVENTS = "anon_inode:[infinibandevent]"
_DEVICES = "/dev/infiniband/"


__all__ = ["BATCH", "Completion", "EndpointInfo", "NeighbourTable", "RdmaDevice", "e", "room"]
