"""Programs for mpi4py run on r2ccl with one changed line, and lose a rail without losing a bit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.mpi import find_mpiexec
from support.slow import slow_but

pytest.importorskip("mpi4py", reason="mpi4py is not installed")

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted((ROOT / "examples/mpi").glob("*.py"))
IMPORTS = ("from mpi4py import MPI\n", "from r2ccl.interop import mpi as MPI\n")
#: Collective of r2ccl, of those that a program runs, in which a rail is lost.
LOST_AT = {"heat": 20, "kmeans": 30, "conjugate_gradient": 30, "ring": 6}

#: Messages of several slices that are under way, in both directions, while a rail is lost.
RING = """
import hashlib

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
x, out = np.arange(300_000.0) + comm.rank, np.empty(300_000)
digest, total = hashlib.sha256(), np.zeros(1)
for step in range(8):
    requests = [comm.Irecv(out, before, step), comm.Isend(x, after, step)]
    comm.Allreduce(x[:1], total)
    MPI.Request.Waitall(requests)
    digest.update(comm.sendrecv(out.tobytes(), before, source=after))
    x += out + total
if comm.rank == 0:
    print(f"sum {x.sum():.6e}, digest {digest.hexdigest()[:16]}")
"""

#: Runs programs; then rank 0 writes the number of repairs of all ranks, because mpiexec mixes what
#: several ranks write. Fault plans take the rank from RANK.
RUN = """
import os, runpy, sys

os.environ["RANK"] = os.environ["PMI_RANK"]
for program in sys.argv[1:]:
    runpy.run_path(program, run_name="__main__")

from r2ccl.interop import mpi

comm = mpi.COMM_WORLD
nrepairs = comm.mpi.reduce(len(comm.communicator.repairs()))
if comm.rank == 0:
    print(f"{nrepairs} repairs")
"""


def run(nranks: int, *programs: Path, **env: str) -> tuple[list[str], int]:
    """Return what each program writes, and the number of repairs on all ranks."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [find_mpiexec(), "-n", str(nranks), sys.executable, "-c", RUN, *map(str, programs)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *written, last = done.stdout.splitlines()
    assert len(written) == len(programs), done.stdout
    assert all("digest " in each for each in written), done.stdout
    found = re.fullmatch(r"(\d+) repairs", last)
    assert found, done.stdout
    return written, int(found[1])


def changed(program: Path, folder: Path) -> Path:
    """Return a copy of a program with the import of MPI changed, which is one line."""
    source = program.read_text(encoding="utf-8")
    assert source.count(IMPORTS[0]) == 1
    copy = folder / program.name
    copy.write_text(source.replace(*IMPORTS), encoding="utf-8")
    return copy


def losing_a_rail(program: Path, folder: Path) -> dict[str, str]:
    """Return the environment in which rank 1 loses its rail 0 in the middle of a program."""
    plan = folder / "plan.json"
    at_op = LOST_AT[program.stem]
    fault = {"action": "nic_down", "node": 1, "rank": 1, "rail": 0, "at_op": at_op}
    plan.write_text(json.dumps([fault]), encoding="utf-8")
    wrapper = "r2ccl.testing.fault_plan:wrap_by_env"
    return {"R2CC_FAULT_PLAN": str(plan), "R2CC_TRANSPORT_WRAPPER": wrapper}


@pytest.mark.parametrize(
    "program", slow_but(PROGRAMS[1:2], PROGRAMS), ids=lambda program: program.stem
)
def test_two_ranks_have_the_bits_of_mpi(program: Path, tmp_path: Path) -> None:
    """The sum of two numbers does not depend on their order, so MPI computes the same bits."""
    check_bits_of_mpi(program, changed(program, tmp_path), tmp_path)


def check_bits_of_mpi(program: Path, ours: Path, folder: Path) -> None:
    (expected, written), nrepairs = run(2, program, ours, **losing_a_rail(program, folder))
    assert written == expected
    assert nrepairs >= 2  # both ends moved their channels


def test_messages_under_way_lose_no_bit(tmp_path: Path) -> None:
    program = tmp_path / "ring.py"
    program.write_text(RING, encoding="utf-8")
    (folder := tmp_path / "changed").mkdir()
    check_bits_of_mpi(program, changed(program, folder), tmp_path)


@pytest.mark.parametrize(
    "program", slow_but(PROGRAMS[:1], PROGRAMS), ids=lambda program: program.stem
)
def test_a_lost_rail_changes_no_bit_of_three_ranks(program: Path, tmp_path: Path) -> None:
    ours = changed(program, tmp_path)
    expected, nrepairs = run(3, ours)
    assert nrepairs == 0
    written, nrepairs = run(3, ours, **losing_a_rail(program, tmp_path))
    assert written == expected
    assert nrepairs >= 2
