"""`r2ccl.interop.mpi` does what mpi4py does: each case of `mpi_rank` has the same outcome."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from contract.mpi_rank import CASES
from support.mpi import find_mpiexec
from support.once import once

pytest.importorskip("mpi4py", reason="mpi4py is not installed")

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("mpi_rank.py")
NRANKS = 3


def mpiexec(nranks: int, *argv: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a Python program under MPI."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [find_mpiexec(), "-n", str(nranks), sys.executable, *map(str, argv)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


#: Runs programs that are given as text.
RUN = """
import sys

for program in sys.argv[1:]:
    exec(program, {"__name__": "__main__"})
"""


def written(nranks: int, *programs: str) -> list[Any]:
    """Run programs that must succeed one after another; return the JSON that each writes."""
    done = mpiexec(nranks, "-c", RUN, *programs)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def of_one(run_folder: Path) -> dict[str, Any]:
    """Output of the programs of one rank, by program. One job runs all: its start is slow."""
    programs = (METHODS, SIGNATURES, NAMES, FLUSHES)
    found = once(run_folder, "mpi-of-one", lambda: written(1, *programs))
    return dict(zip(programs, found, strict=True))


@pytest.fixture(scope="module")
def of_two(run_folder: Path) -> dict[str, Any]:
    """Output of the programs of two ranks. One job runs all; the last leaves active requests."""
    programs = (CHILDREN, UNLIKE_MPI, THREADS, INTERRUPTED, REFUSALS)
    found = once(run_folder, "mpi-of-two", lambda: written(2, *programs))
    return dict(zip(programs, found, strict=True))


@pytest.fixture(scope="module")
def reports(run_folder: Path) -> list[dict[str, Any]]:
    """Outcomes of all cases, and the methods that they called, on each rank."""
    found: list[dict[str, Any]] = once(run_folder, "mpi", reported)
    assert len(found) == NRANKS
    return found


def reported() -> Any:
    done = mpiexec(NRANKS, PROGRAM)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CASES)
def test_both_have_the_same_outcome(reports: list[dict[str, Any]], name: str) -> None:
    for rank, report in enumerate(reports):
        expected, got = (report["outcomes"][name][library] for library in ("mpi4py", "r2ccl"))
        texts = [each.pop("text", "") for each in (expected, got)]
        assert got == expected, f"rank {rank}: {texts}"
        assert ("error" in got) == (name.startswith("error")), texts


METHODS = """
import inspect, json
from mpi4py import MPI
from r2ccl.interop import mpi

pairs = (
    (MPI.Intracomm, mpi.Comm), (MPI.Request, mpi.Request), (MPI.Prequest, mpi.Prequest),
    (MPI.Message, mpi.Message), (MPI.Op, mpi.Op),
)
print(json.dumps({
    f"{own.__name__}.{name}": "buf" in " ".join(inspect.signature(getattr(own, name)).parameters)
    for plain, own in pairs
    for name in vars(own)
    if not name.startswith("_") and callable(getattr(plain, name, None))
    and callable(getattr(own, name)) and getattr(own, name).__doc__[:6] != "Raise "
}))
"""
#: Methods that end a job: `test_abort_ends_the_job_with_its_code` calls it.
ENDING = ["Comm.Abort"]


def test_every_method_is_compared_with_that_of_mpi4py(
    reports: list[dict[str, Any]], of_one: dict[str, Any]
) -> None:
    """Each has a case with a result; those of a communicator with buffers, one with an error."""
    methods = of_one[METHODS]
    with_result: set[str] = set()
    with_error: set[str] = set()
    for report in reports:
        for method, cases in report["called"].items():
            for case in cases:
                (with_error if case.startswith("error") else with_result).add(method)
    assert sorted(set(methods) - with_result) == ENDING
    with_buffers = {
        name for name, has_buffer in methods.items()
        if has_buffer and name.startswith("Comm.") and name.removeprefix("Comm.")[0].isupper()
    }  # fmt: skip
    assert len(with_buffers) > 60
    assert sorted(with_buffers - with_error) == []


SIGNATURES = """
import inspect, json
from mpi4py import MPI
from r2ccl.interop import mpi

def shape(owner, name):
    found = inspect.signature(getattr(owner, name)).parameters.values()
    return [[each.name, repr(each.default)] for each in found][1:]

pairs = (
    (MPI.Intracomm, mpi.Comm), (MPI.Prequest, mpi.Prequest), (MPI.Message, mpi.Message)
)
print(json.dumps({
    name: [shape(plain, name), shape(own, name)]
    for plain, own in pairs
    for name in [*vars(own), *vars(own.__base__)]
    if not name.startswith("_") and callable(getattr(plain, name, None))
    and vars(own).get(name, getattr(own, name)).__doc__[:5] != "Raise"
    and name not in mpi.comm.PASSED
}))
"""


def test_arguments_and_defaults_are_those_of_mpi4py(of_one: dict[str, Any]) -> None:
    found = of_one[SIGNATURES]
    assert len(found) > 40
    assert {name: own for name, (_, own) in found.items()} == {
        name: plain for name, (plain, _) in found.items()
    }


NAMES = """
import json
from mpi4py import MPI
from r2ccl.interop.mpi import comm

public = {name for name in dir(MPI.Intracomm) if not name.startswith("_")}
own = set(vars(comm.Comm))
refused = {name for name in own & public if getattr(comm.Comm, name).__doc__[:6] == "Raise "}
print(json.dumps({
    "refused": sorted(refused),
    "unknown": sorted(comm.PASSED - public),
    "twice": sorted(own & comm.PASSED),
    "missing": sorted(public - own - comm.PASSED),
    "carried": sorted(own & public - refused),
}))
"""


def names_in(rows: list[str]) -> set[str]:
    """Return the names of methods in rows of the page, in lower case."""
    return {name.lower() for row in rows for name in re.findall(r"`([A-Z]?[a-z_]+)`", row)}


def undocumented(names: list[str], documented: set[str]) -> list[str]:
    """Return the names that are neither documented nor a form of a documented method."""

    def bases(name: str) -> set[str]:
        base = name.lower().removesuffix("_init")
        return {name.lower(), base, base.removeprefix("i")}

    return [name for name in names if not bases(name) & documented]


def test_every_name_is_carried_passed_or_refused(of_one: dict[str, Any]) -> None:
    found = dict(of_one[NAMES])
    carried = found.pop("carried")
    table = (ROOT / "docs/mpi.md").read_text(encoding="utf-8").split("<!-- table:mpi -->")[1]
    rows = table.split("<!-- /table -->")[0].splitlines()[3:]
    assert undocumented(carried, names_in(rows[:5])) == []
    assert names_in(rows[:5]) <= {name.lower() for name in carried}
    assert found == {
        "refused": [
            "Ack_failed", "Agree", "Get_failed", "Iagree", "Idup", "Idup_with_info",
            "Iflush_buffer", "Is_revoked", "Ishrink", "Precv_init", "Psend_init", "Revoke",
            "Shrink",
        ],
        "unknown": [], "twice": [], "missing": [],
    }  # fmt: skip


REFUSALS = """
import json
import numpy as np
from mpi4py import MPI
from r2ccl.interop.mpi import Comm

comm = Comm(MPI.COMM_WORLD)
said = []
for run in (
    lambda: comm.Agree(1),
    lambda: comm.Revoke(),
    lambda: comm.Psend_init(np.zeros(2), 2, 0),
    lambda: comm.Send(np.zeros(2), 2),
    lambda: comm.Recv(np.zeros(2), 7),
    lambda: comm.Send(np.zeros(2), 0, -3),
    lambda: comm.Irecv(np.zeros(2)).Free(),
    lambda: comm.Bcast([MPI.BOTTOM, 1, MPI.INT]),
    lambda: comm.Allreduce(np.zeros(2), np.zeros(2), MPI.Op.Create(lambda a, b, t: None)),
    lambda: comm.Allreduce(np.zeros(2, "g"), np.zeros(2, "g")),
    lambda: comm.Bcast([np.zeros(2), 3, MPI.DOUBLE]),
    lambda: comm.Bcast([np.zeros(2), (1, 2), MPI.DOUBLE]),
    lambda: comm.Ibarrier().Free(),
    lambda: comm.Bcast(type("Card", (), {"__cuda_array_interface__": {}})()),
    lambda: Comm(MPI.COMM_WORLD, timeout_s=-1),
    lambda: Comm(MPI.COMM_SELF.Create_intercomm(0, MPI.COMM_WORLD, 1 - comm.rank)),
):
    try:
        run()
    except Exception as exc:
        said.append([type(exc).__name__, str(exc)])
comm.Barrier()
if comm.rank == 0:
    print(json.dumps(said))
"""


def test_refusals_say_what_to_do(of_two: dict[str, Any]) -> None:
    said = of_two[REFUSALS]
    expected = [
        ("MpiError", "r2ccl does not run Agree: call comm.mpi.Agree, which MPI runs"),
        ("MpiError", "does not run Revoke: call comm.communicator.revoke()"),
        ("MpiError", "r2ccl does not run Psend_init: call Send_init() for each part"),
        ("MpiError", "dest=2: allowed are 0 to 1, PROC_NULL"),
        ("MpiError", "source=7: allowed are 0 to 1, PROC_NULL and ANY_SOURCE"),
        ("MpiError", "tag=-3: allowed are 0 to "),
        ("MpiError", "the request is active, and its call is a receive: wait for it, or cancel it"),
        ("MpiError", "MPI.BOTTOM, which means absolute addresses, was given: pass the array"),
        ("MpiError", "op made by mpi4py's MPI.Op.Create for datatype MPI_DOUBLE: allowed are SUM"),
        ("MpiError", "datatype MPI_LONG_DOUBLE in a reduction: allowed are the predefined"),
        ("ValueError", "count 3 of MPI_DOUBLE needs bytes 0 to 24 of a buffer of 16 bytes"),
        ("ValueError", "count 1 of MPI_DOUBLE needs bytes 0 to 8 of a buffer of 0 bytes"),
        ("MpiError", "the request is active, and its call is a collective: wait for it"),
        ("MpiError", "Card in the memory of a GPU was given: call the methods of comm.comm"),
        ("InvalidArgument", "timeout_s"),
        ("TypeError", "expecting an intracommunicator"),
    ]
    for (kind, text), (expected_kind, expected_text) in zip(said, expected, strict=True):
        assert kind == expected_kind
        assert expected_text in text


UNLIKE_MPI = """
import json
import numpy as np
from mpi4py import MPI
from r2ccl.interop.mpi import Comm

comm = Comm(MPI.COMM_WORLD)
found = []

def is_truncated(run):
    try:
        run()
    except MPI.Exception as exc:
        return [exc.Get_error_class() == MPI.ERR_TRUNCATE, str(exc)]

if comm.rank == 0:
    comm.Send(np.arange(3.0), 1)
    found += is_truncated(lambda: comm.Send(np.zeros(100_000), 1))
else:
    out, large = np.zeros(2), np.zeros(3)
    found += is_truncated(lambda: comm.Recv(out))
    comm.Recv(large)
    found += [large.tolist(), *is_truncated(lambda: comm.Recv(large))]
parent = Comm(MPI.COMM_WORLD.Dup())
child = parent.Split()
again = child.Dup()
parent.Free()
found.append(again.allreduce(child.sendrecv(child.rank, 1 - child.rank)))
child.Free()
again.Free()
alone = Comm(MPI.COMM_WORLD.Dup())
alone.bsend("x" * 100_000, 1 - alone.rank)
sent = alone.isend("taken", 1 - alone.rank)
got = [alone.recv(), alone.recv()]
sent.Wait()
alone.Dup().Free()
alone.Free()
found.append([len(each) for each in got])
part = comm.Create_group(comm.Get_group().Incl([1]))
if part != MPI.COMM_NULL:
    found.append(part.allgather(comm.rank))
    part.Free()
found = MPI.COMM_WORLD.gather(found)
if comm.rank == 0:
    print(json.dumps(found))
"""


def test_what_differs_from_mpi(of_two: dict[str, Any]) -> None:
    (is_long, long, total, sizes), receiver = of_two[UNLIKE_MPI]
    assert is_long
    assert "rank 0 sent 800000 elements of uint8 with tag 0, but rank 1 receives up to 24" in long
    assert (total, sizes) == (1, [100_000, 5])
    is_short, short, kept, was_long, same, *rest = receiver
    assert is_short
    assert "rank 0 sent 24 elements of uint8 with tag 0, but rank 1 receives up to 16" in short
    assert kept == [0.0, 1.0, 2.0]
    assert (was_long, same) == (True, long)
    assert rest == [1, [100_000, 5], [1]]


FLUSHES = """
import json, threading
from types import SimpleNamespace
from r2ccl.interop.mpi.comm import Connections

class Message:
    def __init__(self, error=None):
        self.error, self.is_sent = error, threading.Event()

    def is_done(self):
        return self.is_sent.is_set()

    @property
    def has_succeeded(self):
        return self.is_sent.is_set() and self.error is None

    def wait(self):
        turn.release()
        assert self.is_sent.wait(30)
        if self.error is not None:
            raise self.error

connections = Connections(SimpleNamespace(close=lambda: None))
turn, message, found = threading.Semaphore(0), Message(), []

def flush():
    connections.flush()
    found.append(message.is_done())
    turn.release()

connections.keep(message)
threads = [threading.Thread(target=flush) for _ in range(2)]
for each in threads:
    each.start()
    assert turn.acquire(timeout=30)  # it waits for the message, or has ended
message.is_sent.set()
for each in threads:
    each.join(30)

failed = Message(OSError("failed"))
failed.is_sent.set()
connections.keep(failed)
connections.keep(message)
for _ in range(2):
    try:
        connections.flush()
    except OSError as exc:
        found.append(str(exc))
print(json.dumps(found))
"""


def test_two_threads_may_flush_buffered_messages(of_one: dict[str, Any]) -> None:
    assert of_one[FLUSHES] == [True, True, "failed"]


THREADS = """
import json, threading
import numpy as np
from mpi4py import MPI
from r2ccl.interop.mpi import Comm

comm = Comm(MPI.COMM_WORLD)
peer, taken, errors = 1 - comm.rank, [], []

def work(number):
    try:
        for turn in range(30):
            x = np.full(30_000 if turn % 9 == 0 else 10, float(turn))
            comm.Sendrecv_replace(x, peer, 1 + number, peer, 1 + number)
            assert (x == turn).all()
            # Objects of other sizes, which any of the threads may take.
            sent = comm.isend("x" * (97 * turn + number), peer)
            found = comm.recv(tag=0) if turn % 2 else comm.mprobe(tag=0).recv()
            taken.append(len(found))
            sent.wait()
    except BaseException as exc:
        errors.append(repr(exc))

threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
for each in threads:
    each.start()
for _ in range(20):
    comm.Barrier()
for each in threads:
    each.join()
found = MPI.COMM_WORLD.gather([errors, sorted(taken)])
if comm.rank == 0:
    print(json.dumps(found))
"""


def test_threads_send_and_receive_at_once(of_two: dict[str, Any]) -> None:
    sizes = sorted(97 * turn + number for turn in range(30) for number in range(4))
    assert of_two[THREADS] == [[[], sizes]] * 2


INTERRUPTED = """
import json, signal, time
import numpy as np
from mpi4py import MPI
from r2ccl.interop.mpi import Comm

comm = Comm(MPI.COMM_WORLD)
x = np.full(3, comm.rank + 1.0)
found = [False]
if comm.rank == 0:
    request = comm.Iallreduce(MPI.IN_PLACE, x)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        request.Wait()
    except KeyboardInterrupt:
        found = [True, bool(request), request.Wait(), bool(request), x.tolist()]
else:
    time.sleep(0.5)
    comm.Iallreduce(MPI.IN_PLACE, x).Wait()
if comm.rank == 0:
    print(json.dumps(found))
"""


def test_a_wait_can_follow_an_interrupted_wait(of_two: dict[str, Any]) -> None:
    assert of_two[INTERRUPTED] == [True, True, True, False, [3.0] * 3]


CHILDREN = """
import json, os
import numpy as np
from mpi4py import MPI
from r2ccl.interop.mpi import Comm

def used():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

comm = Comm(MPI.COMM_WORLD)
comm.Barrier()
before = used()
made = [comm.Dup() for _ in range(10)] + [comm.Split(0, -comm.rank) for _ in range(9)]
made.append(comm.Create_group(comm.Get_group()))
x = [each.sendrecv(at, 1 - each.rank) for at, each in enumerate(made)]
after = used()
for each in made:
    each.Free()
if comm.rank == 0:
    print(json.dumps([before, after, x]))
"""


def test_children_share_the_connections(of_two: dict[str, Any]) -> None:
    before, after, received = of_two[CHILDREN]
    # Fewer if a connection of the start was still being closed.
    assert [*map(max, before, after)] == before
    assert received == list(range(20))


LOST = """
import json, sys
import numpy as np
from mpi4py import MPI
from r2ccl import PeerLost, CommunicatorRevoked
from r2ccl.interop.mpi import Comm

comm = Comm(MPI.COMM_WORLD)
comm.Barrier()
MPI.COMM_WORLD.Barrier()  # rank 0 has left r2ccl's barrier too
if comm.rank == 1:
    comm.communicator.abort("the test ends it")
said = []
for _ in range(2):
    try:
        comm.Allreduce(MPI.IN_PLACE, np.zeros(1))
    except MPI.Exception as exc:
        is_revoked = exc.Get_error_class() == MPI.ERR_REVOKED
        said.append([is_revoked, exc.Get_error_string(), type(exc.__cause__).__name__])
said = MPI.COMM_WORLD.gather(said)
if comm.rank == 0:
    print(json.dumps(said))
"""


def test_an_ended_communicator_raises_an_mpi_exception() -> None:
    (of_ranks,) = written(2, LOST)
    for rank, said in enumerate(of_ranks):
        assert [[is_revoked, cause] for is_revoked, _, cause in said] == [
            [True, "CommunicatorRevoked"]
        ] * 2
        assert rank == 1 or "the test ends it" in said[0][1]


LOST_REQUEST = """
import json
import numpy as np
from mpi4py import MPI
from r2ccl.interop.mpi import Comm

comm = Comm(MPI.COMM_WORLD)
comm.Barrier()
MPI.COMM_WORLD.Barrier()
if comm.rank == 1:
    comm.communicator.abort("the test ends it")
else:
    request, said = comm.Iallreduce(MPI.IN_PLACE, np.zeros(1)), []
    for look in (request.Get_status, lambda: type(request).Get_status_all([request]), request.Wait):
        try:
            while not look():
                pass
            said.append("no error")
        except MPI.Exception as exc:
            said.append(exc.Get_error_class() == MPI.ERR_REVOKED)
    print(json.dumps(said))
"""


def test_get_status_raises_the_error_of_a_collective() -> None:
    (said,) = written(2, LOST_REQUEST)
    assert said == [True, True, True]


FATAL = """
import numpy as np
from mpi4py import MPI
from r2ccl.interop.mpi import Comm

comm = Comm(MPI.COMM_WORLD)
comm.Set_errhandler(MPI.ERRORS_ARE_FATAL)
try:
    comm.Bcast(np.zeros(1), root=9)
finally:
    print("not reached")
"""

UNCAUGHT = """
import numpy as np
from mpi4py import MPI
from r2ccl.interop.mpi import Comm

comm = Comm(MPI.COMM_WORLD)
comm.Barrier()
if comm.rank == 1:
    raise KeyError("a defect of the program")
comm.Barrier()
"""

ABORTED = """
from mpi4py import MPI
from r2ccl.interop.mpi import Comm

comm = Comm(MPI.COMM_WORLD)
comm.Barrier()
if comm.rank == 1:
    comm.Abort(7)
comm.Barrier()
"""

#: Rank 1 forks while a buffered message is on its way. Without ``finalize = False``, mpi4py itself
#: would wait for ever in the child.
FORKS = """
import os, signal, sys, time

import mpi4py
mpi4py.rc.finalize = False

import numpy as np
from mpi4py import MPI
from r2ccl.interop.mpi import Comm

comm = Comm(MPI.COMM_WORLD)
if comm.rank == 1:
    comm.Bsend(np.ones(100_000), 0)
    child = os.fork()
    if child == 0:
        sys.exit(7)
    until_s = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < until_s:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
    comm.send(os.waitstatus_to_exitcode(ended[1]) if ended[0] else "hangs", 0, 1)
else:
    x = np.zeros(100_000)
    status = comm.recv(source=1, tag=1)
    comm.Recv(x, 1)
    print(f"{status} {x.sum():g}")
comm.Barrier()
MPI.Finalize()
"""


def test_a_forked_child_may_exit() -> None:
    done = mpiexec(2, "-c", FORKS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "7 100000\n", "")


def test_a_fatal_error_ends_the_job() -> None:
    done = mpiexec(2, "-c", FATAL)
    assert done.returncode != 0
    assert "not reached" not in done.stdout


def test_an_uncaught_exception_ends_the_other_ranks() -> None:
    done = mpiexec(2, "-c", UNCAUGHT)
    assert done.returncode != 0
    assert (
        "rank 1 ended the communicator: the program ended with KeyError('a defect of the program')"
        in done.stderr
    )


def test_abort_ends_the_job_with_its_code() -> None:
    assert mpiexec(2, "-c", ABORTED).returncode == 7
