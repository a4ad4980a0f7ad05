"""The driver thread of a lab reports the errors of what it is asked to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from r2ccl.testing.fault_plan import FaultPlan
from r2ccl.testing.netlab.driver import Driver, PlanRun


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
