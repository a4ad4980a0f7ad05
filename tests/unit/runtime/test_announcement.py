"""The line that each rank logs about itself when a job starts."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

import r2ccl
from r2ccl import __version__
from r2ccl.config import Config
from r2ccl.runtime.announcement import announce
from r2ccl.types import Nic

RAILS = (Nic("eth0", "10.0.0.1"), Nic("eth1", "10.1.0.1", is_last_resort=True))


def said(
    caplog: pytest.LogCaptureFixture,
    rank: int = 1,
    nhcas: int = 0,
    rails: tuple[Nic, ...] = RAILS,
    *,
    is_local: bool = False,
    is_shared: bool = False,
    **settings: Any,
) -> list[str]:
    control: Any = SimpleNamespace(rank=rank, nranks=4, nhcas=nhcas)
    caplog.clear()
    announce(control, Config(**settings), rails, is_local=is_local, is_shared=is_shared)
    return caplog.messages


def test_a_rank_says_version_rails_transport_and_mode(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "r2ccl")
    assert said(caplog) == [
        f"rank 1 of 4: r2ccl {__version__}; rails: 0 eth0 10.0.0.1, 1 eth1 10.1.0.1 (last resort); "
        "transport: TCP; schedules: auto; mode: auto"
    ]
    rdma = said(caplog, nhcas=1, rails=(RAILS[1], Nic("mlx5_0:1", "")), mode="balance")
    assert rdma[0].endswith(
        "1 mlx5_0:1; transport: RDMA, TCP as the last resort; schedules: ring; mode: balance"
    )
    assert "schedules: tree;" in said(caplog, algo="tree")[0]
    assert "TCP, shared memory within each host;" in said(caplog, is_shared=True)[0]
    local = said(caplog, is_shared=True, is_local=True)[0]
    assert "transport: shared memory, TCP for calls that cannot use it;" in local


def test_only_rank_0_says_the_version_at_lower_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "r2ccl")
    caplog.handler.setLevel(logging.NOTSET)
    for debug in ("VERSION", "warn"):
        assert said(caplog, rank=0, debug=debug) == [f"r2ccl version {__version__}, 4 ranks"]
        assert said(caplog, rank=1, debug=debug) == []
    assert said(caplog, rank=0) == []


def test_init_says_it_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.INFO, "r2ccl"), r2ccl.init(mode=2):
        pass
    lines = [text for text in caplog.messages if text.startswith("rank 0 of 1: r2ccl ")]
    assert len(lines) == 1
    assert lines[0].endswith("transport: TCP; schedules: ring; mode: balance")
