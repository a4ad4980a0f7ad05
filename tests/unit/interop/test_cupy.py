"""cupyx.distributed's shape says to a communicator what a program for CuPy means."""

from __future__ import annotations

import inspect
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.mpi import find_mpiexec

from r2ccl.communicator import Communicator
from r2ccl.errors import InvalidArgument
from r2ccl.interop import cupy
from r2ccl.interop.cupy import Backend, init_process_group
from r2ccl.types import ReduceOp

NRANKS = 3


class Recorder:
    """A communicator that only remembers what it was asked for; refuses what a real one would."""

    rank, nranks = 1, NRANKS

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        signature = inspect.signature(getattr(Communicator, name))

        def ask(*args: Any, **kwargs: Any) -> None:
            bound = signature.bind(self, *args, **kwargs)
            bound.arguments.pop("self")
            self.asked.append((name, dict(bound.arguments)))

        return ask


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def backend(recorder: Recorder) -> Backend:
    made: Any = recorder
    return Backend(made)


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether the arguments are the very same objects, but for numbers and strings."""
    plain = (int, str, type(None))
    return left.keys() == right.keys() and all(
        value == right[key] if isinstance(value, plain) else value is right[key]
        for key, value in left.items()
    )


class TestMethods:
    """Every method becomes one of the communicator, with its arguments in their places."""

    x, out, stream = np.zeros(6), np.zeros(6), object()

    @pytest.mark.parametrize(
        ("call", "name", "asked"),
        [
            (lambda c, x, o, s: c.all_reduce(x, o), "allreduce", {"op": ReduceOp.SUM}),
            (lambda c, x, o, s: c.all_reduce(x, o, "max", s), "allreduce",
             {"op": ReduceOp.MAX, "stream": "s"}),
            (lambda c, x, o, s: c.reduce(x, o), "reduce", {"op": ReduceOp.SUM, "root": 0}),
            (lambda c, x, o, s: c.reduce(x, o, 2, "prod", s), "reduce",
             {"op": ReduceOp.PROD, "root": 2, "stream": "s"}),
            (lambda c, x, o, s: c.reduce(x, o, root=1, op="min"), "reduce",
             {"op": ReduceOp.MIN, "root": 1}),
            (lambda c, x, o, s: c.scatter(x, o), "scatter", {"root": 0}),
            (lambda c, x, o, s: c.scatter(x, o, 2, s), "scatter", {"root": 2, "stream": "s"}),
            (lambda c, x, o, s: c.gather(x, o), "gather", {"root": 0}),
            (lambda c, x, o, s: c.gather(x, o, 2, s), "gather", {"root": 2, "stream": "s"}),
            (lambda c, x, o, s: c.all_to_all(x, o), "alltoall", {}),
            (lambda c, x, o, s: c.all_to_all(x, o, s), "alltoall", {"stream": "s"}),
        ],
    )  # fmt: skip
    def test_with_an_input_and_an_output(
        self, backend: Backend, recorder: Recorder, call: Any, name: str, asked: dict[str, Any]
    ) -> None:
        assert call(backend, self.x, self.out, self.stream) is None
        expected = {"x": self.x, "out": self.out, "stream": None, **asked}
        if "stream" in asked:
            expected["stream"] = self.stream
        ((got_name, got),) = recorder.asked
        assert got_name == name
        assert same(got, expected)

    def test_broadcast(self, backend: Backend, recorder: Recorder) -> None:
        backend.broadcast(self.x)
        backend.broadcast(self.x, 2, self.stream)
        (first, second) = recorder.asked
        assert first[0] == second[0] == "broadcast"
        assert same(first[1], {"x": self.x, "root": 0, "stream": None})
        assert same(second[1], {"x": self.x, "root": 2, "stream": self.stream})

    def test_reduce_scatter_and_all_gather(self, backend: Backend, recorder: Recorder) -> None:
        part = np.zeros(2)
        backend.reduce_scatter(self.x, part, 2, "avg", self.stream)
        backend.all_gather(part, self.x, 2)
        (scatter, gather) = recorder.asked
        assert (scatter[0], gather[0]) == ("reduce_scatter", "allgather")
        asked = {"x": self.x, "out": part, "op": ReduceOp.AVG, "stream": self.stream}
        assert same(scatter[1], asked)
        assert same(gather[1], {"x": part, "out": self.x, "stream": None})

    def test_barrier_and_stop(self, backend: Backend, recorder: Recorder) -> None:
        backend.barrier()
        backend.stop()
        assert recorder.asked == [("barrier", {}), ("close", {})]

    def test_rank_and_communicator(self, backend: Backend, recorder: Recorder) -> None:
        assert (backend.rank, backend.communicator) == (1, recorder)

    @pytest.mark.parametrize("op", ["SUM", "mean", ReduceOp.SUM, ""])
    def test_another_op_is_refused(self, backend: Backend, recorder: Recorder, op: Any) -> None:
        with pytest.raises(InvalidArgument, match=r"op=.*; allowed are sum, prod, min, max, avg"):
            backend.all_reduce(self.x, self.out, op)
        assert recorder.asked == []

    @pytest.mark.parametrize("name", ["send", "recv", "send_recv"])
    def test_what_a_communicator_cannot_do_is_missing_and_named(self, name: str) -> None:
        assert not hasattr(Backend, name)
        assert name in (cupy.__doc__ or "")


class TestCount:
    """``count`` is what each rank gets or sends; arrays may be longer."""

    def test_the_first_elements_are_used(self, backend: Backend, recorder: Recorder) -> None:
        long, short = np.arange(20.0).reshape(4, 5), np.zeros((2, 2))
        backend.reduce_scatter(long, short, 3)
        backend.all_gather(short, long, 3)
        (_, scatter), (_, gather) = recorder.asked
        for asked, names in ((scatter, ("x", "out")), (gather, ("out", "x"))):
            assert [asked[name].shape for name in names] == [(9,), (3,)]
            assert np.shares_memory(asked[names[0]], long)
            assert np.shares_memory(asked[names[1]], short)

    def test_no_elements(self, backend: Backend, recorder: Recorder) -> None:
        backend.all_gather(np.zeros(4), np.zeros((2, 2)), 0)
        assert [recorder.asked[0][1][name].size for name in ("x", "out")] == [0, 0]

    @pytest.mark.parametrize("count", [3, -1, 100])
    def test_too_short_an_array_is_refused(
        self, backend: Backend, recorder: Recorder, count: int
    ) -> None:
        x, part = np.zeros(6), np.zeros(2)
        for call in (
            lambda: backend.reduce_scatter(x, part, count),
            lambda: backend.all_gather(part, x, count),
        ):
            with pytest.raises(InvalidArgument, match=r"array has \d elements, but count requires"):
                call()
        assert recorder.asked == []

    def test_fortran_order_begins_with_other_elements_than_memory(
        self, backend: Backend, recorder: Recorder
    ) -> None:
        x = np.zeros((4, 5), order="F")
        with pytest.raises(InvalidArgument, match=r"out_array of shape .* is not C-contiguous"):
            backend.all_gather(np.zeros(2), x, 2)
        assert recorder.asked == []


class Started:
    """What `init` was called with, and the environment it saw."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int, nranks: int) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any], dict[str, str]]] = []
        self.made = SimpleNamespace(rank=rank, nranks=nranks)
        monkeypatch.setattr(cupy, "init", self)
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_WORLD_SIZE", "R2CC_LISTEN_FD",
                     "CUPYX_DISTRIBUTED_HOST", "CUPYX_DISTRIBUTED_PORT"):  # fmt: skip
            monkeypatch.delenv(name, raising=False)

    def __call__(self, *args: Any, **settings: Any) -> Any:
        self.calls.append((args, settings, dict(os.environ)))
        return self.made

    @property
    def saw(self) -> tuple[Any, ...]:
        """Port, and who the environment said this process is."""
        ((args, settings, env),) = self.calls
        assert args == ()
        names = ("MASTER_ADDR", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "R2CC_LISTEN_FD")
        return (settings, *(env.get(name) for name in names))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    return Started(monkeypatch, 1, NRANKS)


class TestMeeting:
    """Who this process is comes from the arguments, the environment, or MPI."""

    def test_cupys_defaults(self, started: Started) -> None:
        backend = init_process_group(NRANKS, 1)
        assert backend.communicator is started.made
        assert started.saw == ({"port": 13333}, "127.0.0.1", "1", "3", "3", None)

    def test_a_host_and_a_port(self, started: Started) -> None:
        init_process_group(NRANKS, 1, host="node0", port=4321)
        assert started.saw == ({"port": 4321}, "node0", "1", "3", None, None)

    def test_cupys_variables(self, started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUPYX_DISTRIBUTED_HOST", "node0")
        monkeypatch.setenv("CUPYX_DISTRIBUTED_PORT", "77")
        init_process_group(NRANKS, 1)
        assert started.saw == ({"port": 77}, "node0", "1", "3", None, None)

    def test_an_empty_host_is_none(self, started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUPYX_DISTRIBUTED_HOST", "")
        init_process_group(NRANKS, 1)
        assert started.saw == ({"port": 13333}, "127.0.0.1", "1", "3", "3", None)

    def test_arguments_win_over_variables(
        self, started: Started, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUPYX_DISTRIBUTED_HOST", "node0")
        monkeypatch.setenv("CUPYX_DISTRIBUTED_PORT", "77")
        init_process_group(NRANKS, 1, host="::1", port=78)
        assert started.saw == ({"port": 78}, "::1", "1", "3", "3", None)

    def test_a_launcher_says_who_this_is(
        self, started: Started, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in (("RANK", "1"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "node0"),
                            ("R2CC_LISTEN_FD", "9")):  # fmt: skip
            monkeypatch.setenv(name, value)
        init_process_group(NRANKS, 1)
        assert started.saw == ({}, "node0", "1", "3", None, "9")
        with pytest.raises(InvalidArgument, match="launcher set WORLD_SIZE=3 and RANK=1"):
            init_process_group(NRANKS, 2)

    def test_a_host_beats_a_launcher_whose_variables_are_put_back(
        self, started: Started, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "node7", "R2CC_LISTEN_FD": "9"}
        for name, value in launched.items():
            monkeypatch.setenv(name, value)
        init_process_group(NRANKS, 1, host="localhost")
        assert started.saw == ({"port": 13333}, "localhost", "1", "3", "3", None)
        assert {name: os.environ[name] for name in launched} == launched
        assert "LOCAL_WORLD_SIZE" not in os.environ

    def test_variables_are_put_back_after_a_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Started(monkeypatch, 0, 1)

        def fail(**_: Any) -> None:
            assert os.environ["RANK"] == "1"
            raise InvalidArgument("no")

        monkeypatch.setattr(cupy, "init", fail)
        before = dict(os.environ)
        with pytest.raises(InvalidArgument, match="no"):
            init_process_group(NRANKS, 1)
        assert dict(os.environ) == before

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ((3, 3), "rank=3 of n_devices=3; allowed is 0 to n_devices - 1"),
            ((3, -1), "rank=-1 of"),
            ((0, 0), "n_devices=0"),
        ],
    )
    def test_ranks_that_cannot_be(self, started: Started, arguments: Any, words: str) -> None:
        with pytest.raises(InvalidArgument, match=words):
            init_process_group(*arguments)
        assert started.calls == []

    def test_another_backend(self, started: Started) -> None:
        with pytest.raises(InvalidArgument, match=r"backend='nccl'; allowed is 'r2ccl'"):
            init_process_group(NRANKS, 1, backend="nccl")

    def test_a_port_that_is_no_number(
        self, started: Started, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUPYX_DISTRIBUTED_PORT", "http")
        with pytest.raises(InvalidArgument, match="DISTRIBUTED_PORT='http': a whole number"):
            init_process_group(NRANKS, 1)

    def test_the_parameters_are_cupys(self) -> None:
        parameters = inspect.signature(init_process_group).parameters
        assert [(each.name, each.kind.name[0], each.default) for each in parameters.values()] == [
            ("n_devices", "P", inspect.Parameter.empty), ("rank", "P", inspect.Parameter.empty),
            ("backend", "K", "r2ccl"), ("host", "K", None), ("port", "K", None),
            ("use_mpi", "K", False),
        ]  # fmt: skip


class World:
    """MPI's world as this process, rank 0 of three there, sees it."""

    def __init__(self, given: list[tuple[int, int]]) -> None:
        self.given = given
        self.log: list[Any] = []

    def Get_size(self) -> int:
        return len(self.given)

    def allgather(self, mine: tuple[int, int]) -> list[tuple[int, int]]:
        assert mine == self.given[0]
        return self.given

    def Split(self, color: int, key: int) -> Any:
        self.log.append(("split", color, key))
        return SimpleNamespace(Free=lambda: self.log.append("freed"))


class TestMpi:
    """Over MPI the ranks are those the program gives, not MPI's."""

    def in_world(self, monkeypatch: pytest.MonkeyPatch, given: list[tuple[int, int]]) -> World:
        world = World(given)
        module = ModuleType("mpi4py")
        vars(module)["MPI"] = SimpleNamespace(COMM_WORLD=world)
        monkeypatch.setitem(sys.modules, "mpi4py", module)
        return world

    def test_ranks_are_ordered_by_what_each_gave(
        self, started: Started, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        world = self.in_world(monkeypatch, [(1, 3), (0, 3), (2, 3)])
        init_process_group(3, 1, use_mpi=True)
        (((comm,), settings, _),) = started.calls
        assert hasattr(comm, "Free")
        assert settings == {}
        assert world.log == [("split", 0, 1), "freed"]

    @pytest.mark.parametrize(
        "given", [[(1, 3), (1, 3), (2, 3)], [(1, 3), (0, 3)], [(1, 3), (0, 2), (2, 3)]]
    )
    def test_ranks_that_do_not_fit_are_refused_on_all_of_them(
        self, started: Started, monkeypatch: pytest.MonkeyPatch, given: list[tuple[int, int]]
    ) -> None:
        world = self.in_world(monkeypatch, given)
        with pytest.raises(InvalidArgument, match=f"MPI's {len(given)} ranks gave"):
            init_process_group(3, 1, use_mpi=True)
        assert world.log == started.calls == []

    def test_without_mpi4py(self, started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "mpi4py", None)
        with pytest.raises(InvalidArgument, match=r"use_mpi=True, but mpi4py .*install mpi4py"):
            init_process_group(3, 1, use_mpi=True)


RANK_PROGRAM = """
import json, os, sys
import numpy as np
from r2ccl.interop.cupy import init_process_group

rank, port = map(int, sys.argv[1:])
comm = init_process_group(2, rank, port=port)
x, out, part = np.array([1.0, 2.0, 3.0, 4.0]) * (rank + 1), np.zeros(4), np.zeros(2)
said = {"rank": comm.rank}
comm.all_reduce(x, out)
said["all_reduce"] = out.tolist()
comm.reduce(x, out, 1, "max")
said["reduce"] = out.tolist()
comm.reduce_scatter(x, part, 2, "prod")
said["reduce_scatter"] = part.tolist()
comm.all_gather(part, out, 2)
said["all_gather"] = out.tolist()
comm.broadcast(x, 1)
said["broadcast"] = x.tolist()
comm.barrier()
comm.stop()
said["environment"] = sorted({"RANK", "WORLD_SIZE", "MASTER_ADDR"} & os.environ.keys())
print(json.dumps(said))
"""


MPI_PROGRAM = """
import numpy as np
from mpi4py import MPI
from r2ccl.interop.cupy import init_process_group

rank = 1 - MPI.COMM_WORLD.Get_rank()
comm = init_process_group(2, rank, use_mpi=True)
x = np.array([comm.rank + 1.0])
comm.all_reduce(x, x)
comm.broadcast(x, 1)
comm.stop()
# One process prints: what several write, mpiexec mixes.
said = MPI.COMM_WORLD.gather(f"rank {rank} {comm.rank} {x[0]}")
print(*(said or ()), sep="\\n", end="")
"""


def test_ranks_of_mpi_meet_under_the_numbers_they_give() -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    run = subprocess.run(
        [find_mpiexec(), "-n", "2", sys.executable, "-c", MPI_PROGRAM],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert sorted(run.stdout.splitlines()) == ["rank 0 0 3.0", "rank 1 1 3.0"]


def test_two_processes_meet_and_work_on_numpy_arrays(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    left_out = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "R2CC_SECRET", "R2CC_LISTEN_FD")
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    env["XDG_RUNTIME_DIR"] = str(tmp_path)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_PROGRAM, str(rank), str(port)],
            env=env, stdout=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        said = [json.loads(each.communicate(timeout=60)[0]) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    common = {
        "all_reduce": [3.0, 6.0, 9.0, 12.0],
        "all_gather": [2.0, 8.0, 18.0, 32.0],
        "broadcast": [2.0, 4.0, 6.0, 8.0],
        "environment": [],
    }
    assert said == [
        {"rank": 0, "reduce": common["all_reduce"], "reduce_scatter": [2.0, 8.0], **common},
        {"rank": 1, "reduce": common["broadcast"], "reduce_scatter": [18.0, 32.0], **common},
    ]
