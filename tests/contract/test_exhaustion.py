"""Calls of ranks that have no file descriptor left, with real sockets."""

from __future__ import annotations

import functools
import logging
import os
import time

import numpy as np
import pytest
from support.jobs import launch
from support.limits import no_descriptor_left

import r2ccl

#: Seconds: several times a suspicion timeout and a probe timeout.
LATE_S = 1.5


def sum_with_a_late_peer() -> tuple[float, list[str]]:
    """Sum with rank 1 late, while rank 0 waits and cannot open a probe."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("r2ccl").addHandler(Keep(logging.WARNING))
    with r2ccl.init(suspicion_timeout_s=0.1, probe_timeout_s=0.1) as comm:
        x = np.full(1000, comm.rank + 1.0)
        comm.allreduce(x)
        x = np.full(1000, comm.rank + 1.0)
        if comm.rank == 1:
            time.sleep(LATE_S)
            comm.allreduce(x)
        else:
            with no_descriptor_left():
                comm.allreduce(x)
    return float(x[0]), lines


def test_a_rank_without_a_descriptor_waits_for_a_late_peer() -> None:
    found = launch(sum_with_a_late_peer, 2, timeout_s=60.0)
    assert [value for value, _ in found] == [3.0, 3.0]
    probes = [line for line in found[0][1] if "cannot be probed now: EMFILE" in line]
    assert len(probes) == 1
    assert "raise `ulimit -n`" in probes[0]


def init_with(spare: int) -> str:
    """Join the others; return the error of rank 0, which can open `spare` more descriptors."""
    if os.environ["RANK"] != "0":
        with pytest.raises(r2ccl.R2cclError):
            r2ccl.init(init_timeout_s=2.0)
        return ""
    with no_descriptor_left(spare), pytest.raises(r2ccl.R2cclError) as caught:
        r2ccl.init(init_timeout_s=2.0)
    return str(caught.value)


@pytest.mark.parametrize("spare", [1, 6, 10])
def test_an_init_that_runs_out_of_descriptors_says_so(spare: int) -> None:
    """Run out of descriptors in the control thread, the rendezvous, or the listeners."""
    found = launch(functools.partial(init_with, spare), 3, timeout_s=60.0)
    assert "EMFILE: Too many open files" in found[0]
    assert "raise `ulimit -n`" in found[0]
