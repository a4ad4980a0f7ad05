"""CPUs assigned to the ranks of a host."""

from __future__ import annotations

import os

import pytest

from r2ccl.shm.machine import home_cpu


@pytest.mark.parametrize(
    ("cpus", "nranks", "wanted"),
    [
        ({4, 7}, 2, [(4, 1), (7, 1)]),
        ({4, 7, 9}, 2, [(4, 1), (7, 1)]),
        ({4, 7}, 5, [(4, 3), (7, 3), (4, 3), (7, 3), (4, 3)]),
        ({3}, 2, [(3, 2), (3, 2)]),
        ({0, 1023}, 2, [(0, 1), (1023, 1)]),
        ({0, 1024}, 2, [(-1, 0), (-1, 0)]),  # the sets of CPUs of compiled code are smaller
    ],
)
def test_cpus_are_assigned_evenly(monkeypatch, cpus, nranks, wanted):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: cpus)
    assert [home_cpu(index, nranks) for index in range(nranks)] == wanted
