"""The comparison with other libraries: every collective that they have, verified, with a row."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from support.mpi import find_mpiexec

from r2ccl.cli.perf.cases import Case, make_inputs
from r2ccl.cli.perf.forms import FORMS


@pytest.fixture
def run(bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run `peers` with tiny rounds, as without torch and Open MPI; return status and saved rows."""
    monkeypatch.setattr(bench("jobs"), "is_installed", lambda name: name == "mpi4py")

    def main(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
        saved = tmp_path / "peers.json"
        tiny = ["--nranks", "2", "--rounds", "1", "--quick", "--json", str(saved)]
        monkeypatch.setattr("sys.argv", ["bench/peers.py", *tiny, *arguments])
        status = bench("peers").main()
        return status, json.loads(saved.read_text())["results"]

    return main


def test_every_collective_beside_mpich(bench, run, capsys) -> None:
    find_mpiexec()
    status, rows = run("--collective", "all", "--sizes", "96")
    assert status == 0
    found = {(row["collective"], row["library"], row["transport"]) for row in rows}
    libraries = {("r2ccl", "tcp"), ("r2ccl", "shm"), ("mpich", "tcp"), ("mpich", "shm")}
    assert found == {(name, *library) for name in FORMS for library in libraries}
    assert all(row["median_us"] > 0 for row in rows)
    assert all(row["ratio"] > 0 for row in rows if row["library"] == "mpich")
    printed = capsys.readouterr().out
    assert "gloo over tcp (2 ranks) skipped: the package torch is not installed" in printed


def test_mpich_over_tcp_uses_sockets(bench) -> None:
    find_mpiexec()
    jobs = bench("jobs")
    with jobs.Job(jobs.MPICH_TCP, 2) as job:
        before = loopback_nbytes()
        job.run(1 << 20, 10, 0, collective="alltoall")
        assert loopback_nbytes() - before >= 10 << 20


def loopback_nbytes() -> int:
    """Bytes that the loopback interface has carried."""
    line = next(each for each in Path("/proc/net/dev").read_text().splitlines() if "lo:" in each)
    return int(line.partition(":")[2].split()[0])


class Answers:
    """A job whose calls take as long as given."""

    def __init__(self, library: Any, seconds: Sequence[float]) -> None:
        self.library = library
        self._seconds = list(seconds)
        self.names: list[str] = []

    def calibrate(self, nbytes: int, loop_s: float, collective: str) -> int:
        return 3

    def run(self, nbytes: int, iterations: int, warmup: int, *, collective: str) -> float:
        self.names.append(collective)
        return self._seconds.pop(0)

    def close(self) -> None: ...


def arguments_of(peers: Any, monkeypatch: pytest.MonkeyPatch, *given: str) -> Any:
    monkeypatch.setattr("sys.argv", ["bench/peers.py", *given])
    return peers.parse_arguments()


def test_a_library_without_the_collective_is_left_out_of_it(bench, monkeypatch, capsys) -> None:
    peers, jobs = bench("peers"), bench("jobs")
    args = arguments_of(peers, monkeypatch, "--sizes", "64", "--rounds", "3")
    ours, gloo = Answers(jobs.R2CCL, [2.0, 3.0, 4.0]), Answers(jobs.GLOO, [])
    rows = peers.rows_of(peers.sample([ours, gloo], "scan", args, Console()), "scan", 2)
    assert (ours.names, gloo.names) == (["scan"] * 3, [])
    assert [(row["collective"], row["library"], row["median_us"]) for row in rows] == [
        ("scan", "r2ccl", 3e6)
    ]


def test_a_run_that_fails_leaves_the_rows_of_others(bench, monkeypatch) -> None:
    peers, jobs = bench("peers"), bench("jobs")
    args = arguments_of(peers, monkeypatch, "--sizes", "64", "--rounds", "1")

    def hang(*_: Any, **__: Any) -> float:
        raise jobs.Hung("a rank did not answer in time")

    late = Answers(jobs.MPICH_TCP, [])
    monkeypatch.setattr(late, "run", hang)
    made = [Answers(jobs.R2CCL, [3.0]), late]
    rows = peers.rows_of(peers.sample(made, "gather", args, Console()), "gather", 2)
    assert [(row["library"], row["rounds"]) for row in rows] == [("r2ccl", 1)]


def test_the_neighbour_of_a_killed_bench_ends(bench) -> None:
    folder = str(Path(bench("peers").__file__).parent)
    code = f"""
import os, signal, sys
sys.path.insert(0, {folder!r})
from peers import neighbour
with neighbour(19):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    # The neighbour has the output, too: its end shows that the neighbour has ended.
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert ran.returncode == -signal.SIGKILL, ran.stderr


def test_both_transports_of_a_library_have_columns(bench, monkeypatch, capsys) -> None:
    peers, jobs = bench("peers"), bench("jobs")
    args = arguments_of(peers, monkeypatch, "--sizes", "64", "--rounds", "1")
    made = [
        Answers(jobs.R2CCL, [3.0]),
        Answers(jobs.LOCAL, [1.0]),
        Answers(jobs.MPICH_TCP, [12.0]),
        Answers(jobs.MPICH, [0.5]),
    ]
    rows = peers.rows_of(peers.sample(made, "gather", args, Console()), "gather", 2)
    assert [(row["transport"], row["ratio"]) for row in rows] == [
        ("tcp", None), ("shm", None), ("tcp", 0.25), ("shm", 2.0)
    ]  # fmt: skip
    Console(width=140).print(peers.table_of(rows, "gather", 2))
    printed = capsys.readouterr().out
    assert "mpich (tcp)" in printed
    assert "mpich (shm)" in printed
    assert "0.250" in printed
    assert "2.000" in printed


def test_a_wrong_result_of_a_library_is_refused(bench) -> None:
    worker = bench("worker")
    case = Case.of(FORMS["gather"], 2, 64, np.dtype(np.float32))
    inputs = make_inputs(case, (64,))

    def gathered(of: Any, buffers: Any) -> Any:
        return lambda: buffers.out.__setitem__(slice(None), np.concatenate(inputs))

    right = worker.Group(0, 2, lambda: None, gathered)
    worker.verify(right, case)
    idle = worker.Group(0, 2, lambda: None, lambda of, buffers: lambda: None)
    with pytest.raises(ValueError, match="wrong gather of 64 bytes: 16 elements"):
        worker.verify(idle, case)


def test_gloo_lacks_known_collectives_only(bench) -> None:
    assert set(bench("peer_calls").GLOO_LACKS) < set(FORMS)


def test_collectives_are_called_in_turn(bench, run) -> None:
    find_mpiexec()
    status, rows = run("--collective", "allreduce+barrier+broadcast", "--sizes", "96")
    assert status == 0
    assert {(row["collective"], row["library"]) for row in rows} == {
        ("allreduce+barrier+broadcast", library) for library in ("r2ccl", "mpich")
    }


def test_an_unknown_collective_is_named(bench, monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit):
        arguments_of(bench("peers"), monkeypatch, "--collective", "allreduce+brodcast")
    assert "unknown: brodcast; known: all, allreduce," in capsys.readouterr().err
