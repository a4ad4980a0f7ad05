"""CPUs assigned to the ranks of a host."""

from __future__ import annotations

import os

import pytest

from r2ccl.shm.machine import allowed_cpus, assign_cpu


@pytest.mark.parametrize(
    ("allowed", "wanted"),
    [
        ([0b10010000] * 2, [(4, 1), (7, 1)]),
        ([0b10010010] * 2, [(1, 1), (4, 1)]),
        ([0b10010000] * 5, [(4, 3), (7, 3), (4, 3), (7, 3), (4, 3)]),
        ([0b1000] * 2, [(3, 2), (3, 2)]),
        ([0b01, 0b10], [(-1, 1), (-1, 1)]),  # bound by somebody else
        ([0b01, 0b01, 0b10], [(-1, 2)] * 3),
        ([0b11, 0], [(-1, 1), (-1, 1)]),
    ],
)
def test_cpus_are_assigned_evenly(allowed, wanted):
    assert [assign_cpu(index, allowed) for index in range(len(allowed))] == wanted


@pytest.mark.parametrize(("cpus", "wanted"), [({0, 5}, 0b100001), ({1023}, 1 << 1023), ({1024}, 0)])
def test_allowed_cpus_are_bits(monkeypatch, cpus, wanted):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: cpus)
    assert allowed_cpus() == wanted
