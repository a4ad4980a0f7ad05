"""``R2CC_DEBUG=TRACE`` logs each collective; at other levels, calls are not even checked for it."""

import logging

import numpy as np
import pytest

import r2ccl
from r2ccl.runtime.collectives import Collectives, collectives_class


def test_each_collective_is_a_debug_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    name = "r2ccl.runtime.collectives"
    with caplog.at_level(logging.DEBUG, "r2ccl"), r2ccl.init() as comm:
        for _ in range(2):
            comm.allreduce(np.ones(3, np.float32))
        comm.allgather(np.ones(1), async_op=True).wait()
        comm.barrier()
    assert [record.getMessage() for record in caplog.records if record.name == name] == [
        "rank 0: allreduce of ndarray float32 (3,)",
        "rank 0: allreduce of ndarray float32 (3,)",
        "rank 0: allgather of ndarray float64 (1,), asynchronous",
        "rank 0: barrier",
    ]


def test_at_info_no_call_looks_at_the_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "r2ccl")
    assert collectives_class() is Collectives
