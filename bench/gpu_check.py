"""Runs the library's GPU tests and `r2ccl doctor`, each in a process group of its own.

Invariant: if a process does not end in time, its process group is killed.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from gpu_outcome import Budget, Outcome

_ROOT = Path(__file__).parents[1]
#: The tests run on all cores, and tolerate warnings of the packages of an image.
_TESTS = ("-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider", "-W", "default")
_PARALLEL = ("-n", "auto") if importlib.util.find_spec("xdist") else ()
_DOCTOR = ("-m", "r2ccl", "doctor")
_DOCTOR_S = 60.0
#: Number of lines of pytest's output that are shown if tests failed.
_LAST_LINES = 40
#: Exit statuses: pytest's if all tests passed; the doctor's if it examined the machine.
_PASSED, _EXAMINED = (0,), (0, 1)


class Ended(NamedTuple):
    """Result of a process: its exit status, None if it was killed, and the lines it printed."""

    status: int | None
    lines: list[str]


def check(budget: Budget, outcome: Outcome) -> None:
    """Run the GPU tests, then `r2ccl doctor`; add the results to `outcome`."""
    tests = run((*_TESTS, *_PARALLEL), budget.left_s)
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
    """Run Python with `arguments` in the root of the checkout, in a process group of its own."""
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
        return Ended(None, [*lines, f"did not end within {timeout_s:.0f} s: killed"])
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def closing_line(ended: Ended) -> str:
    """Return the last line that a process printed."""
    return ended.lines[-1].strip(" =") if ended.lines else f"no output, status {ended.status}"


def _paths() -> list[str]:
    """List the module search path: the checkout comes first, so that its modules are tested."""
    before = os.environ.get("PYTHONPATH", "")
    return [str(_ROOT), *([before] if before else [])]


__all__ = ["Ended", "check", "closing_line", "run"]
