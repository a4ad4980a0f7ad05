"""One matrix of all collectives against NumPy, over real processes and real sockets.

A row is a collective, an element type and an operation. It has 30 cells: parts of five sizes, in
place or not, in blocking, asynchronous and grouped calls.
"""

from __future__ import annotations

import functools
import os

import pytest
from support import matrix_programs as programs
from support.jobs import launch
from support.slow import slow_but

from r2ccl.types import Collective

#: One of so many rows is in the slice that always runs.
THINNED = 61
#: One of so many rows is run by the numbers of ranks for which all would take minutes.
EVERY = int(os.environ.get("R2CC_MATRIX_EVERY", "19"))
CASES = [(3, THINNED), (1, 1), (2, 1), (3, 1), (4, EVERY), (5, EVERY), (8, EVERY)]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("nranks", "every"), slow_but([(3, THINNED)], CASES))
def test_every_cell_is_exact(nranks: int, every: int) -> None:
    run = functools.partial(programs.matrix, every)
    found = launch(run, nranks, timeout_s=1180.0)
    print(f"{found[0][0]} cells on {nranks} ranks")
    assert [wrong for _, wrong in found] == [[]] * nranks


def test_every_collective_that_moves_data_has_rows() -> None:
    unequal = {"allgatherv", "reduce_scatterv"}  # on the wire, they are those of equal parts
    moving = {each.name.lower() for each in Collective} - {"barrier"} | unequal
    assert {collective for collective, _, _ in programs.rows(0)} == moving
