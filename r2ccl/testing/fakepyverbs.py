"""pyverbs and RDMA NICs in memory, with completion queues that overrun as a NIC's do.

`installed` puts modules in pyverbs' place and loads the modules that import it anew, so that
`r2ccl.transport.verbs.transport` runs as it is, unmodified, where there is no RDMA device and no
pyverbs. All NICs of a `FakeFabric` reach each other. Of verbs it has what r2ccl uses: reliable
queue pairs, writes with and without immediate data, flushes, one completion queue a device.

A write is done when it is posted, or kept under way while its port is mute. A queue pair that goes
to ERR completes every request that is under way, also those that asked for no completion. A
completion for which there is no room is lost, and the device says CQ_ERR (InfiniBand
specification, volume 1, 10.8.2 and 11.6.3).

Invariant: nothing is written through a queue pair that is not ready to receive.
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

#: ``ibv_wc_status``, ``ibv_wc_opcode``, ``ibv_qp_state``, ``ibv_event_type``.
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
#: Modules that import pyverbs, or one that does.
_IMPORTERS = ("device", "queuepair", "probe", "endpoint", "transport")


class FakePyverbsError(Exception):
    """pyverbs.pyverbs_error.PyverbsError."""


class Completion(SimpleNamespace):
    """An ``ibv_wc``."""


class FakeFabric:
    """The NICs of a test, by name.

    Parameters
    ----------
    max_cqe : int
        Entries of the largest completion queue of a device.
    """

    def __init__(self, max_cqe: int = 1 << 22) -> None:
        self.max_cqe = max_cqe
        self.contexts: dict[str, FakeContext] = {}
        self.qps: dict[int, FakeQueuePair] = {}
        self._numbers = itertools.count(17)
        self._keys = itertools.count(1)

    def add(self, qp: FakeQueuePair) -> int:
        """Give a queue pair its number."""
        number = next(self._numbers)
        self.qps[number] = qp
        return number

    def new_key(self) -> int:
        """Return the key of another memory region."""
        return next(self._keys)

    def mute(self, name: str) -> None:
        """Have a port of the NIC send nothing: what is posted stays under way."""
        self.contexts[name].is_mute = True

    def fail_port(self, name: str) -> None:
        """Break every queue pair of the NIC at once."""
        for qp in list(self.qps.values()):
            if qp.context is self.contexts[name] and qp.state in (_RTR, _RTS):
                qp.to_error()


class FakeContext:
    """pyverbs.device.Context."""

    def __init__(self, fabric: FakeFabric, name: str) -> None:
        self.fabric = fabric
        self.name = name
        self.is_mute = False
        self.events: deque[int] = deque()
        self.async_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        fabric.contexts[name] = self

    def query_device(self) -> Any:
        """Return the limits of the device."""
        return SimpleNamespace(max_cqe=self.fabric.max_cqe)

    def query_port(self, port: int) -> Any:
        """Return a port that is up."""
        return SimpleNamespace(state=_ACTIVE, lid=0, active_mtu=_MTU_4096)

    def raise_event(self, number: int) -> None:
        """Have an asynchronous event."""
        self.events.append(number)
        os.eventfd_write(self.async_fd, 1)

    def get_async_event(self) -> Any:
        """Take the oldest event."""
        os.eventfd_read(self.async_fd)
        return SimpleNamespace(event_type=self.events.popleft(), ack=lambda: None)

    def close(self) -> None:
        """Close its descriptor."""
        os.close(self.async_fd)


class FakeDomain:
    """pyverbs.pd.PD."""

    def __init__(self, context: FakeContext) -> None:
        self.context = context

    def close(self) -> None:
        """Nothing to free."""


class FakeRegion:
    """pyverbs.mr.MR."""

    def __init__(self, pd: FakeDomain, nbytes: int, access: int, address: int) -> None:
        self.lkey = self.rkey = pd.context.fabric.new_key()

    def close(self) -> None:
        """Nothing to free."""


class FakeChannel:
    """pyverbs.cq.CompChannel."""

    def __init__(self, context: FakeContext) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def get_cq_event(self, cq: FakeCompletionQueue) -> None:
        """Take the notification."""
        os.eventfd_read(self.fd)

    def close(self) -> None:
        """Close its descriptor."""
        os.close(self.fd)


class FakeCompletionQueue:
    """pyverbs.cq.CQ.

    Attributes
    ----------
    cqe : int
        Entries.
    nlost : int
        Completions for which there was no room.
    nhighest : int
        Most entries in use at a time.
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
        """Add an entry, or lose it."""
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
        """Take up to `count` entries; none once one was lost."""
        if self.nlost:
            return 0, []
        found = [self._entries.popleft() for _ in range(min(count, len(self._entries)))]
        return len(found), found

    def forget(self, number: int) -> None:
        """Drop the entries of a queue pair that was reset or destroyed, as libmlx5 does."""
        self._entries = deque(each for each in self._entries if each.qp_num != number)

    def req_notify(self) -> None:
        """Have the channel told of the next entry."""
        self._is_armed = True

    def ack_events(self, count: int) -> None:
        """Nothing is counted."""

    def close(self) -> None:
        """Nothing to free."""


class FakeScatter:
    """pyverbs.wr.SGE."""

    def __init__(self, addr: int, length: int, lkey: int) -> None:
        self.addr, self.length, self.lkey = addr, length, lkey


class FakeRequest:
    """pyverbs.wr.SendWR and RecvWR."""

    def __init__(
        self, opcode: int = 0, num_sge: int = 0, sg: Any = (), send_flags: int = 0
    ) -> None:
        self.opcode, self.num_sge, self.send_flags = opcode, num_sge, send_flags
        self.wr_id = self.imm_data = self.rkey = self.remote = 0
        #: pyverbs copies the entries it is given; r2ccl has its requests read the entry itself.
        self.sg_list: FakeScatter = sg[0]

    def set_wr_rdma(self, rkey: int, addr: int) -> None:
        """Say where it writes to."""
        self.rkey, self.remote = rkey, addr

    def close(self) -> None:
        """Nothing to free."""


class FakeAttributes(SimpleNamespace):
    """pyverbs.qp.QPAttr, QPInitAttr and QPCap; pyverbs.addr's classes."""

    def __init__(self, *_: Any, **given: Any) -> None:
        super().__init__(**given)


class _Posted(SimpleNamespace):
    """A send request as it was when it was posted."""


class FakeQueuePair:
    """pyverbs.qp.QP."""

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
        """RESET to INIT."""
        self.state = _INIT

    def to_rtr(self, attr: FakeAttributes) -> None:
        """INIT to RTR."""
        self._remote, self.state = attr.dest_qp_num, _RTR

    def to_rts(self, attr: FakeAttributes) -> None:
        """INIT to RTS."""
        self._remote, self.state = attr.dest_qp_num, _RTS

    def modify(self, attr: FakeAttributes, mask: int) -> None:
        """Go to ERR, or to RESET."""
        if attr.qp_state == _ERR:
            self.to_error()
            return
        self.state = _RESET
        self._sends.clear()
        self._receives.clear()
        self._cq.forget(self.qp_num)

    def to_error(self) -> None:
        """Complete everything that is under way."""
        self.state = _ERR
        while self._sends:
            self._complete(self._sends.popleft().wr_id, _FLUSHED, _SENT)
        while self._receives:
            self._complete(self._receives.popleft(), _FLUSHED, _RECEIVED)

    def post_recv(self, request: FakeRequest) -> None:
        """Post a receive request, which names no memory that matters."""
        if len(self._receives) == self._cap.max_recv_wr:
            raise FakePyverbsError("Failed to post recv. Errno: 12, Cannot allocate memory")
        self._receives.append(request.wr_id)
        if self.state == _ERR:
            self.to_error()

    def post_send(self, request: FakeRequest) -> None:
        """Post a write, which is done at once unless the port is mute."""
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
        """Destroy it."""
        self.context.fabric.qps.pop(self.qp_num, None)
        self._cq.forget(self.qp_num)

    def _carry_out(self) -> None:
        while self._sends:
            peer = self.context.fabric.qps.get(self._remote)
            if peer is None or peer.state not in (_RTR, _RTS) or peer.context.is_mute:
                return  # it retransmits
            posted = self._sends.popleft()
            ctypes.memmove(posted.target, posted.source, posted.nbytes)
            if posted.opcode == _WITH_IMM:
                peer._arrive(posted.imm_data)
            if posted.is_signaled:
                self._complete(posted.wr_id, _SUCCESS, _SENT)

    def _arrive(self, imm_data: int) -> None:
        assert self._receives, "receiver not ready: r2ccl must see to it that this never happens"
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
    """Put the fake in pyverbs' place; gives the modules that then see it.

    They are loaded anew, and forgotten afterwards: classes of theirs that were imported before
    are others.
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
        # The descriptors of events are of another kind.
        loaded["device"]._EVENTS = "anon_inode:[eventfd]"  # type: ignore[attr-defined]
        yield SimpleNamespace(**loaded)
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(held)
        for name, module in shown.items():
            setattr(package, name, module)


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
