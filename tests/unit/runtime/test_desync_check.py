"""All ranks know who has called the collective that any of them waits in."""

from __future__ import annotations

from collections import deque

import pytest

from r2ccl.bootstrap.overlay import neighbors
from r2ccl.runtime.desync_check import Calling, DesyncCheck


def signature(op: int) -> int | None:
    """Return the signature of collective `op`, equal on all ranks; of none without collectives."""
    return 100 + op if op else None


class Control:
    """Control plane of one rank, whose messages arrive when the test says so."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.neighbors = neighbors(rank, ranks.nranks)
        self._ranks = ranks
        self._rank = rank

    def send(self, peer: int, message: object) -> None:
        assert isinstance(message, Calling)
        assert peer in self.neighbors
        self._ranks.queue.append((self._rank, peer, message))

    def gossip(self, message: object) -> None:
        for peer in self.neighbors:
            self.send(peer, message)


class Ranks:
    """Some ranks, the last collective that each has called, and the messages between them."""

    def __init__(self, nranks: int = 3) -> None:
        self.nranks = nranks
        self.ops = [0] * nranks
        self.sent: list[tuple[int, int, Calling]] = []
        self.queue: deque[tuple[int, int, Calling]] = deque()
        self.checks = [
            DesyncCheck(rank, set(range(nranks)) - {rank}, 0.5, Control(self, rank))  # type: ignore[arg-type]
            for rank in range(nranks)
        ]

    def call(self, *ranks: int) -> None:
        for rank in ranks:
            self.ops[rank] += 1
            if self.ops[rank] <= self.checks[rank].asked_op:
                self.checks[rank].called(self.ops[rank], signature(self.ops[rank]))
        self.settle()

    def look(self, rank: int, now: float, activity: int = 0, *, is_late: bool = False) -> None:
        op = self.ops[rank]
        self.checks[rank].look(now, op, signature(op), activity, is_late)
        self.settle()

    def ask(self, rank: int) -> None:
        for now in (0.0, 0.6):
            self.look(rank, now)

    def settle(self) -> None:
        """Deliver all messages, and all that follow from them."""
        while True:
            while self.queue:
                sender, receiver, message = self.queue.popleft()
                self.sent.append((sender, receiver, message))
                op = self.ops[receiver]
                self.checks[receiver].on_calling(message, op, signature(op))
            for check in self.checks:
                check.spread()
            if not self.queue:
                return

    def known(self, rank: int) -> list[int]:
        """Return the last collective of every rank as `rank` knows it."""
        said = {**self.checks[rank].said, rank: self.ops[rank]}
        return [said[peer] for peer in range(self.nranks)]


def test_every_report_has_the_signature_of_its_call() -> None:
    ranks = Ranks(9)
    ranks.ops = [3, 1] + [3] * 7
    ranks.ask(0)
    ranks.call(1)
    ranks.call(1)
    reports = {report for *_, message in ranks.sent for report in message.last}
    assert {op for _, op, _ in reports} == {1, 2, 3}
    assert all(what == signature(op) for _, op, what in reports)


def test_nothing_is_said_while_calls_make_progress() -> None:
    ranks = Ranks()
    ranks.call(0)
    for step in range(20):
        ranks.look(0, 0.4 * step, activity=step)
    assert ranks.sent == []


@pytest.mark.parametrize("nranks", [2, 3, 9, 40])
def test_a_stalled_call_finds_the_ranks_behind(nranks: int) -> None:
    ranks = Ranks(nranks)
    late = {rank for rank in range(1, nranks) if rank % 3 == 1}
    ranks.call(*set(range(nranks)) - late)
    ranks.ask(0)
    for rank in range(nranks):
        assert ranks.known(rank) == ranks.ops
    nsent = len(ranks.sent)
    ranks.look(0, 5.0)
    assert len(ranks.sent) == nsent, "asked once"


def test_few_ranks_answer_with_one_message_each() -> None:
    ranks = Ranks(5)
    ranks.call(0, 1)
    ranks.ask(0)
    assert len(ranks.sent) == 5 * 4


@pytest.mark.parametrize("nranks", [3, 9])
def test_who_calls_later_answers_then(nranks: int) -> None:
    ranks = Ranks(nranks)
    ranks.ops = [3, 1] + [3] * (nranks - 2)
    ranks.ask(0)
    assert ranks.known(nranks - 1) == ranks.ops
    for _ in range(2):
        ranks.call(1)
        assert ranks.known(0) == ranks.known(nranks - 1) == ranks.ops
    nsent = len(ranks.sent)
    ranks.call(*range(nranks))
    assert len(ranks.sent) == nsent, "a later call is nobody's question"


def test_ranks_that_stall_together_ask_one_question() -> None:
    ranks = Ranks(9)
    ranks.call(*range(8))
    for rank in range(8):
        ranks.checks[rank].look(0.0, 1, signature(1), 0, False)
    for rank in range(8):
        ranks.checks[rank].look(0.6, 1, signature(1), 0, False)
    ranks.settle()
    assert all(ranks.known(rank) == ranks.ops for rank in range(9))
    assert len(ranks.sent) < 9 * 9 * 4


def test_a_later_question_is_passed_on_too() -> None:
    ranks = Ranks(9)
    ranks.call(0)
    ranks.ask(0)
    ranks.call(*range(1, 9))
    ranks.call(*range(8))
    ranks.look(3, 10.0)
    ranks.look(3, 10.6)
    assert ranks.known(0) == ranks.ops == [2] * 8 + [1]


def test_a_late_call_asks_whatever_happens_on_its_paths() -> None:
    ranks = Ranks()
    ranks.call(0)
    ranks.look(0, 0.0, activity=1)
    ranks.look(0, 0.1, activity=2, is_late=True)
    assert {each.op for *_, each in ranks.sent} == {1}


def test_a_rank_that_does_not_exist_is_ignored() -> None:
    ranks = Ranks()
    ranks.checks[0].on_calling(Calling(1, ((7, 9, None), (1, 1, None))), 0, None)
    assert ranks.checks[0].said == {1: 1, 2: 0}
