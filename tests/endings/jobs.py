"""Jobs whose ranks are scripts, run to their end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from r2ccl.bootstrap.identity import LISTEN_FD_VARIABLE
from r2ccl.bootstrap.launch import LocalJob

TIMEOUT_S = 60.0


class Output(NamedTuple):
    """Exit status of a rank, and what it wrote."""

    returncode: int
    out: str
    err: str


def run(script: Path, argument: str, *, nranks: int) -> list[Output]:
    """Run `script` as every rank of a job on this machine."""
    started = []
    with LocalJob(nranks) as job:
        for rank in range(nranks):
            env = {**os.environ, **job.environment(rank)}
            passed = [job.listener.fileno()] if rank == 0 else []
            if passed:
                env[LISTEN_FD_VARIABLE] = str(passed[0])
            started.append(
                subprocess.Popen(
                    [sys.executable, str(script), argument],
                    env=env,
                    pass_fds=passed,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return [
        Output(process.returncode, *output)
        for process, output in zip(started, outputs, strict=True)
    ]


def ended_s(out: str) -> float:
    """Return when a rank said that it ends, 0: never."""
    said = [float(line[5:]) for line in out.splitlines() if line.startswith("ends ")]
    return max(said, default=0.0)
