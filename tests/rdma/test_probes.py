"""Probes over real queue pairs: what is heard when a port is silent, down, or on another cable."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rdma.probing import PATIENCE_S, PROBE_TIMEOUT_S, TwoRanks, ip, silent

from r2ccl.testing.rdmalab import MachineShape
from r2ccl.topology.hcas import Hca, list_hcas
from r2ccl.types import ProbeKey

Nodes = tuple[tuple[Hca, ...], ...]
STRAIGHT = (ProbeKey(1, 0, 0), ProbeKey(1, 1, 1))
PROGRAM = Path(__file__).with_name("probes_rank.py")


@pytest.fixture
def two(hcas: Nodes) -> Iterator[TwoRanks]:
    made = TwoRanks([ports[:2] for ports in hcas[:2]])
    yield made
    made.close()


def test_a_silent_port_is_noticed_in_time_and_joined_again(
    two: TwoRanks, lab: MachineShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    from r2ccl.transport.verbs import probe

    two.join(*STRAIGHT)
    gone, beside = STRAIGHT
    with silent(lab.netdev(1, 0), lab.address(0, 0)):
        began = time.monotonic()
        probed = two.ask(gone)
        took_s = time.monotonic() - began
        assert probed.is_answered is False
        assert took_s < 2 * PROBE_TIMEOUT_S
        assert two.ask(beside).is_answered is True
        again = two.ask(gone)
        assert again.is_answered is False, "what was silent just now needs no connection to be so"
        assert probed.detail in again.detail, "it says what became of its connection"
        monkeypatch.setattr(probe, "_SILENCE_S", 0.0)
        assert two.ask(gone).is_answered is None, "what was silent long ago does"
    two.joined.clear()
    two.until(lambda: gone in two.joined, "the connection, anew")
    assert two.ask(gone).is_answered is True


@pytest.mark.parametrize("timeout_s", [1e-6, 0.06, 1.0, 3600.0])
def test_all_tries_of_the_nic_fit_into_the_timeout(timeout_s: float) -> None:
    from r2ccl.transport.verbs.probe import queue_pair_timeout

    exponent = queue_pair_timeout(timeout_s)
    tries_s = 3 * 4.096e-6 * 2**exponent
    assert exponent == 1 or timeout_s / 2 < tries_s <= timeout_s
    assert 1 <= exponent <= 31


@pytest.mark.parametrize("node", [0, 1])
def test_a_port_that_goes_down_is_noticed_at_either_end(two: TwoRanks, node: int) -> None:
    two.join(*STRAIGHT)
    name = f"n{node}r0"
    ip("link", "set", name, "down")
    try:
        assert two.ask(STRAIGHT[0]).is_answered is False
        assert two.ask(STRAIGHT[1]).is_answered is True
    finally:
        ip("link", "set", name, "up")
    two.joined.clear()
    two.until(lambda: STRAIGHT[0] in two.joined, "the connection, anew")
    assert two.ask(STRAIGHT[0]).is_answered is True


def test_between_cables_nothing_is_joined_and_nothing_waits(two: TwoRanks) -> None:
    cross = ProbeKey(1, 0, 1)
    two.joiners[0].begin_probe(cross)
    two.join(*STRAIGHT)
    give_up = time.monotonic() + 6.0  # several tries; the kernel would wait a second in each
    while time.monotonic() < give_up:
        two.turn()
    assert cross not in two.joined
    assert two.longest_s < 0.9
    assert two.ask(cross).is_answered is None
    assert all(two.ask(key).is_answered is True for key in STRAIGHT)


@pytest.fixture
def fabric() -> Iterator[list[list[Hca]]]:
    """Two nodes with two ports each, all on one switch."""
    ip("link", "add", "fabric", "type", "bridge")
    ip("link", "set", "fabric", "up")
    names = [[f"f{node}r{rail}" for rail in (0, 1)] for node in (0, 1)]
    for node in (0, 1):
        for rail, name in enumerate(names[node]):
            ip("link", "add", name, "type", "veth", "peer", "name", f"{name}s")
            ip("link", "set", f"{name}s", "master", "fabric", "up")
            for key, value in (("accept_local", "1"), ("rp_filter", "0"), ("arp_ignore", "1")):
                Path(f"/proc/sys/net/ipv4/conf/{name}/{key}").write_text(value)
            ip("address", "add", f"10.{90 + rail}.0.{node + 1}/24", "dev", name)
            ip("link", "set", name, "up")
            rdma = ["rdma", "link", "add", f"rxe_{name}", "type", "rxe", "netdev", name]
            subprocess.run(rdma, check=True, timeout=PATIENCE_S)
    try:
        yield _await_ports(names)
    finally:
        for name in (*names[0], *names[1], "fabric"):
            ip("link", "del", name)


def _await_ports(names: list[list[str]]) -> list[list[Hca]]:
    give_up = time.monotonic() + PATIENCE_S
    while True:
        found = {each.netdev: each for each in list_hcas() if each.state == "ACTIVE" and each.gids}
        if found.keys() >= {name for node in names for name in node}:
            ports = [[found[name] for name in node] for node in names]
            if all(any(g.address.startswith("::ffff:") for g in p.gids) for n in ports for p in n):
                return ports
        assert time.monotonic() < give_up, "the ports do not come up"
        time.sleep(0.05)  # sysfs tells no news


def test_probes_on_one_fabric_tell_a_dead_nic_from_a_dead_link(
    fabric: list[list[Hca]],
) -> None:
    two = TwoRanks(fabric)
    try:
        local_to_remote, local_to_aux = ProbeKey(1, 0, 0), ProbeKey(1, 1, 0)
        aux_to_remote = ProbeKey(1, 0, 1)
        keys = (local_to_remote, aux_to_remote, local_to_aux)
        two.join(*keys)
        assert [two.ask(key).is_answered for key in keys] == [True] * 3
        with silent("f1r0", "10.90.0.1"), silent("f1r0", "10.91.0.1"):  # the remote NIC
            assert [two.ask(key).is_answered for key in keys] == [False, False, True]
        two.joined.clear()
        two.until(lambda: {*keys[:2]} <= set(two.joined), "the connections, anew")
        with silent("f1r0", "10.90.0.1"):  # the link between the two
            assert [two.ask(key).is_answered for key in keys] == [False, True, True]
    finally:
        two.close()


@pytest.mark.timeout(300)
def test_a_communicator_joins_its_probes_by_itself(lab: MachineShape, tmp_path: Path) -> None:
    """Also between ranks of which one is stopped."""
    report = tmp_path / "report.json"
    done = subprocess.run(
        [
            sys.executable, "-m", "r2ccl", "launch", "-n", "2", "--",
            sys.executable, str(PROGRAM), str(report),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    answers = json.loads(report.read_text())
    assert answers["joined"] == {str(rail): True for rail in range(lab.nics)}
    assert answers["peer stopped"] is True
