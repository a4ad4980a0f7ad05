"""Where the tests on real ibverbs get their devices, or the reason why they are skipped."""

import importlib.util
import os

import pytest

from r2ccl.testing.rdmalab import MachineShape
from r2ccl.topology.hcas import Hca, list_hcas

HINT = "`make test-rdma` runs these in a virtual machine"


def missing() -> str | None:
    """What real ibverbs lack here."""
    if importlib.util.find_spec("pyverbs") is None:
        return f"no pyverbs for this Python; {HINT}"
    if not list_hcas():
        return f"this kernel has no RDMA device; {HINT}"
    return None


@pytest.fixture(scope="session", autouse=True)
def _possible() -> None:
    reason = missing()
    if MachineShape.from_environment(os.environ) is None:
        pytest.skip(reason or f"RDMA devices, but not those of a lab; {HINT}")
    # A lab is made for these tests: one in which they all skip must not look well.
    assert reason is None, reason


@pytest.fixture(scope="session")
def lab(_possible: None) -> MachineShape:
    """Return the lab these tests run in."""
    shape = MachineShape.from_environment(os.environ)
    assert shape is not None
    return shape


@pytest.fixture
def hcas(lab: MachineShape) -> tuple[tuple[Hca, ...], ...]:
    """Return the ports as they are now: of each node, in order of the rails."""
    found = {each.name: each for each in list_hcas()}
    return tuple(tuple(found[name] for name in lab.devices(node)) for node in range(lab.nodes))
