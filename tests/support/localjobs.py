"""Ranks as separate programs, started in a job on this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

from r2ccl.bootstrap.identity import LISTEN_FD_VARIABLE
from r2ccl.bootstrap.launch import LocalJob


def start(
    job: LocalJob, rank: int, argv: Sequence[str], env: Mapping[str, str] | None = None,
    process_group: int | None = None,
) -> subprocess.Popen[str]:  # fmt: skip
    """Start a program as `rank`, with `env` added to the job's variables and output in pipes.

    `process_group` is 0 for a group of its own.
    """
    variables = {**os.environ, **job.environment(rank), **(env or {})}
    passed = [job.listener.fileno()] if rank == 0 else []
    if passed:
        variables[LISTEN_FD_VARIABLE] = str(passed[0])
    return subprocess.Popen(
        list(argv),
        env=variables,
        pass_fds=passed,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=process_group,
    )
