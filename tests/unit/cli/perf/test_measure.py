"""The measurement of collectives: its verification can fail, and every option works."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.jobs import launch
from support.mpi import find_mpiexec

from r2ccl.cli import main, make_parser
from r2ccl.cli.perf import measure
from r2ccl.cli.perf.calls import PerfMemory
from r2ccl.cli.perf.cases import Case, count_wrong, expected, make_inputs, place
from r2ccl.cli.perf.forms import FORMS, DataExtent, busbw
from r2ccl.cli.perf.measure import Measurement
from r2ccl.cli.perf.options import PerfOptions, options_of
from r2ccl.cli.perf.report import HEADER, describe_paths, format_line, row_of, verdict
from r2ccl.cli.results import check_file
from r2ccl.dtypes import CODES, DTYPES
from r2ccl.errors import InvalidArgument
from r2ccl.kernels import ON_GPU, divider, reducer
from r2ccl.planning.planner import Explanation
from r2ccl.runtime.status import RailHealth
from r2ccl.types import ReduceOp

PERF = [sys.executable, "-m", "r2ccl", "bench"]
TIMEOUT_S = 120
SLOW = pytest.mark.slow
PAIRS = [
    pytest.param(dtype, op, id=f"{dtype.name}-{op.name}")
    for code, ops in ON_GPU.items()
    for dtype, op in itertools.product([DTYPES[code]], sorted(ops))
]


def parsed(arguments: Sequence[str]) -> PerfOptions:
    return options_of(make_parser(["bench"]).parse_args(["bench", *arguments]))


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


def test_bus_bandwidth_of_a_known_case() -> None:
    # 4 ranks, 1 GB in 1 s: every NIC carries 2 * 3/4 GB each way.
    assert busbw("allreduce", 4, 10**9, 1.0) == pytest.approx(1.5)
    for name in ("allgather", "reduce_scatter", "alltoall", "gather", "scatter"):
        assert busbw(name, 4, 10**9, 1.0) == pytest.approx(0.75)
    for name in ("broadcast", "reduce", "sendrecv"):
        assert busbw(name, 4, 10**9, 1.0) == pytest.approx(1.0)


def test_every_collective_has_a_bus_bandwidth() -> None:
    assert all(busbw(name, 2, 10**9, 1.0) > 0 for name in FORMS)


@pytest.mark.parametrize(("dtype", "op"), PAIRS)
def test_expected_results_have_no_rounding(dtype: np.dtype[Any], op: ReduceOp) -> None:
    form = FORMS["allreduce"]
    for nranks in (2, 5, 130):
        case = Case(form, nranks, 64, dtype, op.name.lower())
        inputs = make_inputs(case, (1, 2))
        wanted = expected(case, inputs, 0)
        out = np.empty_like(wanted)

        OneProcess(inputs).allreduce(inputs[0], out, op)

        assert out.tobytes() == wanted.tobytes(), nranks


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
def test_results_of_small_inputs(name: str) -> None:
    form = FORMS[name]
    case = Case.of(form, 3, 24, np.dtype(np.int32), root=2)
    counts = [case.sends(rank) for rank in range(3)]
    inputs = [
        None if count is None else np.arange(10 * rank, 10 * rank + count, dtype=np.int32)
        for rank, count in enumerate(counts)
    ]
    found = expected(case, inputs, 1)
    assert (None if found is None else found.tolist()) == RESULTS[name]


def test_the_results_name_every_collective() -> None:
    assert list(RESULTS) == list(FORMS)


def placed(case: Any, rank: int, in_place: bool) -> tuple[Any, Any]:
    """Inputs of all ranks, and arrays of `rank` after a call that was right."""
    inputs = make_inputs(case, (7,))
    buffers = place(case, rank, inputs[rank], in_place=in_place)
    wanted = expected(case, inputs, rank)
    if buffers.out is not None and wanted is not None:
        buffers.out[...] = wanted
    return inputs, buffers


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("name", RESULTS)
def test_any_wrong_element_is_counted(name: str, in_place: bool) -> None:
    form = FORMS[name]
    case = Case.of(form, 3, 360, np.dtype(np.float32), root=2)
    received = 0
    for rank in range(3):
        inputs, buffers = placed(case, rank, in_place)
        assert count_wrong(case, rank, inputs, buffers, in_place=in_place) == 0
        if buffers.out is not None:
            received += 1
            buffers.out.view(np.uint8)[[0, 9]] ^= 1
            assert count_wrong(case, rank, inputs, buffers, in_place=in_place) == 2
    roots = form.receives is DataExtent.ROOT
    assert received == (0 if name == "barrier" else 1 if roots else 3)


@pytest.mark.parametrize("name", [name for name in RESULTS if name != "barrier"])
def test_a_changed_input_is_counted(name: str) -> None:
    case = Case.of(FORMS[name], 3, 360, np.dtype(np.float32), root=1)
    inputs, buffers = placed(case, 1, in_place=False)
    buffers.x.view(np.uint8)[5] ^= 1
    assert count_wrong(case, 1, inputs, buffers, in_place=False) == 1


def test_a_root_alone_passes_whole_buffers() -> None:
    case = Case.of(FORMS["scatter"], 3, 26, np.dtype(np.int32), root=2)
    assert [case.sends(rank) for rank in range(3)] == [None, None, 6]
    assert [case.receives(rank) for rank in range(3)] == [2, 2, 2]
    assert (case.nbytes, case.count) == (24, 2)


def test_unequal_parts_cover_the_buffer() -> None:
    case = Case.of(FORMS["alltoallv"], 3, 28, np.dtype(np.int32))
    assert case.parts == [1, 2, 4]
    table = np.array([case.exchanged(rank) for rank in range(3)])
    assert (table == table.T).all()
    assert set(table.sum(axis=0)) == {7}


def one_rank(comm: Any) -> Any:
    options = parsed([])
    return Measurement(comm, options, PerfMemory(0), threading.Barrier(1))


@pytest.mark.parametrize("in_place", [True, False])
def test_verification_counts_wrong_elements(in_place: bool) -> None:
    case = Case(FORMS["allreduce"], 3, 100, np.dtype(np.float32))
    inputs = make_inputs(case, (9, 0))
    for spoil in (0, 1, 5):
        measured = one_rank(OneProcess(inputs, spoil=spoil))
        assert measured.verify(case, in_place=in_place, seed=(9,)) == spoil


def test_verification_notices_a_changed_input() -> None:
    case = Case(FORMS["allreduce"], 3, 100, np.dtype(np.float32))
    inputs = make_inputs(case, (9, 0))

    class Careless(OneProcess):
        def allreduce(self, x: Any, out: Any = None, op: ReduceOp = ReduceOp.SUM) -> Any:
            result = super().allreduce(x, out, op)
            if x.size > 1:
                x[7] += 1
            return result

    measured = one_rank(Careless(inputs))
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
@pytest.mark.parametrize("name", [name for name in FORMS if name not in ("sendrecv", "barrier")])
def test_arrays_on_a_gpu_are_verified(monkeypatch, name, in_place) -> None:
    case = Case(FORMS[name], 3, 99, np.dtype(np.float32), root=1)
    inputs = make_inputs(case, (9, 0))
    wanted = expected(case, inputs, 1)
    cuda = FakeCuda()

    class Comm:
        rank, nranks = 1, 3
        spoil = 0

        def __getattr__(self, called: str) -> Any:
            assert called == name
            return self.call

        def call(self, x: Any, out: Any = None, **_: Any) -> None:
            assert in_place == np.may_share_memory(x.host, out.host)
            cuda.begun.append(lambda: out.host.view(np.uint8).__setitem__(slice(None), self.right))

        @property
        def right(self) -> Any:
            return wanted.view(np.uint8) ^ np.uint8(self.spoil)

        def allreduce(self, x: Any, out: Any = None, **_: Any) -> Any:
            return x if isinstance(x, np.ndarray) else self.call(x, out)

    memory = PerfMemory(0)
    monkeypatch.setattr(memory, "_cuda", cuda)
    monkeypatch.setenv("LOCAL_RANK", "3")
    measured = Measurement(Comm(), parsed([]), memory, threading.Barrier(1))
    memory.use()
    assert cuda.chosen == [1]
    assert measured.verify(case, in_place=in_place, seed=(9,)) == 0
    Comm.spoil = 1
    assert measured.verify(case, in_place=in_place, seed=(9,)) == wanted.size


def test_a_rank_that_leaves_a_barrier_early_is_noticed() -> None:
    class Leaky:
        rank, nranks = 1, 2

        def barrier(self) -> None:
            pass

        def allgather(self, x: Any) -> Any:
            return np.array(
                [x, np.add(x, [60, 60, self.boot])]
            )  # the other one came a minute later

        boot = 0

    case = Case(FORMS["barrier"], 2, 0, np.dtype(np.float32))
    comm = Leaky()
    measured = one_rank(comm)
    assert measured._verify_barrier(case, in_place=False, seed=(0,)) == 1
    comm.boot = 1  # another machine, whose clock has nothing to do with ours
    assert measured._verify_barrier(case, in_place=False, seed=(0,)) is None


@pytest.mark.parametrize(
    ("average", "seconds"),
    [(0, 1.0), (1, 2.5), (2, 0.5), (3, 6.0)],
    ids=["0", "mean", "min", "max"],
)
def test_reported_times(average: int, seconds: float) -> None:
    class Two:
        def allgather(self, x: Any) -> Any:
            return np.array([x, [6.0, 0.5]])

    assert measure.combine(Two(), [1.0, 2.5], average) == seconds


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

    def health(self) -> Any:
        return SimpleNamespace(rails=())

    def explain(self, nbytes: int) -> Explanation:
        return Explanation(nbytes, None, (), "")  # type: ignore[arg-type]

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
def test_the_exit_status_tells_of_wrong_elements(monkeypatch, capsys, added, status) -> None:
    monkeypatch.setattr(measure, "init", lambda: Solo(added))
    assert measure.run(parsed(["-b", "64", "-n", "1", "-w", "0"])) == status
    printed = capsys.readouterr().out
    assert f"# Out of bounds values : {32 if added else 0} " in printed
    assert ("FAILED" if status else "OK") in printed


def test_results_that_nobody_checked_are_not_ok(monkeypatch, capsys) -> None:
    monkeypatch.setattr(measure, "init", Solo)
    assert measure.run(parsed(["-b", "64", "-n", "1", "-w", "0", "-c", "0"])) == 0
    assert "# Out of bounds values : not checked\n" in capsys.readouterr().out
    assert verdict([{"wrong": 0}, {"wrong": None}]) == "0 OK (1 not checked)"


@pytest.mark.parametrize(("name", "least"), [("allreduce", 4), ("gather", 12), ("alltoallv", 4)])
def test_sizes_below_an_element_are_rounded_up(name: str, least: int) -> None:
    sizes = [Case.of(FORMS[name], 3, nbytes, np.dtype("f4")).nbytes for nbytes in (0, 1, 3, 25)]
    assert sizes == [0, least, least, 24]


def test_the_error_of_one_thread_ends_the_others(monkeypatch, capsys) -> None:
    monkeypatch.setattr(measure, "init", Solo)
    with pytest.raises(RuntimeError, match="no path"):
        measure.run(parsed(["-b", "64", "-t", "2"]))


def run_perf(
    arguments: Sequence[str], launcher: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*launcher, *PERF, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def run_ranks(arguments: Sequence[str], nranks: int = 2) -> list[int]:
    """Run the command on ranks that a launcher has started; return their exit statuses."""
    return launch(partial(main, ["bench", *arguments]), nranks, timeout_s=TIMEOUT_S)


def results_of(path: Path, arguments: Sequence[str], nranks: int = 2) -> list[dict[str, Any]]:
    assert run_ranks([*arguments, "--json", str(path)], nranks) == [0] * nranks
    rows = right_rows(path)
    assert {row["nranks"] for row in rows} == {nranks}
    return rows


def right_rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["results"]
    assert {row["wrong"] for row in rows} == {0}
    return rows


TINY = ["-b", "4", "-e", "600", "-f", "150", "-n", "2", "-w", "1"]


def test_every_collective_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    ran = run_perf([*TINY, "--collective", "all", "--nranks", "3", "--json", str(path)])
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[1].startswith("# transport of host arrays: ")
    rows = right_rows(path)
    forms = FORMS.values()
    assert Counter(row["collective"] for row in rows) == {
        form.name: 1 if form.name == "barrier" else 4 if form.can_be_in_place else 2
        for form in forms
    }
    assert all(row["time_us"] > 0 and row["nranks"] == 3 for row in rows)
    assert {row["nbytes"] for row in rows if row["collective"] == "gather"} == {12, 600}


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
    for row in results_of(tmp_path / "found.json", [*TINY, *options]):
        assert row | fields | {"wrong": 0} == row


def test_every_root_in_turn(tmp_path: Path) -> None:
    options = ["-r", "-1", "--collective", "reduce"]
    rows = results_of(tmp_path / "roots.json", [*TINY, *options], nranks=3)
    assert Counter(row["root"] for row in rows) == {0: 4, 1: 4, 2: 4}


def test_all_types_and_operations(tmp_path: Path) -> None:
    options = ["-b", "64", "-n", "1", "-w", "0", "-d", "all", "-o", "all"]
    rows = results_of(tmp_path / "types.json", [*options, "--collective", "reduce_scatter"])
    found = {(row["dtype"], row["op"]) for row in rows}
    pairs = [(DTYPES[code].name, op.name.lower()) for code, ops in ON_GPU.items() for op in ops]
    assert found == set(pairs)


def test_ranks_started_by_mpiexec(tmp_path: Path) -> None:
    path = tmp_path / "mpi.json"
    launcher = [str(find_mpiexec()), "-n", "2"]
    ran = run_perf([*TINY, "--json", str(path)], launcher)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert {row["nranks"] for row in right_rows(path)} == {2}


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


def test_a_root_that_is_no_rank_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks([*TINY, "--collective", "reduce", "-r", "2"]) == [2, 2]
    assert "-r 2: allowed are 0 to 1" in capfd.readouterr().err


def test_results_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    ran = run_perf([*TINY, "--json", str(tmp_path)])
    assert ran.returncode == 2
    assert f"--json {tmp_path} cannot be written (Is a directory)" in ran.stderr
    assert ran.stdout == "", "nothing was measured"


def test_the_check_of_a_file_of_results_leaves_no_trace(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("{}")
    for path in (old, new):
        check_file(path)
    assert old.read_text() == "{}"
    assert not new.exists()


def test_results_in_a_missing_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"new\.json cannot be written \(No such file or dir"):
        check_file(tmp_path / "folder" / "new.json")
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["-G", "1"], "CUDA graphs cannot capture"),
        (["-R", "2"], "no symmetric memory"),
        (["-g", "2"], "a rank of r2ccl is a process"),
        (["-g", "1", "--collective", "sendrecv"], "sendrecv takes no arrays on a GPU"),
        (["-r", "1"], "allreduce has no root"),
        (["-o", "sum", "--collective", "gather"], "gather does not reduce"),
        (["-z", "0", "-m", "2"], "the calls of a group run at its end"),
        (["-m", "2", "--collective", "barrier"], "cannot be grouped"),
        (["-z", "0", "--collective", "all"], "name one collective"),
        (["-t", "0"], "must be above 0"),
        (["-f", "1", "-i", "0"], "--step must be above 0"),
        (["-c", "-1"], "at least 0"),
        (["-f", "inf"], "allowed is a finite number"),
        (["-e", "1K"], "--maxbytes 1024 is below --minbytes 1048576"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_options_without_a_meaning_are_refused(capsys, options, reason) -> None:
    assert main(["bench", *options]) == 2
    assert reason in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", ["alltoallv", "scan", "all"])
def test_collectives_are_allowed_on_a_gpu(monkeypatch, name: str) -> None:
    cuda = pytest.importorskip("numba.cuda", reason="numba-cuda, of r2ccl[gpu], is not installed")
    monkeypatch.setattr(cuda, "gpus", [0])
    every = set(FORMS) - {"sendrecv", "barrier"}
    found = parsed(["-g", "1", "--collective", name]).collectives
    assert set(found) == (every if name == "all" else {name})


def test_a_gpu_is_refused_where_there_is_none(monkeypatch, capsys) -> None:
    cuda = pytest.importorskip("numba.cuda", reason="numba-cuda, of r2ccl[gpu], is not installed")
    monkeypatch.setattr(cuda, "gpus", [])
    assert main(["bench", "-g", "1"]) == 2
    assert "-g 0 measures host memory" in " ".join(capsys.readouterr().err.split())


def test_lines_have_the_columns_of_their_heading() -> None:
    case = Case(FORMS["sendrecv"], 2, 256, np.dtype(np.float32))
    options = parsed(["--collective", "sendrecv"])
    half = row_of(case, "out_of_place", options, 2e-6, 0)
    line = format_line(case, [half, None])
    assert line.split()[:6] == ["1024", "256", "float", "none", "-1", "2.00"]
    assert line.split()[6:9] == ["0.51", "0.51", "0"]
    assert line.split()[9:] == ["N/A"] * 4
    assert len(line) == len(HEADER.splitlines()[2])


@pytest.mark.parametrize(
    ("name", "address", "way", "transport"),
    [
        ("lo", "127.0.0.1", {"is_local": True}, "shared memory, TCP for calls that cannot use it"),
        ("eth0", "10.0.0.1", {}, "TCP"),
        ("eth0", "10.0.0.1", {"nchunks": 2}, "TCP, shared memory within each host"),
        ("mlx5_0:1", "", {}, "RDMA, TCP as the last resort"),
    ],
)
def test_the_transports_are_named(name: str, address: str, way, transport: str) -> None:
    rail = RailHealth(0, name, address, 0, "up", (), 0)
    call = Explanation(4, None, (), "", **way)  # type: ignore[arg-type]
    assert describe_paths([rail], call) == (
        f"# transport of host arrays: {transport}; rails of rank 0: 0 {name}"
    )
