"""Succession of control planes: all members get the same one, and nobody else can join it."""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import msgspec
import pytest

from r2ccl.bootstrap import ControlPlane, connect, dialing, wire
from r2ccl.bootstrap.auth import Claim, HandshakeRejected, Purpose, Secret
from r2ccl.bootstrap.launch import LocalJob
from r2ccl.bootstrap.messages import Codec
from r2ccl.bootstrap.succession import Succession, derive
from r2ccl.config import Config
from r2ccl.errors import TransportError
from r2ccl.types import Nic

WAIT_S = 10.0
RAILS = (Nic("lo", "127.0.0.1"), Nic("lo", "127.0.0.2"))


class Text(msgspec.Struct, tag="text"):
    value: str


class Inbox:
    """Handler that keeps messages."""

    def __init__(self) -> None:
        self.messages: queue.Queue[tuple[int, object]] = queue.Queue()

    def on_message(self, peer: int, message: object) -> None:
        self.messages.put((peer, message))

    def on_path(self, peer: int, rail: int, epoch: int, sock: socket.socket) -> None:
        sock.close()

    def on_peer_lost(self, peer: int, why: str, last_heard_s: float | None) -> None:
        self.messages.put((peer, why))

    def on_tick(self, now: float) -> None:
        """Do nothing."""


def join(job: LocalJob, rank: int) -> ControlPlane:
    env = job.environment(rank)
    if rank == 0:
        env["R2CC_LISTEN_FD"] = str(job.listener.fileno())
    config = Config.from_env(env, init_timeout_s=WAIT_S)
    return connect(config, codec=Codec(Text), nics_for=lambda *_: RAILS, env=env)


@pytest.fixture
def planes() -> Iterator[list[ControlPlane]]:
    with ExitStack() as stack:
        job = stack.enter_context(LocalJob(3))
        with ThreadPoolExecutor(3) as pool:
            made = list(pool.map(lambda rank: join(job, rank), range(3)))
        for plane in made:
            stack.callback(plane.close, 0)
        yield made


def succeed(planes: list[ControlPlane], members: list[int]) -> list[ControlPlane]:
    successions = {rank: Succession(planes[rank]) for rank in members}
    infos = {rank: each.peer_info for rank, each in successions.items()}
    try:
        return [successions[rank].make({**infos, rank: b""}) for rank in members]
    finally:
        for each in successions.values():
            each.close()


def test_those_who_go_on_meet_under_new_numbers(planes: list[ControlPlane]) -> None:
    first, second = succeed(planes, [0, 2])
    inboxes = Inbox(), Inbox()
    try:
        assert [(each.rank, each.nranks) for each in (first, second)] == [(0, 2), (1, 2)]
        assert first.peers == second.peers
        assert [info.rank for info in first.peers] == [0, 1]
        assert first.nics == second.nics == RAILS
        for plane, inbox in zip((first, second), inboxes, strict=True):
            plane.start(inbox)
        first.send(1, Text("hello"))
        assert inboxes[1].messages.get(timeout=WAIT_S) == (0, Text("hello"))
    finally:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda plane: plane.close(WAIT_S), (first, second)))


def test_the_old_secret_opens_nothing(planes: list[ControlPlane]) -> None:
    first, second = succeed(planes, [0, 2])
    try:
        assert first.communicator_id == second.communicator_id != planes[0].communicator_id
        second.start(Inbox())
        claim = Claim(Purpose.CONTROL, second.communicator_id, 0, 1)
        old = planes[1].setting.secret
        with pytest.raises(HandshakeRejected):
            asyncio.run(dialing.dial(old, claim, second.peers[1].rails[0]))
        assert second.rejections() == {"wrong proof": 1}
    finally:
        first.close(0)
        second.close(0)


def test_a_rail_whose_address_has_gone_is_left_out_by_all(
    planes: list[ControlPlane], monkeypatch: pytest.MonkeyPatch
) -> None:
    listen = wire.listen

    def without_second_rail(host: str, port: int = 0) -> socket.socket:
        if host == RAILS[1].address:
            raise OSError(99, "Cannot assign requested address")
        return listen(host, port)

    healthy = Succession(planes[0])
    monkeypatch.setattr(wire, "listen", without_second_rail)
    broken = Succession(planes[2])
    infos = {0: healthy.peer_info, 2: broken.peer_info}
    made = [healthy.make(infos), broken.make(infos)]
    for plane in made:
        assert plane.nics == RAILS[:1]
        assert [len(info.rails) for info in plane.peers] == [1, 1]
        plane.close(0)


def test_without_a_common_rail_it_is_said_and_nothing_stays_open(
    planes: list[ControlPlane], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[socket.socket] = []
    listen = wire.listen

    def only(allowed: str) -> None:
        def listen_there(host: str, port: int = 0) -> socket.socket:
            if host != allowed:
                raise OSError(99, "Cannot assign requested address")
            opened.append(listen(host, port))
            return opened[-1]

        monkeypatch.setattr(wire, "listen", listen_there)

    only(RAILS[0].address)
    one = Succession(planes[0])
    only(RAILS[1].address)
    other = Succession(planes[1])
    with pytest.raises(TransportError, match=r"ranks \[0, 1\] have no rail that all could reopen"):
        one.make({0: one.peer_info, 1: other.peer_info})
    one.close()
    other.close()
    assert opened
    assert all(sock.fileno() == -1 for sock in opened)


def test_without_a_control_thread_nothing_stays_open(
    planes: list[ControlPlane], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.listdir("/proc/self/fd")
    succession = Succession(planes[0])

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread") as caught:
        succession.make({0: b""})
    succession.close()
    assert os.listdir("/proc/self/fd") == before, caught


def test_members_communicator_secret_and_attempt_all_count() -> None:
    secret, other = Secret(bytes(32)), Secret(bytes([1]) * 32)
    derived = [
        derive(*given)
        for given in (
            (secret, bytes(16), [0, 1]),
            (secret, bytes(16), [0, 2]),
            (secret, bytes([1]) * 16, [0, 1]),
            (other, bytes(16), [0, 1]),
        )
    ]
    derived.append(derive(secret, bytes(16), [0, 1], attempt=1))
    assert len({key.hex() for key, _ in derived}) == len({identity for _, identity in derived}) == 5
    assert derive(secret, bytes(16), [0, 1])[1] == derived[0][1]


def test_each_member_says_which_of_its_rails_stay_excluded(planes: list[ControlPlane]) -> None:
    one, other = Succession(planes[0], (1,)), Succession(planes[2])
    infos = {0: one.peer_info, 2: other.peer_info}
    made = [one.make(infos), other.make(infos)]
    for plane in made:
        assert [info.excluded for info in plane.peers] == [(1,), ()]
        assert [info.nics for info in plane.peers] == [tuple(nic.name for nic in RAILS)] * 2
        plane.close(0)


def test_a_rail_left_out_renumbers_those_excluded(
    planes: list[ControlPlane], monkeypatch: pytest.MonkeyPatch
) -> None:
    listen = wire.listen

    def without_first_rail(host: str, port: int = 0) -> socket.socket:
        if host == RAILS[0].address:
            raise OSError(99, "Cannot assign requested address")
        return listen(host, port)

    one = Succession(planes[0], (0, 1))
    monkeypatch.setattr(wire, "listen", without_first_rail)
    other = Succession(planes[2], (0,))
    infos = {0: one.peer_info, 2: other.peer_info}
    made = [one.make(infos), other.make(infos)]
    for plane in made:
        assert [info.excluded for info in plane.peers] == [(0,), ()]
        plane.close(0)
