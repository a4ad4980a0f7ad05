"""Two ends find each other over the control plane, whatever goes wrong on the way."""

from collections import deque
from typing import Any

import pytest

from r2ccl.errors import TransportError
from r2ccl.joining import Joiner, Offer, Ready
from r2ccl.transport.base import Joined
from r2ccl.types import PathKey


class Endpoint:
    def __init__(self, transport: Any, path: PathKey, number: int) -> None:
        self.transport = transport
        self.path = path
        self.number = number
        self.card = f"{transport.rank}:{number}".encode()
        self.joined_to = b""
        self.is_closed = False

    def join(self, card: bytes, is_caller: bool) -> None:
        if self.transport.refusals:
            raise TransportError(self.transport.refusals.pop())
        self.joined_to = card
        if is_caller:
            self.transport.proofs.append(self.path)

    def close(self) -> None:
        assert not self.is_closed, "closed twice"
        self.is_closed = True


class Transport:
    nrails = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.made: list[Endpoint] = []
        self.proofs: list[PathKey] = []
        self.refusals: list[str] = []
        self.is_down = False

    def offer(self, path: PathKey) -> Endpoint:
        if self.is_down:
            raise TransportError("port down")
        self.made.append(Endpoint(self, path, len(self.made)))
        return self.made[-1]


class Pair:
    """Ranks 0 and 1, and the messages between them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.mail: deque[tuple[int, int, Any]] = deque()
        self.up: list[dict[tuple[int, int], Endpoint]] = [{}, {}]
        self.transports = [Transport(rank) for rank in (0, 1)]
        self.joiners = [self._joiner(rank) for rank in (0, 1)]

    def _joiner(self, rank: int) -> Joiner:
        def send(peer: int, message: object) -> None:
            self.mail.append((rank, peer, message))

        def use(peer: int, rail: int, epoch: int, endpoint: Any) -> None:
            assert peer == 1 - rank
            self.up[rank][rail, epoch] = endpoint

        transport: Any = self.transports[rank]
        return Joiner(rank, transport, send, use, lambda: self.now)

    def begin(self, epoch: int = 0, rail: int = 0, ranks: tuple[int, ...] = (0, 1)) -> None:
        for rank in ranks:
            self.joiners[rank].begin(PathKey(1 - rank, rail), epoch)

    def deliver(self) -> Any:
        sender, receiver, message = self.mail.popleft()
        self.joiners[receiver].on_message(sender, message)
        return message

    def settle(self, error: str = "") -> None:
        """Deliver everything; proofs come true, or fail with `error`."""
        while self.mail or self.transports[0].proofs:
            if self.mail:
                self.deliver()
            for path in self.transports[0].proofs:
                self.joiners[0].on_joined(Joined(path, error))
            self.transports[0].proofs.clear()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for joiner in self.joiners:
            joiner.tick(self.now)

    def check(self, epoch: int = 0, rail: int = 0) -> None:
        """Both ends are in use, joined to each other, and every other one is closed."""
        ends = [self.up[rank][rail, epoch] for rank in (0, 1)]
        assert [end.joined_to for end in ends] == [ends[1].card, ends[0].card]
        used = [end for up in self.up for end in up.values()]
        for transport in self.transports:
            assert all(end.is_closed != (end in used) for end in transport.made)


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
def test_both_ends_meet_whoever_begins(ranks: tuple[int, ...]) -> None:
    pair = Pair()
    pair.begin(ranks=ranks)
    pair.settle()
    pair.check()


@pytest.mark.parametrize("is_kicked", [True, False])
def test_an_answerer_that_is_not_ready_tries_the_same_offer_again(is_kicked: bool) -> None:
    pair = Pair()
    pair.transports[1].is_down = True
    pair.begin()
    pair.settle()
    assert not pair.up[1]
    pair.transports[1].is_down = False
    if is_kicked:
        pair.joiners[1].kick(0)
    else:
        pair.pass_time(0.1)  # long before the caller gives the answer up
    assert [end.number for end in pair.transports[0].made] == [0]
    pair.settle()
    pair.check()


def test_an_offer_that_comes_early_waits() -> None:
    pair = Pair()
    pair.begin(ranks=(0,))
    assert isinstance(pair.deliver(), Offer)
    assert not pair.transports[1].made
    pair.begin(ranks=(1,))
    pair.settle()
    pair.check()


def test_the_answerer_uses_the_path_only_when_it_is_proved() -> None:
    pair = Pair()
    pair.begin()
    while pair.mail:
        pair.deliver()
    assert pair.up == [{}, {}]
    pair.settle()
    pair.check()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_that_is_down_is_tried_again(rank: int) -> None:
    pair = Pair()
    pair.transports[rank].is_down = True
    pair.begin()
    for _ in range(5):
        pair.settle()
        pair.pass_time(3.0)
    assert pair.up == [{}, {}]
    pair.transports[rank].is_down = False
    pair.pass_time(3.0)
    pair.settle()
    pair.check()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_refused_join_is_tried_again_with_fresh_ends(rank: int) -> None:
    pair = Pair()
    pair.transports[rank].refusals.append("no route")
    pair.begin()
    pair.settle()
    assert pair.up == [{}, {}]
    pair.pass_time(3.0)
    pair.settle()
    pair.check()


def test_a_proof_that_fails_begins_again() -> None:
    pair = Pair()
    pair.begin()
    pair.settle(error="RETRY_EXC_ERR")
    assert pair.up == [{}, {}]
    pair.pass_time(0.1)
    pair.settle()
    pair.check()


def test_a_port_that_comes_back_is_called_at_once() -> None:
    pair = Pair()
    pair.transports[0].is_down = True
    pair.begin()
    pair.transports[0].is_down = False
    pair.joiners[0].kick(0)
    pair.settle()
    pair.check()


def test_replies_to_an_earlier_attempt_change_nothing() -> None:
    pair = Pair()
    pair.begin()
    pair.deliver()  # the offer; its answer stays under way
    pair.pass_time(3.0)  # and comes too late
    pair.settle()
    pair.check()
    pair.joiners[1].on_message(0, Ready(0, 0, 1))
    pair.check()


def test_a_new_epoch_replaces_what_was_on_its_way() -> None:
    pair = Pair()
    pair.begin()
    pair.deliver()
    pair.begin(epoch=1)
    pair.settle()
    assert (0, 0) not in pair.up[0]
    pair.check(epoch=1)


def test_a_rail_that_does_not_exist_is_ignored() -> None:
    pair = Pair()
    pair.joiners[1].on_message(0, Offer(7, 0, 1, b"card"))
    assert not pair.mail
    assert not pair.transports[1].made


def test_close_closes_every_end() -> None:
    pair = Pair()
    pair.begin()
    pair.deliver()
    for joiner in pair.joiners:
        joiner.close()
    assert all(end.is_closed for transport in pair.transports for end in transport.made)
