"""Jobs of benches in a netlab: how they are run, their errors, and the exit status of the bench."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from r2ccl.errors import InvalidArgument
from r2ccl.testing import FaultPlan
from r2ccl.testing.netlab import Lab, LabError, ensure_privileged

_EXIT_USAGE, _EXIT_UNAVAILABLE = 2, 69
#: Characters of a failed rank's output to report.
_LAST_WORDS = 2000


class Failure(Exception):
    """Raised when a job ends with an error, or does not do in time what is waited for."""


def last_lines(
    lab: Lab,
    program: Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    plan: FaultPlan | None = None,
    timeout_s: float,
) -> list[str]:
    """Run a Python program on all ranks without showing its output, and restore the lab's NICs.

    Return the last line of the output of each rank.

    Raises
    ------
    Failure
        If a rank ended with an error.
    AssertionError
        If a fault of `plan` did not fire.
    """
    ranks = lab.run(
        [sys.executable, str(program), *arguments],
        env=env, plan=plan, timeout_s=timeout_s, sink=lambda line: None,
    )  # fmt: skip
    lab.restore()
    for each in ranks:
        if each.returncode:
            raise Failure(f"rank {each.rank} failed: {each.output[-_LAST_WORDS:]}")
    if plan is not None:
        plan.assert_all_fired()
    return [each.output.splitlines()[-1] for each in ranks]


@contextmanager
def ready_for_labs(bench: str) -> Iterator[None]:
    """Run a block that builds labs; restart `bench` in a user namespace first, if it needs that.

    End the process with 2 if an option describes no lab, with 69 if no lab can be built here, and
    with 1 after a `Failure`; the message begins with the name of the bench.
    """
    try:
        ensure_privileged()
        yield
    except InvalidArgument as exc:
        print(f"{bench}: {exc}", file=sys.stderr)
        sys.exit(_EXIT_USAGE)
    except LabError as exc:
        print(f"{bench}: {exc}", file=sys.stderr)
        sys.exit(_EXIT_UNAVAILABLE)
    except Failure as exc:
        print(f"{bench}: {exc}", file=sys.stderr)
        sys.exit(1)


__all__ = ["Failure", "last_lines", "ready_for_labs"]
