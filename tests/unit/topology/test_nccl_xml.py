"""NCCL's topology files: a machine is written element by element, in the form NCCL parses."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from support.machines.recorded import NAMES, record

from r2ccl.topology.machine import Gpu, LinkEnd, Machine, NicPort, NumaNode, NvLink, PciDevice
from r2ccl.topology.nccl_xml import format_xml

#: Every element, as NCCL writes it.
FILE = """\
<system version="1">
  <cpu numaid="1" affinity="00000003,00000000" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:16:00.0" class="0x060400" vendor="0x1000" device="0xc030" subsystem_vendor="0x1000" subsystem_device="0x1003" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:18:00.0" class="0x020700" vendor="0x15b3" device="0x1021" subsystem_vendor="0x15b3" subsystem_device="0x0041" link_speed="16.0 GT/s PCIe" link_width="8">
        <nic>
          <net name="mlx5_0" dev="1" speed="400000" port="1" guid="0x1ac21e0003f6b8a0" gdr="1"/>
        </nic>
      </pci>
      <pci busid="0000:1b:00.0" class="0x030200" vendor="0x10de" device="0x2330" subsystem_vendor="0x10de" subsystem_device="0x16c1" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="90" gdr="1">
          <nvlink target="0000:07:00.0" count="5" tclass="0x068000"/>
          <nvlink target="0000:43:00.0" count="2" tclass="0x030200"/>
          <c2c bw="44712" count="10"/>
        </gpu>
      </pci>
    </pci>
    <nic>
      <net name="eth0" dev="0" speed="10000" port="0" guid="0x0" gdr="0"/>
    </nic>
  </cpu>
</system>
"""  # noqa: E501

SWITCH, NIC, GPU = "0000:16:00.0", "0000:18:00.0", "0000:1b:00.0"

MACHINE = Machine.of(
    nodes=[NumaNode(1, (32, 33), "x86_64", "GenuineIntel", 6, 143)],
    pci=[
        PciDevice(SWITCH, "", 1, 0x060400, 32_000, 16, 0x1000, 0xC030, 0x1000, 0x1003),
        PciDevice(GPU, SWITCH, 1, 0x030200, 32_000, 16, 0x10DE, 0x2330, 0x10DE, 0x16C1),
        PciDevice(NIC, SWITCH, 1, 0x020700, 16_000, 8, 0x15B3, 0x1021, 0x15B3, 0x41),
    ],
    gpus=[Gpu(GPU, "", 90, 0, has_gdr=True, c2c_nlinks=10, c2c_mbps=8 * 44712)],
    ports=[
        NicPort("mlx5_0", 1, NIC, 1, 400_000, guid=0x1AC21E0003F6B8A0, has_gdr=True),
        NicPort("eth0", 0, "", 1, 10_000),
    ],
    nvlinks=[
        NvLink(GPU, "0000:07:00.0", LinkEnd.SWITCH, 5),
        NvLink(GPU, "0000:43:00.0", LinkEnd.GPU, 2),
    ],
)


def test_a_machine_is_written_as_nccl_writes_it() -> None:
    assert format_xml(MACHINE) == FILE


def test_ranks_are_written_where_they_are_known() -> None:
    assert '<gpu dev="0" sm="90" rank="5" gdr="1">' in format_xml(MACHINE, {GPU: 5})


@pytest.mark.parametrize("name", NAMES)
def test_every_part_of_a_recorded_machine_is_written_once(tmp_path: Path, name: str) -> None:
    machine = record(tmp_path, name).read()
    root = ET.fromstring(format_xml(machine))
    assert [cpu.get("numaid") for cpu in root.iter("cpu")] == [str(n.id) for n in machine.nodes]
    assert sorted(pci.get("busid", "") for pci in root.iter("pci")) == sorted(
        device.bus_id for device in machine.pci
    )
    assert len(list(root.iter("gpu"))) == len(machine.gpus)
    assert sorted(net.get("name", "") for net in root.iter("net")) == sorted(
        port.name for port in machine.ports
    )
    assert len(list(root.iter("nvlink"))) == len(machine.nvlinks)


def test_nothing_in_the_text_confuses_the_parser_of_nccl(tmp_path: Path) -> None:
    """It knows no declaration, and takes a space before the end of an element for an attribute."""
    text = format_xml(record(tmp_path, "dgx_h100").read())
    assert text.startswith("<system ")
    assert " />" not in text
    assert "&" not in text


def test_special_characters_are_escaped() -> None:
    node = NumaNode(0, vendor="a\"b'<&")
    root = ET.fromstring(format_xml(Machine.of([node])))
    assert root[0].get("vendor") == node.vendor
