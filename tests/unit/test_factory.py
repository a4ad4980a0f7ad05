"""Arguments of `r2ccl.init` that are refused before any connection is made."""

from __future__ import annotations

from typing import Any

import pytest

import r2ccl


@pytest.mark.parametrize("given", ["nccl", 4, ["n1", "n2"]])
def test_a_comm_that_is_no_communicator_is_refused(given: Any) -> None:
    with pytest.raises(r2ccl.InvalidArgument, match=r"^comm=.*: pass a communicator of mpi4py, or"):
        r2ccl.init(given)


@pytest.mark.parametrize("given", ["nic_down", 4, []])
def test_faults_that_are_no_plan_are_refused(given: Any) -> None:
    with pytest.raises(r2ccl.InvalidArgument, match=r"^faults=.*: pass a plan of r2ccl.testing"):
        r2ccl.init(faults=given)
