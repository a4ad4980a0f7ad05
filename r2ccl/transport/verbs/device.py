"""One open port of an RDMA NIC: context, protection domain, completion queue, async events.

pyverbs holds the GIL in every call, so no call may wait for an event or for a peer: events are read
only from descriptors that are readable, and on Ethernet, queue pairs are connected only to peers
whose link-layer address the kernel already knows. (If only connecting can resolve the address,
connecting may block; see `NeighbourTable.knows`.) Compiled code (`r2ccl.transport.verbs.fastpath`)
polls the completion queue and posts most requests instead of pyverbs, if the parameter `fastpath`
allows it, Numba is installed, and libibverbs' structs are found and verified.

Invariant: `RdmaDevice.close` closes the objects of the device in the order that verbs requires. All
queue pairs and memory regions must be closed before that call.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import select
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
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
    """Undo the ``logging.basicConfig`` of pyverbs' import: the application owns the root logger."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
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

#: Peers may write to registered memory; they may not read it or use atomics.
_ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
#: Default number of peers per device, for benches, tests and the doctor.
_NPEERS = 32
#: Maximum number of completions that one call of `RdmaDevice.completions` returns.
BATCH = 256
#: Error numbers with which calls fail once the device was removed.
_REMOVED = (errno.EIO, errno.ENODEV)
#: Held while a NIC is opened: the descriptors that are new in the process are then the NIC's.
_opening = threading.Lock()


#: Work completion (``ibv_wc``): wr_id, status, opcode, vendor_err, imm_data (network byte order),
#: qp_num. opcode and imm_data are valid only if the status is 0.
Completion = tuple[int, int, int, int, int, int]


class EndpointInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Values that the peer needs in order to connect its queue pair to this one.

    ``psn`` is the sequence number of the first packet that this end sends. ``gid`` is an IPv6
    address as text. ``lid`` is 0 on Ethernet. ``mtu`` is verbs' code of the active MTU.
    """

    qp_num: int
    psn: int
    gid: str
    lid: int
    mtu: int


_AnyInfo = TypeVar("_AnyInfo", bound=EndpointInfo)


class NeighbourTable(Protocol):
    """Neighbour table (ARP, NDP) of one interface in the kernel."""

    def knows(self, source: str, destination: str) -> bool:
        """Return True if the link-layer address of `destination` is known or not needed.

        Also return True if only connecting a queue pair can resolve it. Return False, without
        waiting, if the address is not known yet (the kernel then begins to resolve it), or if the
        lookup failed for a reason that may pass, such as a missing route. Both arguments are GIDs
        as text; `source` is the GID of this port.

        Raises
        ------
        OSError
            If the lookup failed for another reason.
        """
        ...

    def close(self) -> None:
        """Free all resources."""
        ...


class RdmaDevice:
    """Open port of an RDMA NIC.

    Parameters
    ----------
    name : str
        Kernel's name of the NIC, such as ``mlx5_0``.
    port : int
    find_gid : callable
        Returns the index and the text form of the GID by which peers address the port. Called by
        the constructor, and by `refresh` after the NIC reported an async event.
    neighbours : NeighbourTable, optional
        Neighbour table of the port's interface. Owned. None: link-layer addresses are not looked
        up, as on InfiniBand, where the subnet manager resolves addresses.
    fastpath : str
        Code that polls and posts. ``"1"``: compiled code; pyverbs if Numba is not installed, or
        libibverbs is not as expected. ``"0"``: pyverbs. ``"auto"``: as ``"1"``, but pyverbs on
        software NICs, where the kernel's work per request is so large that loading Numba (0.7 s)
        does not pay.
    npeers : int
        Maximum number of ranks that this device connects to; determines the size of the
        completion queue.

    Raises
    ------
    TransportError
        If the NIC cannot be opened, or its completion queues are too small for `npeers`.
    InvalidArgument, OSError
        From `find_gid`, for example if the port has no usable GID.
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
        #: True after an async event of the NIC: the port's GID may have changed since `find_gid`.
        self._is_stale = False
        #: True once a call has found that the device was removed.
        self._is_removed = False
        with ExitStack() as opened:
            if neighbours is not None:
                opened.callback(neighbours.close)
            self.gid_index, self.gid = find_gid()
            self._open(opened)
            #: Addresses of libibverbs' structs of this device; None if pyverbs polls and posts.
            self._nic = self._find_nic(fastpath)
            self._poller = self._make_poller()
            self._opened = opened.pop_all()

    def descriptors(self) -> list[int]:
        """Return the file descriptors of the open device."""
        return list(self._descriptors)

    def _open(self, opened: ExitStack) -> None:
        keep_from_children()
        with _opening, _openable(self.name):
            before = _device_fds()
            self.context, self.async_fd = _with_new_fd(lambda: Context(name=self.name))
            opened.callback(self.context.close)
            os.set_blocking(self.async_fd, False)
            self._require_completions()
            self.pd = PD(self.context)
            opened.callback(self.pd.close)
            #: Registers memory with this NIC; its regions must be closed before the device.
            self.registrar = PdRegistrar(self.name, self.pd, _ACCESS)
            self.channel, self.channel_fd = _with_new_fd(lambda: CompChannel(self.context))
            opened.callback(self.channel.close)
            self.cq = CQ(self.context, completions(self._npeers), None, self.channel)
            opened.callback(self.cq.close)
            self._descriptors = _device_fds() - before

    def _require_completions(self) -> None:
        limits = self.context.query_device()
        self._nports = limits.phys_port_cnt
        most = limits.max_cqe
        needed = completions(self._npeers)
        if needed > most:
            raise TransportError(
                f"{self.name} has completion queues of {most} entries, but {self._npeers} peers "
                f"need {needed} ({NCOMPLETIONS} each): use at most {most_peers(most) + 1} ranks, "
                "or leave the NIC out with R2CC_HCA",
                status="CQ_ENTRIES",
            )

    def _find_nic(self, fastpath: str) -> ProviderNic | None:
        if fastpath == "0":
            return None
        if find_spec("numba") is None:
            _log.info(
                "%s: using pyverbs to poll and post, not compiled code, because numba is not "
                'installed: pip install "r2ccl[compiled]"', self.name,
            )  # fmt: skip
            return None
        try:
            nic = locate_nic(
                self.context, self.pd, self.cq, async_fd=self.async_fd, channel_fd=self.channel_fd
            )
        except TransportError as exc:
            _log.info("%s: using pyverbs to poll and post, not compiled code: %s", self.name, exc)
            return None
        if fastpath == "auto" and nic.is_software:
            _log.info("%s: using pyverbs to poll and post: it is a software NIC", self.name)
            return None
        return nic

    def _make_poller(self) -> Poller | None:
        if self._nic is None:
            return None
        from r2ccl.transport.verbs.fastpath import Poller  # loads Numba: 0.7 s

        return Poller(self._nic, BATCH)

    def poster(self, qp: Any, nothing: tuple[int, int, int], nreceives: int) -> Poster | None:
        """Return a `Poster` for a new queue pair; None if pyverbs must post its requests.

        Parameters
        ----------
        qp : pyverbs.qp.QP
        nothing, nreceives
            Parameters of `Poster`.
        """
        if self._nic is None:
            return None
        try:
            address = locate_qp(self._nic, qp)
        except TransportError as exc:
            _log.info("%s: using pyverbs to post to queue pair %d: %s", self.name, qp.qp_num, exc)
            return None
        from r2ccl.transport.verbs.fastpath import Poster

        return Poster(self._nic, address, nothing, nreceives)

    def completions(self) -> list[Completion]:
        """Take completions from the queue; return at most `BATCH`.

        If the completions of several flushed requests of a queue pair have the same wr_id, the
        result contains only the first of them.

        Raises
        ------
        TransportError
            If the device can no longer be polled.
        """
        try:
            if self._poller is not None:
                return self._poller.poll()
            _, found = self.cq.poll(BATCH)
        except (PyverbsError, OSError) as exc:
            raise self.refusal("report completions", exc) from exc
        return [
            (each.wr_id, each.status, each.opcode, each.vendor_err, each.imm_data, each.qp_num)
            for each in _without_repeats(found)
        ]

    def arm(self) -> None:
        """Make the channel's descriptor become readable at the next completion.

        Raises
        ------
        TransportError
            If the device refuses.
        """
        try:
            self.cq.req_notify()
        except PyverbsError as exc:
            raise self.refusal("announce completions", exc) from exc

    def disarm(self) -> None:
        """Consume the notification that made the channel's descriptor readable.

        Blocks if the descriptor is not readable.

        Raises
        ------
        TransportError
            If there is no notification although the descriptor is readable: the device was removed.
            The descriptor then stays readable.
        """
        try:
            self.channel.get_cq_event(self.cq)
        except PyverbsError as exc:
            raise self.refusal("announce completions", exc) from exc
        self.cq.ack_events(1)

    def port_events(self) -> list[int]:
        """Acknowledge the device's pending async events; return their types (``ibv_event_type``).

        An event may be of another port of the NIC; see `is_of_other_port`. After any event, the
        next `refresh` determines the GID again.

        Raises
        ------
        TransportError
            If there is no event although the descriptor is readable: the device was removed. The
            descriptor then stays readable.
        """
        found: list[int] = []
        poll = select.poll()  # `select.select` accepts no descriptor above 1023
        poll.register(self.async_fd, select.POLLIN)
        while poll.poll(0):
            try:
                event = self.context.get_async_event()
            except PyverbsError as exc:
                if found:
                    break  # the next call raises
                raise self.refusal("report its events", exc) from exc
            found.append(event.event_type)
            self._is_stale = True
            event.ack()
        return found

    def is_of_other_port(self, is_up: bool) -> bool:
        """Return True if a port event is of another port of the NIC, not of this one.

        pyverbs does not give the port of an event. So the event is taken to be of this port if the
        port is now in the reported state or cannot be queried, or if the NIC has only one port.

        Parameters
        ----------
        is_up : bool
            True for the event PORT_ACTIVE, False for PORT_ERR.
        """
        if self._nports == 1:
            return False
        try:
            return self.is_active() != is_up
        except TransportError as exc:
            _log.info("%s: a port event may be of another port of this NIC: %s", self.name, exc)
            return False

    def refresh(self) -> None:
        """Determine the port's GID and GID index again if an event may have changed them.

        Raises
        ------
        TransportError
            If the port has no usable GID now, or its GID cannot be read.
        """
        if not self._is_stale:
            return
        try:
            self.gid_index, self.gid = self._find_gid()
        except InvalidArgument as exc:
            raise TransportError(str(exc), status="NO_GID") from exc
        except OSError as exc:
            raise TransportError(
                f"the GID of {self.name} cannot be read now: {describe_os_error(exc)}",
                status="NO_GID",
            ) from exc
        self._is_stale = False

    def query(self) -> Any:
        """Return the port's current attributes, such as ``state``, ``lid`` and ``active_mtu``.

        Raises
        ------
        TransportError
            If the device cannot be queried, for example because it was removed.
        """
        try:
            return self.context.query_port(self.port)
        except PyverbsError as exc:
            raise self.refusal(f"query port {self.port}", exc) from exc

    def is_active(self) -> bool:
        """Return True if the port is in state ACTIVE.

        Raises
        ------
        TransportError
            If the device cannot be queried.
        """
        return bool(self.query().state == e.IBV_PORT_ACTIVE)

    def read_endpoint_info(
        self, info: bytes, decoder: msgspec.msgpack.Decoder[_AnyInfo]
    ) -> _AnyInfo:
        """Decode a peer's endpoint info; raise if the peer's link-layer address is not known yet.

        Raises
        ------
        TransportError
            Status ``ENDPOINT_INFO``: `info` cannot be decoded. Status ``NO_NEIGHBOUR``: the peer's
            link-layer address is not known yet, or its lookup failed; a later call may succeed.
        """
        try:
            remote = decoder.decode(info)
            ipaddress.IPv6Address(remote.gid)
        except (msgspec.DecodeError, ValueError) as exc:
            raise TransportError(
                f"the peer's endpoint info cannot be decoded: {exc}", status="ENDPOINT_INFO"
            ) from exc
        if self._neighbours is None:
            return remote
        try:
            is_known = self._neighbours.knows(self.gid, remote.gid)
        except OSError as exc:
            raise TransportError(
                f"{self.name}: the link-layer address of {remote.gid} cannot be looked up: "
                f"{describe_os_error(exc)}; check the route (`ip route get`) and the neighbor "
                "entry (`ip neigh`)",
                status="NO_NEIGHBOUR",
            ) from exc
        if not is_known:
            raise TransportError(
                f"{self.name}: the link-layer address of {remote.gid} is not resolved yet; "
                "the connection is tried again",
                status="NO_NEIGHBOUR",
            )
        return remote

    def address(self, remote: EndpointInfo) -> Any:
        """Return the address handle attributes for a queue pair that connects to `remote`."""
        gid = ipaddress.IPv6Address(remote.gid).exploded  # pyverbs accepts no shortened form
        route = GlobalRoute(dgid=GID(gid), sgid_index=self.gid_index)
        return AHAttr(dlid=remote.lid, is_global=1, gr=route, port_num=self.port)

    def refusal(self, what: str, exc: Exception) -> TransportError:
        """Return the error for an operation that the device refused.

        Parameters
        ----------
        what : str
            The operation, as a verb phrase such as "make a queue pair".
        exc : Exception
            The error of pyverbs or of the compiled code.
        """
        return TransportError(f"{self.name} refused to {what}: {exc}", status="DEVICE")

    def destroy(self, *parts: Any) -> None:
        """Close objects of the device in the given order.

        When a device is removed, the kernel destroys all of its objects, and answers every later
        call with one of `_REMOVED`. The object then counts as destroyed, which is logged once.

        Raises
        ------
        PyverbsError
            If the device refuses for another reason.
        """
        for part in parts:
            try:
                part.close()
            except PyverbsError as exc:
                self._note_removal(exc)

    def close(self) -> None:
        """Free all resources; queue pairs and memory regions must be closed already.

        Raises
        ------
        PyverbsError
            If the device refuses for a reason other than its removal.
        """
        self._poller = self._nic = None
        try:
            self._opened.close()
        except PyverbsError as exc:
            self._note_removal(exc)

    def _note_removal(self, exc: PyverbsError) -> None:
        """Log once that the device was removed; raise `exc` if it shows another error."""
        if getattr(exc, "error_code", None) not in _REMOVED:
            raise exc
        if not self._is_removed:
            self._is_removed = True
            _log.warning(
                "%s was removed, with all of its resources (%s): check dmesg", self.name, exc
            )


def room(name: str) -> int:
    """Return the maximum number of peers that the completion queue of NIC `name` can serve.

    Raises
    ------
    TransportError
        If the NIC cannot be opened.
    """
    with _opening, _openable(name):
        context = Context(name=name)
        try:
            return most_peers(context.query_device().max_cqe)
        finally:
            context.close()


@contextmanager
def _openable(name: str) -> Iterator[None]:
    """Translate a `PyverbsError` in the block to a `TransportError` that names the NIC."""
    try:
        yield
    except PyverbsError as exc:
        raise TransportError(
            f"RDMA NIC {name} cannot be opened: {exc}; run `r2ccl doctor` for details",
            status="DEVICE",
        ) from exc


def _without_repeats(completions: Iterable[Any]) -> Iterator[Any]:
    """Yield the completions, except flushed ones that repeat an earlier flushed one.

    A repetition has the same wr_id and queue pair. A queue pair that failed flushes dozens of
    receive requests, and reading a completion is slow.
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
    """Return the result of `make` and the event descriptor that it opened.

    pyverbs does not expose this descriptor, so the new one among all open descriptors is taken.
    """
    before = _event_fds()
    made = make()
    (fd,) = _event_fds() - before
    return made, fd


def _event_fds() -> set[int]:
    return {fd for fd, target in _open_files() if target == _EVENTS}


def _device_fds() -> set[int]:
    return {fd for fd, target in _open_files() if target == _EVENTS or target.startswith(_DEVICES)}


def _open_files() -> Iterator[tuple[int, str]]:
    """Yield the number and target of every open descriptor of this process."""
    for name in os.listdir("/proc/self/fd"):
        try:
            yield int(name), os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue


_EVENTS = "anon_inode:[infinibandevent]"
_DEVICES = "/dev/infiniband/"


__all__ = ["BATCH", "Completion", "EndpointInfo", "NeighbourTable", "RdmaDevice", "e", "room"]
