"""Probes over verbs: writes of no bytes, on queue pairs of their own.

The far NIC acknowledges such a write, whatever the process behind it does, or its silence uses up
the retries. A queue pair serves one probe, one way: the rank that asks is its requester, and the
end that is asked is never made ready to send. So a probe that is not answered breaks its own queue
pair only, which is destroyed and joined anew (`r2ccl.failover.connector`). All of them are in a
protection domain without memory: there is nothing a peer could write into.

What broke the connection of a probe is what breaks paths, so further questions about the same two
ports come within seconds, before it is joined anew. They get the same answer, silence, for
`_SILENCE_S`; after that there is no connection to ask by.

An end makes its queue pair when that is first needed, so that one that finds no way to its peer
costs nothing. Beside `r2ccl.transport.verbs.device` and `r2ccl.transport.verbs.queuepair` this
module sees pyverbs.

Invariant: a probe that was asked is reported once; an end has a queue pair until it is discarded.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence

import msgspec

from r2ccl.clock import Clock
from r2ccl.errors import TransportError
from r2ccl.transport.base import Event, Joined, Probed
from r2ccl.transport.verbs.device import EndpointInfo, RdmaDevice, e
from r2ccl.transport.verbs.status import describe_status
from r2ccl.types import ProbeKey

# Below r2ccl.transport.verbs.device, which sees to it that importing pyverbs changes nothing else.
from pyverbs.pd import PD  # isort: skip
from pyverbs.pyverbs_error import PyverbsError  # isort: skip
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr  # isort: skip
from pyverbs.wr import SGE, SendWR  # isort: skip

#: A probe is sent this often before the NIC gives up: two lost packets do not make a dead rail.
_NTRIES = 3
#: How long the silence of one probe answers the next. Queue pairs on the same ports give up at any
#: time within their own retries, about 1 s with the defaults, and then questions go round twice.
_SILENCE_S = 5.0
#: Unit of a queue pair's timeout, which is the power of two it is multiplied with.
_TIMEOUT_UNIT_S = 4.096e-6
_MAX_TIMEOUT = 31


class ProbeEnd:
    """One end of a probe's connection; `Endpoint`.

    Parameters
    ----------
    key : ProbeKey
        The end is on the port of rail ``via``, also at the rank that is asked.
    nic : int
        Number of that port within its transport.
    device : RdmaDevice
    pd : PD
    timeout : int
        Of the queue pair, in verbs' own unit.
    on_made, discard : callable
        Told when it has a queue pair, and to give it back to its `VerbsProber`.
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
        #: Of its queue pair; -1: it has none.
        self.qp_num = -1
        #: Of the write under way: a queue pair's number may have been another's before.
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
        """What the peer must know, of a queue pair that is made now if there is none.

        Raises
        ------
        TransportError
            The device refused.
        """
        self._made()
        port = self._device.query()
        return msgspec.msgpack.encode(
            EndpointInfo(self.qp_num, self._psn, self._device.gid, port.lid, port.active_mtu)
        )

    def join(self, info: bytes, is_caller: bool) -> None:
        """See `Endpoint.join`."""
        remote = self._device.read_endpoint_info(info, EndpointInfo)
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
        """Write nothing to the peer; the completion is its NIC's answer.

        Raises
        ------
        TransportError
            The device refused.
        """
        assert self._qp is not None
        if self._write is None:
            self._write = SendWR(
                opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[SGE(0, 0, 0)],
                send_flags=e.IBV_SEND_SIGNALED,
            )  # fmt: skip
            self._write.num_sge = 0  # which pyverbs does not let be made
            # Without a byte, neither address nor key is looked at (InfiniBand, o9-28).
            self._write.set_wr_rdma(0, 0)
        self.number = self._write.wr_id = secrets.randbits(63)
        try:
            self._qp.post_send(self._write)
        except PyverbsError as exc:
            raise self._device.refusal("post a probe", exc) from exc

    def close(self) -> None:
        """See `Endpoint.close`."""
        self._discard(self)

    def destroy(self) -> None:
        """Destroy the queue pair, if there is one."""
        for part in (self._qp, self._write):
            if part is not None:
                part.close()
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
    """The probes of one transport.

    Parameters
    ----------
    devices : sequence of RdmaDevice
        To be closed after this.
    timeout_s : float
        Of a probe.
    clock : Clock

    Raises
    ------
    TransportError
        A device refused.
    """

    def __init__(self, devices: Sequence[RdmaDevice], timeout_s: float, clock: Clock) -> None:
        self._devices = devices
        self._timeout_s = timeout_s
        self._clock = clock
        self._timeout = queue_pair_timeout(timeout_s)
        self._domains = [_make_domain(device) for device in devices]
        #: Every end with a queue pair, by NIC and number.
        self._ends: list[dict[int, ProbeEnd]] = [{} for _ in devices]
        self._open: dict[ProbeKey, ProbeEnd] = {}
        #: When a probe that was asked is given up.
        self._asked: dict[ProbeKey, float] = {}
        #: Of connections that broke: when a probe was last not answered, and how.
        self._lost: dict[ProbeKey, tuple[float, str]] = {}
        self._events: list[Event] = []

    @property
    def is_busy(self) -> bool:
        """Whether `advance` has something to do, now or later."""
        return bool(self._asked or self._events)

    def offer(self, key: ProbeKey, nic: int) -> ProbeEnd:
        """Make an end of the connection of `key`, on NIC number `nic`."""
        return ProbeEnd(
            key, nic, self._devices[nic], self._domains[nic], self._timeout,
            self._enter, self._discard,
        )  # fmt: skip

    def probe(self, key: ProbeKey) -> None:
        """Begin a probe; see `Transport.probe`."""
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
        """Take the outcome of a write; that of a queue pair that is gone changes nothing."""
        end = self._ends[nic].get(qp_num)
        if end is None or end.number != number:
            return
        error = describe_status(status, vendor_err) if status else ""
        if self._open.get(end.key) is not end:
            self._events.append(Joined(end.key, error))
            if not error:
                self._use(end)
            elif end.key in self._lost:
                self._lost[end.key] = self._clock(), error
        elif end.key in self._asked:
            self._finish(end.key, not status, error or "acknowledged")

    def advance(self) -> list[Event]:
        """Give up what was not answered in time; returns what happened.

        To be called after the completions were taken: one that waited is an answer.
        """
        now = self._clock()
        for key, deadline_s in list(self._asked.items()):
            if now >= deadline_s:
                self._finish(key, False, f"no acknowledgement within {self._timeout_s:g} s")
        events, self._events = self._events, []
        return events

    def limit_s(self, timeout_s: float) -> float:
        """Cut a sleep of `timeout_s` short if something is due before its end."""
        if self._events:
            return 0.0
        if not self._asked:
            return timeout_s
        return max(0.0, min(timeout_s, min(self._asked.values()) - self._clock()))

    def close(self) -> None:
        """Destroy every end."""
        for ends in self._ends:
            for end in ends.values():
                end.destroy()
            ends.clear()
        self._open.clear()
        self._asked.clear()
        for domain in self._domains:
            domain.close()

    def _enter(self, end: ProbeEnd) -> None:
        self._ends[end.nic][end.qp_num] = end

    def _use(self, end: ProbeEnd) -> None:
        """Ask with this end from now on."""
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
            return Probed(key, None, "its connection was never joined")
        when_s, detail = self._lost[key]
        age_s = self._clock() - when_s
        said = f"{age_s:.1f} s ago, and its connection is not joined again: {detail}"
        return Probed(key, False if age_s < _SILENCE_S else None, said)

    def _finish(self, key: ProbeKey, is_answered: bool, detail: str) -> None:
        """Report a probe; the queue pair of one that failed is in ERR, or about to be."""
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
    """Return the timeout of a queue pair with which all its tries fit into `timeout_s`.

    In verbs' own unit, 4.096 us times 2 to its power (ibv_modify_qp(3)); at least 1, because 0
    means for ever.
    """
    a_try = timeout_s / _NTRIES / _TIMEOUT_UNIT_S
    return max(1, min(_MAX_TIMEOUT, math.floor(math.log2(a_try))))


__all__ = ["ProbeEnd", "VerbsProber", "queue_pair_timeout"]
