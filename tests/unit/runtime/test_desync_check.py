"""Who has called a collective is known to whoever waits, with few words."""

from r2ccl.runtime.desync_check import Calling, DesyncCheck


class Ranks:
    """Three ranks that talk to each other at once."""

    def __init__(self) -> None:
        self.ops = [0, 0, 0]
        self.sent: list[tuple[int, int, int]] = []
        self.rolls = [
            DesyncCheck([peer for peer in range(3) if peer != rank], 0.5, self.sender(rank))
            for rank in range(3)
        ]

    def sender(self, rank: int):  # type: ignore[no-untyped-def]
        def send(peer: int, message: object) -> None:
            assert isinstance(message, Calling)
            self.sent.append((rank, peer, message.op))
            self.rolls[peer].on_calling(rank, message.op, self.ops[peer])

        return send

    def call(self, rank: int) -> None:
        self.ops[rank] += 1
        self.rolls[rank].called(self.ops[rank])

    def look(self, rank: int, now: float, activity: int = 0, *, is_late: bool = False) -> None:
        roll, op = self.rolls[rank], self.ops[rank]
        roll.look(now, op, activity, is_late, lambda: [p for p in roll.said if roll.said[p] < op])


def test_nothing_is_said_while_calls_make_progress() -> None:
    ranks = Ranks()
    ranks.call(0)
    for step in range(20):
        ranks.look(0, 0.4 * step, activity=step)
    assert ranks.sent == []


def test_a_stalled_call_asks_once_and_only_callers_answer() -> None:
    ranks = Ranks()
    ranks.call(0)
    ranks.call(2)
    for now in (0.0, 0.4, 0.6, 0.8, 5.0):
        ranks.look(0, now)
    assert ranks.sent == [(0, 1, 1), (0, 2, 1), (2, 0, 1)]
    assert ranks.rolls[0].said == {1: 0, 2: 1}


def test_who_calls_later_answers_then() -> None:
    ranks = Ranks()
    ranks.call(0)
    ranks.look(0, 0.0)
    ranks.look(0, 0.6)
    ranks.call(1)
    assert ranks.rolls[0].said[1] == 1
    ranks.call(1)
    assert ranks.sent.count((1, 0, 1)) == 1
    assert not ranks.rolls[1].askers


def test_a_rank_two_calls_behind_answers_for_the_call_asked() -> None:
    ranks = Ranks()
    ranks.ops = [2, 0, 2]
    ranks.look(0, 0.0)
    ranks.look(0, 0.6)
    ranks.call(1)
    assert ranks.rolls[0].said[1] == 0
    ranks.call(1)
    assert ranks.rolls[0].said[1] == 2


def test_a_rank_behind_says_where_it_is_and_again_when_it_called() -> None:
    ranks = Ranks()
    ranks.ops = [3, 1, 3]
    ranks.look(0, 0.0)
    ranks.look(0, 0.6)
    assert ranks.rolls[0].said == {1: 1, 2: 3}
    ranks.call(1)
    ranks.call(1)
    assert ranks.rolls[0].said == {1: 3, 2: 3}
    assert [each for each in ranks.sent if each[0] == 1] == [(1, 0, 1), (1, 0, 3)]


def test_ranks_that_ask_each_other_say_one_thing_each() -> None:
    ranks = Ranks()
    for rank in (0, 1):
        ranks.call(rank)
        ranks.look(rank, 0.0)
    for rank in (0, 1):
        ranks.look(rank, 0.6)
    between = [(a, b) for a, b, _ in ranks.sent if {a, b} == {0, 1}]
    assert sorted(between) == [(0, 1), (1, 0)]


def test_a_late_call_asks_whatever_happens_on_its_paths() -> None:
    ranks = Ranks()
    ranks.call(0)
    ranks.look(0, 0.0, activity=1)
    ranks.look(0, 0.1, activity=2, is_late=True)
    assert [(a, b) for a, b, _ in ranks.sent] == [(0, 1), (0, 2)]
