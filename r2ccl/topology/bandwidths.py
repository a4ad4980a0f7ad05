"""Bandwidths of the links inside a machine, in one direction, in Mbit/s.

Planning figures, to rank ways and to share them out; what a rail carries in fact is measured
elsewhere. They are NCCL's, so that both libraries judge a machine alike: payload rates reached in
practice, not the signalling rates of data sheets. Must not look at a machine as a whole. Invariant:
whole numbers, equal on every host.

References
----------
NCCL, src/graph/topo.h (NVLink, processors) and src/graph/topo.cc (PCIe per lane, processor models).
"""

from __future__ import annotations

from r2ccl.topology.machine import NumaNode

#: What NCCL takes for a link the kernel does not describe: PCIe 3 x16.
ASSUMED_SPEED_MTPS = 8_000
ASSUMED_WIDTH = 16
#: What NCCL takes for a NIC that does not tell its speed.
ASSUMED_PORT_MBPS = 10_000

#: Within one device.
LOCAL_MBPS = 40_000_000

#: Up to PCIe 2 (5 GT/s) 8 bits travel as 10, from PCIe 3 on 128 as 130.
_LAST_8B10B_MTPS = 5_000

#: From which compute capability on an NVLink carries how much; the first that is not above holds.
_NVLINK_MBPS = ((100, 320_800), (90, 164_800), (87, 160_000), (86, 96_000), (70, 160_000),
                (60, 144_000), (0, 160_000))  # fmt: skip

#: Between two NUMA nodes of processors not known here, the least of all below. NCCL takes those
#: for infinitely fast, which would draw traffic to where nothing is known.
_UNKNOWN_MBPS = 48_000
_ARCH_MBPS = {"arm64": 48_000, "ppc64": 256_000}
#: By CPUID family. 143, 175 and 191 are what releases of NCCL wrote for 23, 25 and 26.
_AMD_MBPS = {25: 192_000, 175: 192_000, 26: 256_000, 191: 256_000}
_AMD_OTHERS_MBPS = 128_000
#: Models of Intel's family 6: Granite Rapids and Sierra Forest have numbers below their elders.
_INTEL_NEWEST = (0xAD, 0xAE, 0xAF)
_INTEL_MBPS = ((0xCF, 320_000), (0x8F, 176_000), (0x55, 80_000), (0, 48_000))


def pcie_mbps(speed_mtps: int, width: int) -> int:
    """Return what a PCIe link carries: three quarters of its lanes' rate after encoding.

    Parameters
    ----------
    speed_mtps : int
        Signalling rate of a lane, megatransfers per second (16000 for PCIe 4).
    width : int
        Lanes.
    """
    rate = speed_mtps * 4 // 5 if speed_mtps <= _LAST_8B10B_MTPS else speed_mtps
    return rate * width * 3 // 4


def nvlink_mbps(compute_capability: int) -> int:
    """Return what one NVLink of a GPU carries; a compute capability of 0 is an unknown one."""
    return next(mbps for least, mbps in _NVLINK_MBPS if compute_capability >= least)


def socket_mbps(node: NumaNode) -> int:
    """Return what the link from a NUMA node to another carries (UPI, Infinity Fabric, ...)."""
    if node.arch != "x86_64":
        return _ARCH_MBPS.get(node.arch, _UNKNOWN_MBPS)
    if node.vendor == "AuthenticAMD":
        return _AMD_MBPS.get(node.family, _AMD_OTHERS_MBPS)
    if node.vendor == "GenuineIntel" and node.family == 6:
        model = _INTEL_MBPS[0][0] if node.model in _INTEL_NEWEST else node.model
        return next(mbps for least, mbps in _INTEL_MBPS if model >= least)
    return _UNKNOWN_MBPS


__all__ = [
    "ASSUMED_PORT_MBPS",
    "ASSUMED_SPEED_MTPS",
    "ASSUMED_WIDTH",
    "LOCAL_MBPS",
    "nvlink_mbps",
    "pcie_mbps",
    "socket_mbps",
]
