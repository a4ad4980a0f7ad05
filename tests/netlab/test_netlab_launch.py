"""`r2ccl launch` on hosts that are network namespaces: one job, and one end for all of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stand_ins import StandIns

from r2ccl.testing.netlab import Lab, unavailable_reason

WAIT_S = 100.0
SUM = (
    "import os, numpy as np, r2ccl\n"
    "with r2ccl.init() as comm:\n"
    "    x = comm.allreduce(np.full(100_000, comm.rank + 1.0))\n"
    "    print(x[0], os.environ['LOCAL_RANK'], os.stat('/proc/self/ns/net').st_ino)\n"
)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    reason = unavailable_reason()
    if reason:
        pytest.skip(reason)
    with Lab(nodes=2, rails=2) as lab:
        yield lab


def command_of(lab: Lab, nranks: int, tmp_path: Path) -> list[str]:
    """Return the launcher's command line for `nranks` ranks per host.

    What stands for ssh enters the namespace of a host.
    """
    (tmp_path / "stand-ins").mkdir()
    enter = {f"10.0.0.{node + 1}": f"ip netns exec {lab.namespace(node)}" for node in range(2)}
    ssh = StandIns(tmp_path / "stand-ins").ssh(enter)
    hosts = tmp_path / "hosts"
    hosts.write_text(f"10.0.0.1 slots={nranks}\n10.0.0.2 slots={nranks}\n")
    launch = [sys.executable, "-m", "r2ccl", "launch", "--hostfile", str(hosts)]
    return [*launch, "--ssh", ssh, "--prefix"]


def run(command: list[str], *program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *program], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=WAIT_S, check=False, env={**os.environ, "R2CC_SOCKET_IFNAME": "=rail0,rail1"},
    )  # fmt: skip


def test_hosts_of_a_list_run_one_job(lab: Lab, tmp_path: Path) -> None:
    done = run(command_of(lab, 2, tmp_path), sys.executable, "-c", SUM)
    assert done.returncode == 0, done.stderr
    ranks = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert [ranks[f"[{rank}]"][:2] for rank in range(4)] == [
        ["10.0", "0"], ["10.0", "1"], ["10.0", "0"], ["10.0", "1"],
    ]  # fmt: skip
    places = [ranks[f"[{rank}]"][2] for rank in range(4)]
    assert places[0] == places[1] != places[2] == places[3]


def test_a_rank_that_dies_is_a_lost_peer_on_the_other_host(lab: Lab, tmp_path: Path) -> None:
    died = "    comm.rank == 1 and os.abort()\n    comm.barrier()\n"
    done = run(command_of(lab, 1, tmp_path), sys.executable, "-c", SUM + died)
    assert done.returncode == 128 + 6
    assert "rank 1: signal SIGABRT" in done.stderr
    assert "PeerLost" in done.stdout
