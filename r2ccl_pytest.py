"""Plugin of pytest: fixtures that run a user's program on several ranks and inject failures.

pytest imports this module in every run in an environment with r2ccl, so it imports nothing of r2ccl
before a test asks for a fixture. It is no module of the package for the same reason. The fixtures
are described in ``docs/testing-your-program.md`` and made by `r2ccl.testing.harness`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from r2ccl.testing.harness import FaultInjection, NetlabRunner, RankRunner


@pytest.fixture
def r2ccl_fail_at(tmp_path: Path) -> Iterator[FaultInjection]:
    """Break a NIC in the next `r2ccl_ranks`: ``r2ccl_fail_at(rank=1, rail=0, op=0, step=5)``.

    The parameters are those of `r2ccl.testing.fail_at`. The program calls `r2ccl.init` as usual. A
    failure that does not happen fails the test.
    """
    from r2ccl.testing.harness import FaultInjection

    injection = FaultInjection(tmp_path)
    yield injection
    injection.require_used()


@pytest.fixture
def r2ccl_ranks(request: pytest.FixtureRequest) -> RankRunner:
    """Run a function on several ranks: ``r2ccl_ranks(function, 4)`` returns its results by rank.

    It takes ``timeout_s`` (default 60) and ``env``, as `r2ccl.launch`.
    """
    from r2ccl.testing.harness import RankRunner

    is_faulty = r2ccl_fail_at.__name__ in request.fixturenames
    return RankRunner(
        request.module, request.getfixturevalue(r2ccl_fail_at.__name__) if is_faulty else None
    )


@pytest.fixture(scope="session")
def _r2ccl_netlab_obstacle() -> str | None:
    """Return the reason why this process cannot build a netlab; None if it can."""
    from r2ccl.testing.netlab import unavailable_reason

    return unavailable_reason()


@pytest.fixture
def r2ccl_netlab(_r2ccl_netlab_obstacle: str | None) -> NetlabRunner:
    """Run a program in network namespaces: ``r2ccl_netlab([sys.executable, "train.py"], nodes=2)``.

    It takes the ``faults`` as texts or `Fault` values, ``env``, ``timeout_s`` (default 120) and the
    shape of the lab, and returns a `RankResult` per rank. If a rank fails or a fault does not
    happen, the test fails. If this process cannot build a netlab, the test is skipped, with the
    reason.
    """
    if _r2ccl_netlab_obstacle:
        pytest.skip(_r2ccl_netlab_obstacle)
    from r2ccl.testing.harness import run_in_netlab

    return run_in_netlab
