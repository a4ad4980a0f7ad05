"""LinkMonitor on a real kernel: every kind of NIC loss, and lost notifications."""

import select
from collections.abc import Iterator

import pytest

from r2ccl.testing.netlab import Lab, unavailable_reason
from r2ccl.testing.netlab.namespaces import run_batch
from r2ccl.topology import LinkEvent, LinkMonitor
from r2ccl.types import Nic

ARRIVES_S = 3.0


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    reason = unavailable_reason()
    if reason:
        pytest.skip(reason)
    with Lab(nodes=1, rails=2) as lab:
        yield lab


def ip(lab: Lab, *lines: str) -> None:
    run_batch(["ip", "-n", lab.namespace(0)], lines)


def await_event(monitor: LinkMonitor) -> LinkEvent:
    while select.select([monitor], [], [], ARRIVES_S)[0]:
        events = monitor.read()
        if events:
            return events[0]
    raise AssertionError(f"no event within {ARRIVES_S} s")


def test_a_removed_address_is_news_for_the_rail_that_uses_it(lab: Lab) -> None:
    nic = Nic("rail0", "10.1.0.1", 11)
    with lab.inside(0, LinkMonitor) as monitor:
        ip(lab, "addr add 10.9.0.1/24 dev rail0")
        added = await_event(monitor)
        assert (added.address, added.is_up, added.concerns(nic)) == ("10.9.0.1", True, False)
        ip(lab, "addr del 10.9.0.1/24 dev rail0")
        assert not await_event(monitor).concerns(nic)
        ip(lab, "addr del 10.1.0.1/24 dev rail0")
        gone = await_event(monitor)
        assert gone.concerns(nic)
        assert not gone.is_up
        ip(lab, "addr add 10.1.0.1/24 dev rail0")
        back = await_event(monitor)
        assert back.concerns(nic)
        assert back.is_up


def test_a_removed_interface_goes_down(lab: Lab) -> None:
    ip(lab, "link add extra0 type veth peer name extra1", "link set extra1 up")
    with lab.inside(0, LinkMonitor) as monitor:
        ip(lab, "link set extra0 up")
        names = {await_event(monitor).name}
        assert names <= {"extra0", "extra1"}
        ip(lab, "link del extra0")
        down = await_event(monitor)
        while down.is_up or down.name != "extra0":
            down = await_event(monitor)
        assert not monitor.is_up(down.index)


def test_lost_notifications_cost_no_change(lab: Lab) -> None:
    with lab.inside(0, lambda: LinkMonitor(receive_buffer_nbytes=1)) as monitor:
        burst = ["link set lo down", "link set lo up"] * 200
        ip(lab, *burst, "link set rail1 down", "link set lo down")
        seen = {}
        for event in monitor.read():
            if not event.address:
                seen[event.name] = event.is_up
        assert seen["rail1"] is False
        assert seen["lo"] is False
        ip(lab, "link set rail1 up", "link set lo up")
        assert await_event(monitor).is_up


def test_a_monitor_does_not_see_other_namespaces(lab: Lab) -> None:
    with LinkMonitor() as monitor:
        ip(lab, "link set rail1 down", "link set rail1 up")
        assert monitor.read() == []


def test_the_overflow_test_does_overflow(lab: Lab) -> None:
    """Check that the burst above overflows the smallest queue of a plain socket."""
    script = (
        "import socket, subprocess\n"
        "s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)\n"
        "s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)\n"
        "s.bind((0, 1))\n"
        "lines = 'link set lo down\\nlink set lo up\\n' * 200\n"
        "subprocess.run(['ip', '-batch', '-'], input=lines.encode(), check=True)\n"
        "try:\n"
        "    while True: s.recv(65536, socket.MSG_DONTWAIT)\n"
        "except OSError as exc: print(exc.errno)\n"
    )
    results = lab.run(["python3", "-c", script], timeout_s=20, sink=lambda _: None)
    assert results[0].output.strip() == "105"
