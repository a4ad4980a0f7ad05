"""The cluster a lab stands for, as values: names, addresses, and the iproute2 lines that build it.

No I/O: everything here is text made from a `LabShape`. Invariant: the two ends of a veth never have
the same interface index, because the kernel reports a lost carrier at once only where they differ
(measured: 0.3 ms against 822 ms).

::

    node 0             switch                         node 1
    rail0 --tbf--tbf-- n0r0 -- br0 -- n1r0 --tbf--tbf-- rail0     10.1.0.0/24
    rail1 --tbf--tbf-- n0r1 -- br1 -- n1r1 --tbf--tbf-- rail1     10.2.0.0/24
    mgmt0 ------------ n0m --- brm --- n1m ------------ mgmt0     10.0.0.0/24

What a node sends from a rail's address leaves through that rail or not at all. With fabric ``full``
the switch also routes between its bridges (the spine).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from r2ccl.errors import InvalidArgument
from r2ccl.testing.faults import RATE

FABRICS = ("full", "rail")

#: A node's number is the last byte of its addresses, a rail's (plus one) the second; 254 is the
#: spine's own.
MAX_NODES = 250
MAX_RAILS = 100

MANAGEMENT_NIC = "mgmt0"

_SIZE = re.compile(r"[1-9][0-9]*(\.[0-9]+)?(k|m|g)?b")
_TIME = re.compile(r"[1-9][0-9]*(\.[0-9]+)?(s|ms|us)")


class LabShape(msgspec.Struct, frozen=True, kw_only=True):
    """Size and properties of a lab.

    Parameters
    ----------
    nodes, rails, ranks_per_node : int
        Nodes, NICs on each, and processes `Lab.run` starts on each.
    rate : str
        Of each NIC, each direction, in tc's spelling.
    fabric : {"full", "rail"}
        Any NIC reaches any NIC, or only NICs of the same index reach each other.
    mtu : int
        Of every NIC, bytes.
    burst : str
        tbf's bucket. Not below 64 KiB, the size of a segment TCP hands to the NIC: such packets
        are cut up in software and cost the whole processor.
    latency : str
        Longest stay in a NIC's queue, which bounds how long a busy NIC delays what is sent last.
        A queue holds at least 128 KiB: below two of those segments TCP stalls.
    buffer : str
        Longest stay in the queue of a switch's port: several nodes send to one at once, and
        switches have the memory for that.

    Raises
    ------
    InvalidArgument
        Out of range or misspelt; says what is allowed.
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
            if not low <= getattr(self, name) <= high:
                raise _bad(name, getattr(self, name), f"{low} to {high}")
        if self.fabric not in FABRICS:
            raise _bad("fabric", self.fabric, " or ".join(FABRICS))
        for name, pattern, example in (
            ("rate", RATE, "200mbit"),
            ("burst", _SIZE, "256kb"),
            ("latency", _TIME, "5ms"),
            ("buffer", _TIME, "20ms"),
        ):
            if not pattern.fullmatch(getattr(self, name)):
                raise _bad(name, getattr(self, name), f"tc's spelling, such as {example}")

    @property
    def nranks(self) -> int:
        """Number of ranks in the lab."""
        return self.nodes * self.ranks_per_node

    def address(self, node: int, rail: int) -> str:
        """Address of a node's NIC on a rail."""
        return f"10.{rail + 1}.0.{node + 1}"

    def management_address(self, node: int) -> str:
        """Address of a node on the management network, which no fault touches."""
        return f"10.0.0.{node + 1}"


def _bad(name: str, given: object, allowed: str) -> InvalidArgument:
    return InvalidArgument(f"netlab: {name}={given!r}; allowed is {allowed}")


def nic_name(rail: int) -> str:
    """Name of a NIC inside its node."""
    return f"rail{rail}"


def nic_index(rail: int) -> int:
    """Interface index of a NIC inside its node."""
    return 11 + rail


def port_name(node: int, rail: int) -> str:
    """Name of the switch's end of a NIC's veth."""
    return f"n{node}r{rail}"


def port_index(node: int, rail: int) -> int:
    """Interface index of a switch port; never that of a NIC."""
    return 1024 + node * 128 + rail


def bridge_name(rail: int) -> str:
    """Name of a rail's bridge in the switch."""
    return f"br{rail}"


def bridge_index(rail: int) -> int:
    """Interface index of a rail's bridge."""
    return 256 + rail


_MIN_QUEUE_NBYTES = 128 << 10

_MANAGEMENT_BRIDGE = "brm"
_MANAGEMENT_NIC_INDEX = 10
_MANAGEMENT_PORT = 127  # stands for a rail's number in `port_index`; above MAX_RAILS

#: Per namespace, written before there is an interface so that all of them inherit it. A NIC answers
#: ARP for its own address only and sends its own address only: one that is down must not be
#: answered for through another. Without IPv6 there is no duplicate address detection to wait for.
#: The path metrics kept of a rail that failed would throttle the connections made after it.
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
    """``ip -batch`` lines, run in the switch: bridges, and a veth into each of `namespaces`."""
    yield "link set lo up"
    yield f"link add {_MANAGEMENT_BRIDGE} type bridge mcast_snooping 0"
    yield f"link set {_MANAGEMENT_BRIDGE} up"
    for rail in range(shape.rails):
        bridge = bridge_name(rail)
        # Its own address, or the bridge takes a port's and changes it when that port is removed.
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
    """``ip -batch`` lines, run in a node: addresses, and routes that keep each rail to itself."""
    yield "link set lo up"
    yield f"addr add {shape.management_address(node)}/24 dev {MANAGEMENT_NIC}"
    yield f"link set {MANAGEMENT_NIC} up"
    for rail in range(shape.rails):
        yield f"addr add {shape.address(node, rail)}/24 dev {nic_name(rail)}"
        yield f"link set {nic_name(rail)} up"
        table = _table(rail)
        yield f"rule add pref {table} from {shape.address(node, rail)} lookup {table}"
        # Has no device, so it stays when the NIC goes down and takes its routes along.
        yield f"route add unreachable default metric 4096 table {table}"
        yield from rail_routes(shape, node, rail)


def rail_routes(shape: LabShape, node: int, rail: int) -> Iterator[str]:
    """Lines for the routes that a NIC loses by going down and the kernel does not bring back."""
    source = shape.address(node, rail)
    device = f"dev {nic_name(rail)} src {source} table {_table(rail)}"
    yield f"route replace 10.{rail + 1}.0.0/24 {device}"
    if shape.fabric == "full":
        yield f"route replace default via {_gateway(rail)} {device}"


def nic_shaper(shape: LabShape, rail: int, *, rate: str = "", verb: str = "add") -> str:
    """``tc -batch`` line that shapes what a node sends, to the lab's rate unless given."""
    return _shaper(shape, nic_name(rail), rate or shape.rate, verb, shape.latency)


def port_shaper(shape: LabShape, node: int, rail: int, *, rate: str = "", verb: str = "add") -> str:
    """``tc -batch`` line that shapes what the switch sends to a node's NIC."""
    return _shaper(shape, port_name(node, rail), rate or shape.rate, verb, shape.buffer)


def _shaper(shape: LabShape, device: str, rate: str, verb: str, stay: str) -> str:
    # Not tbf's own `latency`: that adds the burst to the queue, and so the time the burst takes.
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
    """Locally administered; kind 0 a NIC, 1 a port, 2 a bridge."""
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
