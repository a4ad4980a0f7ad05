"""Transport contract for probes: checks of `Transport.probe` for any implementation.

The checks take the same `Bench` as the checks of `r2ccl.testing.contract`, and raise AssertionError
if the transport breaks its promise or a wait takes longer than ``Bench.patience_s``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from r2ccl.testing.contract import Bench, JoinedPair, random_bytes
from r2ccl.transport.base import Arrived, Failed, Fenced, Probed
from r2ccl.types import ProbeKey

#: Probes of rank 0 to rank 1 on rails 0 and 1, each between the two ranks' ports of one rail.
STRAIGHT = (ProbeKey(1, 0, 0), ProbeKey(1, 1, 1))


def ask(bench: Bench, key: ProbeKey) -> Probed:
    """Probe `key` from rank 0, wait for the outcome, and return the outcome.

    Only rank 0's transport is polled, so the answer cannot depend on the process of rank 1.

    Raises
    ------
    AssertionError
        If no outcome is reported within ``Bench.patience_s``, or the event is malformed.
    """
    transport = bench.transports[0]
    transport.probe(key)
    began = time.monotonic()
    while True:
        probed = [each for each in transport.poll(bench.patience_s) if isinstance(each, Probed)]
        # `poll` must return as soon as the answer arrives or the probe times out, even though
        # its own timeout is longer.
        assert time.monotonic() - began < bench.patience_s, (
            f"timed out waiting for the probe of {key}"
        )
        if probed:
            assert len(probed) == 1
            assert probed[0].key == key
            assert probed[0].detail
            return probed[0]
        bench.run()


def check_probe_is_answered_for_an_idle_process(bench: Bench) -> None:
    """Check that a probe is answered while the peer's process is idle and no path is open.

    A probe between ports of different rails must have the outcome `Bench.cross`.
    """
    bench.join_probes()
    for key in STRAIGHT * 2:
        assert ask(bench, key).is_answered is True
    assert ask(bench, ProbeKey(1, 0, 1)).is_answered is bench.cross


def check_probe_of_a_port_that_is_gone(bench: Bench) -> None:
    """Check that probes of a disconnected port fail, while the peer's other port answers.

    A second probe of the disconnected port must fail in the same way. A probe from the other rail
    to the disconnected port must fail too or, if `Bench.cross` is None, have the outcome None.
    """
    bench.join_probes()
    gone, beside = STRAIGHT
    assert ask(bench, ProbeKey(1, 0, 1)).is_answered is bench.cross
    bench.silence(0)
    assert ask(bench, gone).is_answered is False
    assert ask(bench, ProbeKey(1, 0, 1)).is_answered is (None if bench.cross is None else False)
    # Probe again: the first probe may have broken the connection that it used.
    assert ask(bench, gone).is_answered is False
    assert ask(bench, beside).is_answered is True


def check_probe_survives_the_fence(bench: Bench) -> None:
    """Check that a probe is answered while the path of the probed rail is fenced.

    Another probe of the same port must be answered after the path of the other rail has broken.
    """
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
    """Check that probes do not disturb slices, and that a key has at most one probe in flight."""
    bench.join_probes()
    pair = JoinedPair(bench)
    regions = [bytearray(50_000) for _ in range(8)]
    tokens = [pair.cleared(region, seq) for seq, region in enumerate(regions)]
    for seq, token in enumerate(tokens):
        for key in STRAIGHT * 2:
            pair.a.transport.probe(key)
        pair.a.send(seq, random_bytes(50_000, seq), token)
    pair.until_count(pair.b, Arrived, 8)
    assert regions == [random_bytes(50_000, seq) for seq in range(8)]

    def probed() -> list[Probed]:
        return [event for event in pair.a.events if isinstance(event, Probed)]

    pair.until(lambda: {each.key for each in probed()} == set(STRAIGHT), "an answer to each probe")
    pair.settle()
    assert all(each.is_answered is True for each in probed())
    assert len(probed()) == len(STRAIGHT)
    assert not pair.a.of(Failed)


def check_probe_of_what_is_not_there(bench: Bench) -> None:
    """Check that a probe has outcome None, and no error, if the peer or a rail does not exist."""
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
