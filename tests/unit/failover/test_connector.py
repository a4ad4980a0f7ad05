"""Two ends find each other over the control plane, whatever goes wrong on the way."""

import itertools
from collections import deque
from typing import Any

import pytest

from r2ccl.errors import TransportError
from r2ccl.failover.connector import Answer, Connector, EndpointReady, Offer, probe_keys
from r2ccl.transport.base import Joined
from r2ccl.types import PathKey, ProbeKey

Key = PathKey | ProbeKey


class Endpoint:
    def __init__(self, transport: Any, key: Key, number: int) -> None:
        self.transport = transport
        self.key = key
        self.number = number
        self.info = f"{transport.rank}:{number}".encode()
        self.joined_to = b""
        self.is_closed = False

    def join(self, info: bytes, is_caller: bool) -> None:
        if self.transport.refusals:
            raise TransportError(self.transport.refusals.pop())
        self.joined_to = info
        if is_caller:
            self.transport.proofs.append(self)

    def close(self) -> None:
        assert not self.is_closed, "closed twice"
        self.is_closed = True


class Transport:
    nrails = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.made: list[Endpoint] = []
        self.proofs: list[Endpoint] = []
        self.refusals: list[str] = []
        self.is_down = False

    def offer(self, key: Key) -> Endpoint:
        if self.is_down:
            raise TransportError("port down")
        self.made.append(Endpoint(self, key, len(self.made)))
        return self.made[-1]


class Pair:
    """Ranks 0 and 1, and the messages between them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.mail: deque[tuple[int, int, Any]] = deque()
        self.up: list[dict[tuple[int, int], Endpoint]] = [{}, {}]
        self.transports = [Transport(rank) for rank in (0, 1)]
        self.joiners = [self._connector(rank) for rank in (0, 1)]

    def _connector(self, rank: int) -> Connector:
        def send(peer: int, message: object) -> None:
            self.mail.append((rank, peer, message))

        def use(peer: int, rail: int, epoch: int, endpoint: Any) -> None:
            assert peer == 1 - rank
            self.up[rank][rail, epoch] = endpoint

        transport: Any = self.transports[rank]
        return Connector(rank, transport, send, use, lambda: self.now)

    def begin(self, epoch: int = 0, rail: int = 0, ranks: tuple[int, ...] = (0, 1)) -> None:
        for rank in ranks:
            self.joiners[rank].begin(PathKey(1 - rank, rail), epoch)

    def deliver(self) -> Any:
        sender, receiver, message = self.mail.popleft()
        self.joiners[receiver].on_message(sender, message)
        return message

    def settle(self, error: str = "") -> None:
        """Deliver everything; proofs come true, or fail with `error`."""
        while self.mail or any(transport.proofs for transport in self.transports):
            if self.mail:
                self.deliver()
            for connector, transport in zip(self.joiners, self.transports, strict=True):
                proofs, transport.proofs = transport.proofs, []
                for end in proofs:
                    connector.on_joined(Joined(end.key, end, error))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for connector in self.joiners:
            connector.tick(self.now)

    def check(self, epoch: int = 0, rail: int = 0) -> None:
        """Both ends are in use, joined to each other, and every other one is closed."""
        ends = [self.up[rank][rail, epoch] for rank in (0, 1)]
        assert [end.joined_to for end in ends] == [ends[1].info, ends[0].info]
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
def test_an_answerer_that_is_not_ready_retries_the_same_offer(is_kicked: bool) -> None:
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


def test_a_stale_proof_does_not_count_for_a_new_endpoint() -> None:
    pair = Pair()
    pair.begin()
    pair.deliver()
    pair.deliver()
    (stale,) = pair.transports[0].proofs
    pair.joiners[0].kick(0)  # in the same poll as the stale proof, and before it
    pair.joiners[0].on_joined(Joined(stale.key, stale))
    assert pair.up == [{}, {}]
    assert [type(message) for _, _, message in pair.mail] == [Offer]
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
    pair.joiners[1].on_message(0, EndpointReady(0, 0, 1))
    pair.check()


def test_a_reply_to_a_cancelled_attempt_of_the_epoch_is_ignored() -> None:
    """The rail is excluded and included again while the answer is under way."""
    pair = Pair()
    pair.begin()
    pair.deliver()
    (_, _, late) = pair.mail.pop()
    assert isinstance(late, Answer)
    pair.joiners[0].cancel(PathKey(1, 0))
    pair.begin(ranks=(0,))
    pair.joiners[0].on_message(1, late)
    assert not pair.transports[0].proofs
    pair.settle()
    pair.check()


def test_an_offer_that_is_not_answered_is_recorded_as_failure() -> None:
    pair = Pair()
    pair.begin(ranks=(0,))
    assert pair.joiners[0].obstacles(1) == []
    pair.pass_time(2.0)
    (obstacle,) = pair.joiners[0].obstacles(1)
    assert obstacle.startswith("rail 0: the peer did not answer within 2 s")
    assert len(pair.mail) == 2, "the next offer leaves at once: the wait was pause enough"
    pair.begin(ranks=(1,))
    pair.settle()
    pair.check()
    assert pair.joiners[0].obstacles(1) == []


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
    pair.joiners[1].on_message(0, Offer(7, 0, 1, b"info"))
    assert not pair.mail
    assert not pair.transports[1].made


def test_close_closes_every_end() -> None:
    pair = Pair()
    pair.begin()
    pair.deliver()
    for connector in pair.joiners:
        connector.close()
    assert all(end.is_closed for transport in pair.transports for end in transport.made)


def test_probes_leave_from_the_rail_itself_and_from_the_next_one() -> None:
    assert probe_keys([4], [2, 5, 6]) == [
        ProbeKey(4, 2, 2), ProbeKey(4, 2, 5),
        ProbeKey(4, 5, 5), ProbeKey(4, 5, 6),
        ProbeKey(4, 6, 6), ProbeKey(4, 6, 2),
    ]  # fmt: skip
    assert probe_keys([4, 5], [0]) == [ProbeKey(4, 0, 0), ProbeKey(5, 0, 0)]
    assert probe_keys([4], []) == []


def begin_probe(pair: Pair, asker: int, rail: int, via: int) -> ProbeKey:
    key = ProbeKey(1 - asker, rail, via)
    pair.joiners[asker].begin_probe(key)
    return key


def ends_of(pair: Pair, rank: int) -> list[Endpoint]:
    """Ends of a rank that are not closed, oldest first."""
    return [end for end in pair.transports[rank].made if not end.is_closed]


@pytest.mark.parametrize("asker", [0, 1])
def test_the_asker_calls_whichever_rank_it_is(asker: int) -> None:
    pair = Pair()
    begin_probe(pair, asker, rail=0, via=1)
    assert not pair.mail, "it waits for its turn"
    pair.pass_time(0.02)
    pair.settle()
    (asking,), (asked,) = ends_of(pair, asker), ends_of(pair, 1 - asker)
    assert asking.key == ProbeKey(1 - asker, rail=0, via=1)
    assert asked.key == ProbeKey(asker, rail=1, via=0), "each end is on its own port"
    assert (asking.joined_to, asked.joined_to) == (asked.info, asking.info)
    assert pair.up == [{}, {}]
    pair.pass_time(100.0)
    assert not pair.mail, "it is joined"


def test_both_ranks_may_ask_between_the_same_ports_at_once() -> None:
    pair = Pair()
    begin_probe(pair, 0, rail=1, via=0)
    begin_probe(pair, 1, rail=0, via=1)
    pair.pass_time(0.02)
    pair.settle()
    for rank in (0, 1):
        assert len(ends_of(pair, rank)) == 2
        assert {end.key for end in ends_of(pair, rank)} == {ProbeKey(1 - rank, 1 - rank, rank)}


def test_one_probe_is_called_a_tick_and_paths_do_not_wait_for_it() -> None:
    pair = Pair()
    for rail in (0, 1):
        begin_probe(pair, 0, rail, rail)
    pair.begin()
    pair.settle()
    pair.check()
    pair.pass_time(0.02)
    assert [message.rail for _, _, message in pair.mail] == [0]
    pair.pass_time(0.02)
    assert [message.rail for _, _, message in pair.mail] == [0, 1]


def test_a_probe_begun_again_replaces_both_ends() -> None:
    pair = Pair()
    key = begin_probe(pair, 1, rail=0, via=0)
    pair.pass_time(0.02)
    pair.settle()
    (old,) = ends_of(pair, 1)
    old.close()  # the transport gave it up: its probe was not answered
    pair.joiners[1].begin_probe(key)
    pair.pass_time(0.02)
    pair.settle()
    assert len(pair.transports[0].made) == len(pair.transports[1].made) == 2
    (asking,), (asked,) = ends_of(pair, 1), ends_of(pair, 0)
    assert (asking.joined_to, asked.joined_to) == (asked.info, asking.info)


def test_an_answer_to_an_earlier_life_of_a_probe_changes_nothing() -> None:
    pair = Pair()
    key = begin_probe(pair, 0, rail=0, via=0)
    pair.pass_time(0.02)
    pair.deliver()
    _, _, late = pair.mail.pop()
    assert isinstance(late, Answer)
    pair.joiners[0].begin_probe(key)
    pair.pass_time(0.02)
    pair.joiners[0].on_message(1, late)
    assert not pair.transports[0].proofs
    pair.settle()
    (asking,), (asked,) = ends_of(pair, 0), ends_of(pair, 1)
    assert asking.joined_to == asked.info


def test_a_probe_without_a_way_is_tried_ever_more_rarely() -> None:
    pair = Pair()
    begin_probe(pair, 0, rail=0, via=1)
    offered_at = []
    while pair.now < 600.0:
        pair.pass_time(0.5)
        if pair.mail:
            pair.mail.clear()
            offered_at.append(pair.now)
    gaps = [later - earlier for earlier, later in itertools.pairwise(offered_at)]
    assert gaps == sorted(gaps)
    assert gaps[0] < 5.0
    assert 60.0 <= gaps[-2] == gaps[-1] < 65.0
    assert len(ends_of(pair, 0)) <= 1


@pytest.mark.parametrize("reason", ["port", "path"])
def test_what_brings_a_port_back_brings_its_probes_forward(reason: str) -> None:
    pair = Pair()
    begin_probe(pair, 0, rail=0, via=1)
    for _ in range(100):
        pair.pass_time(2.0)
        pair.mail.clear()
    if reason == "port":
        pair.joiners[0].kick(1)
    else:
        pair.begin(rail=1)
        pair.settle()
    pair.pass_time(0.0)
    (offer,) = [message for _, _, message in pair.mail]
    assert (offer.rail, offer.via) == (0, 1)


def test_an_asked_rank_that_is_not_ready_answers_the_offer_later() -> None:
    pair = Pair()
    pair.transports[1].is_down = True
    begin_probe(pair, 0, rail=0, via=0)
    pair.pass_time(0.02)
    pair.settle()
    pair.transports[1].is_down = False
    pair.pass_time(0.1)
    pair.settle()
    assert len(pair.transports[0].made) == 1
    assert ends_of(pair, 1)[0].joined_to == ends_of(pair, 0)[0].info


def test_an_offer_the_asker_has_given_up_is_answered_no_more() -> None:
    pair = Pair()
    pair.transports[1].is_down = True
    begin_probe(pair, 0, rail=0, via=0)
    pair.pass_time(0.02)
    pair.settle()
    pair.transports[1].is_down = False
    pair.now += 2.0
    pair.joiners[1].tick(pair.now)
    assert not pair.mail
    assert not pair.transports[1].made


def test_a_probe_of_a_rail_that_does_not_exist_is_ignored() -> None:
    pair = Pair()
    for rail, via in ((7, 0), (0, 7), (0, -5)):
        pair.joiners[1].on_message(0, Offer(rail, 0, 1, b"info", via))
    assert not pair.mail
    assert not pair.transports[1].made


def test_close_closes_the_ends_of_probes_too() -> None:
    pair = Pair()
    begin_probe(pair, 0, rail=0, via=0)
    pair.pass_time(0.02)
    pair.deliver()
    for connector in pair.joiners:
        connector.close()
    assert all(end.is_closed for transport in pair.transports for end in transport.made)


def test_paths_under_repair_call_and_answer_no_probes() -> None:
    pair = Pair()
    key = ProbeKey(1, 0, 0)
    pair.joiners[0].begin_probe(key)
    pair.joiners[0].tick(pair.now, is_calm=False)
    assert not pair.mail
    pair.joiners[0].tick(pair.now, is_calm=True)
    pair.joiners[1].tick(pair.now, is_calm=False)
    pair.deliver()
    assert not pair.mail
    pair.joiners[1].tick(pair.now, is_calm=True)
    assert isinstance(pair.deliver(), Answer)
