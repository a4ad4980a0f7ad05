"""Breaks NICs of a running lab and mends them.

Cuts go through netlink sockets held open in each namespace, because a cut must land at the moment
it is asked for; a NIC's return, which needs its routes as well, and a change of rate go through
iproute2. Must not know about time or plans. Invariant: `undo` of a fault leaves the NIC as it would
be had that fault never been.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import NamedTuple

from r2ccl.errors import InvalidArgument
from r2ccl.testing.faults import Action, Fault
from r2ccl.testing.netlab import fabric
from r2ccl.testing.netlab.fabric import Shape
from r2ccl.testing.netlab.namespaces import LabError, inside, run_batch
from r2ccl.topology import netlink
from r2ccl.topology.netlink import RouteSocket

_IFF_UP = 0x1
# linux/if_link.h
_IFLA_MASTER = 10
_IFLA_PROTINFO = 12
_IFLA_BRPORT_ISOLATED = 33
_NLA_F_NESTED = 0x8000

_U32 = struct.Struct("=I")


class Target(NamedTuple):
    """What a fault changes; a later fault with the same target takes its place."""

    action: Action
    node: int
    rail: int


class Hold:
    """One fault in force; an object, so that two equal faults stay two."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.target = _target(fault)


class NicFaults:
    """The faults in force on the NICs of one lab. Not thread-safe.

    Parameters
    ----------
    shape : Shape
    switch : str
        Namespace of the switch.
    nodes : list of str
        Namespace of each node.
    """

    def __init__(self, shape: Shape, switch: str, nodes: list[str]) -> None:
        self._shape = shape
        self._switch = switch
        self._nodes = nodes
        self._active: dict[Target, Hold] = {}
        self._sockets = {name: inside(name, RouteSocket) for name in (switch, *nodes)}
        self._do: dict[Action, Callable[[Fault, int, int], None]] = {
            Action.NIC_DOWN: self._nic_down,
            Action.FLAP: self._nic_down,
            Action.SWITCH_PORT_DOWN: lambda _, node, rail: self._set_port(node, rail, is_up=False),
            Action.BLACKHOLE: lambda _, node, rail: self._set_bridge(node, rail, 0),
            Action.ISOLATE: lambda fault, *_: self._set_isolated(fault, True),
            Action.SLOW: lambda fault, node, rail: self._set_rate(node, rail, fault.rate or ""),
        }
        self._undo: dict[Action, Callable[[Fault, int, int], None]] = {
            Action.NIC_DOWN: self._nic_up,
            Action.FLAP: self._nic_up,
            Action.SWITCH_PORT_DOWN: lambda _, node, rail: self._set_port(node, rail, is_up=True),
            Action.BLACKHOLE: lambda _, node, rail: self._set_bridge(
                node, rail, fabric.bridge_index(rail)
            ),
            Action.ISOLATE: lambda fault, *_: self._set_isolated(fault, False),
            Action.SLOW: lambda _, node, rail: self._set_rate(node, rail, ""),
        }

    def close(self) -> None:
        """Let go of the namespaces."""
        for each in self._sockets.values():
            each.close()

    def apply(self, fault: Fault) -> Hold:
        """Put a fault in force; it is when this returns.

        Raises
        ------
        InvalidArgument
            A second pair of nodes would be isolated on one rail.
        LabError
            The kernel refused.
        """
        if fault.action is Action.ISOLATE:
            self._check_isolation(fault)
        hold = Hold(fault)
        self._change(self._do, hold)
        self._active[hold.target] = hold
        return hold

    def is_active(self, hold: Hold) -> bool:
        """Whether a fault is still in force: not restored, nor replaced by a later one."""
        return self._active.get(hold.target) is hold

    def undo(self, hold: Hold) -> None:
        """Take one fault back; nothing happens where it is not in force."""
        if self.is_active(hold):
            self._change(self._undo, hold)
            del self._active[hold.target]

    def restore(self, node: int | None = None, rail: int | None = None) -> None:
        """Take back every fault of a NIC, of a node, of a rail, or all."""
        for hold in list(self._active.values()):
            if node in (None, hold.fault.node, hold.fault.peer) and rail in (None, hold.fault.rail):
                self.undo(hold)

    def set_flapping(self, hold: Hold, *, is_up: bool) -> None:
        """Move a flapping NIC without ending its flap."""
        self._change(self._undo if is_up else self._do, hold)

    def _change(self, table: dict[Action, Callable[[Fault, int, int], None]], hold: Hold) -> None:
        fault = hold.fault
        assert fault.node is not None
        assert fault.rail is not None
        try:
            table[fault.action](fault, fault.node, fault.rail)
        except OSError as exc:
            raise LabError(f"fault {fault}: the kernel refused: {exc}") from exc

    def _nic_down(self, _: Fault, node: int, rail: int) -> None:
        _set_link(self._sockets[self._nodes[node]], fabric.nic_index(rail), is_up=False)

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

    def _set_isolated(self, fault: Fault, is_isolated: bool) -> None:
        flag = netlink.attribute(_IFLA_BRPORT_ISOLATED, bytes([is_isolated]))
        for node in (fault.node, fault.peer):
            assert node is not None
            assert fault.rail is not None
            body = netlink.IFINFO.pack(
                socket.AF_BRIDGE, 0, fabric.port_index(node, fault.rail), 0, 0
            ) + netlink.attribute(_IFLA_PROTINFO | _NLA_F_NESTED, flag)
            self._sockets[self._switch].transact(netlink.RTM_SETLINK, body)

    def _check_isolation(self, fault: Fault) -> None:
        # Isolated ports of a bridge reach no other isolated port: two pairs would be a foursome.
        pair = {fault.node, fault.peer}
        for other in (hold.fault for hold in self._active.values()):
            if (
                other.action is Action.ISOLATE
                and other.rail == fault.rail
                and {other.node, other.peer} != pair
            ):
                raise InvalidArgument(
                    f"fault {fault}: rail {fault.rail} already isolates nodes {other.node} and "
                    f"{other.peer}; a rail can isolate one pair at a time, restore that first"
                )

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
    node = fault.node if fault.peer is None else min(fault.node, fault.peer)
    return Target(action, node, fault.rail)


def _set_link(route: RouteSocket, index: int, *, is_up: bool) -> None:
    body = netlink.IFINFO.pack(socket.AF_UNSPEC, 0, index, _IFF_UP if is_up else 0, _IFF_UP)
    route.transact(netlink.RTM_NEWLINK, body)


__all__ = ["Hold", "NicFaults"]
