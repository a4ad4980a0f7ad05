"""The transport contract about probes, as checks any implementation takes.

The second half of `r2ccl.testing.contract`, whose benches serve here too. Sees the interface only.
Invariant: every wait in here ends, at the latest after ``Bench.patience_s``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from r2ccl.testing.contract import Bench, JoinedPair, pattern
from r2ccl.transport.base import Arrived, Failed, Fenced, Probed
from r2ccl.types import ProbeKey

#: Rank 0 asks rank 1 between the two ports of a path.
STRAIGHT = (ProbeKey(1, 0, 0), ProbeKey(1, 1, 1))


def ask(bench: Bench, key: ProbeKey) -> Probed:
    """Have rank 0 probe; only its own transport is polled, so nobody but it can answer late."""
    transport = bench.transports[0]
    transport.probe(key)
    began = time.monotonic()
    while True:
        probed = [each for each in transport.poll(bench.patience_s) if isinstance(each, Probed)]
        # Also what sleeps must be awake when the answer is there, or the time for it is over.
        assert time.monotonic() - began < bench.patience_s, f"waited in vain for {key}"
        if probed:
            assert len(probed) == 1
            assert probed[0].key == key
            assert probed[0].detail
            return probed[0]
        bench.run()


def check_probe_is_answered_for_an_idle_process(bench: Bench) -> None:
    """A probe is answered although the far process does nothing at all, and needs no path."""
    bench.join_probes()
    for key in STRAIGHT * 2:
        assert ask(bench, key).is_answered is True
    assert ask(bench, ProbeKey(1, 0, 1)).is_answered is bench.cross


def check_probe_of_a_port_that_is_gone(bench: Bench) -> None:
    """A port off the fabric answers nobody, the one beside it does, and asking goes on."""
    bench.join_probes()
    gone, beside = STRAIGHT
    assert ask(bench, ProbeKey(1, 0, 1)).is_answered is bench.cross
    bench.silence(0)
    assert ask(bench, gone).is_answered is False
    assert ask(bench, ProbeKey(1, 0, 1)).is_answered is (None if bench.cross is None else False)
    # Also where the connection broke, and cannot be asked by.
    assert ask(bench, gone).is_answered is False
    assert ask(bench, beside).is_answered is True


def check_probe_survives_the_fence(bench: Bench) -> None:
    """Neither a fenced path nor a broken one is what a probe travels on."""
    bench.join_probes()
    pair = JoinedPair(bench)
    for side in (pair.a, pair.b):
        side.fence()
        pair.until_count(side, Fenced)
    assert ask(bench, STRAIGHT[0]).is_answered is True
    JoinedPair(bench, 1)
    bench.break_path(1)
    assert ask(bench, STRAIGHT[0]).is_answered is True


def check_probes_disturb_nothing(bench: Bench) -> None:
    """Slices of a path pass while it is probed, and one probe at a time is under way."""
    bench.join_probes()
    pair = JoinedPair(bench)
    regions = [bytearray(50_000) for _ in range(8)]
    tokens = [pair.cleared(region, seq) for seq, region in enumerate(regions)]
    for seq, token in enumerate(tokens):
        for key in STRAIGHT * 2:
            pair.a.transport.probe(key)
        pair.a.send(seq, pattern(50_000, seq), token)
    pair.until_count(pair.b, Arrived, 8)
    assert regions == [pattern(50_000, seq) for seq in range(8)]

    def probed() -> list[Probed]:
        return [event for event in pair.a.events if isinstance(event, Probed)]

    pair.until(lambda: {each.key for each in probed()} == set(STRAIGHT), "an answer to each probe")
    pair.settle()
    assert all(each.is_answered is True for each in probed())
    assert len(probed()) == len(STRAIGHT)
    assert not pair.a.of(Failed)


def check_probe_of_what_is_not_there(bench: Bench) -> None:
    """A rail or a rank there is none of cannot be asked; that raises nothing."""
    bench.join_probes()
    for key in (ProbeKey(1, 7, 7), ProbeKey(1, 0, 7), ProbeKey(1, -1, -1), ProbeKey(5, 0, 0)):
        assert ask(bench, key).is_answered is None


PROBE_CHECKS: tuple[Callable[[Bench], None], ...] = (
    check_probe_is_answered_for_an_idle_process,
    check_probe_of_a_port_that_is_gone,
    check_probe_survives_the_fence,
    check_probes_disturb_nothing,
    check_probe_of_what_is_not_there,
)

__all__ = ["PROBE_CHECKS", "ask"]
