"""The compiled path behind real pyverbs; that it does the same is shown by `test_transport`."""

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from r2ccl.errors import TransportError
from r2ccl.topology.hcas import GidFinder, Hca
from r2ccl.topology.neighbours import Neighbours
from r2ccl.transport.verbs.layout import locate_nic

Open = Callable[[str], Any]

FLUSHED = 5


@pytest.fixture
def open_device(hcas: tuple[tuple[Hca, ...], ...]) -> Iterator[Open]:
    """Return what opens a port."""
    from r2ccl.transport.verbs.device import RdmaDevice

    hca = hcas[0][0]
    made = []

    def opened(fastpath: str) -> Any:
        find_gid = GidFinder(hca.name, hca.port)
        made.append(
            RdmaDevice(hca.name, hca.port, find_gid, Neighbours(find_gid.interface), fastpath)
        )
        return made[-1]

    yield opened
    for each in made:
        each.close()


@pytest.fixture
def open_pair(open_device: Open) -> Iterator[Callable[[str], tuple[Any, Any]]]:
    """Return what opens a port and makes a queue pair on it."""
    from r2ccl.transport.verbs.queuepair import QueuePair

    made = []

    def opened(fastpath: str) -> tuple[Any, Any]:
        device = open_device(fastpath)
        made.append(QueuePair(device, ring_nbytes=4096, timeout=16, retry_cnt=3))
        return device, made[-1]

    yield opened
    for each in made:
        each.close()


def test_it_is_found_and_taken(open_pair: Any) -> None:
    device, qp = open_pair("1")
    assert device._poller is not None
    assert qp._poster is not None


@pytest.mark.parametrize("fastpath", ["0", "auto"])
def test_it_is_not_taken_where_it_does_not_pay(open_pair: Any, fastpath: str) -> None:
    device, qp = open_pair(fastpath)  # the lab's NICs are the kernel's
    assert device._poller is None
    assert qp._poster is None


def test_an_unknown_device_is_left_to_pyverbs(
    open_pair: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from r2ccl.transport.verbs import device as room

    def expect_another(*objects: Any, async_fd: int, channel_fd: int) -> Any:
        return locate_nic(*objects, async_fd=async_fd, channel_fd=channel_fd + 1)

    monkeypatch.setattr(room, "locate_nic", expect_another)
    with caplog.at_level(logging.INFO, "r2ccl"):
        device, qp = open_pair("1")
    assert device._poller is None
    assert qp._poster is None
    (told,) = [each for each in caplog.messages if "compiled" in each]
    assert "ibv_comp_channel has fd" in told
    assert device.completions() == []


def test_an_unknown_queue_pair_is_left_to_pyverbs(
    open_pair: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from r2ccl.transport.verbs import device as room

    def refuse(nic: Any, qp: Any) -> int:
        raise TransportError("no such thing", status="LAYOUT")

    monkeypatch.setattr(room, "locate_qp", refuse)
    with caplog.at_level(logging.INFO, "r2ccl"):
        device, qp = open_pair("1")
    assert device._poller is not None
    assert qp._poster is None
    assert any("no such thing" in each for each in caplog.messages)


@pytest.mark.parametrize(("fastpath", "most"), [("0", 1000), ("1", 10)])
def test_a_flushed_queue_pair_tells_its_failure_and_both_markers(
    open_pair: Any, fastpath: str, most: int
) -> None:
    """Compiled, the dozens of receive requests are told once a call."""
    from r2ccl.transport.verbs.queuepair import RequestKind

    device, qp = open_pair(fastpath)
    qp.flush()
    told: list[tuple[int, ...]] = []
    give_up = time.monotonic() + 30
    while sum(qp.work_of(each[0]) is RequestKind.MARKER for each in told) < 2:
        assert time.monotonic() < give_up, told
        told += device.completions()
    assert {(each[1], each[5]) for each in told} == {(FLUSHED, qp.number)}
    assert len(told) <= most


def test_a_refused_post_names_the_device(open_pair: Any) -> None:
    """More receives than there is room for."""
    device, qp = open_pair("1")
    with pytest.raises(TransportError, match=f"{device.name} refused to post a receive request"):
        qp.receive(10_000)


def test_every_life_of_a_queue_pair_numbers_its_receives(open_pair: Any) -> None:
    device, qp = open_pair("1")
    qp.reset()
    qp.renew()
    qp.flush()
    told: list[tuple[int, ...]] = []
    give_up = time.monotonic() + 30
    while not any(qp.owns(each[0]) for each in told):
        assert time.monotonic() < give_up, told
        told += device.completions()
