"""The lab itself: it has what was asked for, its devices move data, a lost carrier is reported."""

import ipaddress
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from r2ccl.testing.rdmalab import MachineShape
from r2ccl.testing.rdmalab.guest import missing_ports
from r2ccl.topology.hcas import Gid, Hca, choose_gid, list_hcas

PATIENCE_S = 20.0
NBYTES = 4096
IMMEDIATE = 0x01020304


def await_true(condition: Callable[[], bool], what: str) -> None:
    """Poll for what no descriptor tells."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} within {PATIENCE_S} s"
        select.select([], [], [], 0.005)


class Endpoint:
    """One RC queue pair on one port, with a landing place of `NBYTES`."""

    def __init__(self, hca: Hca, gid: Gid) -> None:
        from pyverbs import enums as e
        from pyverbs.cq import CQ
        from pyverbs.device import Context
        from pyverbs.mr import MR
        from pyverbs.pd import PD
        from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr

        self.gid = gid
        self.access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        self.context = Context(name=hca.name)
        self.pd = PD(self.context)
        self.mr = MR(self.pd, NBYTES, self.access)
        self.cq = CQ(self.context, 8)
        cap = QPCap(max_send_wr=4, max_recv_wr=4, max_send_sge=1, max_recv_sge=1)
        made = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=1)
        attr = QPAttr(port_num=hca.port)
        attr.qp_access_flags = self.access
        self.qp = QP(self.pd, made, attr)

    def join(self, other: "Endpoint") -> None:
        from pyverbs import enums as e
        from pyverbs.addr import GID, AHAttr, GlobalRoute
        from pyverbs.qp import QPAttr

        # pyverbs takes eight words and no shorthand.
        words = ipaddress.IPv6Address(other.gid.address).packed.hex(":", 2)
        route = GlobalRoute(dgid=GID(words), sgid_index=self.gid.index)
        attr = QPAttr(port_num=1)
        attr.ah_attr = AHAttr(is_global=1, gr=route, port_num=1)
        attr.qp_access_flags = self.access
        attr.path_mtu = e.IBV_MTU_1024
        attr.dest_qp_num = other.qp.qp_num
        attr.timeout, attr.retry_cnt, attr.rnr_retry = 16, 3, 7
        self.qp.to_rts(attr)

    def completion(self) -> Any:
        """Return the next completion."""
        found: list[Any] = []

        def has_come() -> bool:
            found.extend(self.cq.poll(1)[1])
            return bool(found)

        await_true(has_come, "a completion")
        return found[0]

    def close(self) -> None:
        for part in (self.qp, self.cq, self.mr, self.pd, self.context):
            part.close()


@pytest.fixture
def pair(hcas: tuple[tuple[Hca, ...], ...]) -> Iterator[tuple[Endpoint, Endpoint]]:
    """Rail 0 of nodes 0 and 1, joined."""
    near, far = (Endpoint(node[0], choose_gid(node[0])) for node in hcas[:2])
    near.join(far)
    far.join(near)
    yield near, far
    near.close()
    far.close()


@pytest.fixture
def carrier(lab: MachineShape) -> Iterator[Callable[[str], None]]:
    """Take the last rail's interface of node 1 down and up; it is up again afterwards."""
    name = lab.netdev(1, lab.nics - 1)

    def set_carrier(state: str) -> None:
        subprocess.run(["ip", "link", "set", name, state], check=True, timeout=PATIENCE_S)

    yield set_carrier
    set_carrier("up")
    await_true(lambda: not missing_ports(lab, list_hcas()), "every port is usable again")


def test_there_is_a_device_for_every_nic_and_it_is_active(
    lab: MachineShape, hcas: tuple[tuple[Hca, ...], ...]
) -> None:
    assert [len(node) for node in hcas] == [lab.nics] * lab.nodes
    assert missing_ports(lab, list_hcas()) == []
    for node, ports in enumerate(hcas):
        assert [port.netdev for port in ports] == [lab.netdev(node, r) for r in range(lab.nics)]
        addresses = [choose_gid(port).address for port in ports]
        assert addresses == [f"::ffff:{lab.address(node, rail)}" for rail in range(lab.nics)]


def test_making_the_devices_again_changes_nothing(lab: MachineShape) -> None:
    from r2ccl.testing.rdmalab.guest import main

    before = list_hcas()
    assert main(["--nodes", str(lab.nodes), "--nics", str(lab.nics)]) == 0
    assert list_hcas() == before


def test_a_write_with_immediate_arrives_whole(pair: tuple[Endpoint, Endpoint]) -> None:
    from pyverbs import enums as e
    from pyverbs.wr import SGE, RecvWR, SendWR

    near, far = pair
    sent = os.urandom(NBYTES)
    near.mr.write(sent, NBYTES)
    landing = SGE(far.mr.buf, 0, far.mr.lkey)
    receive = RecvWR(num_sge=1, sg=[landing])
    far.qp.post_recv(receive)
    source = SGE(near.mr.buf, NBYTES, near.mr.lkey)
    write = SendWR(opcode=e.IBV_WR_RDMA_WRITE_WITH_IMM, num_sge=1, sg=[source], imm_data=IMMEDIATE)
    write.set_wr_rdma(far.mr.rkey, far.mr.buf)
    near.qp.post_send(write)
    assert near.completion().status == e.IBV_WC_SUCCESS
    arrived = far.completion()
    assert (arrived.status, arrived.byte_len, arrived.imm_data) == (
        e.IBV_WC_SUCCESS,
        NBYTES,
        IMMEDIATE,
    )
    assert far.mr.read(NBYTES, 0) == sent


def test_a_port_reports_that_its_carrier_is_lost_and_found(
    lab: MachineShape, carrier: Callable[[str], None]
) -> None:
    from pyverbs import enums as e
    from pyverbs.device import Context

    rail = lab.nics - 1
    before = open_descriptors()
    context = Context(name=lab.device(1, rail))
    # The descriptor of asynchronous events is the one that has this name.
    (descriptor,) = (
        number
        for number, target in (open_descriptors().items() - before.items())
        if "infinibandevent" in target
    )

    def await_event(kind: int) -> None:
        """Read events until one is of `kind`: changes of the GID table are told as well."""
        deadline = time.monotonic() + PATIENCE_S
        while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            event = context.get_async_event()
            event.ack()
            if event.event_type == kind:
                return
        pytest.fail(f"no event {kind} within {PATIENCE_S} s")

    try:
        carrier("down")
        await_event(e.IBV_EVENT_PORT_ERR)
        down = {hca.name: hca.state for hca in list_hcas() if hca.state != "ACTIVE"}
        assert lab.device(1, rail) in down
        carrier("up")
        await_event(e.IBV_EVENT_PORT_ACTIVE)
    finally:
        context.close()


def open_descriptors() -> dict[int, str]:
    """Return this process's descriptors and what they are."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[int(entry.name)] = str(entry.readlink())
        except FileNotFoundError:
            continue  # the one the listing itself had open
    return found
