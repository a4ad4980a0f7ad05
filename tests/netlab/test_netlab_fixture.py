"""A test of a user loses a NIC of a netlab under a program that knows nothing of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from r2ccl.testing.harness import run_in_netlab
from r2ccl.testing.netlab import unavailable_reason

PROGRAM = """
import numpy as np
import r2ccl

with r2ccl.init() as comm:
    assert comm.allreduce(np.ones(1_000_000))[0] == comm.nranks
"""


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    reason = unavailable_reason()
    if reason:
        pytest.skip(reason)


def test_a_program_survives_the_fault_of_a_test(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    faults = ["nic_down:node=1,rail=0,at_op=0,at_step=2"]
    results = run_in_netlab([sys.executable, str(script)], nodes=2, rails=2, faults=faults)
    assert [each.returncode for each in results] == [0, 0]


@pytest.mark.parametrize(
    ("code", "faults", "message"),
    [
        ("raise SystemExit(3)", [], "2 of 2 ranks failed: rank 0: status 3"),
        ("pass", ["nic_down:node=0,rail=0,at_op=0"], "did not fire"),
        ("import time; time.sleep(60)", [], "longer than 1 s"),
    ],
)
def test_a_run_that_is_not_as_planned_fails(code: str, faults: list[str], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run_in_netlab(
            [sys.executable, "-c", code],
            nodes=2,
            rails=1,
            faults=faults,
            timeout_s=1.0 if "sleep" in code else 30.0,
        )
