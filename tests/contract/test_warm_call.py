"""Path of a warm call through the code: few modules, each entered once."""

from __future__ import annotations

import functools
import itertools
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from support.compiled_programs import compiled_of
from support.jobs import launch

import r2ccl

LIBRARY = str(Path(r2ccl.__file__).parent)
#: Limits on modules from the call to the transport, and on functions called on the way.
MOST_MODULES = 9
MOST_FUNCTIONS = 40


#: Limits on functions called by a repeated call, from its start to its return.
MOST_LOCAL, MOST_REPEATED = 1, 8


def calls_of_an_allreduce(compiled: str, last: str) -> list[tuple[str, str]]:
    """Return module and name of each function called until `last`, which sends the first slice.

    The shortest of several calls counts: if the peer is late, a call first waits for confirmations.
    """
    called: list[tuple[str, str]] = []
    traces = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(LIBRARY):
            called.append((code.co_filename.removeprefix(LIBRARY + "/"), code.co_name))
            if code.co_name == last:
                sys.setprofile(None)

    with r2ccl.init(compiled=compiled) as comm:
        x = np.ones(64, np.float32)
        for _ in range(20):
            comm.allreduce(x)
        for _ in range(10):
            if last == "run_compiled":
                comm._participant.on_host.repeats.forget()  # otherwise the call is only repeated
                compiled_of(comm).settle()
            called.clear()
            sys.setprofile(note)
            try:
                comm.allreduce(x)
            finally:
                sys.setprofile(None)
            traces.append(called.copy())
    return min(traces, key=len)


@pytest.mark.parametrize(("compiled", "last"), [("0", "isend"), ("1", "run_compiled")])
def test_a_warm_allreduce_enters_few_modules_and_each_once(compiled: str, last: str) -> None:
    program = functools.partial(calls_of_an_allreduce, compiled, last)
    for called in launch(program, 2, timeout_s=60.0):
        assert (called[0][1], called[-1][1]) == ("allreduce", last)
        assert len({module for module, _ in called}) <= MOST_MODULES, called
        assert len(called) <= MOST_FUNCTIONS, called
        before_slices = itertools.takewhile(lambda call: call[1] != "advance", called)
        visits = [module for module, _ in itertools.groupby(before_slices, lambda call: call[0])]
        assert len(visits) == len(set(visits)), visits


def names_of_a_repeated_call(name: str, shm: str) -> list[str]:
    """Return the name of each function that a repeated allreduce or sendrecv calls."""
    called: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(LIBRARY):
            called.append(frame.f_code.co_name)

    with r2ccl.init(shm=shm, compiled="1") as comm:
        x, out, peer = np.ones(64, np.float32), np.empty(64, np.float32), 1 - comm.rank
        traces = []
        for _ in range(20):
            called.clear()
            sys.setprofile(note)
            try:
                if name == "allreduce":
                    comm.allreduce(x)
                else:
                    comm.sendrecv(x, peer, out, peer)
            finally:
                sys.setprofile(None)
            traces.append(called.copy())
    return min(traces, key=len)


@pytest.mark.parametrize(
    ("name", "shm", "most"),
    [
        ("allreduce", "1", MOST_LOCAL),
        ("sendrecv", "1", MOST_LOCAL),
        ("allreduce", "0", MOST_REPEATED),
    ],
)
def test_a_repeated_call_calls_few_functions(name: str, shm: str, most: int) -> None:
    program = functools.partial(names_of_a_repeated_call, name, shm)
    for called in launch(program, 2, timeout_s=60.0):
        assert called[0] == name
        assert len(called) <= most, called
