"""Jobs whose ranks are forked from one process that has already imported their program.

Importing r2ccl takes 0.4 s of CPU time, on an emulated processor 15 s; a fork takes milliseconds.
The process that forks has one thread and opens no device, so that a rank starts like a new process.

Run as a program, with the paths of scripts and the names of modules to import, it reads jobs from
stdin, one line of JSON each, and writes the outputs of each job's ranks as one line. A script has a
function ``main`` that takes the argument.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from r2ccl.bootstrap.identity import LISTEN_FD_VARIABLE
from r2ccl.bootstrap.launch import LocalJob

_POLL_S = 0.02
#: Seconds for the imports, unless more are given.
_START_S = 120.0


class Output(NamedTuple):
    """Exit status and output of a rank."""

    returncode: int
    out: str
    err: str


class ForkedRanks:
    """Context manager that starts jobs.

    Parameters
    ----------
    scripts : sequence of Path
    modules : sequence of str
        Modules to import before the first job.
    start_s : float
        Limit of the imports, in seconds.
    """

    def __init__(
        self, scripts: Sequence[Path], modules: Sequence[str] = (), start_s: float = _START_S
    ) -> None:
        self._names = ",".join(str(each) for each in scripts)
        self._modules = modules
        self._start_s = start_s
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        started = self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, self._names, *self._modules],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._read(self._start_s) == "ready"
        return started

    def __enter__(self) -> ForkedRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, script: Path, argument: str, environments: Sequence[Mapping[str, str]],
        timeout_s: float, groups: Sequence[Sequence[int]] = (),
    ) -> list[Output]:  # fmt: skip
        """Run a job with one rank per environment; kill ranks that exceed `timeout_s`.

        The ranks of each of `groups` are a process group.
        """
        order = [str(script), argument, list(environments), timeout_s, groups]
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return [Output(*each) for each in self._read(timeout_s + _START_S)]
        except BaseException:
            # The answer may still come, and the next job would take it for its own.
            self.close()
            self._process = self._start()
            raise

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _read(self, timeout_s: float) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        assert ready, "the process that forks the ranks does not answer"
        return json.loads(self._process.stdout.readline())


class _Rank(NamedTuple):
    pid: int
    out: int
    err: int


def _serve(scripts: Sequence[str], modules: Sequence[str]) -> None:
    mains = {script: _main_of(script) for script in scripts}
    for module in modules:
        importlib.import_module(module)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        script, argument, environments, timeout_s, groups = json.loads(line)
        outputs = _run(mains[script], argument, environments, timeout_s, groups)
        print(json.dumps(outputs), flush=True)


def _main_of(script: str) -> Callable[[str], None]:
    sys.path.insert(0, str(Path(script).parent))  # as Python does for a script
    spec = importlib.util.spec_from_file_location(Path(script).stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    main: Callable[[str], None] = module.main
    return main


def _run(
    main: Callable[[str], None], argument: str, environments: Sequence[Mapping[str, str]],
    timeout_s: float, groups: Sequence[Sequence[int]],
) -> list[Output]:  # fmt: skip
    leaders = {rank: min(group) for group in groups for rank in group}
    ranks: list[_Rank] = []
    with LocalJob(len(environments)) as job:
        for rank, env in enumerate(environments):
            group = None
            if rank in leaders:
                group = 0 if leaders[rank] == rank else ranks[leaders[rank]].pid
            ranks.append(_fork(job, rank, main, argument, env, group))
    codes = _wait([rank.pid for rank in ranks], time.monotonic() + timeout_s)
    outputs = []
    for rank in ranks:
        with os.fdopen(rank.out, "rb") as out, os.fdopen(rank.err, "rb") as err:
            texts = [_text(file) for file in (out, err)]
        outputs.append(Output(codes[rank.pid], *texts))
    return outputs


def _wait(pids: Sequence[int], until_s: float) -> dict[int, int]:
    """Return the exit status of each process; kill processes that exceed the deadline."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                if time.monotonic() > until_s:
                    os.kill(pid, signal.SIGKILL)
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(_POLL_S)
    return codes


def _fork(
    job: LocalJob, rank: int, main: Callable[[str], None], argument: str, env: Mapping[str, str],
    group: int | None,
) -> _Rank:  # fmt: skip
    """Fork a rank into the process group `group`; 0: into one of its own, None: into this one's."""
    # In memory, because not every file system lets unlinked files be read.
    started = _Rank(0, os.memfd_create(f"out-{rank}"), os.memfd_create(f"err-{rank}"))
    pid = os.fork()
    if pid:
        if group is not None:
            os.setpgid(pid, group)
        return started._replace(pid=pid)
    code = 1
    try:
        if group is not None:  # here and above: whichever process runs first
            os.setpgid(0, group)
        # A job in the background of a shell that is not interactive ignores Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        null = os.open(os.devnull, os.O_RDONLY)
        for at, descriptor in enumerate((null, started.out, started.err)):
            os.dup2(descriptor, at)
        os.environ.update(job.environment(rank) | dict(env))
        if rank == 0:
            os.environ[LISTEN_FD_VARIABLE] = str(job.listener.detach())
        else:
            job.close()
        main(argument)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


if __name__ == "__main__":
    _serve(sys.argv[1].split(","), sys.argv[2:])
