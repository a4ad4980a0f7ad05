"""Discovery of the MPI that the tests use."""

import shutil
import sys
from pathlib import Path

import pytest

#: MPICH maps its queues in /dev/shm and dies of SIGBUS if they do not fit. With 2 to 4 ranks it
#: takes under 32 MiB.
_SHM_NBYTES = 32 << 20


def find_mpiexec() -> Path:
    """Return the launcher of the environment's own MPI; skip the test if it cannot run."""
    beside = Path(sys.executable).with_name("mpiexec.hydra")
    if not beside.exists():
        pytest.skip(f"no mpiexec beside {sys.executable}: pip install mpich")
    free = shutil.disk_usage("/dev/shm").free
    if free < _SHM_NBYTES:
        pytest.skip(f"MPICH needs {_SHM_NBYTES >> 20} MiB in /dev/shm; {free >> 20} are free")
    return beside
