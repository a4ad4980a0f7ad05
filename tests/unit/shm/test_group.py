"""`LocalGroup` between processes: exact results, failures, and what it leaves behind."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support import values
from support.local_programs import AHEAD
from support.local_ranks import run_ranks
from support.slow import slow_but

from r2ccl.bootstrap.auth import Secret
from r2ccl.dtypes import CODES
from r2ccl.errors import TransportError
from r2ccl.shm import group as group_module
from r2ccl.shm import passing
from r2ccl.shm.group import LocalGroup
from r2ccl.shm.layout import BATCH
from r2ccl.shm.symmetric import SymmetricMemory
from r2ccl.shm.transfer import LEAST_NBYTES, PAST_CACHES
from r2ccl.types import CallSignature, Collective, ReduceOp

# A slow case compiles the kernels of all dtypes and ops: 35 s of CPU time.
pytestmark = pytest.mark.timeout(300)
_PROGRAMS = "support.local_programs"
#: Calls of the slow case of ranks that are stopped.
NMANY = int(os.environ.get("R2CC_LOCAL_CALLS", "20000"))


def _run(nranks, program, *arguments):
    return run_ranks(nranks, f"{_PROGRAMS}:{program}", *arguments)


@pytest.mark.parametrize(
    ("nranks", "dtypes"),
    slow_but(
        [(1, ["float32"]), (3, ["float32", "float16"])],
        [
            (1, ["float32"]),
            (3, ["float32", "float16"]),
            *((nranks, ["float32", "float16", "uint8"]) for nranks in (1, 2, 3, 4, 5)),
        ],
    ),
)
def test_collectives_give_exact_results(nranks, dtypes):
    assert _run(nranks, "check_matrix", dtypes) == [["value", []]] * nranks


@pytest.mark.parametrize(
    "dtypes", slow_but([["uint8"]], [["uint8"], ["float32", "float16", "uint8"]])
)
def test_results_written_past_the_caches_are_exact(dtypes):
    assert _run(3, "check_matrix", dtypes, 1 << 16) == [["value", []]] * 3


@pytest.mark.parametrize("nranks", slow_but([2], [2, 3, 5]))
def test_slots_written_past_the_caches_give_exact_results(nranks):
    wanted = [["value", []]] * nranks
    assert _run(nranks, "check_matrix", ["float32", "uint8"], None, PAST_CACHES) == wanted


@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("nranks", [2, 3])
def test_an_alltoall_may_be_in_place_on_some_ranks(nranks, is_symmetric):
    wanted = [["value", [True] * 3]] * nranks
    assert _run(nranks, "alltoall_partly_in_place", is_symmetric) == wanted


def test_only_calls_of_some_size_choose_how_to_write_slots():
    assert _run(2, "durations", LEAST_NBYTES) == [["value", [True, True]]] * 2
    assert _run(2, "durations", LEAST_NBYTES // 2) == [["value", [False, False]]] * 2


@pytest.mark.parametrize(
    ("nranks", "dtypes"),
    slow_but(
        [(3, values.COMPILED)],
        [(3, values.COMPILED), *((nranks, values.DTYPES) for nranks in (1, 2, 3))],
    ),
    ids=lambda given: str(given) if isinstance(given, int) else f"{len(given)} types",
)
def test_all_dtypes_and_ops_give_exact_results(nranks, dtypes):
    assert _run(nranks, "check_reductions", dtypes) == [["value", []]] * nranks


@pytest.mark.parametrize(
    ("nranks", "most"),
    slow_but([(3, 100_000)], [(3, 100_000), (2, 400_000), (3, 400_000), (5, 400_000)]),
)
def test_calls_in_any_order_do_not_mix(nranks, most):
    assert _run(nranks, "mix_calls", 300, most) == [["value", []]] * nranks


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("ncalls", "nstops"), slow_but([(2000, 2)], [(2000, 2), (NMANY, NMANY // 2000)])
)
def test_ranks_that_are_stopped_at_random_give_exact_results(ncalls, nstops):
    program = f"{_PROGRAMS}:mix_calls_of_stopped_ranks"
    for _, (wrong, grown_kib) in run_ranks(4, program, ncalls, 5000, nstops, timeout_s=3500.0):
        assert wrong == []
        assert grown_kib < 4096


@pytest.mark.parametrize("ncalls", slow_but([30_000], [30_000, 100_000]))
def test_memory_does_not_grow(ncalls):
    for _, grown in _run(2, "count_memory", ncalls):
        assert grown < 1 << 20


def test_stopped_rank_is_waited_for():
    assert _run(3, "stop", 1.0) == [["value", float(1 << 20)]] * 3


@pytest.mark.parametrize("name", AHEAD)
def test_a_rank_that_only_sends_does_not_wait(name):
    assert _run(3, "go_ahead", name, 16, BATCH) == [["value", []]] * 3


@pytest.mark.parametrize(
    ("name", "size"),
    [("broadcast", 70_000), ("scatterv", 70_000), ("gatherv", 70_000), ("scan", 50_000)],
)
def test_a_rank_does_not_wait_with_several_rounds(name, size):
    assert _run(2, "go_ahead", name, size, 1) == [["value", []]] * 2


def test_a_rank_that_goes_ahead_finds_different_calls_later():
    first, *others = _run(3, "differ_ahead")
    assert first == ["value", [2, True, 8, 4]]
    assert others == [["value", [1, False, 4, 8]]] * 2


def test_calls_that_differ_at_the_end_are_found():
    assert _run(2, "differ_at_the_end") == [["value", [8, 9]], ["value", [9, 8]]]


@pytest.mark.parametrize("before", ["barrier", "GATHER"])
def test_senders_of_many_rounds_do_not_wait_for_each_other(before):
    assert _run(3, "many_rounds_after_few", before) == [["value", True]] * 3


@pytest.mark.parametrize("what", ["collective", "count", "op"])
def test_different_calls_are_found(what):
    results = _run(3, "differ", what)
    assert [each[1] for each in results] == ["CallsDiffer"] * 3


def test_different_sizes_of_a_part_are_found():
    first, *_ = results = _run(3, "differ", "parts")
    assert [each[1] for each in results] == ["CallsDiffer"] * 3
    assert first[2].endswith(", 8, 4)")  # bytes sent by rank 1, bytes that rank 0 expects


def test_ranks_may_end_after_the_last_call():
    assert _run(3, "finish_and_leave") == [["value", "closed"]] * 3


def test_rank_with_another_secret_is_refused():
    results = _run(3, "wrong_secret")
    assert [each[1] for each in results] == ["TransportError"] * 3


def test_group_leaves_nothing_behind():
    for _, (names, open_before, *during, names_after, open_after) in _run(2, "leave_nothing"):
        assert during[0] == names_after == names
        assert open_after == open_before


def _opened():
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:r2ccl")


def _nothing(*_):
    """Do nothing."""


def _connect(exchange, ranks=(0,)):
    return LocalGroup.connect(
        ranks,
        0,
        exchange,
        Secret(b"s" * 32),
        attend=_nothing,
        on_exit=_nothing,
        has_ended=lambda: False,
    )


def test_ranks_in_other_namespaces_are_named_by_their_numbers():
    def exchange(mine):
        return [mine, bytes(16) + mine[16:]]  # an offer begins with the digest of the namespaces

    with pytest.raises(TransportError, match=r"ranks \[7\] run .* than rank 4; run all"):
        _connect(exchange, [4, 7])


def _interrupted_after(nexchanges):
    left = [None] * nexchanges

    def exchange(mine):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return [mine]

    return exchange


@pytest.mark.parametrize("nexchanges", range(2))
def test_an_interrupted_connection_leaves_nothing_open(nexchanges):
    before = _opened()
    with pytest.raises(KeyboardInterrupt):
        _connect(_interrupted_after(nexchanges))
    assert _opened() == before


def test_a_listener_that_cannot_be_made_is_told(monkeypatch):
    def fail(name):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))

    nexchanges = []
    monkeypatch.setattr(passing, "_abstract", fail)
    before = _opened()
    with pytest.raises(TransportError, match="no shared memory: rank 0: EADDRINUSE"):
        _connect(lambda mine: [nexchanges.append(mine) or mine])
    assert len(nexchanges) == 1
    assert _opened() == before


@pytest.mark.parametrize("error", [ImportError("no llvmlite"), OSError("no libc")])
def test_compiled_code_that_cannot_be_loaded_is_told(monkeypatch, error):
    def fail():
        raise error

    monkeypatch.setattr(group_module, "preload", fail)
    with pytest.raises(TransportError, match="rank 0: compiled code cannot be used: no l"):
        _connect(lambda mine: [mine])


def test_a_group_that_cannot_be_made_leaves_nothing_open(monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(SymmetricMemory, "__init__", fail)
    before = _opened()
    with pytest.raises(MemoryError):
        _connect(lambda mine: [mine])
    assert _opened() == before


@pytest.mark.parametrize("nexchanges", range(5))
def test_an_interrupted_allocation_leaves_nothing_open(nexchanges):
    group = _connect(lambda mine: [mine])
    before = _opened()
    with pytest.raises(KeyboardInterrupt):
        group.symmetric.allocate(4096, _interrupted_after(nexchanges), lambda fn: fn())
    assert _opened() == before
    group.close()


def test_a_group_is_not_woken_after_its_end():
    """Its memory is free then, and a wake-up that comes late would write to it."""
    group = _connect(lambda mine: [mine])
    group.close()
    process = os.fork()
    if process == 0:
        group.wake()
        group.rings.wake()
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0


def test_an_output_that_stays_shared_is_logged_beside_the_error(caplog):
    def run(*_):
        raise TimeoutError("a peer is late")

    def withdraw(output):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    x = np.ones(2)
    call = CallSignature(Collective.ALLREDUCE, CODES[x.dtype], ReduceOp.SUM, x.size)
    group = LocalGroup.__new__(LocalGroup)
    group.symmetric, group._own = SimpleNamespace(withdraw=withdraw), SimpleNamespace(words={})
    group._place, group.rank = SimpleNamespace(ranks=(3, 7)), 1
    group._state, group._wake_all = 0, lambda state: 0
    group._wakes, group._is_closed = threading.RLock(), False
    caplog.set_level(logging.WARNING)
    with pytest.raises(TimeoutError, match="a peer is late"):
        group.run(SimpleNamespace(run=run, at=0, words=[0, call.pack()]), x, x)
    assert "rank 7: other ranks may still write to the output" in caplog.text
