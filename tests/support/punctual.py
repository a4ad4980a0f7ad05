"""Time limits of tests on a machine that other programs use, too.

Other programs only add time, so one of a few runs must keep a limit. All else that a test asserts
must hold in every run, and no run may take a multiple of its limit: then a wake-up was missed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

NRUNS = 3
#: Multiple of a limit from which a delay is not taken for one by other programs.
FAR = 4.0


class Late(AssertionError):
    """A run exceeded its time limit."""


def check(took_s: float, limit_s: float, told: object = "") -> None:
    """Raise `Late` if `took_s` is at least `limit_s`; fail if it is at least `FAR` times that."""
    assert took_s < FAR * limit_s, told
    if took_s >= limit_s:
        raise Late(f"{took_s:.3f} s, with a limit of {limit_s:g} s\n{told}")


def in_time(run: Callable[[], T]) -> T:
    """Return the result of ``run()``; repeat it if it raises `Late`, up to `NRUNS` runs."""
    for _ in range(NRUNS - 1):
        try:
            return run()
        except Late as late:
            print(f"repeated: {late}")
    return run()
