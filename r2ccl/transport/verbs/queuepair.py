"""A reliable queue pair: one end of one path over one RDMA NIC.

It carries two kinds of traffic, both as RDMA_WRITE_WITH_IMM, so that each wakes the peer once:

- *messages* (headers, landing places, confirmations, eager payloads) into the peer's ring, whose
  places the sender chooses (`r2ccl.transport.verbs.ring`);
- *slices* into the landing place their receiver named.

The 32 bits of immediate data are: two bits that say which; eight bits of *mark*, a random number
that the receiver draws for each connection, so that data of an earlier one is recognised; and 22
bits that are an offset in the ring, the number of a landing place, or a count of consumed messages
(a credit, sent without payload).

Receive requests receive no data; they only produce completions. One is posted for every message,
landing place and credit that can be under way, so the receiver is never not ready. Work requests
are made once and refilled: those of pyverbs and, where the device has it, those of the compiled
path. Of the library, only this module, `r2ccl.transport.verbs.device` and
`r2ccl.transport.verbs.probe` import pyverbs.

A queue pair is used again: `reset` ends a connection, `renew` prepares the next one (a new *life*)
with another packet sequence number, another mark, and another life in the numbers of its requests.
It is destroyed only at the end, or if flushing or resetting it fails: that can take seconds,
because the NIC first waits for packets that are not on the wire yet.

Invariant: a request is posted only while the queue has room; the count of retired requests grows
in the order they were posted.
"""

from __future__ import annotations

import enum
import secrets
import socket

import msgspec
import numpy as np

from r2ccl.transport.verbs.device import EndpointInfo, RdmaDevice, e
from r2ccl.transport.verbs.queue_depths import NMESSAGES, NRECEIVES, NSENDS
from r2ccl.transport.verbs.regions import MemoryRegion, register_everywhere
from r2ccl.transport.verbs.ring import ALIGN, COUNT_MODULUS, SendRing

# Below r2ccl.transport.verbs.device, which sees to it that importing pyverbs changes nothing else.
from pyverbs.pyverbs_error import PyverbsError  # isort: skip
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr  # isort: skip
from pyverbs.wr import SGE, RecvWR, SendWR  # isort: skip

#: One request in this many asks for a completion, if nothing else does.
_SIGNAL_EVERY = 16
#: Receiver-not-ready never happens by construction; if it does, wait this long (12: 0.64 ms).
_MIN_RNR_TIMER = 12
_MAX_RD_ATOMIC = 1

_MARK_BITS = 8
#: A request's number: what it is, the life of the queue pair, how many were posted in this life.
_COUNT_BITS = 44
_COUNT_MASK = (1 << _COUNT_BITS) - 1
_LIFE_BITS = 10
_LIFE_MASK = (1 << _LIFE_BITS) - 1
_WORK_SHIFT = _COUNT_BITS + _LIFE_BITS


#: What says that the device did not take something: pyverbs, and the compiled path.
_REFUSALS = (PyverbsError, OSError)


class Tag(enum.IntEnum):
    """What immediate data announces."""

    MESSAGE = 0
    SLICE = 1
    CREDIT = 2


_TAGS = frozenset(Tag)


class RequestKind(enum.IntEnum):
    """What a completed request was; the upper bits of its number."""

    MESSAGE = 0
    SLICE = 1
    MARKER = 2
    HELLO = 3


class PathEndpointInfo(EndpointInfo, frozen=True, array_like=True):
    """What the peer must know of an end of a path: also its mark, and where its ring is."""

    mark: int
    ring_address: int
    ring_rkey: int


class QueuePair:
    """One end of a path.

    Parameters
    ----------
    device : RdmaDevice
    ring_nbytes : int
        Room for messages under way, one way.
    timeout, retry_cnt : int
        Of the queue pair: 4.096 us times 2 to the power of `timeout`, and how often again.

    Raises
    ------
    TransportError
        The device refused.
    """

    def __init__(
        self, device: RdmaDevice, *, ring_nbytes: int, timeout: int, retry_cnt: int
    ) -> None:
        self._device = device
        self._timeout = timeout
        self._retry_cnt = retry_cnt
        #: The peer writes into the first half, the second is where messages leave from.
        self._memory = np.zeros(2 * ring_nbytes, np.uint8)
        self._ring_nbytes = ring_nbytes
        self._region: MemoryRegion
        (self._region,) = register_everywhere(
            [device.registrar], self._memory.ctypes.data, 2 * ring_nbytes
        )
        view = memoryview(self._memory)  # type: ignore[arg-type]
        self.inbox = view[:ring_nbytes]
        self._outbox = view[ring_nbytes:]
        self._outbox_address = self._memory.ctypes.data + ring_nbytes
        self._life = 0
        try:
            self._make()
            self._begin()
        except _REFUSALS as exc:
            self._region.close()
            raise device.refusal("make a queue pair", exc) from exc
        self.number: int = self._qp.qp_num

    def renew(self) -> None:
        """Begin another life, after `reset`.

        Raises
        ------
        TransportError
            The device refused: only `close` is left.
        """
        self._life = self._life + 1 & _LIFE_MASK
        try:
            self._qp.to_init(self._init_attr())
            self._begin()
        except _REFUSALS as exc:
            raise self._device.refusal("set a queue pair up again", exc) from exc

    def _make(self) -> None:
        device = self._device
        cap = QPCap(max_send_wr=NSENDS, max_recv_wr=NRECEIVES + 1, max_send_sge=1, max_recv_sge=1)
        made = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=device.cq, rcq=device.cq, cap=cap, sq_sig_all=0)
        self._qp = QP(device.pd, made, self._init_attr())
        self._sge = SGE(self._outbox_address, 0, self._region.lkey)
        self._write = SendWR(
            opcode=e.IBV_WR_RDMA_WRITE_WITH_IMM, num_sge=1, sg=[self._sge], send_flags=0
        )
        # The request now reads the very entry that is refilled before each post.
        self._write.sg_list = self._sge
        nothing = SGE(self._memory.ctypes.data, 0, self._region.lkey)
        self._hello = SendWR(
            opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[nothing], send_flags=e.IBV_SEND_SIGNALED
        )
        self._receive = RecvWR(num_sge=1, sg=[nothing])
        self._marker = RecvWR(num_sge=1, sg=[nothing])
        #: Posts messages, slices and receives in their stead; markers and hellos are too few.
        self._poster = device.poster(
            self._qp, (self._memory.ctypes.data, 0, self._region.lkey), NRECEIVES
        )

    def _begin(self) -> None:
        """Forget the last life, post the receives of this one, describe it."""
        self._mark = secrets.randbits(_MARK_BITS)
        self._psn = secrets.randbits(24)
        self._remote: PathEndpointInfo | None = None
        self._ring = SendRing(self._ring_nbytes, NMESSAGES, ALIGN)
        #: Requests posted and, in order, retired; and posted since one asked for a completion.
        self.posted = 0
        self.retired = 0
        self._unsignaled = 0
        self._receive.wr_id = self._numbered(RequestKind.MESSAGE, 0)
        if self._poster is not None:
            self._poster.number_receives(self._numbered(RequestKind.MESSAGE, 0))
        self._marker.wr_id = self._numbered(RequestKind.MARKER, 0)
        self._post_receives(NRECEIVES)
        port = self._device.query()
        self._mtu = port.active_mtu
        self.info = msgspec.msgpack.encode(
            PathEndpointInfo(
                self._qp.qp_num, self._psn, self._device.gid, port.lid, port.active_mtu,
                self._mark, self._memory.ctypes.data, self._region.rkey,
            )
        )  # fmt: skip

    def _init_attr(self) -> QPAttr:
        attr = QPAttr(port_num=self._device.port)
        attr.qp_access_flags = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        return attr

    # Joining

    def join(self, info: bytes) -> None:
        """Connect to the queue pair that `info` describes.

        Raises
        ------
        TransportError
            If the endpoint info makes no sense, the kernel does not know the peer's link-layer
            address yet, or the device refuses.
        """
        remote = self._device.read_endpoint_info(info, PathEndpointInfo)
        attr = self._init_attr()
        attr.ah_attr = self._device.address(remote)
        attr.path_mtu = min(remote.mtu, self._mtu)
        attr.dest_qp_num = remote.qp_num
        attr.rq_psn, attr.sq_psn = remote.psn, self._psn
        attr.max_dest_rd_atomic = attr.max_rd_atomic = _MAX_RD_ATOMIC
        attr.min_rnr_timer = _MIN_RNR_TIMER
        attr.timeout, attr.retry_cnt, attr.rnr_retry = self._timeout, self._retry_cnt, 7
        try:
            self._qp.to_rts(attr)
        except PyverbsError as exc:
            what = f"join queue pair {remote.qp_num} at {remote.gid}"
            raise self._device.refusal(what, exc) from exc
        self._remote = remote

    def hello(self) -> None:
        """Write nothing to the peer; its completion proves the way there and back.

        Raises
        ------
        TransportError
            The device refused.
        """
        assert self._remote is not None
        self._hello.wr_id = self._number(RequestKind.HELLO)
        self._hello.set_wr_rdma(self._remote.ring_rkey, self._remote.ring_address)
        self._send(self._hello)

    # Sending

    def has_room(self) -> bool:
        """Whether another request may be posted; one place is kept for the marker."""
        return self.posted - self.retired < NSENDS - 1

    def write_message(self, header: bytearray, payload: bytes | memoryview) -> bool:
        """Send a message; False until there is room."""
        nbytes = len(header) + len(payload)
        if not self.has_room():
            return False
        offset = self._ring.take(nbytes)
        if offset is None:
            return False
        start = offset + len(header)
        self._outbox[offset:start] = header
        if payload:
            self._outbox[start : offset + nbytes] = payload
        remote = self._remote
        assert remote is not None
        self._post(
            RequestKind.MESSAGE, self._imm(Tag.MESSAGE, offset // ALIGN),
            (self._outbox_address + offset, nbytes, self._region.lkey),
            (remote.ring_address + offset, remote.ring_rkey),
        )  # fmt: skip
        return True

    def write_slice(
        self, source: tuple[int, int, int], target: tuple[int, int], number: int
    ) -> int:
        """Write (address, nbytes, lkey) to (address, rkey), landing place `number`.

        Returns the request's count, as its completion will tell it; `has_room` must hold.
        """
        self._post(RequestKind.SLICE, self._imm(Tag.SLICE, number), source, target)
        return self.posted

    def write_credit(self, count: int) -> bool:
        """Tell how many messages were consumed so far; False until there is room."""
        if not self.has_room():
            return False
        assert self._remote is not None
        self._post(
            RequestKind.MESSAGE, self._imm(Tag.CREDIT, count % COUNT_MODULUS),
            (self._outbox_address, 0, self._region.lkey),
            (self._remote.ring_address, self._remote.ring_rkey),
        )  # fmt: skip
        return True

    def credit(self, count: int) -> None:
        """Take the peer's count of consumed messages."""
        self._ring.credit(count)

    def receive(self, count: int) -> None:
        """Post `count` receive requests anew.

        Raises
        ------
        TransportError
            The device refused.
        """
        try:
            self._post_receives(count)
        except _REFUSALS as exc:
            raise self._device.refusal("post a receive request", exc) from exc

    def untag(self, imm_data: int) -> tuple[Tag, int] | None:
        """Split immediate data; None: it does not carry this end's mark, or makes no sense."""
        imm = socket.ntohl(imm_data)
        if imm // COUNT_MODULUS % (1 << _MARK_BITS) != self._mark or imm >> 30 not in _TAGS:
            return None
        return Tag(imm >> 30), imm % COUNT_MODULUS

    @staticmethod
    def work_of(number: int) -> RequestKind:
        """Return what the request of this number was."""
        return RequestKind(number >> _WORK_SHIFT)

    def owns(self, number: int) -> bool:
        """Whether the request of this number is of this life."""
        return number >> _COUNT_BITS & _LIFE_MASK == self._life

    def retire(self, number: int) -> tuple[RequestKind, int]:
        """Take the number of a completed send request; returns what it was, and its count."""
        count = number & _COUNT_MASK
        self.retired = max(self.retired, count)
        return self.work_of(number), count

    # Ending

    def flush(self) -> None:
        """Go to ERR and post a marker on both queues: their completions are the last ones.

        Raises
        ------
        TransportError
            The device refused: only `close` is left.
        """
        try:
            # Before: Soft-RoCE looks at its receive queue when the state changes, not when a
            # request is posted. Everything under way needs fewer receives than stand before it.
            self._qp.post_recv(self._marker)
            self._qp.modify(QPAttr(qp_state=e.IBV_QPS_ERR), e.IBV_QP_STATE)
            self._write.send_flags = e.IBV_SEND_SIGNALED
            self._write.wr_id = self._number(RequestKind.MARKER)
            self._sge.length = 0
            self._qp.post_send(self._write)
        except PyverbsError as exc:
            raise self._device.refusal("flush a queue pair", exc) from exc

    def reset(self) -> None:
        """Stop it: nothing is written into this rank's memory afterwards. See `renew`.

        Raises
        ------
        TransportError
            The device refused: only `close` is left.
        """
        try:
            self._qp.modify(QPAttr(qp_state=e.IBV_QPS_RESET), e.IBV_QP_STATE)
        except PyverbsError as exc:
            raise self._device.refusal("reset a queue pair", exc) from exc

    def close(self) -> None:
        """Destroy it: nothing is written into this rank's memory afterwards."""
        self._qp.close()
        self._region.close()
        for request in (self._receive, self._marker, self._hello, self._write):
            request.close()

    def _post(
        self, work: RequestKind, imm: int, source: tuple[int, int, int], target: tuple[int, int]
    ) -> None:
        number = self._number(work)
        self._unsignaled += 1
        is_signaled = work is RequestKind.SLICE or self._unsignaled >= _SIGNAL_EVERY
        flags = e.IBV_SEND_SIGNALED if is_signaled else 0
        if is_signaled:
            self._unsignaled = 0
        if self._poster is None:
            request, sge = self._write, self._sge
            sge.addr, sge.length, sge.lkey = source
            request.wr_id, request.imm_data, request.send_flags = number, imm, flags
            request.set_wr_rdma(target[1], target[0])
            self._send(request)
            return
        try:
            self._poster.write(number, flags, imm, source, target)
        except OSError as exc:
            raise self._device.refusal("post a work request", exc) from exc

    def _send(self, request: SendWR) -> None:
        try:
            self._qp.post_send(request)
        except PyverbsError as exc:
            raise self._device.refusal("post a work request", exc) from exc

    def _post_receives(self, count: int) -> None:
        if self._poster is not None:
            self._poster.receive(count)
            return
        for _ in range(count):
            self._qp.post_recv(self._receive)

    def _number(self, work: RequestKind) -> int:
        self.posted += 1
        return self._numbered(work, self.posted)

    def _numbered(self, work: RequestKind, count: int) -> int:
        return (work << _LIFE_BITS | self._life) << _COUNT_BITS | count

    def _imm(self, tag: Tag, value: int) -> int:
        assert self._remote is not None
        return socket.htonl(tag << 30 | self._remote.mark * COUNT_MODULUS | value)


__all__ = ["PathEndpointInfo", "QueuePair", "RequestKind", "Tag"]
