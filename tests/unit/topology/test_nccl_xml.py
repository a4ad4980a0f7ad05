"""NCCL's topology files: machines survive the round trip, and what is no such file is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machines.recorded import NAMES, record

from r2ccl.errors import InvalidArgument
from r2ccl.topology.bounded_xml import MAX_DEPTH, MAX_ELEMENTS, MAX_NBYTES
from r2ccl.topology.machine import Gpu, LinkEnd, Machine, NicPort, NumaNode, NvLink, PciDevice
from r2ccl.topology.nccl_xml import load_xml, parse_xml
from r2ccl.topology.nccl_xml_writer import format_xml

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


def parse(text: str) -> Machine:
    return parse_xml(text.encode())


def sayable(machine: Machine) -> Machine:
    """A machine without what the format has no words for."""
    replace = msgspec.structs.replace
    return Machine.of(
        [replace(node, distances=()) for node in machine.nodes],
        machine.pci,
        [replace(gpu, uuid="", nsm=0) for gpu in machine.gpus],
        [replace(port, netdev="") for port in machine.ports],
        machine.nvlinks,
    )


def test_every_element_is_read() -> None:
    assert parse(FILE) == MACHINE


def test_a_machine_is_written_as_nccl_writes_it() -> None:
    assert format_xml(MACHINE) == FILE


def test_ranks_are_written_where_they_are_known() -> None:
    text = format_xml(MACHINE, {GPU: 5})
    assert '<gpu dev="0" sm="90" rank="5" gdr="1">' in text
    assert parse(text) == MACHINE


@pytest.mark.parametrize("name", NAMES)
def test_recorded_machines_survive(tmp_path: Path, name: str) -> None:
    machine = record(tmp_path, name).read()
    assert parse(format_xml(machine)) == sayable(machine)


def test_nothing_in_the_text_confuses_the_reader_of_nccl(tmp_path: Path) -> None:
    """It knows no declaration, and takes a blank before the end of an element for an attribute."""
    text = format_xml(record(tmp_path, "dgx_h100").read())
    assert text.startswith("<system ")
    assert " />" not in text
    assert "&" not in text


# Machines of any shape

IDENTIFIER = st.integers(0, 0xFFFF)
NAME = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    ids = draw(st.lists(st.integers(-1, 9), min_size=1, max_size=3, unique=True))
    nodes = [
        NumaNode(
            each,
            tuple(sorted(draw(st.sets(st.integers(0, 300), max_size=5)))),
            draw(st.sampled_from(("x86_64", "arm64", "<odd>&"))),
            draw(st.sampled_from(("GenuineIntel", "  Shanghai  ", "a\"b'"))),
            draw(IDENTIFIER),
            draw(IDENTIFIER),
        )
        for each in ids
    ]
    pci: list[PciDevice] = []
    for number in range(draw(st.integers(0, 8))):
        parent = draw(st.sampled_from([None, *pci]))
        pci.append(
            PciDevice(
                f"{draw(st.sampled_from((0, 1, 0x10000))):04x}:{number:02x}:00.{number % 8}",
                parent.bus_id if parent else "",
                parent.numa_node if parent else draw(st.sampled_from(ids)),
                draw(st.integers(0, 0xFFFFFF)),
                draw(st.sampled_from((2_500, 5_000, 8_000, 16_000, 32_000, 64_000))),
                draw(st.integers(1, 32)),
                *(draw(IDENTIFIER) for _ in range(4)),
            )
        )
    gpus = [draw(a_gpu(device)) for device in pci if draw(st.booleans())]
    names = draw(st.lists(st.tuples(NAME, st.integers(0, 4)), max_size=4, unique=True))
    ports = [draw(a_port(*name, [*pci, None], ids)) for name in names]
    return Machine.of(nodes, pci, gpus, unique_labels(ports), draw(nvlinks(gpus)))


def a_gpu(device: PciDevice) -> st.SearchStrategy[Gpu]:
    return st.builds(
        Gpu,
        bus_id=st.just(device.bus_id),
        uuid=st.just(""),
        compute_capability=st.integers(0, 130),
        nsm=st.just(0),
        has_gdr=st.booleans(),
    )


@st.composite
def a_port(draw: st.DrawFn, name: str, port: int, pci: list[Any], ids: list[int]) -> NicPort:
    device = draw(st.sampled_from(pci))
    return NicPort(
        name,
        port,
        device.bus_id if device else "",
        device.numa_node if device else draw(st.sampled_from(ids)),
        draw(st.integers(1, 800_000)),
        guid=draw(st.integers(0, 2**64 - 1)),
        has_gdr=draw(st.booleans()),
    )


def unique_labels(ports: list[NicPort]) -> list[NicPort]:
    """``a:1`` is port 1 of ``a``, and an interface of that name."""
    return list({port.label: port for port in ports}.values())


@st.composite
def nvlinks(draw: st.DrawFn, gpus: list[Gpu]) -> list[NvLink]:
    targets = ["0000:07:00.0", "0000:08:00.0", *(gpu.bus_id for gpu in gpus)]
    pairs = st.tuples(st.sampled_from([gpu.bus_id for gpu in gpus]), st.sampled_from(targets))
    drawn = draw(st.lists(pairs, max_size=6, unique=True)) if gpus else []
    ends = st.sampled_from(LinkEnd)
    return [NvLink(*pair, draw(ends), draw(st.integers(0, 18))) for pair in drawn]


@given(machines())
def test_any_machine_survives(machine: Machine) -> None:
    assert parse(format_xml(machine)) == machine
    assert format_xml(parse(format_xml(machine))) == format_xml(machine)


# What others write


def test_what_is_not_known_is_left_out() -> None:
    text = FILE.replace("<cpu ", '<cpu host_hash="0x5" ').replace(
        "<net ", '<net coll="1" keep="1" '
    )
    text = text.replace("<nic>", '<pcilink target="x"/><nic><gin name="mlx5_0"/>')
    text = text.replace("<system ", "<!-- by hand -->\n<system name='x' ")
    assert parse(text) == MACHINE


def test_a_file_by_hand_may_say_little() -> None:
    machine = parse(
        """
        <system version="1">
          <cpu numaid="0">
            <pci busid="0001:00:00.0" class="0x03" link_speed="" link_width="0">
              <gpu sm="80"><nvlink target="fffffff:ffff:ff" count="12"/></gpu>
            </pci>
            <nic><net name="eth0" speed="-1"/></nic>
          </cpu>
        </system>
        """
    )
    assert machine.pci == (PciDevice("0001:00:00.0", "", 0, 0x030000, 8_000, 16),)
    assert machine.gpus == (Gpu("0001:00:00.0", compute_capability=80),)
    assert machine.nvlinks == (NvLink("0001:00:00.0", "fffffff:ffff:ff", LinkEnd.SWITCH, 12),)
    assert machine.ports == (NicPort("eth0", 0, "", 0, 10_000),)
    assert machine.remarks == (
        "0001:00:00.0: PCIe link not described, taken for PCIe 3, 16 lanes",
        "eth0: rate unknown, taken for 10 Gbit/s",
    )


def test_a_nic_that_is_a_part_of_another_is_none() -> None:
    text = FILE.replace('<net name="mlx5_0" ', '<net net="0" name="mlx5_0" ')
    assert [port.label for port in parse(text).ports] == ["eth0"]


def test_ranks_that_share_a_gpu_are_one_gpu() -> None:
    twin = '<gpu dev="0" sm="90" rank="1" gdr="1"/>'
    assert parse(FILE.replace("</gpu>", f"</gpu>{twin}")) == MACHINE


def test_a_file_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "topology.xml"
    path.write_bytes(b"\xef\xbb\xbf" + FILE.encode())
    assert load_xml(path) == MACHINE
    with pytest.raises(FileNotFoundError):
        load_xml(tmp_path / "none.xml")


# What is refused

BOMB = """<!DOCTYPE system [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>
<system version="1" name="&b;"/>"""
FETCH = """<!DOCTYPE system SYSTEM "file:///etc/passwd"><system version="1"/>"""
XXE = """<!DOCTYPE s [<!ENTITY x SYSTEM "file:///etc/passwd">]><system version="1">&x;</system>"""


@pytest.mark.parametrize("text", [BOMB, FETCH, XXE])
def test_a_document_type_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="document type"):
        parse(text)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "cp037"])
def test_an_encoding_that_could_hide_one_is_refused(encoding: str) -> None:
    with pytest.raises(InvalidArgument, match="no XML in UTF-8"):
        parse_xml(BOMB.encode(encoding))


def test_an_entity_without_a_document_type_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="undefined entity"):
        parse('<system version="1">&x;</system>')


def test_bounds_are_held() -> None:
    with pytest.raises(InvalidArgument, match="bytes"):
        parse_xml(b" " * (MAX_NBYTES + 1))
    for count in (MAX_DEPTH - 1, MAX_DEPTH):
        text = f'<system version="1">{"<x>" * count}{"</x>" * count}<cpu numaid="0"/></system>'
        if count < MAX_DEPTH:
            assert parse(text).nodes == (NumaNode(0),)
        else:
            with pytest.raises(InvalidArgument, match="within each other"):
                parse(text)
    with pytest.raises(InvalidArgument, match=f"{MAX_ELEMENTS} elements"):
        parse(f'<system version="1">{"<x/>" * MAX_ELEMENTS}</system>')
    with pytest.raises(InvalidArgument, match="mask of at most 8192 CPUs"):
        parse(f'<system version="1"><cpu numaid="0" affinity="{"f" * 2049}"/></system>')


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", None, "no XML in UTF-8"),
        ("</system>", "", "no XML in UTF-8"),
        ("system", "topology", "begins with <system"),
        ('version="1"', 'version="2"', "begins with <system"),
        ('version="1"', "", "begins with <system"),
        ('numaid="1"', "", "cpu numaid=''"),
        ('numaid="1"', 'numaid="one"', "cpu numaid='one'"),
        ('numaid="1"', 'numaid="-2"', "whole number from -1"),
        ('affinity="00000003', 'affinity="0x3', "affinity"),
        ('busid="0000:16:00.0"', "", "PCI bus id ''"),
        ('busid="0000:18:00.0"', 'busid="0000:16:00.0"', "0000:16:00.0 is there twice"),
        ('class="0x020700"', 'class="network"', "class='network'"),
        ('link_width="8"', 'link_width="x8"', "link_width='x8'"),
        ('vendor="0x15b3"', 'vendor="0x-1"', "vendor='0x-1'"),
        ('sm="90"', 'sm="9.0"', "gpu sm='9.0'"),
        ('count="5"', 'count="-5"', "nvlink count='-5'"),
        ('count="5"', 'count="' + "9" * 19 + '"', "nvlink count='9"),
        ('target="0000:43:00.0"', 'target="0000:07:00.0"', "NVLink .* is there twice"),
        ('name="mlx5_0"', "", "net name=''"),
        ('name="mlx5_0"', 'name="mlx5 0"', "net name='mlx5 0'"),
        ('name="mlx5_0"', 'name="²"', "net name='²'"),
        ('guid="0x1ac', 'guid="0x11ac', "net guid"),
    ],
)
def test_what_is_no_topology_is_refused(old: str, new: str | None, message: str) -> None:
    assert old in FILE
    text = "" if new is None else FILE.replace(old, new)
    with pytest.raises(InvalidArgument, match=message):
        parse(text)


def test_a_file_without_processors_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="without a NUMA node"):
        parse('<system version="1"/>')


@given(st.binary(max_size=200))
def test_any_bytes_are_a_machine_or_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgument):
        parse_xml(data)


@given(st.integers(0, len(FILE)), st.integers(0, len(FILE)), st.text(max_size=8))
def test_a_damaged_file_is_a_machine_or_refused(start: int, end: int, text: str) -> None:
    damaged = FILE[: min(start, end)] + text + FILE[max(start, end) :]
    try:
        machine = parse_xml(damaged.encode("utf-8", "replace"))
    except InvalidArgument:
        return
    assert parse(format_xml(machine)) == sayable(machine)
