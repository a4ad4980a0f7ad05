"""Probes over verbs: RDMA writes of 0 bytes, on queue pairs used for nothing else.

The peer's NIC acknowledges such a write even while the peer's process is stopped. Without
acknowledgement the retries run out. A queue pair serves the probes of one key in one direction: the
rank that probes is the requester, and the other end never enters the state RTS. A probe that is not
answered breaks only its own queue pair, which is destroyed; `r2ccl.failover.connector` connects a
new one. The queue pairs are in a protection domain without memory, so peers cannot write anything
through them.

A failure that breaks the connection of a probe breaks paths as well, so more probes of the same two
ports follow within seconds, before the connection is made again. Their outcome is "not answered"
too, for `_SILENCE_S` seconds after the last failure of a probe or of the test of a new connection.
Afterwards the outcome is None, because there is no connection for the probe.

An end makes its queue pair when `info` is first read, or in `join` once the peer's link-layer
address is known. At the probed rank `join` comes first, so an unknown address costs no queue pair.

Invariant: a probe that was started is reported once, unless the prober is closed first. A queue
pair belongs to its end until the end is discarded.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec

from r2ccl.clock import Clock
from r2ccl.errors import TransportError
from r2ccl.transport.base import Event, Joined, Probed
from r2ccl.transport.verbs.device import EndpointInfo, RdmaDevice, e
from r2ccl.transport.verbs.status import describe_status
from r2ccl.types import ProbeKey

# After r2ccl.transport.verbs.device, which imports pyverbs without its change to logging.
from pyverbs.pd import PD  # isort: skip
from pyverbs.pyverbs_error import PyverbsError  # isort: skip
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr  # isort: skip
from pyverbs.wr import SGE, SendWR  # isort: skip

#: How often the NIC sends a probe before it gives up: two lost packets do not prove that a rail
#: failed.
_NTRIES = 3
#: For this time, in seconds, later probes of the same two ports have the outcome of an unanswered
#: probe. The queue pairs between these ports fail at different times, within about 1 s with the
#: default retries; each failure starts probes, and diagnosis may repeat them once.
_SILENCE_S = 5.0
#: Unit of a queue pair's timeout: attribute ``timeout`` t means this many seconds times 2^t.
_TIMEOUT_UNIT_S = 4.096e-6
_MAX_TIMEOUT = 31
_info_decoder = msgspec.msgpack.Decoder(EndpointInfo)


class ProbeEnd:
    """End of a connection for probes (implements `Endpoint`).

    Parameters
    ----------
    key : ProbeKey
        As seen from this rank: ``via`` is the rail of this rank's port, on which the end is made,
        and ``rail`` is the rail of the peer's port. The key of the peer's end therefore has ``via``
        and ``rail`` swapped.
    nic : int
        Index of the NIC of this rank's port within its transport.
    device : RdmaDevice
    pd : PD
    timeout : int
        Attribute of the queue pair: an unacknowledged packet is retransmitted after 4.096 us times
        2^timeout.
    on_made, discard : callable
        Called with this end: `on_made` once the end has made its queue pair, `discard` by `close`.
    """

    def __init__(
        self,
        key: ProbeKey,
        nic: int,
        device: RdmaDevice,
        pd: PD,
        timeout: int,
        on_made: Callable[[ProbeEnd], None],
        discard: Callable[[ProbeEnd], None],
    ) -> None:
        self.key = key
        self.nic = nic
        #: Number of the queue pair; -1 if there is none.
        self.qp_num = -1
        #: wr_id of the write in flight. It is random because the device reuses queue pair numbers:
        #: a late completion may be of an earlier queue pair with the same number.
        self.number = -1
        self._device = device
        self._pd = pd
        self._timeout = timeout
        self._on_made = on_made
        self._discard = discard
        self._qp: QP | None = None
        self._write: SendWR | None = None
        self._psn = secrets.randbits(24)

    @property
    def info(self) -> bytes:
        """Encoded endpoint info, for the peer's `join`.

        If the end has no queue pair yet, reading this property makes it.

        Raises
        ------
        TransportError
            If the device refuses.
        """
        self._made()
        port = self._device.query()
        return msgspec.msgpack.encode(
            EndpointInfo(self.qp_num, self._psn, self._device.gid, port.lid, port.active_mtu)
        )

    def join(self, info: bytes, is_caller: bool) -> None:
        """Connect to the end that `info` describes; if `is_caller`, also send the first probe.

        Raises
        ------
        TransportError
            If `info` cannot be decoded, the peer's link-layer address is not known, or the device
            refuses.
        """
        remote = self._device.read_endpoint_info(info, _info_decoder)
        qp = self._made()
        try:
            if is_caller:
                qp.to_rts(self._attributes(remote))
            else:
                qp.to_rtr(self._attributes(remote))
        except PyverbsError as exc:
            raise self._device.refusal(f"join {remote.gid}", exc) from exc
        if is_caller:
            self.ask()

    def ask(self) -> None:
        """Post an RDMA write of 0 bytes; if it completes without error, the peer's NIC answered.

        Raises
        ------
        TransportError
            If the device refuses.
        """
        assert self._qp is not None
        if self._write is None:
            self._write = SendWR(
                opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[SGE(0, 0, 0)],
                send_flags=e.IBV_SEND_SIGNALED,
            )  # fmt: skip
            self._write.num_sge = 0  # pyverbs cannot make a request without an entry
            # For a write of 0 bytes the peer checks neither address nor key (InfiniBand, o9-28).
            self._write.set_wr_rdma(0, 0)
        self.number = self._write.wr_id = secrets.randbits(63)
        try:
            self._qp.post_send(self._write)
        except PyverbsError as exc:
            raise self._device.refusal("post a probe", exc) from exc

    def close(self) -> None:
        """Return this end to its `VerbsProber`, which destroys the queue pair."""
        self._discard(self)

    def destroy(self) -> None:
        """Destroy the queue pair, if there is one."""
        self._device.destroy(*(part for part in (self._qp, self._write) if part is not None))
        self._qp = self._write = None
        self.qp_num = -1

    def _made(self) -> QP:
        if self._qp is None:
            device = self._device
            cap = QPCap(max_send_wr=1, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
            made = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=device.cq, rcq=device.cq, cap=cap)
            attr = QPAttr(port_num=device.port)
            attr.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE
            try:
                self._qp = QP(self._pd, made, attr)
            except (PyverbsError, OSError) as exc:
                raise device.refusal("make a queue pair for a probe", exc) from exc
            self.qp_num = self._qp.qp_num
            self._on_made(self)
        return self._qp

    def _attributes(self, remote: EndpointInfo) -> QPAttr:
        device = self._device
        attr = QPAttr(port_num=device.port)
        attr.ah_attr = device.address(remote)
        attr.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE
        attr.path_mtu = min(remote.mtu, device.query().active_mtu)
        attr.dest_qp_num = remote.qp_num
        attr.rq_psn, attr.sq_psn = remote.psn, self._psn
        attr.max_dest_rd_atomic = attr.max_rd_atomic = 1
        attr.timeout, attr.retry_cnt, attr.rnr_retry = self._timeout, _NTRIES - 1, _NTRIES - 1
        return attr


class VerbsProber:
    """Probes of one verbs transport, and their connections.

    Parameters
    ----------
    devices : sequence of RdmaDevice
        Borrowed: they must be closed after this object.
    timeout_s : float
        Time in which a probe must be answered, in seconds.
    clock : Clock

    Raises
    ------
    TransportError
        If a device refuses a protection domain.
    """

    def __init__(self, devices: Sequence[RdmaDevice], timeout_s: float, clock: Clock) -> None:
        self._devices = devices
        self._timeout_s = timeout_s
        self._clock = clock
        self._timeout = queue_pair_timeout(timeout_s)
        with ExitStack() as opened:
            self._domains: list[PD] = []
            for device in devices:
                self._domains.append(_make_domain(device))
                opened.callback(device.destroy, self._domains[-1])
            opened.pop_all()
        #: Every end with a queue pair, by NIC index and queue pair number.
        self._ends: list[dict[int, ProbeEnd]] = [{} for _ in devices]
        self._open: dict[ProbeKey, ProbeEnd] = {}
        #: Probes in flight, with the clock's time when each times out.
        self._asked: dict[ProbeKey, float] = {}
        #: For each connection that broke and is not restored: clock's time and error of the last
        #: unanswered probe, or of a later test of a new connection that failed.
        self._lost: dict[ProbeKey, tuple[float, str]] = {}
        self._events: list[Event] = []

    @property
    def is_busy(self) -> bool:
        """True while a probe is in flight or an event is not yet returned by `advance`."""
        return bool(self._asked or self._events)

    def offer(self, key: ProbeKey, nic: int) -> ProbeEnd:
        """Return a new end of a connection for probes of `key`, on the NIC with index `nic`."""
        return ProbeEnd(
            key, nic, self._devices[nic], self._domains[nic], self._timeout,
            self._enter, self._discard,
        )  # fmt: skip

    def probe(self, key: ProbeKey) -> None:
        """Start a probe, as `Transport.probe` does."""
        if key in self._asked:
            return
        end = self._open.get(key)
        if end is None:
            self._events.append(self._without_connection(key))
            return
        self._asked[key] = self._clock() + self._timeout_s
        try:
            end.ask()
        except TransportError as exc:
            self._finish(key, False, str(exc))

    def on_completion(
        self, nic: int, qp_num: int, number: int, status: int, vendor_err: int
    ) -> None:
        """Handle the completion of a write that an end posted; ignore it if the end was discarded.

        The first write of an end tests the connection, and its completion is reported as `Joined`.

        Parameters
        ----------
        nic : int
            Index of the NIC that reported the completion.
        qp_num, number, status, vendor_err : int
            Fields of the work completion; `number` is the wr_id.
        """
        end = self._ends[nic].get(qp_num)
        if end is None or end.number != number:
            return
        error = describe_status(status, vendor_err) if status else ""
        if self._open.get(end.key) is not end:
            self._events.append(Joined(end.key, end, error))
            if not error:
                self._use(end)
            elif end.key in self._lost:
                self._lost[end.key] = self._clock(), error
        elif end.key in self._asked:
            self._finish(end.key, not status, error or "acknowledged")

    def advance(self) -> list[Event]:
        """End probes that timed out; return the events since the last call.

        Call it after the completions were taken, so that answers that already arrived count.
        """
        now = self._clock()
        for key, deadline_s in list(self._asked.items()):
            if now >= deadline_s:
                self._finish(key, False, f"no acknowledgement within {self._timeout_s:g} s")
        events, self._events = self._events, []
        return events

    def limit_s(self, timeout_s: float) -> float:
        """Return the time until `advance` must be called, at most `timeout_s`, in seconds."""
        if self._events:
            return 0.0
        if not self._asked:
            return timeout_s
        return max(0.0, min(timeout_s, min(self._asked.values()) - self._clock()))

    def close(self) -> None:
        """Destroy all queue pairs and protection domains."""
        for ends in self._ends:
            for end in ends.values():
                end.destroy()
            ends.clear()
        self._open.clear()
        self._asked.clear()
        for device, domain in zip(self._devices, self._domains, strict=True):
            device.destroy(domain)

    def _enter(self, end: ProbeEnd) -> None:
        self._ends[end.nic][end.qp_num] = end

    def _use(self, end: ProbeEnd) -> None:
        """Use `end` for the probes of its key from now on."""
        previous = self._open.get(end.key)
        if previous is not None:
            self._discard(previous)
        self._open[end.key] = end
        self._lost.pop(end.key, None)

    def _discard(self, end: ProbeEnd) -> None:
        self._ends[end.nic].pop(end.qp_num, None)
        if self._open.get(end.key) is end:
            del self._open[end.key]
        end.destroy()

    def _without_connection(self, key: ProbeKey) -> Probed:
        if key not in self._lost:
            return Probed(key, None, "no connection for probes of this port is established")
        when_s, detail = self._lost[key]
        age_s = self._clock() - when_s
        said = (
            f"the last probe or test of a connection failed {age_s:.1f} s ago ({detail}); the "
            "connection is not restored yet"
        )
        return Probed(key, False if age_s < _SILENCE_S else None, said)

    def _finish(self, key: ProbeKey, is_answered: bool, detail: str) -> None:
        """Report the outcome of a probe; if the probe failed, discard the end that sent it.

        The queue pair of a failed probe is in state ERR or will soon be, so it cannot be used.
        """
        del self._asked[key]
        self._events.append(Probed(key, is_answered, detail))
        if not is_answered:
            self._discard(self._open[key])
            self._lost[key] = self._clock(), detail


def _make_domain(device: RdmaDevice) -> PD:
    try:
        return PD(device.context)
    except PyverbsError as exc:
        raise device.refusal("make a protection domain", exc) from exc


def queue_pair_timeout(timeout_s: float) -> int:
    """Return the queue pair attribute ``timeout`` for which all tries take at most `timeout_s`.

    Parameters
    ----------
    timeout_s : float
        Time for all tries, in seconds.

    Returns
    -------
    int
        The largest such t; each try takes 4.096 us times 2^t (ibv_modify_qp(3)). At least 1,
        because 0 means to wait forever.
    """
    a_try = timeout_s / _NTRIES / _TIMEOUT_UNIT_S
    return max(1, min(_MAX_TIMEOUT, math.floor(math.log2(a_try))))


__all__ = ["ProbeEnd", "VerbsProber", "queue_pair_timeout"]
