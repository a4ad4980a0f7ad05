"""Whatever carriers do, messages arrive exactly once and in order once one of them works."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import strategies as st
from support import slow

from r2ccl.bootstrap.session import (
    MAX_BODY_NBYTES,
    MAX_FRAME_NBYTES,
    FrameError,
    FrameReader,
    Session,
    SessionFrame,
    SessionLimits,
)
from r2ccl.errors import InvalidArgument

LIMITS = SessionLimits(window=8, early_nbytes=256)


def unpack(data: bytes) -> SessionFrame:
    (frame,) = FrameReader().feed(data)
    return frame


class Pair:
    """Two sessions, a virtual clock, and frames under way that a test may drop or shuffle."""

    def __init__(self, limits: SessionLimits = LIMITS) -> None:
        self.now = 0.0
        self.ends = (Session(self.now, limits), Session(self.now, limits))
        self.got: tuple[list[bytes], list[bytes]] = ([], [])
        self.sent: tuple[list[bytes], list[bytes]] = ([], [])
        self.under_way: list[tuple[int, int, bytes]] = []  # destination, carrier, frame

    def post(self, end: int, body: bytes) -> None:
        self.sent[end].append(body)
        self.ends[end].post(body)

    def up(self, carrier: int) -> None:
        for session in self.ends:
            session.carrier_up(carrier, self.now)

    def down(self, carrier: int) -> None:
        for session in self.ends:
            session.carrier_down(carrier)
        self.under_way = [item for item in self.under_way if item[1] != carrier]

    def poll(self) -> None:
        for end, session in enumerate(self.ends):
            self.under_way += [(1 - end, *frame) for frame in session.poll(self.now)]

    def arrive(self, index: int = 0, keep: bool = False) -> None:
        item = self.under_way[index]
        if not keep:
            del self.under_way[index]
        end, carrier, data = item
        self.got[end].extend(self.ends[end].receive(carrier, unpack(data), self.now))

    def arrive_all(self) -> None:
        self.poll()
        while self.under_way:
            self.arrive()
            self.poll()

    def settle(self) -> None:
        """Let everything arrive until nothing is left to say; bounded."""
        for _ in range(200):
            self.arrive_all()
            if self.got == (self.sent[1], self.sent[0]) and not any(
                session.unacknowledged for session in self.ends
            ):
                return
            self.now += 0.05
        raise AssertionError(f"not settled: {self.got} of {self.sent}")


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_messages_arrive_in_order(pair: Pair) -> None:
    pair.up(0)
    for number in range(20):  # more than the window
        pair.post(0, b"%d" % number)
    pair.settle()
    assert pair.got[1] == [b"%d" % number for number in range(20)]


def test_nothing_leaves_without_a_carrier(pair: Pair) -> None:
    pair.post(0, b"early")
    pair.poll()
    assert pair.under_way == []
    assert pair.ends[0].deadline() == float("inf")
    pair.up(0)
    pair.settle()


def test_losing_every_carrier_loses_nothing(pair: Pair) -> None:
    pair.up(0)
    pair.post(0, b"a")
    pair.poll()
    pair.down(0)
    assert pair.under_way == []
    pair.post(0, b"b")
    pair.up(1)
    pair.settle()
    assert pair.got[1] == [b"a", b"b"]


def test_what_a_dead_carrier_held_leaves_at_once_on_the_other(pair: Pair) -> None:
    pair.up(0)
    pair.up(1)
    pair.post(0, b"a")
    pair.poll()
    (_, carrier, _), *_ = pair.under_way
    pair.down(carrier)
    pair.arrive_all()  # the clock has not moved
    assert pair.got[1] == [b"a"]


def test_a_black_hole_costs_one_resend_timer(pair: Pair) -> None:
    pair.up(0)
    pair.up(1)
    pair.post(0, b"a")
    pair.poll()
    (_, hole, _), *_ = pair.under_way
    pair.under_way.clear()
    pair.now += LIMITS.resend_s
    pair.poll()
    pair.under_way = [item for item in pair.under_way if item[1] != hole]
    pair.arrive_all()
    assert pair.got[1] == [b"a"]


def test_all_that_a_black_hole_held_follows_the_oldest(pair: Pair) -> None:
    pair.up(0)
    pair.up(1)
    for body in (b"a", b"b", b"c"):
        pair.post(0, body)
    pair.poll()
    (_, hole, _), *_ = pair.under_way
    pair.under_way.clear()
    pair.now += LIMITS.resend_s
    pair.poll()
    assert [unpack(data).seq for _, _, data in pair.under_way] == [1, 1]
    pair.under_way = [item for item in pair.under_way if item[1] != hole]
    pair.arrive_all()
    pair.now += LIMITS.ack_s
    pair.arrive_all()
    assert pair.got[1] == [b"a", b"b", b"c"]


def test_a_slow_rank_is_sent_one_message_again(pair: Pair) -> None:
    pair.up(0)
    for number in range(5):
        pair.post(0, b"%d" % number)
    pair.poll()
    pair.now += LIMITS.resend_s  # the other rank has not read yet
    pair.poll()
    assert [unpack(data).seq for _, _, data in pair.under_way] == [1, 2, 3, 4, 5, 1]
    pair.arrive_all()
    pair.now += LIMITS.ack_s
    pair.poll()  # the acknowledgement covers all
    pair.arrive_all()
    assert pair.ends[0].unacknowledged == 0
    assert pair.under_way == []


def test_an_acknowledgement_does_not_wait_for_company(pair: Pair) -> None:
    pair.up(0)
    pair.post(0, b"a")
    pair.arrive_all()
    assert pair.ends[1].deadline() == LIMITS.ack_s
    pair.now = LIMITS.ack_s
    pair.arrive_all()
    assert pair.ends[0].unacknowledged == 0
    pair.post(0, b"b")
    pair.poll()
    pair.arrive()
    pair.ends[1].ack_now()
    pair.arrive_all()
    assert pair.ends[0].unacknowledged == 0


def test_resends_slow_down_while_nothing_answers(pair: Pair) -> None:
    pair.up(0)
    pair.post(0, b"a")
    sent_at = []
    while pair.now < 10:
        if any(unpack(data).seq for _, data in pair.ends[0].poll(pair.now)):
            sent_at.append(pair.now)
        pair.now += 0.01
    gaps = [later - earlier for earlier, later in itertools.pairwise(sent_at)]
    assert gaps[0] == pytest.approx(0.05, abs=0.011)
    assert gaps[-1] == pytest.approx(LIMITS.resend_max_s, abs=0.011)
    assert len(sent_at) < 20


def test_an_idle_carrier_speaks_every_heartbeat(pair: Pair) -> None:
    pair.up(0)
    pair.up(1)
    spoken: list[int] = []
    for _ in range(40):
        pair.now += 0.125
        spoken += [carrier for carrier, _ in pair.ends[0].poll(pair.now)]
    assert (spoken.count(0), spoken.count(1)) == (5, 5)


def test_silence_counts_from_the_last_frame_less_the_excused(pair: Pair) -> None:
    pair.up(0)
    pair.now = 3.0
    assert pair.ends[0].silence_s(pair.now) == 3.0
    pair.ends[0].excuse(2.0)
    assert pair.ends[0].silence_s(pair.now) == 1.0
    assert pair.ends[0].last_heard == 0.0
    pair.ends[1].post(b"x")
    pair.arrive_all()
    assert pair.ends[0].silence_s(pair.now) == 0.0
    assert pair.ends[0].last_heard == 3.0


def test_the_memory_for_early_messages_is_bounded() -> None:
    session = Session(0.0, LIMITS)
    session.carrier_up(0, 0.0)
    for seq in range(2, 1000):
        assert session.receive(0, SessionFrame(seq, 0, b"x" * 40), 0.0) == []
    assert session._early_nbytes <= LIMITS.early_nbytes
    delivered = session.receive(0, SessionFrame(1, 0, b"first"), 0.0)
    assert delivered[0] == b"first"
    assert 1 < len(delivered) <= 256 // 40 + 1


def test_an_acknowledgement_of_the_unsent_is_refused(pair: Pair) -> None:
    pair.up(0)
    with pytest.raises(FrameError, match="unsent"):
        pair.ends[0].receive(0, SessionFrame(0, 1, b""), 0.0)


def test_a_message_that_fits_no_frame_is_refused(pair: Pair) -> None:
    pair.ends[0].post(b"x" * MAX_BODY_NBYTES)
    with pytest.raises(InvalidArgument, match="at most"):
        pair.ends[0].post(b"x" * (MAX_BODY_NBYTES + 1))


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["post"]), st.integers(0, 1)),
        st.tuples(st.sampled_from(["drop", "repeat", "arrive"]), st.integers(0, 1000)),
        st.tuples(st.sampled_from(["up", "down"]), st.integers(0, 2)),
        st.tuples(st.sampled_from(["wait"]), st.integers(1, 2000)),
    ),
    max_size=80,
)


@slow.given(75, 300, ACTIONS)
def test_any_drop_repeat_reorder_and_cut_ends_in_exactly_once(
    actions: list[tuple[str, int]],
) -> None:
    pair = Pair()
    is_up: set[int] = set()
    for kind, value in actions:
        if kind == "post":
            pair.post(value, b"%d" % len(pair.sent[value]))
        elif kind == "up" and value not in is_up:
            is_up.add(value)
            pair.up(value)
        elif kind == "down" and value in is_up:
            is_up.discard(value)
            pair.down(value)
        elif kind == "wait":
            pair.now += value / 1000
        elif pair.under_way and kind in ("drop", "repeat", "arrive"):
            index = value % len(pair.under_way)
            if kind == "drop":
                del pair.under_way[index]
            else:
                pair.arrive(index, keep=kind == "repeat")
        pair.poll()
        for end in (0, 1):  # never wrong, doubled or out of order on the way there
            assert pair.got[end] == pair.sent[1 - end][: len(pair.got[end])]
    pair.up(99)
    pair.settle()


@slow.given(25, 100, st.integers(0, 2**32), st.lists(st.binary(max_size=40), max_size=20))
def test_frames_survive_any_cut_of_the_byte_stream(seed: int, bodies: list[bytes]) -> None:
    frames = [SessionFrame(seq, 0, body) for seq, body in enumerate(bodies, start=1)]
    frames.append(SessionFrame(0, 7, b""))
    stream = b"".join(frame.pack() for frame in frames)
    chance, reader, found = random.Random(seed), FrameReader(), []
    while stream:
        size = chance.randint(1, 30)
        found += reader.feed(stream[:size])
        stream = stream[size:]
    assert found == frames


HEADER = SessionFrame(1, 0, b"x").pack()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ((MAX_FRAME_NBYTES + 1).to_bytes(4, "big") + HEADER[4:], "oversized"),
        (b"\xff" * 24, "wrong frame version"),
        (HEADER[:4] + b"\x00" + HEADER[5:], "wrong frame version"),
        (HEADER[:5] + b"\x09" + HEADER[6:], "malformed"),
        ((3).to_bytes(4, "big") + HEADER[4:], "malformed"),
        (HEADER[:8] + bytes(8) + HEADER[16:], "malformed"),
    ],
)
def test_bytes_that_are_no_frame_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(FrameError, match=reason):
        FrameReader().feed(data)


def test_an_oversized_frame_is_refused_by_its_header_alone() -> None:
    reader = FrameReader()
    header = (MAX_FRAME_NBYTES + 1).to_bytes(4, "big") + HEADER[4:24]
    with pytest.raises(FrameError, match="oversized"):
        reader.feed(header)
