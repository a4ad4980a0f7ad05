"""One RDMA NIC port, opened: context, protection domain, completion queue, async events.

With `r2ccl.transport.queuepair` the only room that sees pyverbs. pyverbs holds the GIL in every
call, so nothing here is called that could block: descriptors are polled first.

Invariant: what was opened is closed in the order verbs wants (queue pairs before the completion
queue, memory regions before the domain), by `close`.
"""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from r2ccl.errors import InvalidArgument, TransportError
from r2ccl.transport.dmabuf import PdRegistrar


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
_CQ_ENTRIES = 8192
#: Completions taken at once: a batch costs one call.
BATCH = 32


class Completion(NamedTuple):
    """What is read of an ``ibv_wc``."""

    wr_id: int
    status: int
    #: Of no meaning if the status is not 0, nor is what follows but ``qp_num``.
    opcode: int
    vendor_err: int
    #: In network byte order, as pyverbs leaves it.
    imm_data: int
    qp_num: int


class Device:
    """An open port of an RDMA NIC.

    Parameters
    ----------
    name : str
        As the kernel spells it: ``mlx5_0``.
    port : int
    find_gid : callable
        Returns (index, GID) under which peers address the port; asked again after its events.

    Raises
    ------
    TransportError
        The NIC cannot be opened; says why.
    """

    def __init__(self, name: str, port: int, find_gid: Callable[[], tuple[int, str]]) -> None:
        self.name = name
        self.port = port
        self._find_gid = find_gid
        self.gid_index, self.gid = find_gid()
        #: Something happened to the port: its GIDs may have moved.
        self._is_stale = False
        try:
            self._open()
        except PyverbsError as exc:
            raise TransportError(
                f"RDMA NIC {name} cannot be opened: {exc}; `r2ccl doctor` says more",
                status="DEVICE",
            ) from exc

    def _open(self) -> None:
        self.context, self.async_fd = _with_new_fd(lambda: Context(name=self.name))
        os.set_blocking(self.async_fd, False)
        self.pd = PD(self.context)
        #: Registers memory with this NIC; regions must be closed before the device is.
        self.registrar = PdRegistrar(self.name, self.pd, _ACCESS)
        self.channel, self.channel_fd = _with_new_fd(lambda: CompChannel(self.context))
        self.cq = CQ(self.context, _CQ_ENTRIES, None, self.channel)

    def completions(self) -> list[Completion]:
        """Take what has completed, up to one batch."""
        _, found = self.cq.poll(BATCH)
        return [
            Completion(each.wr_id, each.status, each.opcode, each.vendor_err, each.imm_data,
                       each.qp_num)
            for each in found
        ]  # fmt: skip

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
        while select.select((self.async_fd,), (), (), 0)[0]:
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
        self._is_stale = False

    def query(self) -> Any:
        """Return verbs' port attributes as they are now: ``state``, ``lid``, ``active_mtu``."""
        return self.context.query_port(self.port)

    def is_active(self) -> bool:
        """Whether the port is up."""
        return bool(self.query().state == e.IBV_PORT_ACTIVE)

    def close(self) -> None:
        """Free everything; queue pairs and memory regions must be closed."""
        self.cq.close()
        self.channel.close()
        self.pd.close()
        self.context.close()


def _with_new_fd(make: Any) -> tuple[Any, int]:
    """Return what `make` made and the event descriptor it opened, which pyverbs does not show."""
    before = _event_fds()
    made = make()
    (fd,) = _event_fds() - before
    return made, fd


def _event_fds() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own
            continue
        if target == "anon_inode:[infinibandevent]":
            found.add(int(name))
    return found


__all__ = ["BATCH", "Completion", "Device", "e"]
