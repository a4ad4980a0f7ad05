"""Every ending at every moment: all ranks end quickly, for the right reason, and leave nothing."""

from __future__ import annotations

from typing import Any

import pytest
from endings import cells
from endings.cells import CLOSES, METHODS, SIGNALS
from support import punctual
from support.slow import slow_but

#: `close` waits for asynchronous calls, and for the other ranks when idle, also if another thread
#: waits for a message.
CELLS = [
    *((ending, moment) for moment in ("idle", "async") for ending in (*METHODS, *SIGNALS)),
    *((each, moment) for moment in ("call", "repair") for each in (*METHODS, *CLOSES, *SIGNALS)),
    *((ending, "message") for ending in (*METHODS, "close_handler", *SIGNALS)),
    *((ending, moment) for moment in ("init", "shrink") for ending in SIGNALS),
    *((ending, "shrink") for ending in ("abort_thread", "abort_handler", *CLOSES)),
    *(
        (ending, moment)
        for moment in ("flow", "exchange")
        for ending in ("abort_thread", "interrupt", "twice", "kill")
    ),
    ("memory", "call"),
]  # fmt: skip
#: With `LOCAL_QUICK`, every ending and every moment at least once.
QUICK = [
    ("abort_handler", "idle"),
    ("revoke_thread", "async"),
    ("close_handler", "shrink"),
    ("interrupt", "init"),
    ("twice", "flow"),
    ("term", "repair"),
    ("kill", "call"),
    ("memory", "call"),
]


#: Cells in which ranks are in calls or messages in shared memory, or were: those that need neither
#: a rail nor memory for partial sums.
LOCAL = [cell for cell in CELLS if cell[0] != "memory" and cell[1] not in ("init", "repair")]
LOCAL_QUICK = [
    ("close_thread", "call"),
    ("revoke_handler", "async"),
    ("interrupt", "message"),
    ("abort_thread", "exchange"),
]


def end(run_ranks: Any, ending: str, moment: str, *, is_local: bool) -> None:
    outputs = run_ranks("ending_rank", cells.plan(ending, moment), is_local)
    cells.judge(cells.read(outputs, ending), ending, moment)


@pytest.mark.parametrize(("ending", "moment"), slow_but(LOCAL_QUICK, LOCAL))
def test_an_end_in_shared_memory(run_ranks: Any, ending: str, moment: str) -> None:
    punctual.in_time(lambda: end(run_ranks, ending, moment, is_local=True))


@pytest.mark.parametrize(("ending", "moment"), slow_but(QUICK, CELLS))
def test_an_end(run_ranks: Any, ending: str, moment: str) -> None:
    punctual.in_time(lambda: end(run_ranks, ending, moment, is_local=False))
