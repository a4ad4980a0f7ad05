"""Fake pyverbs with RDMA NICs in memory, whose completion queues overrun like real ones.

`installed` replaces pyverbs in ``sys.modules`` and reimports the modules that import it. So the
unmodified `r2ccl.transport.verbs.transport` runs without an RDMA device and without pyverbs. All
NICs of a `FakeFabric` reach each other. The fake implements the part of verbs that r2ccl uses:
reliable queue pairs, RDMA writes with and without immediate data, flushed requests, and one
completion queue per device.

A write is carried out when it is posted. If the port of either NIC is mute or one of the two queue
pairs is not ready, the write stays in flight, and is tried again when the next write is posted on
the same queue pair. A queue pair that goes to ERR completes every request in flight as flushed,
including unsignaled requests. A completion that does not fit into the completion queue is lost, and
the device reports CQ_ERR once (InfiniBand specification, volume 1, 10.8.2 and 11.6.3).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import os
import sys
from collections import deque
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

#: Values of ``ibv_wc_status``, ``ibv_wc_opcode``, ``ibv_qp_state``, ``ibv_event_type``,
#: ``ibv_port_state``, ``ibv_mtu``, ``ibv_wr_opcode`` and ``ibv_send_flags``, in this order.
_SUCCESS, _FLUSHED = 0, 5
_SENT, _RECEIVED = 1, 129
_RESET, _INIT, _RTR, _RTS, _ERR = 0, 1, 2, 3, 6
_CQ_ERR = 0
_ACTIVE, _MTU_4096 = 4, 5
_WITH_IMM, _SIGNALED = 1, 2

_ENUMS = {
    "IBV_ACCESS_LOCAL_WRITE": 1,
    "IBV_ACCESS_REMOTE_WRITE": 2,
    "IBV_PORT_ACTIVE": _ACTIVE,
    "IBV_QPS_RESET": _RESET,
    "IBV_QPS_ERR": _ERR,
    "IBV_QPT_RC": 2,
    "IBV_QP_STATE": 1,
    "IBV_SEND_SIGNALED": _SIGNALED,
    "IBV_WC_WR_FLUSH_ERR": _FLUSHED,
    "IBV_WR_RDMA_WRITE": 0,
    "IBV_WR_RDMA_WRITE_WITH_IMM": _WITH_IMM,
}
#: Modules of `r2ccl.transport.verbs` that import pyverbs, directly or through each other.
_IMPORTERS = ("device", "queuepair", "probe", "endpoint", "transport")


class FakePyverbsError(Exception):
    """Fake of ``pyverbs.pyverbs_error.PyverbsError``."""


class Completion(SimpleNamespace):
    """Fake of ``ibv_wc``."""


class FakeFabric:
    """Network that connects all fake NICs of a test.

    Parameters
    ----------
    max_cqe : int
        Largest number of entries that a device allows in a completion queue.
    nports : int
        Number of ports of each NIC.

    Attributes
    ----------
    broken : set of str
        Names of the NICs that cannot be opened.
    """

    def __init__(self, max_cqe: int = 1 << 22, nports: int = 1) -> None:
        self.max_cqe = max_cqe
        self.nports = nports
        self.broken: set[str] = set()
        self.contexts: dict[str, FakeContext] = {}
        self.qps: dict[int, FakeQueuePair] = {}
        self._numbers = itertools.count(17)
        self._keys = itertools.count(1)

    def add(self, qp: FakeQueuePair) -> int:
        """Register a queue pair and return its number."""
        number = next(self._numbers)
        self.qps[number] = qp
        return number

    def new_key(self) -> int:
        """Return a key that no other memory region has."""
        return next(self._keys)

    def mute(self, name: str) -> None:
        """Make the port of NIC `name` mute: writes from and to the NIC stay in flight."""
        self.contexts[name].is_mute = True

    def fail_port(self, name: str) -> None:
        """Move every queue pair of NIC `name` that is in RTR or RTS to ERR."""
        for qp in list(self.qps.values()):
            if qp.context is self.contexts[name] and qp.state in (_RTR, _RTS):
                qp.to_error()


class FakeContext:
    """Fake of ``pyverbs.device.Context``."""

    def __init__(self, fabric: FakeFabric, name: str) -> None:
        if name in fabric.broken:
            raise FakePyverbsError(f"Failed to open device {name}")
        self.fabric = fabric
        self.name = name
        self.is_mute = False
        self.events: deque[int] = deque()
        self.async_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        fabric.contexts[name] = self

    def query_device(self) -> Any:
        """Return the largest size of a completion queue, and the number of ports."""
        return SimpleNamespace(max_cqe=self.fabric.max_cqe, phys_port_cnt=self.fabric.nports)

    def query_port(self, port: int) -> Any:
        """Return the attributes of an active Ethernet port, for every port number."""
        return SimpleNamespace(state=_ACTIVE, lid=0, active_mtu=_MTU_4096)

    def raise_event(self, number: int) -> None:
        """Queue an asynchronous event, such as CQ_ERR."""
        self.events.append(number)
        os.eventfd_write(self.async_fd, 1)

    def get_async_event(self) -> Any:
        """Remove and return the oldest asynchronous event; call it only if there is one."""
        os.eventfd_read(self.async_fd)
        return SimpleNamespace(event_type=self.events.popleft(), ack=lambda: None)

    def close(self) -> None:
        """Close the event descriptor."""
        os.close(self.async_fd)


class FakeDomain:
    """Fake of ``pyverbs.pd.PD``."""

    def __init__(self, context: FakeContext) -> None:
        self.context = context

    def close(self) -> None:
        """Do nothing: a fake domain holds no resources."""


class FakeRegion:
    """Fake of ``pyverbs.mr.MR``."""

    def __init__(self, pd: FakeDomain, nbytes: int, access: int, address: int) -> None:
        self.lkey = self.rkey = pd.context.fabric.new_key()

    def close(self) -> None:
        """Do nothing: a fake region holds no resources."""


class FakeChannel:
    """Fake of ``pyverbs.cq.CompChannel``."""

    def __init__(self, context: FakeContext) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def get_cq_event(self, cq: FakeCompletionQueue) -> None:
        """Consume the pending notifications."""
        os.eventfd_read(self.fd)

    def close(self) -> None:
        """Close the event descriptor."""
        os.close(self.fd)


class FakeCompletionQueue:
    """Fake of ``pyverbs.cq.CQ``.

    Attributes
    ----------
    cqe : int
        Capacity in entries.
    nlost : int
        Completions lost because the queue was full.
    nhighest : int
        Highest number of entries in use at a time.
    """

    def __init__(
        self, context: FakeContext, cqe: int, cq_context: object, channel: FakeChannel
    ) -> None:
        if cqe > context.fabric.max_cqe:
            raise FakePyverbsError("Failed to create a CQ. Errno: 22, Invalid argument")
        self.cqe = cqe
        self.nlost = self.nhighest = 0
        self._context = context
        self._channel = channel
        self._entries: deque[Completion] = deque()
        self._is_armed = False

    def push(self, completion: Completion) -> None:
        """Add an entry; if the queue is full, drop the entry, and report CQ_ERR the first time."""
        if len(self._entries) == self.cqe:
            if not self.nlost:
                self._context.raise_event(_CQ_ERR)
            self.nlost += 1
            return
        self._entries.append(completion)
        self.nhighest = max(self.nhighest, len(self._entries))
        if self._is_armed:
            self._is_armed = False
            os.eventfd_write(self._channel.fd, 1)

    def poll(self, count: int) -> tuple[int, list[Completion]]:
        """Remove up to `count` entries; return their number and the entries.

        Once an entry has been lost, every poll returns no entries.
        """
        if self.nlost:
            return 0, []
        found = [self._entries.popleft() for _ in range(min(count, len(self._entries)))]
        return len(found), found

    def forget(self, number: int) -> None:
        """Drop the entries of queue pair `number` on reset or destruction, as libmlx5 does."""
        self._entries = deque(each for each in self._entries if each.qp_num != number)

    def req_notify(self) -> None:
        """Arm the queue: the next entry notifies the channel."""
        self._is_armed = True

    def ack_events(self, count: int) -> None:
        """Do nothing: the fake does not count unacknowledged events."""

    def close(self) -> None:
        """Do nothing: a fake completion queue holds no resources."""


class FakeScatter:
    """Fake of ``pyverbs.wr.SGE``."""

    def __init__(self, addr: int, length: int, lkey: int) -> None:
        self.addr, self.length, self.lkey = addr, length, lkey


class FakeRequest:
    """Fake of ``pyverbs.wr.SendWR`` and ``RecvWR``."""

    def __init__(
        self, opcode: int = 0, num_sge: int = 0, sg: Any = (), send_flags: int = 0
    ) -> None:
        self.opcode, self.num_sge, self.send_flags = opcode, num_sge, send_flags
        self.wr_id = self.imm_data = self.rkey = self.remote = 0
        #: The caller's scatter-gather entry. pyverbs copies the entry, but r2ccl patches its
        #: requests so that they read the original.
        self.sg_list: FakeScatter = sg[0]

    def set_wr_rdma(self, rkey: int, addr: int) -> None:
        """Set the remote address and key of an RDMA write."""
        self.rkey, self.remote = rkey, addr

    def close(self) -> None:
        """Do nothing: a fake request holds no resources."""


class FakeAttributes(SimpleNamespace):
    """Fake of ``QPAttr``, ``QPInitAttr`` and ``QPCap``, and of the classes of ``pyverbs.addr``."""

    def __init__(self, *_: Any, **given: Any) -> None:
        super().__init__(**given)


class _Posted(SimpleNamespace):
    """Copy of a send request, made when it is posted."""


class FakeQueuePair:
    """Fake of ``pyverbs.qp.QP``."""

    def __init__(self, pd: FakeDomain, init: FakeAttributes, attr: FakeAttributes) -> None:
        self.context = pd.context
        self.state = _INIT
        self._cq: FakeCompletionQueue = init.scq
        self._cap = init.cap
        self._remote = 0
        self._receives: deque[int] = deque()
        self._sends: deque[_Posted] = deque()
        self.qp_num = self.context.fabric.add(self)

    def to_init(self, attr: FakeAttributes) -> None:
        """Move the queue pair to INIT."""
        self.state = _INIT

    def to_rtr(self, attr: FakeAttributes) -> None:
        """Move the queue pair to RTR and set its remote queue pair."""
        self._remote, self.state = attr.dest_qp_num, _RTR

    def to_rts(self, attr: FakeAttributes) -> None:
        """Move the queue pair to RTS and set its remote queue pair."""
        self._remote, self.state = attr.dest_qp_num, _RTS

    def modify(self, attr: FakeAttributes, mask: int) -> None:
        """Move the queue pair to ERR, or to RESET for any other state in `attr`.

        RESET drops all requests and completions of the queue pair.
        """
        if attr.qp_state == _ERR:
            self.to_error()
            return
        self.state = _RESET
        self._sends.clear()
        self._receives.clear()
        self._cq.forget(self.qp_num)

    def to_error(self) -> None:
        """Move the queue pair to ERR and complete all its requests as flushed."""
        self.state = _ERR
        while self._sends:
            self._complete(self._sends.popleft().wr_id, _FLUSHED, _SENT)
        while self._receives:
            self._complete(self._receives.popleft(), _FLUSHED, _RECEIVED)

    def post_recv(self, request: FakeRequest) -> None:
        """Post a receive request, which has no memory; in ERR it completes as flushed.

        Raises
        ------
        FakePyverbsError
            If ``max_recv_wr`` requests are posted already.
        """
        if len(self._receives) == self._cap.max_recv_wr:
            raise FakePyverbsError("Failed to post recv. Errno: 12, Cannot allocate memory")
        self._receives.append(request.wr_id)
        if self.state == _ERR:
            self.to_error()

    def post_send(self, request: FakeRequest) -> None:
        """Post a write, and carry it out at once unless it must stay in flight.

        The write stays in flight if the port of either NIC is mute, this queue pair is not yet in
        RTS, or the remote queue pair is not in RTR or RTS. A later call of this method carries the
        write out when none of these conditions holds. If this queue pair is in ERR, the write
        completes as flushed.

        Raises
        ------
        FakePyverbsError
            If ``max_send_wr`` requests are in flight already.
        AssertionError
            If a write with immediate data finds no receive request at the remote queue pair.
        """
        if len(self._sends) == self._cap.max_send_wr:
            raise FakePyverbsError("Failed to post send. Errno: 12, Cannot allocate memory")
        source = request.sg_list if request.num_sge else FakeScatter(0, 0, 0)
        self._sends.append(
            _Posted(
                wr_id=request.wr_id, opcode=request.opcode, imm_data=request.imm_data,
                is_signaled=bool(request.send_flags & _SIGNALED),
                source=source.addr, nbytes=source.length, target=request.remote,
            )
        )  # fmt: skip
        if self.state == _ERR:
            self.to_error()
        elif self.state == _RTS and not self.context.is_mute:
            self._carry_out()

    def close(self) -> None:
        """Destroy the queue pair and drop its completions."""
        self.context.fabric.qps.pop(self.qp_num, None)
        self._cq.forget(self.qp_num)

    def _carry_out(self) -> None:
        while self._sends:
            peer = self.context.fabric.qps.get(self._remote)
            if peer is None or peer.state not in (_RTR, _RTS) or peer.context.is_mute:
                return  # keep the write: a real queue pair would retransmit
            posted = self._sends.popleft()
            ctypes.memmove(posted.target, posted.source, posted.nbytes)
            if posted.opcode == _WITH_IMM:
                peer._arrive(posted.imm_data)
            if posted.is_signaled:
                self._complete(posted.wr_id, _SUCCESS, _SENT)

    def _arrive(self, imm_data: int) -> None:
        assert self._receives, "receiver not ready: r2ccl must post receives before the peer sends"
        self._complete(self._receives.popleft(), _SUCCESS, _RECEIVED, imm_data)

    def _complete(self, wr_id: int, status: int, opcode: int, imm_data: int = 0) -> None:
        self._cq.push(
            Completion(
                wr_id=wr_id, status=status, opcode=opcode, vendor_err=0, imm_data=imm_data,
                qp_num=self.qp_num,
            )
        )  # fmt: skip


@contextlib.contextmanager
def installed(fabric: FakeFabric) -> Iterator[SimpleNamespace]:
    """Replace pyverbs with the fake; yield the `r2ccl.transport.verbs` modules that then use it.

    These modules are reimported on entry, and the original modules are restored on exit. The
    classes in the yielded modules are therefore not the same objects as the classes outside this
    context.
    """
    importers = [f"r2ccl.transport.verbs.{name}" for name in _IMPORTERS]
    modules = _modules(fabric)
    names = [*importers, *modules]
    held = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    package = importlib.import_module("r2ccl.transport.verbs")
    shown = {name: getattr(package, name) for name in _IMPORTERS if hasattr(package, name)}
    sys.modules.update(modules)
    try:
        loaded = {
            name: importlib.import_module(f"r2ccl.transport.verbs.{name}") for name in _IMPORTERS
        }
        # The fake's event descriptors are eventfds, not those of the kernel's uverbs.
        loaded["device"]._EVENTS = "anon_inode:[eventfd]"  # type: ignore[attr-defined]
        yield SimpleNamespace(**loaded)
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(held)
        for name in _IMPORTERS:
            if name in shown:
                setattr(package, name, shown[name])
            elif hasattr(package, name):
                delattr(package, name)


def _modules(fabric: FakeFabric) -> dict[str, ModuleType]:
    contents: dict[str, dict[str, Any]] = {
        "addr": dict.fromkeys(("GID", "AHAttr", "GlobalRoute"), FakeAttributes),
        "cq": {"CQ": FakeCompletionQueue, "CompChannel": FakeChannel},
        "device": {"Context": lambda name: FakeContext(fabric, name)},
        "enums": _ENUMS,
        "mr": {"MR": FakeRegion},
        "pd": {"PD": FakeDomain},
        "pyverbs_error": {"PyverbsError": FakePyverbsError},
        "qp": {
            "QP": FakeQueuePair,
            **dict.fromkeys(("QPAttr", "QPCap", "QPInitAttr"), FakeAttributes),
        },
        "wr": {"SGE": FakeScatter, "SendWR": FakeRequest, "RecvWR": FakeRequest},
    }
    found = {"pyverbs": ModuleType("pyverbs")}
    for name, members in contents.items():
        module = found[f"pyverbs.{name}"] = ModuleType(f"pyverbs.{name}")
        vars(module).update(members)
        setattr(found["pyverbs"], name, module)
    return found


__all__ = ["FakeCompletionQueue", "FakeContext", "FakeFabric", "FakeQueuePair", "installed"]
