"""Reliable queue pair: one end of one path over one RDMA NIC.

All traffic except `QueuePair.hello` is RDMA_WRITE_WITH_IMM, so that each write produces one
completion at the peer:

- *messages* (clear-to-send, confirmations, eager slices) go into the peer's ring, at an offset that
  the sender chooses (`r2ccl.transport.verbs.ring`);
- *cleared slices* go into the landing place that their receiver announced;
- *credits* carry no payload.

The 32 bits of immediate data are:

- 2 bits for the kind (`Tag`);
- 8 bits for the *mark*, a random number that the receiver chooses for each connection. It lets the
  receiver recognize data of an earlier connection, unless both connections have the same mark;
- 22 bits for the offset of a message in the ring, in units of `ALIGN`; the number of a slice's
  landing place; or the count of consumed messages, modulo 2^22, of a credit.

Receive requests receive no data; they only produce completions. One is posted for every message,
landing place and credit that can be in flight, so receiver-not-ready does not occur. The objects
for work requests, both of pyverbs and of the compiled code, are made once per queue pair and
refilled for each post.

A queue pair is reused: `reset` ends a connection, `renew` prepares the next one. Each connection is
a *life* of the queue pair, with its own packet sequence number, mark, and life number in the wr_id
of its requests. A queue pair is destroyed only when the transport is closed, or if flushing,
resetting or renewing it fails, or the flush takes too long. Destroying can take seconds, because
the NIC first waits for packets that are not on the wire yet.

Invariants: a request is posted only while the queue has room; requests are retired in the order in
which they were posted.
"""

from __future__ import annotations

import enum
import secrets
import socket
from contextlib import ExitStack

import msgspec
import numpy as np

from r2ccl.transport.verbs.device import EndpointInfo, RdmaDevice, e
from r2ccl.transport.verbs.queue_depths import NMESSAGES, NRECEIVES, NSENDS
from r2ccl.transport.verbs.regions import MemoryRegion, register_everywhere
from r2ccl.transport.verbs.ring import ALIGN, COUNT_MODULUS, SendRing

# After r2ccl.transport.verbs.device, which imports pyverbs without its change to logging.
from pyverbs.pyverbs_error import PyverbsError  # isort: skip
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr  # isort: skip
from pyverbs.wr import SGE, RecvWR, SendWR  # isort: skip

#: At least every 16th send request is signaled, that is, produces a completion.
_SIGNAL_EVERY = 16
#: Wait time after receiver-not-ready, in verbs' encoding (12: 0.64 ms).
_MIN_RNR_TIMER = 12
_MAX_RD_ATOMIC = 1

_MARK_BITS = 8
#: Fields of a wr_id, from the top: request kind, life of the queue pair, count of send requests
#: posted in this life up to this request (0 for receive requests).
_COUNT_BITS = 44
_COUNT_MASK = (1 << _COUNT_BITS) - 1
_LIFE_BITS = 10
_LIFE_MASK = (1 << _LIFE_BITS) - 1
_WORK_SHIFT = _COUNT_BITS + _LIFE_BITS


#: Exceptions by which pyverbs and the compiled code report that the device refused a request.
_REFUSALS = (PyverbsError, OSError)


class Tag(enum.IntEnum):
    """Kind of a write, in the top two bits of its immediate data."""

    MESSAGE = 0
    SLICE = 1
    CREDIT = 2


_TAGS = frozenset(Tag)


class RequestKind(enum.IntEnum):
    """Kind of a request, in the top bits of its wr_id.

    ``MESSAGE`` includes credits and receive requests. ``MARKER`` is the last request of a queue,
    posted by `QueuePair.flush`; ``HELLO`` is the test of a new connection by `QueuePair.hello`.
    """

    MESSAGE = 0
    SLICE = 1
    MARKER = 2
    HELLO = 3


class PathEndpointInfo(EndpointInfo, frozen=True, array_like=True):
    """Endpoint info of a path: the queue pair, its mark, and the address and rkey of its ring."""

    mark: int
    ring_address: int
    ring_rkey: int


_info_decoder = msgspec.msgpack.Decoder(PathEndpointInfo)


class QueuePair:
    """Queue pair of one end of a path, with its message rings.

    It serves one connection after another. The constructor or `renew` begins the *life* of a
    connection; `reset` ends it.

    Parameters
    ----------
    device : RdmaDevice
    ring_nbytes : int
        Size of the message ring of each direction, in bytes.
    timeout, retry_cnt : int
        Attributes of the queue pair: an unacknowledged packet is retransmitted after 4.096 us times
        2^timeout, at most `retry_cnt` times.

    Raises
    ------
    TransportError
        If the device refuses, or the memory of the rings cannot be registered.
    """

    def __init__(
        self, device: RdmaDevice, *, ring_nbytes: int, timeout: int, retry_cnt: int
    ) -> None:
        self._device = device
        self._timeout = timeout
        self._retry_cnt = retry_cnt
        #: First half: the ring that the peer writes to. Second half: the source of sent messages,
        #: at the same offsets as in the peer's ring.
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
            with ExitStack() as opened:
                opened.callback(device.destroy, self._region)
                self._make()
                opened.callback(self._close_queue)
                self._begin()
                opened.pop_all()
        except _REFUSALS as exc:
            raise device.refusal("make a queue pair", exc) from exc
        self.number: int = self._qp.qp_num

    def renew(self) -> None:
        """Prepare the queue pair for another connection after `reset`; `info` gets new values.

        Raises
        ------
        TransportError
            If the device refuses; the queue pair can then only be closed.
        """
        self._life = self._life + 1 & _LIFE_MASK
        try:
            self._qp.to_init(self._init_attr())
            self._begin()
        except _REFUSALS as exc:
            raise self._device.refusal("renew a queue pair", exc) from exc

    def _make(self) -> None:
        device = self._device
        cap = QPCap(max_send_wr=NSENDS, max_recv_wr=NRECEIVES + 1, max_send_sge=1, max_recv_sge=1)
        made = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=device.cq, rcq=device.cq, cap=cap, sq_sig_all=0)
        self._qp = QP(device.pd, made, self._init_attr())
        self._sge = SGE(self._outbox_address, 0, self._region.lkey)
        self._write = SendWR(
            opcode=e.IBV_WR_RDMA_WRITE_WITH_IMM, num_sge=1, sg=[self._sge], send_flags=0
        )
        # From here on the request refers to `self._sge` itself, which `_post` refills.
        self._write.sg_list = self._sge
        nothing = SGE(self._memory.ctypes.data, 0, self._region.lkey)
        self._hello = SendWR(
            opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[nothing], send_flags=e.IBV_SEND_SIGNALED
        )
        self._receive = RecvWR(num_sge=1, sg=[nothing])
        self._marker = RecvWR(num_sge=1, sg=[nothing])
        #: Compiled code that posts messages, slices, credits and receives; None if pyverbs posts
        #: them. Markers and hellos are rare, so pyverbs posts them.
        self._poster = device.poster(
            self._qp, (self._memory.ctypes.data, 0, self._region.lkey), NRECEIVES
        )

    def _begin(self) -> None:
        """Start a life: reset the counts, post the receive requests, encode the endpoint info."""
        self._mark = secrets.randbits(_MARK_BITS)
        self._psn = secrets.randbits(24)
        self._remote: PathEndpointInfo | None = None
        self._ring = SendRing(self._ring_nbytes, NMESSAGES, ALIGN)
        #: Send requests posted, retired, and posted since the last signaled one.
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
            If the endpoint info cannot be decoded, the peer's link-layer address is not known, or
            the device refuses.
        """
        remote = self._device.read_endpoint_info(info, _info_decoder)
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
            what = f"connect to queue pair {remote.qp_num} at {remote.gid}"
            raise self._device.refusal(what, exc) from exc
        self._remote = remote

    def hello(self) -> None:
        """Post an RDMA write of 0 bytes; if it succeeds, packets pass in both directions.

        Raises
        ------
        TransportError
            If the device refuses.
        """
        assert self._remote is not None
        self._hello.wr_id = self._number(RequestKind.HELLO)
        self._hello.set_wr_rdma(self._remote.ring_rkey, self._remote.ring_address)
        self._send(self._hello)

    # Sending

    def has_room(self) -> bool:
        """Return True if another send request may be posted.

        One entry of the queue stays free for the marker of `flush`.
        """
        return self.posted - self.retired < NSENDS - 1

    def write_message(self, header: bytearray, payload: bytes | memoryview) -> bool:
        """Copy a message and post its write to the peer's ring.

        Return False and do nothing if the send queue or the ring has no room.

        Raises
        ------
        TransportError
            If the device refuses.
        InternalError
            If the message is larger than the ring.
        """
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
        """Post the write of a slice into a landing place; `has_room` must be True.

        Parameters
        ----------
        source : (int, int, int)
            I/O address, size in bytes and lkey of the local memory.
        target : (int, int)
            I/O address and rkey of the landing place.
        number : int
            Number of the landing place.

        Returns
        -------
        int
            Number of send requests posted in this life, including this one. `retire` returns the
            same number when the request has completed.

        Raises
        ------
        TransportError
            If the device refuses.
        """
        self._post(RequestKind.SLICE, self._imm(Tag.SLICE, number), source, target)
        return self.posted

    def write_credit(self, count: int) -> bool:
        """Post a credit: the peer learns that `count` of its messages were consumed in this life.

        Return False and post nothing if the send queue has no room.

        Raises
        ------
        TransportError
            If the device refuses.
        """
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
        """Handle a credit: the peer has consumed `count` messages, modulo `COUNT_MODULUS`.

        Raises
        ------
        InternalError
            If the peer has consumed more messages than were sent.
        """
        self._ring.credit(count)

    def receive(self, count: int) -> None:
        """Post `count` receive requests to replace completed ones.

        Raises
        ------
        TransportError
            If the device refuses.
        """
        try:
            self._post_receives(count)
        except _REFUSALS as exc:
            raise self._device.refusal("post a receive request", exc) from exc

    def untag(self, imm_data: int) -> tuple[Tag, int] | None:
        """Return the tag and the value of immediate data, which is in network byte order.

        Return None if the mark is not that of this connection, or the tag is unknown.
        """
        imm = socket.ntohl(imm_data)
        if imm // COUNT_MODULUS % (1 << _MARK_BITS) != self._mark or imm >> 30 not in _TAGS:
            return None
        return Tag(imm >> 30), imm % COUNT_MODULUS

    @staticmethod
    def work_of(number: int) -> RequestKind:
        """Return the kind of the request with wr_id `number`."""
        return RequestKind(number >> _WORK_SHIFT)

    def owns(self, number: int) -> bool:
        """Return True if the request with wr_id `number` was posted in the current life."""
        return number >> _COUNT_BITS & _LIFE_MASK == self._life

    def retire(self, number: int) -> tuple[RequestKind, int]:
        """Handle the completion of the send request with wr_id `number`; return its kind and count.

        The count is the number of send requests posted in this life, up to and including this one.
        All of them have completed, because a send queue completes in order.
        """
        count = number & _COUNT_MASK
        self.retired = max(self.retired, count)
        return self.work_of(number), count

    # Ending

    def flush(self) -> None:
        """Take the queue pair to state ERR, with a marker as the last request of each queue.

        When both markers have completed, no other request is in flight.

        Raises
        ------
        TransportError
            If the device refuses; the queue pair can then only be closed.
        """
        try:
            # Posted before the change to ERR: Soft-RoCE flushes its receive queue when the state
            # changes, not when a request is posted. Incoming writes cannot consume the marker:
            # at least as many receive requests precede it as writes can be in flight.
            self._qp.post_recv(self._marker)
            self._qp.modify(QPAttr(qp_state=e.IBV_QPS_ERR), e.IBV_QP_STATE)
            self._write.send_flags = e.IBV_SEND_SIGNALED
            self._write.wr_id = self._number(RequestKind.MARKER)
            self._sge.length = 0
            self._qp.post_send(self._write)
        except PyverbsError as exc:
            raise self._device.refusal("flush a queue pair", exc) from exc

    def reset(self) -> None:
        """Take the queue pair to state RESET and end its life; `renew` begins the next life.

        Between the two calls, no peer can write to this rank's memory through the queue pair.

        Raises
        ------
        TransportError
            If the device refuses; the queue pair can then only be closed.
        """
        try:
            self._qp.modify(QPAttr(qp_state=e.IBV_QPS_RESET), e.IBV_QP_STATE)
        except PyverbsError as exc:
            raise self._device.refusal("reset a queue pair", exc) from exc

    def close(self) -> None:
        """Destroy the queue pair; afterwards no peer can write to this rank's memory through it.

        If the device was removed, the kernel has destroyed the queue pair already.
        """
        self._close_queue()
        self._device.destroy(self._region)

    def _close_queue(self) -> None:
        self._device.destroy(self._qp, self._receive, self._marker, self._hello, self._write)

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
