"""The benches' own arithmetic, that their verification can fail, and that every option works."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.mpi import find_mpiexec

from r2ccl.dtypes import CODES, DTYPES
from r2ccl.kernels import ON_GPU, divider, reducer
from r2ccl.types import ReduceOp

BENCH = Path(__file__).parents[3] / "bench"
PERF = [sys.executable, str(BENCH / "perf.py")]
TIMEOUT_S = 120
SLOW = pytest.mark.slow
PAIRS = [
    pytest.param(dtype, op, id=f"{dtype.name}-{op.name}")
    for code, ops in ON_GPU.items()
    for dtype, op in itertools.product([DTYPES[code]], sorted(ops))
]


@pytest.fixture
def common(bench: Any) -> Any:
    return bench("common")


@pytest.fixture
def collectives(bench: Any) -> Any:
    return bench("collectives")


@pytest.fixture
def perf(bench: Any) -> Any:
    return bench("perf")


class OneProcess:
    """All ranks' allreduce in one process, from the inputs the bench itself made."""

    def __init__(self, inputs: list[Any], *, spoil: int = 0) -> None:
        self.rank, self.nranks = 1, len(inputs)
        self.inputs = inputs
        self.spoil = spoil

    def allreduce(self, x: Any, out: Any = None, op: ReduceOp = ReduceOp.SUM) -> Any:
        target = x if out is None else out
        if x.dtype == np.int64 and x.size == 1:  # the count of wrong elements: only ours are here
            return target
        code = CODES[x.dtype]
        total = self.inputs[-1].copy()
        for contribution in self.inputs[-2::-1]:
            reducer(code, op)(total, contribution, total)
        if op is ReduceOp.AVG:
            divider(code, self.nranks)(total)
        total[: self.spoil] += total.dtype.type(1)
        target[...] = total
        return target


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("256", 256), ("64K", 65536), ("1.5m", 3 << 19), ("2GiB", 2 << 30), ("8B", 8)],
)
def test_sizes_are_powers_of_1024(common: Any, text: str, nbytes: int) -> None:
    assert common.parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "K", "-1", "1T", "0.3", "1 2", "nan", "inf"])
def test_other_sizes_are_refused(common: Any, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        common.parse_size(text)


def test_ranges_of_sizes_end(common: Any) -> None:
    assert list(common.size_range(4, 100, step=1, factor=3)) == [4, 12, 36]
    assert list(common.size_range(4, 12, step=4, factor=1)) == [4, 8, 12]
    assert list(common.size_range(0, 9, step=0, factor=2)) == [0, 1, 2, 4, 8]
    with pytest.raises(ValueError, match="never reach"):
        list(common.size_range(0, 9, step=0, factor=1))


def test_bus_bandwidth_of_a_known_case(common: Any) -> None:
    # 4 ranks, 1 GB in 1 s: every NIC carries 2 * 3/4 GB each way.
    assert common.busbw("allreduce", 4, 10**9, 1.0) == pytest.approx(1.5)
    for name in ("allgather", "reduce_scatter", "alltoall", "gather", "scatter"):
        assert common.busbw(name, 4, 10**9, 1.0) == pytest.approx(0.75)
    for name in ("broadcast", "reduce", "sendrecv"):
        assert common.busbw(name, 4, 10**9, 1.0) == pytest.approx(1.0)


def test_every_collective_has_a_bus_bandwidth(common: Any, collectives: Any) -> None:
    assert all(common.busbw(name, 2, 10**9, 1.0) > 0 for name in collectives.FORMS)


def test_statistics(common: Any) -> None:
    assert common.Stats.of([1, 2, 3, 4, 5]) == (3, 2, 4)
    assert common.Stats.of([7.0]) == (7.0, 7.0, 7.0)


def test_json_names_machine_commit_and_command(common: Any, tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    common.write_json(path, [{"nbytes": 256, "time_us": 1.5}])

    saved = json.loads(path.read_text())

    assert set(saved) == {"machine", "commit", "command", "results"}
    assert saved["results"] == [{"nbytes": 256, "time_us": 1.5}]
    assert saved["machine"]["cores"] >= 1
    assert saved["command"].startswith("python ")


@pytest.mark.parametrize(("dtype", "op"), PAIRS)
@pytest.mark.parametrize("nranks", [2, 5, 130])
def test_expected_results_have_no_rounding(
    collectives: Any, dtype: np.dtype[Any], op: ReduceOp, nranks: int
) -> None:
    form = collectives.FORMS["allreduce"]
    case = collectives.Case(form, nranks, 64, dtype, op.name.lower())
    inputs = collectives.make_inputs(case, (1, 2))
    wanted = collectives.expected(case, inputs, 0)
    out = np.empty_like(wanted)

    OneProcess(inputs).allreduce(inputs[0], out, op)

    assert out.tobytes() == wanted.tobytes()


#: Results of rank 1 of 3 from the inputs [0, ...], [10, ...] and [20, ...]; the root is rank 2.
RESULTS = {
    "allreduce": [30, 33, 36, 39, 42, 45],
    "allgather": [0, 1, 10, 11, 20, 21],
    "allgatherv": [0, 10, 11, 20, 21, 22],
    "reduce_scatter": [36, 39],
    "reduce_scatterv": [33, 36],
    "broadcast": [20, 21, 22, 23, 24, 25],
    "reduce": None,
    "gather": None,
    "gatherv": None,
    "scatter": [22, 23],
    "scatterv": [21, 22],
    "alltoall": [2, 3, 12, 13, 22, 23],
    "alltoallv": [1, 2, 12, 13, 14, 23],
    "scan": [10, 12, 14, 16, 18, 20],
    "exscan": [0, 1, 2, 3, 4, 5],
    "sendrecv": [0, 1, 2, 3, 4, 5],
    "barrier": None,
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_of_small_inputs(collectives: Any, name: str) -> None:
    form = collectives.FORMS[name]
    case = collectives.Case.of(form, 3, 24, np.dtype(np.int32), root=2)
    counts = [case.sends(rank) for rank in range(3)]
    inputs = [
        None if count is None else np.arange(10 * rank, 10 * rank + count, dtype=np.int32)
        for rank, count in enumerate(counts)
    ]
    found = collectives.expected(case, inputs, 1)
    assert (None if found is None else found.tolist()) == RESULTS[name]


def test_the_results_name_every_collective(collectives: Any) -> None:
    assert list(RESULTS) == list(collectives.FORMS)


def placed(collectives: Any, case: Any, rank: int, in_place: bool) -> tuple[Any, Any]:
    """Inputs of all ranks, and arrays of `rank` after a call that was right."""
    inputs = collectives.make_inputs(case, (7,))
    buffers = collectives.place(case, rank, inputs[rank], in_place=in_place)
    wanted = collectives.expected(case, inputs, rank)
    if buffers.out is not None and wanted is not None:
        buffers.out[...] = wanted
    return inputs, buffers


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("name", RESULTS)
def test_any_wrong_element_is_counted(collectives: Any, name: str, in_place: bool) -> None:
    form = collectives.FORMS[name]
    case = collectives.Case.of(form, 3, 360, np.dtype(np.float32), root=2)
    received = 0
    for rank in range(3):
        inputs, buffers = placed(collectives, case, rank, in_place)
        assert collectives.count_wrong(case, rank, inputs, buffers, in_place=in_place) == 0
        if buffers.out is not None:
            received += 1
            buffers.out.view(np.uint8)[[0, 9]] ^= 1
            assert collectives.count_wrong(case, rank, inputs, buffers, in_place=in_place) == 2
    roots = form.receives is collectives.Extent.ROOT
    assert received == (0 if name == "barrier" else 1 if roots else 3)


@pytest.mark.parametrize("name", [name for name in RESULTS if name != "barrier"])
def test_a_changed_input_is_counted(collectives: Any, name: str) -> None:
    case = collectives.Case.of(collectives.FORMS[name], 3, 360, np.dtype(np.float32), root=1)
    inputs, buffers = placed(collectives, case, 1, in_place=False)
    inputs[1] = inputs[1].copy()
    buffers.x.view(np.uint8)[5] ^= 1
    assert collectives.count_wrong(case, 1, inputs, buffers, in_place=False) == 1


def test_a_root_alone_passes_whole_buffers(collectives: Any) -> None:
    case = collectives.Case.of(collectives.FORMS["scatter"], 3, 26, np.dtype(np.int32), root=2)
    assert [case.sends(rank) for rank in range(3)] == [None, None, 6]
    assert [case.receives(rank) for rank in range(3)] == [2, 2, 2]
    assert (case.nbytes, case.count) == (24, 2)


def test_unequal_parts_cover_the_buffer(collectives: Any) -> None:
    case = collectives.Case.of(collectives.FORMS["alltoallv"], 3, 28, np.dtype(np.int32))
    assert case.parts == [1, 2, 4]
    table = np.array([case.exchanged(rank) for rank in range(3)])
    assert (table == table.T).all()
    assert set(table.sum(axis=0)) == {7}


def one_bench(perf: Any, comm: Any) -> Any:
    options = perf.parse_arguments([])
    return perf.Bench(comm, options, perf.Memory(0), threading.Barrier(1))


@pytest.mark.parametrize("in_place", [True, False])
def test_verification_counts_wrong_elements(collectives, perf, in_place) -> None:
    case = collectives.Case(collectives.FORMS["allreduce"], 3, 100, np.dtype(np.float32))
    inputs = collectives.make_inputs(case, (9, 0))
    for spoil in (0, 1, 5):
        measured = one_bench(perf, OneProcess(inputs, spoil=spoil))
        assert measured.verify(case, in_place=in_place, seed=(9,)) == spoil


def test_verification_notices_a_changed_input(collectives: Any, perf: Any) -> None:
    case = collectives.Case(collectives.FORMS["allreduce"], 3, 100, np.dtype(np.float32))
    inputs = collectives.make_inputs(case, (9, 0))

    class Careless(OneProcess):
        def allreduce(self, x: Any, out: Any = None, op: ReduceOp = ReduceOp.SUM) -> Any:
            result = super().allreduce(x, out, op)
            if x.size > 1:
                x[7] += 1
            return result

    measured = one_bench(perf, Careless(inputs))
    assert measured.verify(case, in_place=False, seed=(9,)) == 1


class OnGpu:
    """Array in the memory of a GPU, which is not read before the calls on it have ended."""

    def __init__(self, host: Any) -> None:
        self.host = host

    def __getitem__(self, part: slice) -> OnGpu:
        return OnGpu(self.host[part])

    def copy_to_host(self) -> Any:
        return self.host.copy()


class FakeCuda:
    """Numba's CUDA module; calls end when they are waited for."""

    def __init__(self) -> None:
        self.gpus = [0, 1]
        self.chosen: list[int] = []
        self.begun: list[Any] = []

    def select_device(self, number: int) -> None:
        self.chosen.append(number)

    def to_device(self, block: Any) -> OnGpu:
        return OnGpu(block.copy())

    def synchronize(self) -> None:
        while self.begun:
            self.begun.pop(0)()


@pytest.mark.parametrize("in_place", [True, False])
def test_arrays_on_a_gpu_are_verified(collectives, perf, monkeypatch, in_place) -> None:
    case = collectives.Case(collectives.FORMS["reduce_scatter"], 3, 99, np.dtype(np.float32))
    inputs = collectives.make_inputs(case, (9, 0))
    wanted = collectives.expected(case, inputs, 1)
    cuda = FakeCuda()

    class Comm:
        rank, nranks = 1, 3
        spoil = 0

        def reduce_scatter(self, x: OnGpu, out: OnGpu, op: ReduceOp) -> None:
            assert in_place == np.may_share_memory(x.host, out.host)
            cuda.begun.append(lambda: out.host.__setitem__(slice(None), wanted + self.spoil))

        def allreduce(self, x: Any) -> Any:
            return x

    memory = perf.Memory(0)
    monkeypatch.setattr(memory, "_cuda", cuda)
    monkeypatch.setenv("LOCAL_RANK", "3")
    measured = perf.Bench(Comm(), perf.parse_arguments([]), memory, threading.Barrier(1))
    memory.use()
    assert cuda.chosen == [1]
    assert measured.verify(case, in_place=in_place, seed=(9,)) == 0
    Comm.spoil = 1
    assert measured.verify(case, in_place=in_place, seed=(9,)) == 33


def test_a_rank_that_leaves_a_barrier_early_is_noticed(collectives: Any, perf: Any) -> None:
    class Leaky:
        rank, nranks = 1, 2

        def barrier(self) -> None:
            pass

        def allgather(self, x: Any) -> Any:
            return np.array(
                [x, np.add(x, [60, 60, self.boot])]
            )  # the other one came a minute later

        boot = 0

    case = collectives.Case(collectives.FORMS["barrier"], 2, 0, np.dtype(np.float32))
    comm = Leaky()
    measured = one_bench(perf, comm)
    assert measured._verify_barrier(case, in_place=False, seed=(0,)) == 1
    comm.boot = 1  # another machine, whose clock has nothing to do with ours
    assert measured._verify_barrier(case, in_place=False, seed=(0,)) is None


@pytest.mark.parametrize(
    ("average", "seconds"),
    [(0, 1.0), (1, 2.5), (2, 0.5), (3, 6.0)],
    ids=["0", "mean", "min", "max"],
)
def test_reported_times(perf: Any, average: int, seconds: float) -> None:
    class Two:
        def allgather(self, x: Any) -> Any:
            return np.array([x, [6.0, 0.5]])

    assert perf.combine(Two(), [1.0, 2.5], average) == seconds


class Solo:
    """Communicator of one rank, whose allreduce adds something or fails."""

    rank, nranks = 0, 1

    def __init__(self, added: float = 0.0, error: Exception | None = None) -> None:
        self.added, self.error = added, error

    def __enter__(self) -> Solo:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def close(self) -> None: ...

    def barrier(self) -> None: ...

    def dup(self) -> Solo:
        return Solo(error=RuntimeError("no path"))

    def allgather(self, x: Any) -> Any:
        return x[np.newaxis]

    def allreduce(self, x: Any, out: Any = None, op: ReduceOp = ReduceOp.SUM) -> Any:
        if self.error is not None:
            raise self.error
        target = x if out is None else out
        if x.dtype == np.int64:  # the count of wrong elements
            return target
        target[...] = x + np.float32(self.added)
        return target


@pytest.mark.parametrize(("added", "status"), [(0.0, 0), (1.0, 1)])
def test_the_exit_status_tells_of_wrong_elements(perf, monkeypatch, capsys, added, status) -> None:
    monkeypatch.setattr(perf.r2ccl, "init", lambda: Solo(added))
    assert perf.run(perf.parse_arguments(["-b", "64", "-n", "1", "-w", "0"])) == status
    printed = capsys.readouterr().out
    assert f"# Out of bounds values : {32 if added else 0} " in printed
    assert ("FAILED" if status else "OK") in printed


def test_the_error_of_one_thread_ends_the_others(perf, monkeypatch, capsys) -> None:
    monkeypatch.setattr(perf.r2ccl, "init", Solo)
    with pytest.raises(RuntimeError, match="no path"):
        perf.run(perf.parse_arguments(["-b", "64", "-t", "2"]))


def run_perf(
    arguments: Sequence[str], launcher: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*launcher, *PERF, *arguments],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def results_of(path: Path, ran: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows: list[dict[str, Any]] = json.loads(path.read_text())["results"]
    assert {row["wrong"] for row in rows} == {0}
    return rows


TINY = ["-b", "4", "-e", "600", "-f", "150", "-n", "2", "-w", "1"]


def test_every_collective_is_measured(collectives: Any, tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    ran = run_perf([*TINY, "--collective", "all", "--nranks", "3", "--json", str(path)])
    rows = results_of(path, ran)
    forms = collectives.FORMS.values()
    assert Counter(row["collective"] for row in rows) == {
        form.name: 1 if form.name == "barrier" else 4 if form.can_be_in_place else 2
        for form in forms
    }
    assert all(row["time_us"] > 0 and row["nranks"] == 3 for row in rows)
    assert {row["nbytes"] for row in rows if row["collective"] == "gather"} == {0, 600}


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (["-t", "2", "-c", "2", "-a", "3", "--collective", "alltoall"], {"nthreads": 2}),
        (["-m", "3", "-r", "1", "--collective", "scatterv"], {"ngrouped": 3, "root": 1}),
        pytest.param(
            ["-z", "0", "-R", "1", "--collective", "reduce_scatter"],
            {"is_blocking": False},
            marks=SLOW,
        ),
        (["-d", "double", "-o", "max", "--collective", "scan"], {"dtype": "float64", "op": "max"}),
        pytest.param(["-m", "2", "--collective", "sendrecv"], {"ngrouped": 2}, marks=SLOW),
        pytest.param(
            ["-z", "0", "-t", "2", "--collective", "sendrecv"], {"is_blocking": False}, marks=SLOW
        ),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_options_of_nccl_tests(tmp_path: Path, options, fields) -> None:
    path = tmp_path / "found.json"
    rows = results_of(path, run_perf([*TINY, *options, "--json", str(path)]))
    for row in rows:
        assert row | fields | {"wrong": 0} == row


def test_every_root_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "roots.json"
    options = ["-r", "-1", "--collective", "reduce", "--json", str(path)]
    rows = results_of(path, run_perf([*TINY, *options]))
    assert Counter(row["root"] for row in rows) == {0: 4, 1: 4}


def test_all_types_and_operations(tmp_path: Path) -> None:
    path = tmp_path / "types.json"
    options = ["-b", "64", "-n", "1", "-w", "0", "-d", "all", "-o", "all", "--json", str(path)]
    rows = results_of(path, run_perf([*options, "--collective", "reduce_scatter"]))
    found = {(row["dtype"], row["op"]) for row in rows}
    pairs = [(DTYPES[code].name, op.name.lower()) for code, ops in ON_GPU.items() for op in ops]
    assert found == set(pairs)


def test_ranks_started_by_mpiexec(tmp_path: Path) -> None:
    path = tmp_path / "mpi.json"
    launcher = [str(find_mpiexec()), "-n", "2"]
    rows = results_of(path, run_perf([*TINY, "--json", str(path)], launcher))
    assert {row["nranks"] for row in rows} == {2}


def test_ranks_started_by_r2ccl_launch(tmp_path: Path) -> None:
    path = tmp_path / "launch.json"
    launcher = [sys.executable, "-m", "r2ccl", "launch", "-n", "3", "--"]
    rows = results_of(path, run_perf([*TINY, "--json", str(path)], launcher))
    assert {row["nranks"] for row in rows} == {3}


def test_ranks_with_the_variables_of_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "torchrun.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*PERF, *TINY, "--json", str(path)]
    shared = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "R2CC_PORT": str(port), "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.DEVNULL,
        )
        for rank in "01"
    ]
    try:
        assert [rank.wait(TIMEOUT_S) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert {row["nranks"] for row in json.loads(path.read_text())["results"]} == {2}


def test_a_root_that_is_no_rank_is_refused() -> None:
    ran = run_perf([*TINY, "--collective", "reduce", "-r", "2"])
    assert ran.returncode == 2
    assert "-r 2: allowed are 0 to 1" in ran.stdout


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["-G", "1"], "CUDA graphs cannot capture"),
        (["-R", "2"], "no symmetric memory"),
        (["-g", "2"], "a rank of r2ccl is a process"),
        (["-g", "1", "--collective", "scan"], "scan needs host memory"),
        (["-r", "1"], "allreduce has no root"),
        (["-o", "sum", "--collective", "gather"], "gather does not reduce"),
        (["-z", "0", "-m", "2"], "the calls of a group run at its end"),
        (["-m", "2", "--collective", "barrier"], "cannot be grouped"),
        (["-z", "0", "--collective", "all"], "name one collective"),
        (["-t", "0"], "must be above 0"),
        (["-f", "1", "-i", "0"], "--step must be above 0"),
        (["-c", "-1"], "at least 0"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_options_without_a_meaning_are_refused(bench, capsys, options, reason) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench("perf_options").parse_arguments(options)
    assert reason in " ".join(capsys.readouterr().err.split())


def test_a_gpu_is_refused_where_there_is_none(bench, monkeypatch, capsys) -> None:
    cuda = pytest.importorskip("numba.cuda", reason="numba-cuda, of r2ccl[gpu], is not installed")
    monkeypatch.setattr(cuda, "gpus", [])
    with pytest.raises(SystemExit, match="2"):
        bench("perf_options").parse_arguments(["-g", "1"])
    assert "-g 0 measures host memory" in " ".join(capsys.readouterr().err.split())


def test_lines_have_the_columns_of_their_heading(collectives: Any, perf: Any) -> None:
    case = collectives.Case(collectives.FORMS["sendrecv"], 2, 256, np.dtype(np.float32))
    options = perf.parse_arguments(["--collective", "sendrecv"])
    half = perf.row(case, "out_of_place", options, perf.Measured(2e-6, 0))
    line = perf.format_line(case, [half, None])
    assert line.split()[:6] == ["1024", "256", "float", "none", "-1", "2.00"]
    assert line.split()[6:9] == ["0.51", "0.51", "0"]
    assert line.split()[9:] == ["N/A"] * 4
    assert len(line) == len(perf._HEADER.splitlines()[2])
