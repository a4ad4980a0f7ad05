"""Effect of each fault on plain sockets, and on the netlink events of the nodes concerned."""

import errno
import itertools
import random
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from support.slow import slow_but

from r2ccl.errors import InvalidArgument
from r2ccl.testing import Action, Fault, FaultPlan
from r2ccl.testing.netlab import Lab, unavailable_reason
from r2ccl.topology import LinkEvent, LinkMonitor

ARRIVES_S = 3.0
SILENCE_S = 0.15
AGAIN_S = 0.05

End = tuple[int, int]


@pytest.fixture(scope="module")
def running_lab() -> Iterator[Lab]:
    reason = unavailable_reason()
    if reason:
        pytest.skip(reason)
    with Lab(nodes=3, rails=2, rate="100mbit") as lab:
        yield lab


@pytest.fixture
def lab(running_lab: Lab) -> Iterator[Lab]:
    yield running_lab
    running_lab.restore()
    running_lab.raise_errors()


def bound(lab: Lab, end: End, kind: socket.SocketKind) -> socket.socket:
    def make() -> socket.socket:
        sock = socket.socket(socket.AF_INET, kind)
        sock.bind((lab.shape.address(*end), 0))
        return sock

    return lab.inside(end[0], make)


def reaches(lab: Lab, source: End, target: End, timeout_s: float = ARRIVES_S) -> bool:
    """Return whether a datagram arrives, with the address it was sent from.

    It is sent repeatedly: the kernel drops one whose ARP requests began while the NIC was down.
    """
    with (
        bound(lab, source, socket.SOCK_DGRAM) as sender,
        bound(lab, target, socket.SOCK_DGRAM) as receiver,
    ):
        receiver.settimeout(AGAIN_S)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                sender.sendto(b"ping", receiver.getsockname())
                return receiver.recvfrom(16) == (b"ping", sender.getsockname())
            except TimeoutError:
                continue
            except OSError as exc:
                if exc.errno not in (errno.ENETUNREACH, errno.EHOSTUNREACH):
                    raise
                time.sleep(AGAIN_S)
    return False


def connected(lab: Lab, source: End, target: End) -> tuple[socket.socket, socket.socket]:
    with bound(lab, target, socket.SOCK_STREAM) as listener:
        listener.listen()
        listener.settimeout(ARRIVES_S)
        client = bound(lab, source, socket.SOCK_STREAM)
        client.settimeout(ARRIVES_S)
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        server.settimeout(ARRIVES_S)
        return client, server


def is_silent(*sockets: socket.socket) -> bool:
    """Return whether no socket has data, an end or an error to report."""
    return select.select(sockets, [], sockets, SILENCE_S) == ([], [], [])


def next_event(monitor: LinkMonitor, *, is_up: bool, name: str = "rail0") -> LinkEvent:
    deadline = time.monotonic() + ARRIVES_S
    while select.select([monitor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        for event in monitor.read():
            if event.name == name and event.is_up == is_up and not event.address:
                return event
    raise AssertionError(f"no event {name} {'up' if is_up else 'down'} within {ARRIVES_S} s")


@pytest.fixture
def monitors(lab: Lab) -> Iterator[list[LinkMonitor]]:
    """Watch the links of nodes 0, 1 and 2."""
    made = [lab.inside(node, LinkMonitor) for node in range(3)]
    yield made
    for monitor in made:
        monitor.close()


def fault(action: Action, node: int = 1, rail: int = 0, **fields: object) -> Fault:
    return Fault(action=action, node=node, rail=rail, **fields)  # type: ignore[arg-type]


def test_a_full_fabric_joins_any_nic_with_any_nic(lab: Lab) -> None:
    assert all(reaches(lab, (0, rail), (1, other)) for rail in (0, 1) for other in (0, 1))


@pytest.mark.parametrize("action", [Action.NIC_DOWN, Action.SWITCH_PORT_DOWN])
def test_a_dead_nic_is_seen_by_its_owner_and_by_nobody_else(
    lab: Lab, monitors: list[LinkMonitor], action: Action
) -> None:
    client, server = connected(lab, (0, 0), (1, 0))
    with client, server:
        firing = lab.apply(fault(action))
        event = next_event(monitors[1], is_up=False)
        assert firing.time_s < event.time < firing.time_s + 0.05
        client.send(b"lost")
        assert is_silent(client, server)
    assert monitors[0].read() == []
    assert not reaches(lab, (0, 0), (1, 0), SILENCE_S)
    assert not reaches(lab, (0, 1), (1, 0), SILENCE_S)
    assert not reaches(lab, (1, 0), (0, 0), SILENCE_S)
    assert reaches(lab, (0, 1), (1, 1))
    assert reaches(lab, (0, 0), (2, 0))
    lab.restore(1, 0)
    next_event(monitors[1], is_up=True)
    assert reaches(lab, (0, 0), (1, 0))
    assert reaches(lab, (1, 0), (0, 1))


def test_a_dead_nics_traffic_does_not_leave_through_another(lab: Lab) -> None:
    lab.apply(fault(Action.NIC_DOWN))
    before = lab.counters()[1, 1][0]
    assert not reaches(lab, (1, 0), (0, 1), SILENCE_S)
    assert lab.counters()[1, 1][0] == before


def test_a_blackhole_keeps_the_carrier_and_swallows_everything(
    lab: Lab, monitors: list[LinkMonitor]
) -> None:
    client, server = connected(lab, (0, 0), (1, 0))
    with client, server:
        lab.apply(fault(Action.BLACKHOLE))
        client.send(b"late")
        server.send(b"late")
        assert is_silent(client, server)
        assert not reaches(lab, (0, 0), (1, 0), SILENCE_S)
        assert not reaches(lab, (1, 0), (0, 0), SILENCE_S)
        assert not reaches(lab, (0, 1), (1, 0), SILENCE_S)
        assert reaches(lab, (0, 0), (2, 0))
        assert reaches(lab, (0, 1), (2, 0)), "the spine's address left with the port"
        lab.restore(1, 0)
        assert server.recv(16) == b"late"
        assert client.recv(16) == b"late"
    assert [monitor.read() for monitor in monitors] == [[], [], []]


def test_isolation_parts_one_pair_on_one_rail(lab: Lab, monitors: list[LinkMonitor]) -> None:
    lab.apply(fault(Action.ISOLATE, node=1, peer=0))
    assert not reaches(lab, (0, 0), (1, 0), SILENCE_S)
    assert not reaches(lab, (1, 0), (0, 0), SILENCE_S)
    assert reaches(lab, (0, 1), (1, 1))
    assert reaches(lab, (0, 0), (2, 0))
    assert reaches(lab, (2, 0), (1, 0))
    assert [monitor.read() for monitor in monitors] == [[], [], []]
    lab.restore(0)
    assert reaches(lab, (0, 0), (1, 0))


def transfer_s(lab: Lab, source: End, target: End, nbytes: int) -> float:
    client, server = connected(lab, source, target)
    with client, server:
        start = time.monotonic()
        sender = threading.Thread(target=client.sendall, args=(bytes(nbytes),))
        sender.start()
        left = nbytes
        while left:
            left -= len(server.recv(1 << 20))
        sender.join()
        return time.monotonic() - start


def test_a_slow_nic_is_slow_both_ways_until_restored(lab: Lab) -> None:
    nbytes = 1 << 20
    healthy = transfer_s(lab, (0, 0), (1, 0), nbytes)
    lab.apply(fault(Action.SLOW, rate="10mbit"))
    inward = transfer_s(lab, (0, 0), (1, 0), nbytes)
    outward = transfer_s(lab, (1, 0), (0, 0), nbytes)
    lab.restore()
    assert min(inward, outward) > 3 * healthy
    assert transfer_s(lab, (0, 0), (1, 0), nbytes) < min(inward, outward) / 2


def test_a_flap_goes_down_and_up_and_ends_up(lab: Lab, monitors: list[LinkMonitor]) -> None:
    firing = lab.apply(fault(Action.FLAP, duration_s=0.4, mean_s=0.03, seed=7))
    events = []
    while time.monotonic() < firing.time_s + 0.4:
        select.select([monitors[1]], [], [], 0.05)
        events += [event.is_up for event in monitors[1].read()]
    assert events.count(False) >= 2
    assert True in events
    # On a busy machine, the end of the flap may still be under way.
    while not reaches(lab, (0, 0), (1, 0), SILENCE_S):
        assert time.monotonic() < firing.time_s + ARRIVES_S
    assert reaches(lab, (0, 0), (1, 0))


def test_a_fault_with_a_duration_undoes_itself(lab: Lab, monitors: list[LinkMonitor]) -> None:
    firing = lab.apply(fault(Action.NIC_DOWN, duration_s=0.1))
    next_event(monitors[1], is_up=False)
    assert next_event(monitors[1], is_up=True).time >= firing.time_s + 0.1


def test_ending_one_of_two_faults_of_a_nic_leaves_the_other(
    lab: Lab, monitors: list[LinkMonitor]
) -> None:
    def pass_by(duration_s: float) -> None:
        lab.apply(fault(Action.NIC_DOWN, node=2, duration_s=duration_s))
        next_event(monitors[2], is_up=False)
        next_event(monitors[2], is_up=True)

    lab.apply(fault(Action.NIC_DOWN, duration_s=0.05))
    lab.apply(fault(Action.NIC_DOWN))
    pass_by(0.1)
    assert not reaches(lab, (0, 0), (1, 0), SILENCE_S)
    lab.apply(fault(Action.NIC_DOWN, duration_s=0.05))
    pass_by(0.1)
    assert not reaches(lab, (0, 0), (1, 0), SILENCE_S)


def test_faults_that_overlap_on_one_rail_add_up(lab: Lab) -> None:
    lab.apply(fault(Action.BLACKHOLE, duration_s=0.3))
    lab.apply(fault(Action.ISOLATE, node=1, peer=0))
    lab.apply(fault(Action.ISOLATE, node=1, peer=2))
    assert reaches(lab, (0, 0), (2, 0))
    time.sleep(0.4)
    assert not reaches(lab, (0, 0), (1, 0), SILENCE_S)
    assert not reaches(lab, (2, 0), (1, 0), SILENCE_S)
    lab.apply(fault(Action.NIC_DOWN, duration_s=0.05))
    time.sleep(0.15)
    assert not reaches(lab, (1, 0), (0, 0), SILENCE_S), "the NIC's return does not join them"
    assert reaches(lab, (0, 0), (2, 0))
    lab.restore(2)
    assert reaches(lab, (2, 0), (1, 0))
    assert not reaches(lab, (0, 0), (1, 0), SILENCE_S)


@pytest.mark.parametrize(("seed", "end_s"), slow_but([(1, 0.6)], [(1, 0.6), (1, 1.5), (2, 1.5)]))
def test_any_plan_runs_and_leaves_a_whole_lab(lab: Lab, seed: int, end_s: float) -> None:
    """Make 25 faults a second until `end_s`."""
    rng = random.Random(seed)
    faults = []
    for _ in range(round(25 * end_s)):
        action = rng.choice([each for each in Action if each not in (Action.STOP, Action.KILL)])
        fields: dict[str, object] = {} if action is Action.RESTORE else {"duration_s": 0.3}
        if action is Action.ISOLATE:
            fields["peer"] = 2
        if action is Action.SLOW:
            fields["rate"] = "50mbit"
        if action is Action.FLAP:
            fields |= {"mean_s": 0.02, "seed": rng.randrange(9)}
        at_s = rng.uniform(0, end_s)
        faults.append(fault(action, rng.randrange(2), rng.randrange(2), at_s=at_s, **fields))
    plan = FaultPlan(faults)
    lab.run(["sleep", str(end_s + 1.0)], plan=plan)
    plan.assert_all_fired()
    lab.raise_errors()
    ends = [(node, rail) for node in range(3) for rail in range(2)]
    parted = [
        (one, other)
        for one, other in itertools.permutations(ends, 2)
        if one[0] != other[0] and not reaches(lab, one, other)
    ]
    assert not parted


def test_restore_ends_a_flap(lab: Lab, monitors: list[LinkMonitor]) -> None:
    lab.apply(fault(Action.FLAP, duration_s=5, mean_s=0.01))
    lab.restore()
    monitors[1].read()
    assert not select.select([monitors[1]], [], [], SILENCE_S)[0]
    assert reaches(lab, (0, 0), (1, 0))


def test_counters_tell_which_nic_carried_the_bytes(lab: Lab) -> None:
    before = lab.counters()
    transfer_s(lab, (0, 0), (1, 1), 1 << 20)
    after = lab.counters()
    sent = {end: after[end][0] - before[end][0] for end in after}
    received = {end: after[end][1] - before[end][1] for end in after}
    assert sent[0, 0] >= 1 << 20
    assert received[1, 1] >= 1 << 20
    assert max(sent[0, 1], sent[2, 0], sent[2, 1], received[1, 0], received[2, 0]) < 1 << 17


def test_a_fault_on_what_does_not_exist_is_refused(lab: Lab) -> None:
    with pytest.raises(InvalidArgument, match="rail 2 does not exist"):
        lab.apply(fault(Action.NIC_DOWN, rail=2))
    with pytest.raises(InvalidArgument, match="no job runs"):
        lab.apply(Fault(action=Action.KILL, rank=0))


def test_a_rail_fabric_joins_only_nics_of_one_index() -> None:
    reason = unavailable_reason()
    if reason:
        pytest.skip(reason)
    with Lab(nodes=2, rails=2, fabric="rail") as lab:
        assert reaches(lab, (0, 0), (1, 0))
        assert reaches(lab, (0, 1), (1, 1))
        assert not reaches(lab, (0, 0), (1, 1), SILENCE_S)
        lab.apply(fault(Action.NIC_DOWN))
        lab.restore()
        assert reaches(lab, (0, 0), (1, 0))
