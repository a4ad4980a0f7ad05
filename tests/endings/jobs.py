"""Jobs whose ranks are scripts, run to their end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from support import localjobs

from r2ccl.bootstrap.launch import LocalJob

TIMEOUT_S = 60.0


class Output(NamedTuple):
    """Exit status and output of a rank."""

    returncode: int
    out: str
    err: str


def run(script: Path, argument: str, *, nranks: int) -> list[Output]:
    """Run `script` as every rank of a job on this machine."""
    with LocalJob(nranks) as job:
        argv = [sys.executable, str(script), argument]
        started = [localjobs.start(job, rank, argv) for rank in range(nranks)]
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
    """Return the time at which a rank printed that it ends; 0 if it did not."""
    said = [float(line[5:]) for line in out.splitlines() if line.startswith("ends ")]
    return max(said, default=0.0)
