"""Names and addresses of a lab's devices, and the ``ip`` and ``rdma`` lines that make them.

This module does no I/O: it makes text from a `MachineShape`.

::

    2 nodes:     n0r0 ---- n1r0        10.50.0.1/24, 10.50.0.2/24      a veth pair is the cable
                 n0r1 ---- n1r1        10.51.0.1/24, ...
    3 and more:  n0r0 ---- s0r0
                 n1r0 ---- s1r0 }- br0                                 a bridge is the switch
                 n2r0 ---- s2r0

A single node has a bridge too. Each interface ``n<node>r<rail>`` has the RDMA device
``rxe_n<node>r<rail>``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Self

import msgspec

from r2ccl.errors import InvalidArgument, R2cclError
from r2ccl.testing.faults import is_integer

#: Environment variables of a program in the lab. `MARK` is 1 in a lab and not set elsewhere; the
#: next two have the fields of the `MachineShape`; `REPORT` is the directory for results.
MARK = "R2CC_RDMALAB"
_NODES = "R2CC_RDMALAB_NODES"
_NICS = "R2CC_RDMALAB_NICS"
REPORT = "R2CC_RDMALAB_REPORT"

#: Limits, because each device takes kernel memory and time of the emulated CPU, and the numbers of
#: node and rail are parts of an IPv4 address.
MAX_NODES = 16
MAX_NICS = 16

#: MTU of the interfaces in bytes, the default of netlab. RoCE's largest packet, 4096 bytes plus
#: headers, fits.
MTU = 9000

#: Kernel settings of each interface. Soft-RoCE sends between addresses of the same machine. Without
#: accept_local such packets are dropped and a queue pair does not leave INIT (ETIMEDOUT). Without
#: arp_ignore each interface on a bridge answers ARP for all addresses, and packets reach the wrong
#: device.
_SYSCTLS = {"accept_local": "1", "rp_filter": "0", "arp_ignore": "1", "arp_announce": "2"}


class RdmaLabError(R2cclError):
    """Error raised when the host or the virtual machine cannot run a lab; it gives the cause."""


class MachineShape(msgspec.Struct, frozen=True, kw_only=True):
    """Size of a lab: the number of nodes, and the number of RDMA devices per node.

    Parameters
    ----------
    nodes : int
        Number of nodes, 1 to 16.
    nics : int
        Number of RDMA devices per node, 1 to 16; each device of a node is on a rail of its own.

    Raises
    ------
    InvalidArgument
        If a value is out of range. The message gives the range.
    """

    nodes: int = 2
    nics: int = 3

    def __post_init__(self) -> None:
        for name, most in (("nodes", MAX_NODES), ("nics", MAX_NICS)):
            value = getattr(self, name)
            if not is_integer(value, 1, most):
                raise InvalidArgument(f"a lab cannot have {name}={value!r}; allowed is 1 to {most}")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self | None:
        """Return the shape of the lab in which a program with this environment runs.

        The result is None if the program does not run in a lab.
        """
        if environment.get(MARK) != "1":
            return None
        return cls(nodes=int(environment[_NODES]), nics=int(environment[_NICS]))

    def environment(self) -> dict[str, str]:
        """Return the environment variables that describe the lab to programs in it."""
        return {MARK: "1", _NODES: str(self.nodes), _NICS: str(self.nics)}

    def netdev(self, node: int, rail: int) -> str:
        """Return the name of a node's network interface on `rail`."""
        return f"n{node}r{rail}"

    def device(self, node: int, rail: int) -> str:
        """Return the name of a node's RDMA device on `rail`."""
        return f"rxe_{self.netdev(node, rail)}"

    def devices(self, node: int) -> tuple[str, ...]:
        """Return the names of a node's RDMA devices, in order of their rails."""
        return tuple(self.device(node, rail) for rail in range(self.nics))

    def address(self, node: int, rail: int) -> str:
        """Return the IPv4 address of a node's interface on `rail`; its prefix length is 24."""
        return f"10.{50 + rail}.0.{node + 1}"

    def places(self) -> Iterator[tuple[int, int]]:
        """Yield ``(node, rail)`` of every device."""
        return ((node, rail) for rail in range(self.nics) for node in range(self.nodes))


def link_lines(shape: MachineShape, present: Collection[str]) -> Iterator[str]:
    """Yield the ``ip -batch`` lines that make the interfaces, and that make and set up the bridges.

    Interfaces and bridges whose names are in `present` exist already and are not made.
    `address_lines` assigns the addresses and sets the interfaces up.
    """
    for rail in range(shape.nics):
        if shape.nodes == 2:
            near, far = shape.netdev(0, rail), shape.netdev(1, rail)
            if near not in present:
                yield f"link add {near} type veth peer name {far}"
            continue
        if f"br{rail}" not in present:
            yield f"link add br{rail} type bridge"
        yield f"link set br{rail} mtu {MTU} up"
        for node in range(shape.nodes):
            port = f"s{node}r{rail}"
            if port not in present:
                yield f"link add {shape.netdev(node, rail)} type veth peer name {port}"
            yield f"link set {port} mtu {MTU} master br{rail} up"


def address_lines(shape: MachineShape) -> Iterator[str]:
    """Yield the ``ip -batch`` lines that assign addresses to the interfaces and set them up."""
    for node, rail in shape.places():
        name = shape.netdev(node, rail)
        yield f"address replace {shape.address(node, rail)}/24 dev {name}"
        yield f"link set {name} mtu {MTU} up"


def device_lines(shape: MachineShape, present: Collection[str]) -> Iterator[str]:
    """Yield the ``rdma -b`` lines that make the RDMA devices whose names are not in `present`."""
    for node, rail in shape.places():
        name = shape.device(node, rail)
        if name not in present:
            yield f"link add {name} type rxe netdev {shape.netdev(node, rail)}"


def sysctls(shape: MachineShape) -> dict[str, str]:
    """Return the kernel settings that let the NICs of one machine send to each other.

    The keys are paths under ``/proc/sys``.
    """
    netdevs = [shape.netdev(node, rail) for node, rail in shape.places()]
    return {
        f"net/ipv4/conf/{netdev}/{key}": value
        for netdev in ("all", "default", *netdevs)
        for key, value in _SYSCTLS.items()
    }


__all__ = [
    "MARK",
    "MTU",
    "REPORT",
    "MachineShape",
    "RdmaLabError",
    "address_lines",
    "device_lines",
    "link_lines",
    "sysctls",
]
