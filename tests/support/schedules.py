"""Replay of a schedule on data of all ranks, in one process."""

from __future__ import annotations

import numpy as np

from r2ccl.schedule.interpret import interpret
from r2ccl.schedule.ir import Schedule


def float_results(schedule: Schedule) -> set[bytes]:
    """Return the different results of all ranks, in place and out of place.

    The inputs are floats whose sum depends on the order of the additions.
    """
    inputs = [
        (np.random.default_rng(rank).standard_normal(101) * 10.0 ** (rank % 7)).astype(np.float32)
        for rank in range(schedule.nranks)
    ]
    return {
        output.tobytes()
        for in_place in (False, True)
        for output in interpret(schedule, inputs, np.add, in_place)
    }
