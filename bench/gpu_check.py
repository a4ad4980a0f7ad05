"""The library's own tests on a GPU, and what `r2ccl doctor` says of the machine.

Sees processes. Invariant: a process that does not end in its time is killed, by its own number.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from gpu_outcome import Budget, Outcome

_ROOT = Path(__file__).parents[1]
_TESTS = ("-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider")
_DOCTOR = ("-m", "r2ccl", "doctor")
_DOCTOR_S = 60.0
#: Of what pytest says, how much is shown of tests that failed.
_LAST_LINES = 40
#: pytest's: all passed; and of doctor's those that say something of the machine.
_PASSED, _EXAMINED = (0,), (0, 1)


class Ended(NamedTuple):
    """How a process ended: its status, None if it was killed; and all it wrote."""

    status: int | None
    lines: list[str]


def check(budget: Budget, outcome: Outcome) -> None:
    """Run the tests, then the doctor."""
    tests = run(_TESTS, budget.left_s)
    outcome.lines.append("pytest tests/gpu: " + closing_line(tests))
    if tests.status not in _PASSED:
        outcome.lines += tests.lines[-_LAST_LINES:]
        outcome.failures.append(f"tests/gpu: {closing_line(tests)}")
    doctor = run(_DOCTOR, _DOCTOR_S)
    outcome.lines += ["", "r2ccl doctor:", *doctor.lines]
    if doctor.status not in _EXAMINED:
        outcome.failures.append(f"r2ccl doctor: {closing_line(doctor)}")
    outcome.rows += [
        {"measure": "tests", "status": tests.status, "closing_line": closing_line(tests)},
        {"measure": "doctor", "status": doctor.status, "lines": doctor.lines},
    ]


def run(arguments: tuple[str, ...], timeout_s: float) -> Ended:
    """Run a Python program in the root of the checkout, all its processes in one group."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(_paths())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said = process.communicate(timeout=timeout_s)[0]
        return Ended(process.returncode, said.strip().splitlines())
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said = process.communicate()[0]
        lines = said.strip().splitlines()
        return Ended(None, [*lines, f"not ended after {timeout_s:.0f} s: killed"])
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def closing_line(ended: Ended) -> str:
    """Return the last line a process wrote."""
    return ended.lines[-1].strip(" =") if ended.lines else f"no word, status {ended.status}"


def _paths() -> list[str]:
    """List where modules are looked for: the checkout first, so that what is tested is there."""
    before = os.environ.get("PYTHONPATH", "")
    return [str(_ROOT), *([before] if before else [])]


__all__ = ["Ended", "check", "closing_line", "run"]
