"""The compiled start of calls: when it runs a repeated call, and when it leaves that to Python."""

from __future__ import annotations

import ctypes
import signal
import sys
from contextlib import suppress
from threading import get_ident
from types import SimpleNamespace

import numpy as np
import pytest

from r2ccl.shm.layout import CHANGED, FINISHED, WAITING
from r2ccl.shm.repeat import Role, repeat_of, start_of
from r2ccl.types import ReduceOp

_LOOP = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 5)
X, OUT = np.ones(3), np.zeros(3)


class Calls:
    """Stand-in for a communicator that remembers a call of `make`, whose loop is in Python."""

    def __init__(self, rest=(0, None), role=Role.ARRAY):
        self.results, self.seen, self.slow, self.continued = [FINISHED], [], [], []
        self.error, self.failures, self.failure, self.wake_error = None, [], None, None
        self.turn = SimpleNamespace(
            is_repeating=False, is_awaited=False, wake=self._wake, holder=np.zeros(1, np.int64)
        )
        self.state = SimpleNamespace(refusal=None)
        self.groups, self.last, self.nwakes = [], {}, 0
        self._loop = _LOOP(self._run)
        at = ctypes.cast(self._loop, ctypes.c_void_p).value
        self.last[self.make] = repeat_of(
            at, 0, 0, rest, uses_input=True, output=role, proceed=self._proceed, kept=self
        )
        conditions = [(self.state, "refusal", None)]
        self.start = start_of(
            self._slow, self._failed, self.last, self.turn, self.groups, conditions
        )

    @staticmethod
    def make(*_):
        raise AssertionError("it is only a key")

    def _run(self, *_):
        self.seen.append(self.turn.is_repeating)
        return self.results.pop(0) if len(self.results) > 1 else self.results[0]

    def _proceed(self, source, target, result):
        self.continued.append((source, target, result, self.turn.holder[0] == get_ident()))
        if self.error is not None:
            raise self.error

    def _failed(self, make, x, out, error):
        assert self.turn.is_repeating == (self.wake_error is None)
        self.failures.append((make, x, out, error))
        if self.failure is not None:
            raise self.failure

    def _slow(self, *given):
        self.slow.append(given)
        return "slow"

    def _wake(self):
        self.nwakes += 1
        if self.wake_error is not None:
            raise self.wake_error

    def call(self, *rest, x=X, out=OUT, stream=None, is_async=False):
        return self.start(stream, is_async, self.make, x, out, *rest)


def test_a_repeated_call_runs_in_compiled_code():
    calls = Calls()
    assert calls.call(0, None) is OUT
    assert (calls.seen, calls.slow, calls.nwakes) == ([True], [], 0)
    assert calls.turn.is_repeating is False


def test_the_result_has_the_role_of_the_output():
    assert Calls(role=Role.INPUT).call(0, None, out=None) is X
    assert Calls(role=Role.NONE).call(0, None, out=None) is None


@pytest.mark.parametrize(
    ("rest", "given"),
    [
        ((0, None), {"stream": 1}),
        ((0, None), {"is_async": True}),
        ((0, None), {"x": [1.0]}),
        ((0, None), {"out": None}),
        ((0, None), {"out": [1.0]}),
        ((1, None), {}),
        ((0, 5), {}),
        ((0.0, None), {}),
        ((False, None), {}),
        ((0,), {}),
        ((0, None, 1), {}),
        ((), {}),
    ],
)
def test_other_arguments_are_left_to_python(rest, given):
    calls = Calls()
    assert calls.call(*rest, **given) == "slow"
    full = {"x": X, "out": OUT, "stream": None, "is_async": False} | given
    x, out, stream, is_async = (full[name] for name in ("x", "out", "stream", "is_async"))
    assert calls.slow == [(stream, is_async, calls.make, x, out, *rest)]
    assert calls.seen == []


def test_lists_are_compared_by_value():
    calls = Calls(rest=([3, 4], None))
    assert calls.call([3, 4], None) is OUT
    assert calls.call([3, 5], None) == "slow"
    assert calls.call((3, 4), None) == "slow"
    assert calls.call(np.array([3, 4]), None) == "slow"
    assert calls.call([3, 4.0], None) == "slow"
    assert calls.call([3, np.int64(4)], None) == "slow"
    assert calls.call([3], None) == "slow"
    calls = Calls(rest=(0, (3, 4)))
    assert calls.call(0, (3, 4)) is OUT
    assert calls.call(0, (3, 5)) == "slow"
    assert calls.call(0, (3, True)) == "slow"
    assert calls.call(0, (3,)) == "slow"


def test_an_argument_that_cannot_be_compared_is_left_to_python():
    calls = Calls(rest=(ReduceOp.SUM, 1))
    assert calls.call(ReduceOp.SUM, np.array([1, 1])) == "slow"


def _refuse(calls):
    calls.state.refusal = ValueError


def _open_a_group(calls):
    calls.groups.append(1)


def _take_the_turn(calls):
    calls.turn.is_repeating = True


def _forget(calls):
    calls.last.clear()


def _replace(calls):
    calls.last[calls.make] = calls._slow


@pytest.mark.parametrize("change", [_refuse, _open_a_group, _take_the_turn, _forget, _replace])
def test_in_other_states_calls_are_left_to_python(change):
    calls = Calls()
    change(calls)
    assert calls.call(0, None) == "slow"
    assert calls.seen == []


def test_arrays_of_another_form_are_left_to_python():
    calls = Calls()
    calls.results = [CHANGED]
    assert calls.call(0, None) == "slow"
    assert calls.turn.is_repeating is False


def test_a_call_that_waits_is_continued_in_python():
    calls = Calls()
    calls.results = [WAITING]
    assert calls.call(0, None) is OUT
    assert calls.continued == [(X, OUT, WAITING, True)]
    assert calls.failures == []
    assert calls.turn.is_repeating is False


def test_an_error_of_the_continuation_is_raised():
    calls = Calls()
    calls.results, calls.error = [WAITING], KeyError("a peer")
    with pytest.raises(KeyError, match="a peer"):
        calls.call(0, None)
    assert calls.failures == [(calls.make, X, OUT, calls.error)]
    assert calls.turn.is_repeating is False
    calls.results = [FINISHED]
    assert calls.call(0, None) is OUT


def test_an_error_as_a_failure_is_noted_is_raised_instead():
    calls = Calls()
    calls.results, calls.error, calls.failure = [WAITING], KeyError(), OverflowError("second")
    with pytest.raises(OverflowError, match="second"):
        calls.call(0, None)
    assert calls.turn.is_repeating is False


def test_threads_that_wait_for_the_turn_are_woken():
    calls = Calls()
    calls.turn.is_awaited = True
    calls.call(0, None)
    assert calls.nwakes == 1


def test_ctrl_c_as_threads_are_woken_is_noted():
    calls = Calls()
    calls.turn.is_awaited, calls.wake_error = True, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        calls.call(0, None)
    assert calls.failures == [(calls.make, X, OUT, calls.wake_error)]
    assert calls.turn.is_repeating is False


def test_ctrl_c_during_a_call_is_noted():
    calls = Calls()
    at = ctypes.cast(ctypes.CDLL(None)["raise"], ctypes.c_void_p).value
    # The loop of this call is raise(3); it returns FINISHED.
    calls.last[calls.make] = repeat_of(
        at, signal.SIGINT, 0, (0, None),
        uses_input=True, output=Role.ARRAY, proceed=calls._proceed, kept=calls,
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        calls.call(0, None)
    assert [(*given, type(error)) for *given, error in calls.failures] == [
        (calls.make, X, OUT, KeyboardInterrupt)
    ]
    assert calls.turn.is_repeating is False


@pytest.mark.parametrize(
    ("result", "error", "failure"),
    [
        (FINISHED, None, None),
        (CHANGED, None, None),
        (WAITING, None, None),
        (WAITING, KeyError("a peer"), None),
        (WAITING, KeyError("a peer"), KeyError("second")),
    ],
)
def test_no_reference_is_kept_or_dropped_too_often(result, error, failure):
    calls = Calls(rest=([3, 4], None))
    calls.results, calls.error, calls.failure = [result], error, failure
    x, out, counts = X.copy(), OUT.copy(), [3, 4]
    objects = x, out, counts, calls.last[calls.make], calls.turn, calls.make, error, failure, True
    before = [sys.getrefcount(each) for each in objects]
    for _ in range(2000):
        with suppress(KeyError):
            calls.call(counts, None, x=x, out=out)
        for each in (calls.seen, calls.slow, calls.continued, calls.failures):
            each.clear()
        for each in (error, failure):
            if each is not None:
                each.__traceback__ = each.__context__ = None
    after = [sys.getrefcount(each) for each in objects]
    assert max(abs(late - early) for late, early in zip(after, before, strict=True)) < 20
