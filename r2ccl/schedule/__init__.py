"""Schedules as values: intermediate representation, checker, cost, interpreter and printers.

No module of this package does I/O. Every `Schedule` that the library builds passes
`r2ccl.schedule.check.check`.
"""

from __future__ import annotations

from r2ccl.schedule.ir import Cost, Op, OpKind, RankProgram, Schedule, Space

__all__ = ["Cost", "Op", "OpKind", "RankProgram", "Schedule", "Space"]
