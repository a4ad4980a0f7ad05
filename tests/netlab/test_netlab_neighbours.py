"""`Neighbours` on real kernel tables, in namespaces of the test."""

import socket
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from r2ccl.testing.netlab import unavailable_reason
from r2ccl.testing.netlab.namespaces import NamespaceSet, inside, run_batch
from r2ccl.topology.neighbours import Neighbours

REASON = unavailable_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

NEAR, FAR, NOBODY = "10.9.0.1", "10.9.0.2", "10.9.0.3"
BEYOND = "10.8.0.1"


def ip(namespace: str, *words: str) -> None:
    run_batch(["ip", "-n", namespace], [" ".join(words)])


@pytest.fixture
def pair() -> Iterator[tuple[str, str]]:
    """Create two namespaces joined by a wire, whose far end is also the gateway to 10.8.0.0/16."""
    made = NamespaceSet(["near", "far"])
    near, far = made.namespaces["near"], made.namespaces["far"]
    try:
        ip(near, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", far)
        for name, v4, v6 in ((near, NEAR, "fd09::1"), (far, FAR, "fd09::2")):
            ip(name, "addr", "add", f"{v4}/24", "dev", "wire")
            ip(name, "addr", "add", f"{v6}/64", "dev", "wire", "nodad")
            ip(name, "link", "set", "wire", "up")
        ip(near, "route", "add", "10.8.0.0/16", "via", FAR)
        yield near, far
    finally:
        made.close()


def ask(namespace: str, *questions: tuple[str, str], patience_s: float = 5.0) -> list[bool]:
    """Query each (source, destination) until the answer is yes, or `patience_s` has passed."""

    def calls() -> list[bool]:
        neighbours = Neighbours(partial(socket.if_nametoindex, "wire"))
        try:
            return [until(partial(neighbours.knows, *each), patience_s) for each in questions]
        finally:
            neighbours.close()

    return inside(namespace, calls)


def until(is_so: Callable[[], bool], patience_s: float) -> bool:
    give_up = time.monotonic() + patience_s
    while not is_so():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.005)
    return True


@pytest.mark.parametrize(
    ("source", "destination"),
    [(NEAR, FAR), (f"::ffff:{NEAR}", f"::ffff:{FAR}"), ("fd09::1", "fd09::2"), (NEAR, BEYOND)],
    ids=["IPv4", "as a GID", "IPv6", "behind a gateway"],
)
def test_a_neighbour_is_not_known_at_first_and_then_is(
    pair: tuple[str, str], source: str, destination: str
) -> None:
    near, _ = pair
    assert ask(near, (source, destination), patience_s=0.0) == [False]
    assert ask(near, (source, destination)) == [True]
    assert ask(near, (source, destination), patience_s=0.0) == [True]


def test_nobody_is_never_known(pair: tuple[str, str]) -> None:
    near, _ = pair
    assert ask(near, (NEAR, NOBODY), patience_s=0.3) == [False]


def test_an_ipv4_route_may_have_an_ipv6_gateway(pair: tuple[str, str]) -> None:
    """As in fabrics whose switches have no IPv4 addresses (RFC 8950)."""
    near, _ = pair
    ip(near, "route", "add", "10.7.0.0/16", "via", "inet6", "fd09::2", "dev", "wire", "src", NEAR)
    assert ask(near, (NEAR, "10.7.0.1")) == [True]


@pytest.mark.parametrize("destination", [NEAR, "fe80::1"])
def test_where_nobody_need_be_asked(pair: tuple[str, str], destination: str) -> None:
    near, _ = pair
    assert ask(near, (NEAR, destination), patience_s=0.0) == [True]


def test_a_dead_wire_forgets_and_is_no_way(pair: tuple[str, str]) -> None:
    near, _ = pair
    assert ask(near, (NEAR, FAR)) == [True]
    ip(near, "link", "set", "wire", "down")
    assert ask(near, (NEAR, FAR), patience_s=0.0) == [False]
    ip(near, "link", "set", "wire", "up")
    assert ask(near, (NEAR, FAR)) == [True]


@pytest.mark.parametrize("index", [9999, 0])
def test_an_interface_that_is_gone_is_no_way(pair: tuple[str, str], index: int) -> None:
    near, _ = pair

    def ask_of_the_gone() -> bool:
        neighbours = Neighbours(lambda: index)
        try:
            return neighbours.knows(NEAR, FAR)
        finally:
            neighbours.close()

    assert inside(near, ask_of_the_gone) is False
