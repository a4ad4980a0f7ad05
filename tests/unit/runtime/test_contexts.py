"""Context ids that the threads of a rank offer, and what Ctrl-C leaves of an offer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from r2ccl.errors import InvalidArgument, TransportTimeout
from r2ccl.runtime.contexts import NO_OFFER, Closing, Context, Contexts, InContext
from r2ccl.runtime.splitting import agree


def in_another_thread(fn: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(fn()))
    thread.start()
    thread.join()
    return found[0]


def test_threads_offer_in_the_order_of_their_communicators() -> None:
    """Otherwise each rank may let another thread go first, again and again."""
    contexts = Contexts()
    assert contexts.offer(7) != NO_OFFER
    first_s_turn, done = threading.Event(), threading.Event()
    seen: list[bool] = []

    def other() -> None:
        seen.append(contexts.offer(3) == NO_OFFER)
        first_s_turn.set()
        done.wait(30.0)
        seen.append(contexts.offer(3) != NO_OFFER)
        contexts.withdraw(is_last=True)

    thread = threading.Thread(target=other)
    thread.start()
    first_s_turn.wait(30.0)
    contexts.withdraw(is_last=False)
    assert contexts.offer(7) == NO_OFFER
    done.set()
    thread.join()
    assert seen == [True, True]
    assert contexts.offer(7) != NO_OFFER


def engine_of(contexts: Contexts) -> Any:
    return SimpleNamespace(contexts=contexts, rank=0, context=Context(0, 1, (0,)))


class Interrupted(list[bytes]):
    """Rows in the use of which Ctrl-C arrives."""

    def __iter__(self) -> Any:
        raise KeyboardInterrupt


def test_control_c_leaves_no_offer() -> None:
    contexts = Contexts()

    def allgather(mine: bytes) -> list[bytes]:
        return [mine] if mine.endswith(NO_OFFER) else Interrupted([mine])

    with pytest.raises(KeyboardInterrupt):
        agree(engine_of(contexts), allgather, 0, 0, 30.0)
    assert in_another_thread(lambda: contexts.offer(7)) != NO_OFFER


@pytest.mark.parametrize(
    ("color", "key"),
    [
        (int, 0),
        (1.0, 0),
        (1.5, 0),
        ("1", 0),
        (1 << 63, 0),
        (0, None),
        (None, None),
        (0, 1.0),
        (None, "1"),
    ],
)
def test_colors_and_keys_are_integers(color: Any, key: Any) -> None:
    with pytest.raises(InvalidArgument, match="integers of 64 bits"):
        agree(engine_of(Contexts()), lambda mine: [mine], color, key, 30.0)


@pytest.mark.timeout(10)  # the check of a color of NumPy once went through all integers of 64 bits
def test_colors_and_keys_may_be_integers_of_numpy() -> None:
    part = agree(engine_of(Contexts()), lambda mine: [mine], np.int64(3), np.int64(1), 30.0)
    assert part is not None
    assert part.members == (0,)


def changed(place: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda row: row[:place] + value + row[place + len(value) :]


@pytest.mark.parametrize(
    "change",
    [
        lambda row: b"",
        lambda row: row[:17],
        lambda row: row[:-1],
        lambda row: row + b"x",
        changed(0, b"\2"),
        changed(1, b"\2"),
        changed(18, b"\xff"),  # offers the id of the job's first communicator
        changed(-8, bytes(8)),
        changed(-8, b"\xff" * 8),
    ],
)
def test_a_row_that_no_rank_passes_is_refused(change: Callable[[bytes], bytes]) -> None:
    contexts = Contexts()
    engine = SimpleNamespace(contexts=contexts, rank=0, context=Context(0, 1, (0, 1)))

    def allgather(mine: bytes) -> list[bytes]:
        return [mine, mine if mine.endswith(NO_OFFER) else change(mine)]

    with pytest.raises(InvalidArgument, match=r"allgather returned b.* for rank 1; it must"):
        agree(engine, allgather, 0, 0, 30.0)  # type: ignore[arg-type]
    assert in_another_thread(lambda: contexts.offer(7)) != NO_OFFER


class Member:
    """Engine of a communicator that keeps the messages it gets."""

    def __init__(self, *context: Any) -> None:
        self.context = Context(*context)
        self.heard: list[tuple[int, object]] = []

    def on_message(self, peer: int, message: object) -> None:
        self.heard.append((peer, message))

    def adopt(self, health: Any) -> None: ...


def test_a_message_may_come_before_its_communicator() -> None:
    """A peer has made it already; here an older communicator ends between choice and making."""
    contexts, old = Contexts(), Member(1, 1, (0, 1))
    contexts.choose([contexts.offer(0)])
    contexts.withdraw(is_last=True)
    contexts.add(old)
    contexts.nclosing += 1
    context_id, first_op = contexts.choose([contexts.offer(0)])
    contexts.withdraw(is_last=True)
    contexts.remove(old, 100)
    contexts.on_message(1, InContext(context_id, first_op, Closing()))
    contexts.on_message(1, InContext(1, 1, Closing()))  # for the old one, which is closed
    new = Member(context_id, first_op, (0, 1))
    contexts.add(new)
    assert new.heard == [(1, Closing())]
    assert old.heard == []
    again = Member(1, 1, (0, 1))
    contexts.add(again)
    assert again.heard == []


def test_no_message_is_kept_after_an_exchange_that_failed() -> None:
    """A peer has made the communicator, but the exchange of offers raised at this rank."""
    contexts, message = Contexts(), InContext(1, 1, Closing())
    contexts.offer(0)
    contexts.on_message(1, message)
    contexts.withdraw(is_last=True)
    contexts.on_message(1, message)
    made = Member(1, 1, (0, 1))
    contexts.add(made)
    assert made.heard == []


def test_no_message_is_kept_for_a_communicator_given_up() -> None:
    contexts = Contexts()
    context_id, first_op = contexts.choose([contexts.offer(0)])
    contexts.withdraw(is_last=True)
    message = InContext(context_id, first_op, Closing())
    contexts.on_message(1, message)
    contexts.give_up(Context(context_id, first_op, (0, 1)))
    contexts.on_message(1, message)
    made = Member(context_id, first_op, (0, 1))
    contexts.add(made)
    assert made.heard == []


def test_a_message_may_come_before_the_end_of_the_exchange() -> None:
    contexts = Contexts()
    offer = contexts.offer(0)
    contexts.on_message(1, InContext(1, 1, Closing()))
    context_id, first_op = contexts.choose([offer])
    contexts.withdraw(is_last=True)
    contexts.on_message(2, InContext(1, 1, Closing()))
    made = Member(context_id, first_op, (0, 1, 2))
    contexts.add(made)
    assert made.heard == [(1, Closing()), (2, Closing())]


def test_a_rank_that_is_no_member_is_not_heard() -> None:
    """It may have made a communicator of the same identity that failed at this rank."""
    contexts = Contexts()
    context_id, first_op = contexts.choose([contexts.offer(0)])
    contexts.on_message(1, InContext(context_id, first_op, Closing()))
    contexts.withdraw(is_last=True)
    member = Member(context_id, first_op, (0, 2))
    contexts.add(member)
    contexts.on_message(1, InContext(context_id, first_op, Closing()))
    assert member.heard == []


def test_if_one_rank_gives_up_all_do() -> None:
    """A rank that went on would wait for the others until R2CC_TIMEOUT_S."""
    exchanges: list[bytes] = []

    def allgather(mine: bytes) -> list[bytes]:
        exchanges.append(mine)
        takes_part, is_late = b"\1", b"\1" if len(exchanges) == 3 else b"\0"
        return [mine, takes_part + is_late + bytes(16) + NO_OFFER]

    engine = engine_of(Contexts())
    engine.context, engine.rank_in_job = Context(0, 1, (0, 1)), 0
    with pytest.raises(TransportTimeout, match="other threads were making communicators"):
        agree(engine, allgather, 0, 0, 3600.0)
    assert len(exchanges) == 3
