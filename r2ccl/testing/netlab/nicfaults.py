"""Breaks NICs of a running lab and mends them.

Cuts go through netlink sockets held open in each namespace, because a cut must land at the moment
it is asked for; a NIC's return, which needs its routes as well, and a change of rate go through
iproute2. Must not know about time or plans. Invariant: whatever faults overlap, `undo` of one
leaves the NIC as it would be had that fault never been.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import NamedTuple

from r2ccl.testing.faults import Action, Fault
from r2ccl.testing.netlab import fabric
from r2ccl.testing.netlab.fabric import LabShape
from r2ccl.testing.netlab.namespaces import LabError, inside, run_batch
from r2ccl.topology import netlink
from r2ccl.topology.netlink import RouteSocket

_IFF_UP = 0x1
# linux/if_link.h
_IFLA_MASTER = 10

_U32 = struct.Struct("=I")
#: IEEE 802.1D reserves it for pause frames, which no bridge forwards: what is sent there is lost at
#: the switch.
_NOWHERE = bytes.fromhex("0180c2000001")


class Target(NamedTuple):
    """What a fault changes: of several with one target, the last is in force."""

    action: Action
    node: int
    rail: int
    peer: int | None


class FaultHold:
    """One fault in force; an object, so that two equal faults stay two."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.target = _target(fault)


class NicFaults:
    """The faults that last on the NICs of one lab, in any combination. Not thread-safe.

    Faults of different targets add up. Of those with one target (two rates of a NIC) the last is
    in force, and when it ends the one before is again.

    Parameters
    ----------
    shape : LabShape
    switch : str
        Namespace of the switch.
    nodes : list of str
        Namespace of each node.
    """

    def __init__(self, shape: LabShape, switch: str, nodes: list[str]) -> None:
        self._shape = shape
        self._switch = switch
        self._nodes = nodes
        self._holds: dict[Target, list[FaultHold]] = {}
        self._sockets = {name: inside(name, RouteSocket) for name in (switch, *nodes)}
        self._do: dict[Action, Callable[[Fault, int, int], None]] = {
            Action.NIC_DOWN: self._nic_down,
            Action.FLAP: self._nic_down,
            Action.SWITCH_PORT_DOWN: lambda _, node, rail: self._set_port(node, rail, is_up=False),
            Action.BLACKHOLE: lambda _, node, rail: self._set_bridge(node, rail, 0),
            Action.ISOLATE: lambda fault, *_: self._isolate(fault),
            Action.SLOW: lambda fault, node, rail: self._set_rate(node, rail, fault.rate or ""),
        }
        self._undo: dict[Action, Callable[[Fault, int, int], None]] = {
            Action.NIC_DOWN: self._nic_up,
            Action.FLAP: self._nic_up,
            Action.SWITCH_PORT_DOWN: lambda _, node, rail: self._set_port(node, rail, is_up=True),
            Action.BLACKHOLE: lambda _, node, rail: self._set_bridge(
                node, rail, fabric.bridge_index(rail)
            ),
            Action.ISOLATE: lambda fault, *_: self._join(fault),
            Action.SLOW: lambda _, node, rail: self._set_rate(node, rail, ""),
        }

    def close(self) -> None:
        """Let go of the namespaces."""
        for each in self._sockets.values():
            each.close()

    def apply(self, fault: Fault) -> FaultHold:
        """Put a fault in force; it is when this returns.

        Raises
        ------
        LabError
            The kernel refused.
        """
        hold = FaultHold(fault)
        self._change(self._do, hold)
        self._holds.setdefault(hold.target, []).append(hold)
        return hold

    def is_held(self, hold: FaultHold) -> bool:
        """Whether a fault lasts: whether it is not undone, though a later one may hide it."""
        return hold in self._holds.get(hold.target, ())

    def undo(self, hold: FaultHold) -> None:
        """Take one fault back; nothing happens where that was done before."""
        if not self.is_held(hold):
            return
        holds = self._holds[hold.target]
        if hold is holds[-1]:
            if len(holds) > 1:
                self._change(self._do, holds[-2])
            else:
                self._change(self._undo, hold)
        holds.remove(hold)

    def restore(self, node: int | None = None, rail: int | None = None) -> None:
        """Take back every fault of a NIC, of a node, of a rail, or all."""
        for hold in [each for holds in self._holds.values() for each in reversed(holds)]:
            if node in (None, hold.fault.node, hold.fault.peer) and rail in (None, hold.fault.rail):
                self.undo(hold)

    def set_flapping(self, hold: FaultHold, *, is_up: bool) -> None:
        """Move a flapping NIC without ending its flap; nothing happens where a later fault is."""
        if self._holds[hold.target][-1] is hold:
            self._change(self._undo if is_up else self._do, hold)

    def _change(
        self, table: dict[Action, Callable[[Fault, int, int], None]], hold: FaultHold
    ) -> None:
        fault = hold.fault
        assert fault.node is not None
        assert fault.rail is not None
        try:
            table[fault.action](fault, fault.node, fault.rail)
        except OSError as exc:
            raise LabError(f"fault {fault}: the kernel refused: {exc}") from exc

    def _nic_down(self, _: Fault, node: int, rail: int) -> None:
        _set_link(self._sockets[self._nodes[node]], fabric.nic_index(rail), is_up=False)
        # A NIC that goes down forgets its neighbours; those it is isolated from stay lost.
        for target, holds in self._holds.items():
            if holds and target.action is Action.ISOLATE and target.rail == rail:
                for near, far in _directions(holds[-1].fault):
                    if near == node:
                        self._lose_neighbour(near, far, rail)

    def _nic_up(self, _: Fault, node: int, rail: int) -> None:
        lines = [
            f"link set {fabric.nic_name(rail)} up",
            *fabric.rail_routes(self._shape, node, rail),
        ]
        run_batch(["ip", "-n", self._nodes[node]], lines)

    def _set_port(self, node: int, rail: int, *, is_up: bool) -> None:
        _set_link(self._sockets[self._switch], fabric.port_index(node, rail), is_up=is_up)

    def _set_bridge(self, node: int, rail: int, bridge: int) -> None:
        body = netlink.IFINFO.pack(
            socket.AF_UNSPEC, 0, fabric.port_index(node, rail), 0, 0
        ) + netlink.attribute(_IFLA_MASTER, _U32.pack(bridge))
        self._sockets[self._switch].transact(netlink.RTM_SETLINK, body)

    def _isolate(self, fault: Fault) -> None:
        for node, peer in _directions(fault):
            self._lose_neighbour(node, peer, fault.rail)

    def _join(self, fault: Fault) -> None:
        for node, peer in _directions(fault):
            body = self._neighbour(peer, fault.rail)
            self._sockets[self._nodes[node]].transact(netlink.RTM_DELNEIGH, body)

    def _lose_neighbour(self, node: int, peer: int, rail: int | None) -> None:
        """Have `node` send to nowhere what it sends to `peer` on a rail; no event tells of it."""
        body = self._neighbour(peer, rail) + netlink.attribute(netlink.NDA_LLADDR, _NOWHERE)
        flags = netlink.NLM_F_CREATE | netlink.NLM_F_REPLACE
        self._sockets[self._nodes[node]].transact(netlink.RTM_NEWNEIGH, body, flags=flags)

    def _neighbour(self, peer: int, rail: int | None) -> bytes:
        assert rail is not None
        address = socket.inet_aton(self._shape.address(peer, rail))
        index = fabric.nic_index(rail)
        return netlink.NDMSG.pack(
            socket.AF_INET, index, netlink.NUD_PERMANENT, 0, 0
        ) + netlink.attribute(netlink.NDA_DST, address)

    def _set_rate(self, node: int, rail: int, rate: str) -> None:
        nic = fabric.nic_shaper(self._shape, rail, rate=rate, verb="change")
        port = fabric.port_shaper(self._shape, node, rail, rate=rate, verb="change")
        for namespace, line in ((self._nodes[node], nic), (self._switch, port)):
            run_batch(["tc", "-n", namespace], [line])


def _target(fault: Fault) -> Target:
    assert fault.node is not None
    assert fault.rail is not None
    # A flap is the NIC's own doing as much as a cut: the two must not undo each other.
    action = Action.NIC_DOWN if fault.action is Action.FLAP else fault.action
    if fault.peer is None:
        return Target(action, fault.node, fault.rail, None)
    return Target(action, min(fault.node, fault.peer), fault.rail, max(fault.node, fault.peer))


def _directions(fault: Fault) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (sender, receiver) of both directions between the nodes of an ``isolate``."""
    assert fault.node is not None
    assert fault.peer is not None
    return (fault.node, fault.peer), (fault.peer, fault.node)


def _set_link(route: RouteSocket, index: int, *, is_up: bool) -> None:
    body = netlink.IFINFO.pack(socket.AF_UNSPEC, 0, index, _IFF_UP if is_up else 0, _IFF_UP)
    route.transact(netlink.RTM_NEWLINK, body)


__all__ = ["FaultHold", "NicFaults"]
