"""Names and addresses of a lab's cluster, and the iproute2 lines that build the cluster.

This module does no I/O: it makes text from a `LabShape`. The two ends of a veth always have
different interface indices, because otherwise the kernel reports a lost carrier late (measured:
after 822 ms instead of 0.3 ms).

::

    node 0             switch                         node 1
    rail0 --tbf--tbf-- n0r0 -- br0 -- n1r0 --tbf--tbf-- rail0     10.1.0.0/24
    rail1 --tbf--tbf-- n0r1 -- br1 -- n1r1 --tbf--tbf-- rail1     10.2.0.0/24
    mgmt0 ------------ n0m --- brm --- n1m ------------ mgmt0     10.0.0.0/24

Packets with a rail's source address leave the node only through the NIC on that rail. If the NIC
has no route to the destination, for example because it is down, sending them fails. With fabric
``full`` the switch also routes between its bridges and so acts as the spine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from r2ccl.errors import InvalidArgument
from r2ccl.testing.faults import RATE, is_integer, is_text

FABRICS = ("full", "rail")

#: Limits, because addresses are ``10.<rail + 1>.0.<node + 1>``, and last byte 254 is the switch.
MAX_NODES = 250
MAX_RAILS = 100

MANAGEMENT_NIC = "mgmt0"

_SIZE = re.compile(r"[1-9][0-9]*(\.[0-9]+)?(k|m|g)?b")
_TIME = re.compile(r"[1-9][0-9]*(\.[0-9]+)?(s|ms|us)")


class LabShape(msgspec.Struct, frozen=True, kw_only=True):
    """Size and properties of a lab.

    Parameters
    ----------
    nodes : int
        Number of nodes.
    rails : int
        Number of NICs per node, one on each rail.
    rate : str
        Rate of each NIC in each direction, in tc's syntax, such as ``200mbit``.
    fabric : {"full", "rail"}
        ``full``: any NIC reaches any NIC. ``rail``: only NICs of the same rail reach each other.
    mtu : int
        MTU of every NIC in bytes.
    burst : str
        Bucket size of tbf, in tc's syntax, such as ``256kb``. Use at least 64 KiB, the size of the
        segments that TCP passes to the NIC: with a smaller bucket the kernel splits the segments in
        software, which takes all CPU time.
    latency : str
        Longest time a packet may wait in a NIC's queue, such as ``5ms``. At low rates the wait may
        be longer, because a queue holds at least 128 KiB, two segments of 64 KiB: TCP stalls with a
        shorter queue.
    buffer : str
        As `latency`, for the queue of a switch port. Its default is longer, ``20ms``, because
        several nodes can send to one port at once, and real switches have buffers for that case.
    ranks_per_node : int
        Number of processes that `Lab.run` starts on each node.

    Raises
    ------
    InvalidArgument
        If a field is out of range or malformed. The message says what is allowed.
    """

    nodes: int = 4
    rails: int = 4
    rate: str = "200mbit"
    fabric: str = "full"
    mtu: int = 9000
    burst: str = "256kb"
    latency: str = "5ms"
    buffer: str = "20ms"
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        ranges = {
            "nodes": (1, MAX_NODES),
            "rails": (1, MAX_RAILS),
            "mtu": (1280, 65535),
            "ranks_per_node": (1, 1024),
        }
        for name, (low, high) in ranges.items():
            if not is_integer(getattr(self, name), low, high):
                raise _bad(name, getattr(self, name), f"{low} to {high}")
        if self.fabric not in FABRICS:
            raise _bad("fabric", self.fabric, " or ".join(FABRICS))
        for name, pattern, example in (
            ("rate", RATE, "200mbit"),
            ("burst", _SIZE, "256kb"),
            ("latency", _TIME, "5ms"),
            ("buffer", _TIME, "20ms"),
        ):
            if not is_text(getattr(self, name), pattern):
                raise _bad(name, getattr(self, name), f"tc's syntax, such as {example}")

    @property
    def nranks(self) -> int:
        """Number of ranks in the lab."""
        return self.nodes * self.ranks_per_node

    def address(self, node: int, rail: int) -> str:
        """Return the IP address of a node's NIC on a rail."""
        return f"10.{rail + 1}.0.{node + 1}"

    def management_address(self, node: int) -> str:
        """Return the IP address of a node on the management network, which no fault affects."""
        return f"10.0.0.{node + 1}"


def _bad(name: str, given: object, allowed: str) -> InvalidArgument:
    return InvalidArgument(f"a lab cannot have {name}={given!r}; allowed is {allowed}")


def nic_name(rail: int) -> str:
    """Return the interface name of a NIC inside its node."""
    return f"rail{rail}"


def nic_index(rail: int) -> int:
    """Return the interface index of a NIC inside its node."""
    return 11 + rail


def port_name(node: int, rail: int) -> str:
    """Return the interface name of a switch port, the switch's end of a NIC's veth."""
    return f"n{node}r{rail}"


def port_index(node: int, rail: int) -> int:
    """Return the interface index of a switch port, which differs from the index of every NIC."""
    return 1024 + node * 128 + rail


def bridge_name(rail: int) -> str:
    """Return the interface name of a rail's bridge in the switch."""
    return f"br{rail}"


def bridge_index(rail: int) -> int:
    """Return the interface index of a rail's bridge in the switch."""
    return 256 + rail


_MIN_QUEUE_NBYTES = 128 << 10

_MANAGEMENT_BRIDGE = "brm"
_MANAGEMENT_NIC_INDEX = 10
_MANAGEMENT_PORT = 127  # used as the rail in `port_index`; larger than MAX_RAILS

#: Kernel settings of a node's namespace, written before its interfaces have addresses. A NIC
#: answers ARP only for its own address and announces only its own address: otherwise another NIC of
#: the node would answer for one that is down. IPv6 is off because its duplicate address detection
#: takes time. TCP metrics are not saved because those of a failed rail would throttle later
#: connections.
NODE_SYSCTLS = {
    "net/ipv4/conf/all/arp_ignore": "1",
    "net/ipv4/conf/all/arp_announce": "2",
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/conf/default/rp_filter": "0",
    "net/ipv4/tcp_no_metrics_save": "1",
    "net/ipv6/conf/all/disable_ipv6": "1",
    "net/ipv6/conf/default/disable_ipv6": "1",
}

SWITCH_SYSCTLS = {**NODE_SYSCTLS, "net/ipv4/ip_forward": "1"}


def switch_lines(shape: LabShape, namespaces: list[str]) -> Iterator[str]:
    """Yield the ``ip -batch`` lines for the switch: its bridges, and the veths to the nodes.

    Parameters
    ----------
    shape : LabShape
    namespaces : list of str
        Name of the network namespace of each node.
    """
    yield "link set lo up"
    yield f"link add {_MANAGEMENT_BRIDGE} type bridge mcast_snooping 0"
    yield f"link set {_MANAGEMENT_BRIDGE} up"
    for rail in range(shape.rails):
        bridge = bridge_name(rail)
        # Give the bridge an explicit MAC address. Otherwise it takes that of a port, and changes
        # it when that port is removed.
        yield (
            f"link add {bridge} index {bridge_index(rail)} address {_mac(2, rail, 0)} "
            "type bridge mcast_snooping 0"
        )
        if shape.fabric == "full":
            yield f"addr add {_gateway(rail)}/24 dev {bridge}"
        yield f"link set {bridge} up"
    for node, namespace in enumerate(namespaces):
        yield (
            f"link add n{node}m index {port_index(node, _MANAGEMENT_PORT)} type veth peer name "
            f"{MANAGEMENT_NIC} index {_MANAGEMENT_NIC_INDEX} netns {namespace}"
        )
        yield f"link set n{node}m master {_MANAGEMENT_BRIDGE} up"
        for rail in range(shape.rails):
            port = port_name(node, rail)
            yield (
                f"link add {port} index {port_index(node, rail)} mtu {shape.mtu} "
                f"address {_mac(1, rail, node)} type veth peer name {nic_name(rail)} "
                f"index {nic_index(rail)} mtu {shape.mtu} address {_mac(0, rail, node)} "
                f"netns {namespace}"
            )
            yield f"link set {port} master {bridge_name(rail)} up"


def node_lines(shape: LabShape, node: int) -> Iterator[str]:
    """Yield the ``ip -batch`` lines for a node: its addresses, and one routing table per rail."""
    yield "link set lo up"
    yield f"addr add {shape.management_address(node)}/24 dev {MANAGEMENT_NIC}"
    yield f"link set {MANAGEMENT_NIC} up"
    for rail in range(shape.rails):
        yield f"addr add {shape.address(node, rail)}/24 dev {nic_name(rail)}"
        yield f"link set {nic_name(rail)} up"
        table = _table(rail)
        yield f"rule add pref {table} from {shape.address(node, rail)} lookup {table}"
        # This route has no device, so it stays when the NIC goes down and loses its routes.
        yield f"route add unreachable default metric 4096 table {table}"
        yield from rail_routes(shape, node, rail)


def rail_routes(shape: LabShape, node: int, rail: int) -> Iterator[str]:
    """Yield the ``ip -batch`` lines for the routes of a node's NIC on `rail`.

    The NIC loses these routes when it goes down, and the kernel does not restore them when it comes
    up again.
    """
    source = shape.address(node, rail)
    device = f"dev {nic_name(rail)} src {source} table {_table(rail)}"
    yield f"route replace 10.{rail + 1}.0.0/24 {device}"
    if shape.fabric == "full":
        yield f"route replace default via {_gateway(rail)} {device}"


def nic_shaper(shape: LabShape, rail: int, *, rate: str = "", verb: str = "add") -> str:
    """Return the ``tc -batch`` line that shapes the outgoing traffic of a NIC.

    `rate` is in tc's syntax; empty means the lab's rate. `verb` is ``add``, or ``change`` if the
    traffic is shaped already.
    """
    return _shaper(shape, nic_name(rail), rate or shape.rate, verb, shape.latency)


def port_shaper(shape: LabShape, node: int, rail: int, *, rate: str = "", verb: str = "add") -> str:
    """Return the ``tc -batch`` line that shapes the switch's traffic to a node's NIC on `rail`.

    `rate` and `verb` are as for `nic_shaper`.
    """
    return _shaper(shape, port_name(node, rail), rate or shape.rate, verb, shape.buffer)


def _shaper(shape: LabShape, device: str, rate: str, verb: str, stay: str) -> str:
    # Do not use tbf's `latency`: it adds the burst to the queue size, and so adds the time that
    # the burst takes.
    limit = max(_MIN_QUEUE_NBYTES, int(_bits_per_s(rate) * _seconds(stay) / 8))
    return f"qdisc {verb} dev {device} root tbf rate {rate} burst {shape.burst} limit {limit}"


def _bits_per_s(rate: str) -> float:
    number = rate.removesuffix("bit")
    return float(number.rstrip("kmg")) * {"k": 1e3, "m": 1e6, "g": 1e9}.get(number[-1], 1.0)


def _seconds(time: str) -> float:
    number = time.removesuffix("s")
    return float(number.rstrip("mu")) * {"m": 1e-3, "u": 1e-6}.get(number[-1], 1.0)


def _gateway(rail: int) -> str:
    return f"10.{rail + 1}.0.254"


def _table(rail: int) -> int:
    return 1000 + rail


def _mac(kind: int, rail: int, node: int) -> str:
    """Return a locally administered MAC address; `kind` is 0 for NIC, 1 for port, 2 for bridge."""
    return f"02:00:00:{kind:02x}:{rail:02x}:{node:02x}"


__all__ = [
    "FABRICS",
    "MANAGEMENT_NIC",
    "MAX_NODES",
    "MAX_RAILS",
    "NODE_SYSCTLS",
    "SWITCH_SYSCTLS",
    "LabShape",
    "bridge_index",
    "bridge_name",
    "nic_index",
    "nic_name",
    "nic_shaper",
    "node_lines",
    "port_index",
    "port_name",
    "port_shaper",
    "rail_routes",
    "switch_lines",
]
