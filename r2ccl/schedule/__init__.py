"""Schedules as values: the IR, its checker, its cost, its printer.

This package imports `errors`, `msgspec` and NumPy; it never sees a socket, a thread, the clock or
a random source. Invariant: every `Schedule` the library builds is one that `check` accepts.
"""

from __future__ import annotations

from r2ccl.schedule.ir import Cost, Op, OpKind, RankProgram, Schedule, Space

__all__ = ["Cost", "Op", "OpKind", "RankProgram", "Schedule", "Space"]
