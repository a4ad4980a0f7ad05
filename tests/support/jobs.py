"""`launch`, which starts jobs as `r2ccl.launch` does, in a tenth of the time.

`r2ccl.launch` imports the library in a new process for each job. Here the ranks of all jobs of a
test process are forked from one process; see `support.forked_ranks`.
"""

from __future__ import annotations

import atexit
import base64
import functools
import json
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.forked_ranks import ForkedRanks, Output

from r2ccl.bootstrap.launch import describe_exit
from r2ccl.errors import R2cclError

#: Begins the line with the result of a rank.
MARK = "result of the rank: "
_SCRIPT = Path(__file__).with_name("pickled_program.py")
#: Modules that ranks use in their first calls; imported once, before the first rank is forked.
_IMPORTED = (
    "r2ccl.factory", "r2ccl.bootstrap.startup", "r2ccl.gpu.backends", "r2ccl.testing",
    "psutil", "numpy.ma", "numpy.random",
)  # fmt: skip


def launch(
    fn: Callable[[], Any],
    nranks: int,
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `fn` in `nranks` processes and return their results, as `r2ccl.launch`.

    If several ranks raise, raise the exception that came first.
    """
    outputs = _outputs(fn, nranks, timeout_s, env)
    return list(_values(dict(enumerate(outputs))).values())


def survivors(
    fn: Callable[[], Any],
    nranks: int,
    dying: Sequence[Sequence[int]],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> dict[int, Any]:
    """Run `fn` in `nranks` processes, of which SIGKILL ends some; return the results of the others.

    The ranks of each sequence in `dying` are a process group, which one signal can end.
    """
    outputs = _outputs(fn, nranks, timeout_s, env, dying)
    killed = {rank for group in dying for rank in group}
    left = {rank: output for rank, output in enumerate(outputs) if rank not in killed}
    values = _values(left)
    for rank in killed:
        assert outputs[rank].returncode == -signal.SIGKILL, f"rank {rank}"
    return values


def _outputs(
    fn: Callable[[], Any], nranks: int, timeout_s: float, env: Mapping[str, str] | None,
    groups: Sequence[Sequence[int]] = (),
) -> list[Output]:  # fmt: skip
    argument = {
        "function": base64.b64encode(pickle.dumps(fn)).decode(),
        "environment": {**os.environ, **(env or {})},
        "folder": os.getcwd(),
        "path": sys.path,
    }
    return _forked_ranks().run(_SCRIPT, json.dumps(argument), [{}] * nranks, timeout_s, groups)


def _values(outputs: Mapping[int, Output]) -> dict[int, Any]:
    """Return the results of ranks, or raise the exception that came first."""
    found = {rank: _result(rank, output) for rank, output in outputs.items()}
    failures = [(time_s, rank) for rank, (is_good, time_s, _) in found.items() if not is_good]
    if failures:
        raise found[min(failures)[1]][2]
    return {rank: value for rank, (_, _, value) in found.items()}


@functools.cache
def _forked_ranks() -> ForkedRanks:
    forked = ForkedRanks([_SCRIPT], _IMPORTED)
    atexit.register(forked.close)
    return forked


def _result(rank: int, output: Output) -> tuple[bool, float, Any]:
    """Return whether a rank returned, when it ended, and its result or exception."""
    said, is_found, found = output.out.rpartition(MARK)
    os.write(1, said.encode())  # where pytest finds it, and shows it if the test fails
    os.write(2, output.err.encode())
    if not is_found:
        why = describe_exit(output.returncode)
        return False, 0.0, R2cclError(f"rank {rank} exited without a result: {why}")
    ended: tuple[bool, float, Any] = pickle.loads(base64.b64decode(found))
    return ended


__all__ = ["MARK", "launch", "survivors"]
