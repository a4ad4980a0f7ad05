"""Faults of the NICs of a running lab: `NicFaults` applies and undoes them.

Faults that cut a NIC use netlink sockets that are kept open in each namespace, so that the faults
take effect without delay. iproute2 changes rates; it also brings a NIC up again and restores the
NIC's routes. If faults overlap and `NicFaults.undo` undoes one of them, the NIC is then in the
state that the other faults alone would have caused.
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
#: MAC address that IEEE 802.1D reserves for pause frames. No bridge forwards packets to it, so they
#: are lost at the switch.
_NOWHERE = bytes.fromhex("0180c2000001")


class Target(NamedTuple):
    """Part of a lab's state that a fault changes.

    If several faults have the same target, the last one applies.
    """

    action: Action
    node: int
    rail: int
    peer: int | None


class FaultHold:
    """Applied fault; compared by identity, so that two equal faults are undone separately."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.target = _target(fault)


class NicFaults:
    """Faults in force on the NICs of one lab. Not thread-safe.

    Faults with different targets add up. If several faults have the same target, such as two rates
    of a NIC, the last fault applies; when it ends, the fault before it applies again.

    Parameters
    ----------
    shape : LabShape
    switch : str
        Name of the switch's network namespace.
    nodes : list of str
        Name of the network namespace of each node.
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
        """Close the netlink sockets in the namespaces."""
        for each in self._sockets.values():
            each.close()

    def apply(self, fault: Fault) -> FaultHold:
        """Apply a NIC fault; it is in force when the call returns.

        The result identifies the fault for the other methods.

        Raises
        ------
        LabError
            If the kernel refuses the change.
        """
        hold = FaultHold(fault)
        self._change(self._do, hold)
        self._holds.setdefault(hold.target, []).append(hold)
        return hold

    def is_held(self, hold: FaultHold) -> bool:
        """Return True if a fault has not been undone, even if a later fault overrides it."""
        return hold in self._holds.get(hold.target, ())

    def undo(self, hold: FaultHold) -> None:
        """Undo one fault; do nothing if it was undone before.

        Raises
        ------
        LabError
            If the kernel refuses the change. The fault then counts as not undone.
        """
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
        """Undo all faults of a NIC, of a node, of a rail or, with no argument, of all NICs.

        An ``isolate`` is a fault of both of its nodes.

        Raises
        ------
        LabError
            If the kernel refuses a change.
        """
        for hold in [each for holds in self._holds.values() for each in reversed(holds)]:
            if node in (None, hold.fault.node, hold.fault.peer) and rail in (None, hold.fault.rail):
                self.undo(hold)

    def set_flapping(self, hold: FaultHold, *, is_up: bool) -> None:
        """Set a flapping NIC up or down, without ending the flap.

        The flap must not have been undone. Do nothing if a later fault of the same target overrides
        it.

        Raises
        ------
        LabError
            If the kernel refuses the change.
        """
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
        # A NIC that goes down loses its neighbour entries: set those of an ``isolate`` again.
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
        """Make `node` send packets for `peer` on a rail to a MAC address that the switch drops."""
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
    # A flap sets the same NIC state as ``nic_down``. They share a target, so that the end of one
    # does not bring up a NIC that the other holds down.
    action = Action.NIC_DOWN if fault.action is Action.FLAP else fault.action
    if fault.peer is None:
        return Target(action, fault.node, fault.rail, None)
    return Target(action, min(fault.node, fault.peer), fault.rail, max(fault.node, fault.peer))


def _directions(fault: Fault) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (sender, receiver) for each of the two directions that an ``isolate`` cuts."""
    assert fault.node is not None
    assert fault.peer is not None
    return (fault.node, fault.peer), (fault.peer, fault.node)


def _set_link(route: RouteSocket, index: int, *, is_up: bool) -> None:
    body = netlink.IFINFO.pack(socket.AF_UNSPEC, 0, index, _IFF_UP if is_up else 0, _IFF_UP)
    route.transact(netlink.RTM_NEWLINK, body)


__all__ = ["FaultHold", "NicFaults"]
