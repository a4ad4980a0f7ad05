"""The driver thread of a lab reports the errors of what it is asked to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from r2ccl.errors import TransportTimeout
from r2ccl.testing.fault_plan import FaultPlan, fail_at
from r2ccl.testing.faults import Fault, Firing
from r2ccl.testing.faults_reporter import Due, LabClient
from r2ccl.testing.netlab.driver import Driver, PlanRun
from r2ccl.testing.netlab.namespaces import LabError


def test_an_error_in_the_thread_is_raised_at_once(tmp_path: Path) -> None:
    driver = Driver()
    run = PlanRun(FaultPlan([]), tmp_path, 1, lambda fault: pytest.fail("no fault is due"))
    try:
        driver.begin(run)
        with pytest.raises(KeyError, match="already registered"):
            driver.begin(run)
        driver.end(run)
    finally:
        driver.close()


def test_a_long_path_is_an_error_of_the_lab(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    with pytest.raises(LabError, match="AF_UNIX path too long; set TMPDIR to a short path"):
        PlanRun(FaultPlan([]), deep, 1, lambda fault: pytest.fail("no fault is due"))


@pytest.mark.parametrize("letter", ["x", "\N{SNOWMAN}"])
def test_a_rank_gets_the_start_of_a_long_error(tmp_path: Path, letter: str) -> None:
    def refuse(fault: Fault) -> Firing:
        raise OSError("no such NIC: " + 100_000 * letter)

    plan = fail_at(rank=0, rail=0, op=0)
    run, driver = PlanRun(plan, tmp_path, 1, refuse), Driver()
    try:
        driver.begin(run)
        client = LabClient(run.environment["R2CC_FAULT_SOCKET"], timeout_s=10.0)
        with pytest.raises(TransportTimeout, match=f"was not applied: no such NIC: {letter}"):
            client(Due(0, 0, 0, 0, plan.faults[0]))
        driver.end(run)
        assert isinstance(driver.errors[0], OSError)
    finally:
        driver.close()
