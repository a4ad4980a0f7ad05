"""Nominal bandwidths of the links inside a machine, in one direction, in Mbit/s.

These figures serve only to rank routes and to divide links among flows; they are not measured on
the machine. Except the figures for unknown processors, all are NCCL's, so both libraries rank the
routes of a machine with known processors alike. The figures are payload rates reached in practice,
not the signaling rates of data sheets. Invariant: all figures are integers, equal on every host.

References
----------
NCCL, src/graph/topo.h (NVLink, processors) and src/graph/topo.cc (PCIe per lane, processor models).
"""

from __future__ import annotations

from r2ccl.topology.machine import NumaNode

#: NCCL's assumption for a PCIe link that the kernel does not describe: PCIe 3 x16.
ASSUMED_SPEED_MTPS = 8_000
ASSUMED_WIDTH = 16
#: NCCL's assumption for a NIC whose speed is unknown.
ASSUMED_PORT_MBPS = 10_000

#: Bandwidth within one device, and of the link between a NIC without a PCI device and a processor.
LOCAL_MBPS = 40_000_000

#: Highest lane rate with 8b/10b encoding (PCIe 2, 5 GT/s); faster links use 128b/130b.
_LAST_8B10B_MTPS = 5_000

#: Bandwidth of one NVLink by minimum compute capability (90: 9.0); the first that fits counts.
_NVLINK_MBPS = ((100, 320_800), (90, 164_800), (87, 160_000), (86, 96_000), (70, 160_000),
                (60, 144_000), (0, 160_000))  # fmt: skip

#: Bandwidth between two NUMA nodes of an unknown processor: the lowest of the values below. NCCL
#: assumes infinite bandwidth, which would attract traffic to links of unknown bandwidth.
_UNKNOWN_MBPS = 48_000
#: Bandwidth between two NUMA nodes by architecture, except x86_64.
_ARCH_MBPS = {"arm64": 48_000, "ppc64": 256_000}
#: Bandwidth between two NUMA nodes by CPUID family of an AMD processor; all other families have
#: `_AMD_OTHERS_MBPS`. Some releases of NCCL write the families 23, 25 and 26 as 143, 175 and 191.
_AMD_MBPS = {25: 192_000, 175: 192_000, 26: 256_000, 191: 256_000}
_AMD_OTHERS_MBPS = 128_000
#: Models of Granite Rapids and Sierra Forest (Intel, CPUID family 6). They have the first bandwidth
#: in `_INTEL_MBPS`, although older models have higher numbers.
_INTEL_NEWEST = (0xAD, 0xAE, 0xAF)
#: Bandwidth between two NUMA nodes by minimum model of an Intel processor of CPUID family 6; the
#: first entry that fits counts.
_INTEL_MBPS = ((0xCF, 320_000), (0x8F, 176_000), (0x55, 80_000), (0, 48_000))


def pcie_mbps(speed_mtps: int, width: int) -> int:
    """Return the bandwidth of a PCIe link in one direction, in Mbit/s.

    The bandwidth is three quarters of the bit rate of all lanes. With 8b/10b encoding (up to
    PCIe 2), only 8 of 10 bits count; the small overhead of 128b/130b encoding is neglected.

    Parameters
    ----------
    speed_mtps : int
        Signaling rate of a lane in megatransfers per second (16000 for PCIe 4).
    width : int
        Number of lanes.
    """
    rate = speed_mtps * 4 // 5 if speed_mtps <= _LAST_8B10B_MTPS else speed_mtps
    return rate * width * 3 // 4


def nvlink_mbps(compute_capability: int) -> int:
    """Return the bandwidth of one NVLink in Mbit/s.

    Parameters
    ----------
    compute_capability : int
        Compute capability of the GPU (90 for 9.0); 0: unknown.
    """
    return next(mbps for least, mbps in _NVLINK_MBPS if compute_capability >= least)


def socket_mbps(node: NumaNode) -> int:
    """Return the bandwidth in Mbit/s of the link from `node` to any other NUMA node.

    Such a link is for example Intel's UPI or AMD's Infinity Fabric.
    """
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
