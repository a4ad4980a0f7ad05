"""Run jobs of several libraries side by side, and measure one at a time.

A `Job` starts the ranks of one library (`worker`) and then commands all of them, through one local
socket each, to run a number of calls. Between commands every rank sleeps in a read of that
socket, so that an idle library takes no processor time from the measured one; MPICH, for example,
spins inside its calls.

A rank ends when its socket closes, so it also ends when the bench is killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec
from peer_calls import GLOO_LACKS

_WORKER = str(Path(__file__).with_name("worker.py"))
_START_TIMEOUT_S = 60.0
#: Seconds between checks for ranks that ended.
_LOOK_S = 0.5
_RUN_TIMEOUT_S = 120.0
_MESSAGE_NBYTES = 1 << 16


class Unavailable(Exception):
    """Raised when a library cannot be measured on this machine; the text has the reason."""


class Hung(Unavailable):
    """Raised when a rank does not answer."""


#: Command line of a process, and its additional environment variables.
ToStart = tuple[list[str], dict[str, str]]


class Ranks:
    """Base class of jobs: processes that connect to a local socket and wait for commands.

    Parameters
    ----------
    nranks : int
    nlines : int
        Number of last output lines that an error shows.
    """

    def __init__(self, nranks: int, nlines: int = 1) -> None:
        self.nranks = nranks
        self._nlines = nlines
        self._folder = tempfile.TemporaryDirectory(prefix="r2ccl-bench-")
        self._log = Path(self._folder.name, "log")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: list[socket.socket] = []

    def close(self) -> None:
        """End the ranks: close their sockets, then SIGTERM, then SIGKILL."""
        for rank in self._ranks:
            rank.close()
        steps = ((10.0 if self._ranks else 0.0, 0), (5.0, signal.SIGTERM), (5.0, signal.SIGKILL))
        for patience_s, number in steps:
            alive = [process for process in self._processes if process.poll() is None]
            if number:
                for process in alive:
                    os.killpg(process.pid, number)
            deadline = time.monotonic() + patience_s
            for process in alive:
                with suppress(subprocess.TimeoutExpired):  # the next step is harsher
                    process.wait(max(0.0, deadline - time.monotonic()))
        self._folder.cleanup()

    def __enter__(self) -> Self:
        """Return this object."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the ranks."""
        self.close()

    def _start(self, commands: Iterable[ToStart], env: Mapping[str, str]) -> None:
        """Start the processes, each with its own variables, and wait until all ranks connect."""
        address = str(Path(self._folder.name, "socket"))
        common = {**os.environ, **env, "BENCH_ADDRESS": address}
        # SOCK_SEQPACKET preserves message boundaries and reports the end of a peer.
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen(self.nranks)
            with self._log.open("wb") as log:
                for arguments, extra in commands:
                    self._processes.append(
                        subprocess.Popen(
                            arguments,
                            env={**common, **extra},
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            self._accept(listener)

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(_LOOK_S)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while len(self._ranks) < self.nranks:
            try:
                self._ranks.append(listener.accept()[0])
            except TimeoutError:
                if any(process.poll() is not None for process in self._processes):
                    raise self._failed("a rank ended while starting") from None
                if time.monotonic() > deadline:
                    why = self._failed(f"the ranks did not start within {_START_TIMEOUT_S:g} s")
                    raise Hung(str(why)) from None

    def _failed(self, what: str) -> Unavailable:
        """Return the error for ranks that ended or hang, with their last output."""
        said = self._log.read_text(errors="replace").strip().splitlines()
        return Unavailable(f"{what}; last output: {' / '.join(said[-self._nlines :]) or '(none)'}")


class Library(NamedTuple):
    """Library to compare: its name, its transport, and what it needs and lacks."""

    name: str
    transport: str
    packages: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()

    def lacks_any(self, collective: str) -> bool:
        """Return whether the library lacks one of the collectives, their names joined by ``+``."""
        return not set(collective.split("+")).isdisjoint(self.lacks)


R2CCL = Library("r2ccl", "tcp", env=(("R2CC_SHM", "0"),))
LOCAL = Library("r2ccl", "shm", env=(("R2CC_SHM", "1"),))
#: Arrays that all ranks reach directly.
SYMMETRIC = Library("r2ccl", "symmetric", env=(*LOCAL.env, ("BENCH_SYMMETRIC", "1")))
GLOO = Library("gloo", "tcp", ("torch",), GLOO_LACKS)
MPICH = Library("mpich", "shm", ("mpi4py",))
#: MPICH's ranks treat one another as on different nodes; either of its network layers uses TCP.
MPICH_TCP = Library(
    "mpich",
    "tcp",
    ("mpi4py",),
    env=(("MPIR_CVAR_NOLOCAL", "1"), ("UCX_TLS", "tcp,self"), ("FI_PROVIDER", "tcp")),
)
OPENMPI = Library(
    "openmpi",
    "shm",
    ("mpi4py", "openmpi"),
    env=(
        ("MPI4PY_MPIABI", "openmpi"),
        *((f"{name}_PREFIX", sys.prefix) for name in ("OPAL", "PRTE", "PMIX")),
        *(
            (f"{name}_ALLOW_RUN_AS_ROOT{suffix}", "1")
            for name in ("OMPI", "PRTE")
            for suffix in ("", "_CONFIRM")
        ),
        ("LD_LIBRARY_PATH", f"{sys.prefix}/lib"),
    ),
)
#: Without the collectives that use shared memory, so that all data passes TCP.
OPENMPI_TCP = OPENMPI._replace(
    transport="tcp",
    env=(
        *OPENMPI.env,
        ("OMPI_MCA_pml", "ob1"),
        ("OMPI_MCA_btl", "tcp,self"),
        ("OMPI_MCA_btl_tcp_if_include", "lo"),
        ("OMPI_MCA_coll", "^sm,xhc,han"),
    ),
)


class Job(Ranks):
    """Ranks of one library, started and waiting for commands.

    Parameters
    ----------
    library : Library
    nranks : int
    **env : str
        Environment variables of the ranks, added to those of this process.

    Raises
    ------
    Unavailable
        If a package or launcher is missing, or the ranks do not start.
    """

    def __init__(self, library: Library, nranks: int, **env: str) -> None:
        super().__init__(nranks)
        self.library = library
        try:
            self._start(_commands(library, nranks, self._folder.name), {**dict(library.env), **env})
        except BaseException:
            self.close()
            raise

    def run(
        self,
        nbytes: int,
        iterations: int,
        warmup: int,
        group: int = 0,
        collective: str = "allreduce",
    ) -> float:
        """Run a collective on `nbytes` of float32; return the time of one call in seconds.

        Several collectives, their names joined by ``+``, are called in turn. Allreduces, broadcasts
        and reduces are in place. The time is that of `iterations` back-to-back calls, or rounds of
        one call of each collective, divided by the number of calls, on the slowest rank. `group`
        selects the communicator of an r2ccl job with several (``BENCH_MODES``).

        Raises
        ------
        Unavailable
            If a rank fails or does not answer in time.
        """
        for rank in self._ranks:
            rank.send(msgspec.json.encode((collective, nbytes, iterations, warmup, group)))
        deadline = time.monotonic() + _RUN_TIMEOUT_S
        return max(self._answer(rank, deadline) for rank in self._ranks)

    def calibrate(self, nbytes: int, loop_s: float, collective: str = "allreduce") -> int:
        """Return the number of calls, or rounds, in a loop of about `loop_s` s: 3 to 2,000."""
        count = 3
        for _ in range(2):  # again, because the first calls of a size are slow
            once_s = self.run(nbytes, count, warmup=1, collective=collective)
            round_s = once_s * len(collective.split("+"))
            count = min(2000, max(3, round(loop_s / round_s)))
        return count

    def _answer(self, rank: socket.socket, deadline: float) -> float:
        rank.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            answer = rank.recv(_MESSAGE_NBYTES)
        except TimeoutError:
            raise self._failed("a rank did not answer in time") from None
        if not answer:
            raise self._failed("a rank ended")
        decoded: float | str = msgspec.json.decode(answer, type=float | str)
        if isinstance(decoded, str):
            raise self._failed(decoded)
        return decoded


def _commands(library: Library, nranks: int, folder: str) -> list[ToStart]:
    """Return the processes to start for a library, each with its own variables."""
    for package in library.packages:
        if not is_installed(package):
            raise Unavailable(f"the package {package} is not installed")
    worker = [sys.executable, _WORKER, library.name]
    if library.name == R2CCL.name:
        return [([sys.executable, "-m", "r2ccl", "launch", "-n", str(nranks), "--", *worker], {})]
    if library.name == MPICH.name:
        return [([_mpiexec(), "-n", str(nranks), *worker], {})]
    if library.name == OPENMPI.name:
        # Launcher of Open MPI 5; `mpiexec` may be that of another MPI.
        prterun = str(Path(sys.executable).with_name("prterun"))
        options = ["--map-by", ":oversubscribe", "--bind-to", "none"]
        return [([prterun, "-n", str(nranks), *options, *worker], {})]
    common = {
        "WORLD_SIZE": str(nranks),
        "GLOO_SOCKET_IFNAME": "lo",
        "BENCH_STORE": str(Path(folder, "store")),
    }
    return [(worker, {**common, "RANK": str(rank)}) for rank in range(nranks)]


def is_installed(name: str) -> bool:
    """Return whether a module or, for Open MPI, which has none, a distribution is installed."""
    if find_spec(name) is not None:
        return True
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _mpiexec() -> str:
    """Return MPICH's launcher: beside this Python (pip's mpich), else on the path.

    Open MPI installs an `mpiexec`, too, in the place of MPICH's; only MPICH has the longer name.
    """
    beside = Path(sys.executable).with_name("mpiexec.hydra")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise Unavailable("mpiexec not found: install the package mpich")
    said = subprocess.run(
        [found, "--version"], capture_output=True, text=True, timeout=20, check=False
    ).stdout
    if "HYDRA" not in said:
        raise Unavailable(f"{found} is not MPICH's: install the package mpich")
    return found


__all__ = [
    "GLOO",
    "LOCAL",
    "MPICH",
    "MPICH_TCP",
    "OPENMPI",
    "OPENMPI_TCP",
    "R2CCL",
    "SYMMETRIC",
    "Hung",
    "Job",
    "Library",
    "Ranks",
    "ToStart",
    "Unavailable",
    "is_installed",
]
