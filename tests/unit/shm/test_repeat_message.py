"""The compiled start of messages: which calls it runs, and which it leaves to Python."""

from __future__ import annotations

import ctypes
import signal
import sys
from contextlib import suppress
from threading import get_ident
from types import SimpleNamespace

import numpy as np
import pytest

from r2ccl.shm.layout import CHANGED, FINISHED
from r2ccl.shm.message_layout import CALL_NWORDS, CALL_RESULT, FINISHED_OTHER, OPEN
from r2ccl.shm.repeat_message import DIRECT, STATE, message_of

_DIRECT = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 5)
X, OUT = np.ones(3), np.zeros(3)
_SENDRECV = ("x", "to", "tag", "out", "source", "recv_tag")


class Messages:
    """Stand-in for messages that remembers one call, whose direct call is in Python."""

    def __init__(self, names=_SENDRECV, key=(1, 0, 2, -1)):
        self.results, self.seen, self.slow, self.continued = [FINISHED], [], [], []
        self.error, self.failures, self.failure, self.wake_error = None, [], None, None
        #: Whether the turn is taken after `proceed`, and the other thread that has it, if any.
        self.keeps_turn, self.other = False, 0
        self.turn = SimpleNamespace(
            is_repeating=False, is_awaited=False, wake=self._wake, holder=np.zeros(1, np.int64)
        )
        #: Called when another thread may take the turn.
        self.turn_over = lambda: None
        self.state = SimpleNamespace(refusal=None)
        self.groups, self.nwakes = [], 0
        self.words = np.zeros(CALL_NWORDS, np.int64)
        self.message = object()
        self.calls = [(self.words, key, [self.message])]
        self._direct = _DIRECT(self._run)
        self.call = message_of(
            self._slow, self._proceed, self._failed, self.turn, self.groups,
            [(self.state, "refusal", None)],
            calls=self.calls, state=5, table=6, names=names,
        )  # fmt: skip
        self.call.__self__[0][DIRECT] = ctypes.cast(self._direct, ctypes.c_void_p).value

    def _run(self, state, table, call, source, target):
        assert (state, table, call) == (5, 6, self.words.ctypes.data)
        self.seen.append(self.turn.is_repeating)
        return self.results.pop(0) if len(self.results) > 1 else self.results[0]

    def _proceed(self, call, x, out):
        is_mine = self.turn.is_repeating and self.turn.holder[0] == get_ident()
        self.continued.append((call, x, out, int(self.words[CALL_RESULT]), is_mine))
        self.turn.is_repeating = self.keeps_turn
        if self.other:
            self.turn.holder[0] = self.other
        if self.error is not None:
            raise self.error
        return "continued"

    def _failed(self, error):
        self.failures.append(error)
        if self.failure is not None:
            raise self.failure

    def _slow(self, *given):
        self.slow.append(given)
        return "slow"

    def _wake(self):
        self.nwakes += 1
        self.turn_over()
        if self.wake_error is not None:
            raise self.wake_error

    def sendrecv(self, x=X, to=1, tag=0, out=OUT, source=2, recv_tag=-1):
        return self.call(x, to, tag, out, source, recv_tag)


def test_a_repeated_message_runs_in_compiled_code():
    messages = Messages()
    assert messages.sendrecv() is messages.message
    assert (messages.seen, messages.slow, messages.nwakes) == ([True], [], 0)
    assert messages.turn.is_repeating is False


def test_one_of_several_calls_is_found():
    messages = Messages()
    others = [(messages.words, (1, 0, 2, tag), [tag]) for tag in range(7)]
    messages.calls[:] = [*others, *messages.calls]
    assert messages.sendrecv() is messages.message
    assert messages.sendrecv(recv_tag=6) == 6
    assert messages.slow == []


@pytest.mark.parametrize(
    ("names", "key", "given", "others"),
    [
        (
            ("x", "to", "tag", "is_synchronous", "is_async"),
            (1, 7),
            (X, 1, 7, False, False),
            [(X, 1, 7, True, False), (X, 1, 7, False, True), (X, 1, 7, False, 0), (X, 1, 7)],
        ),
        (
            ("out", "source", "tag", "is_async"),
            (1, 7, 0),
            (OUT, 1, 7, False),
            [(OUT, 1, 7, True), (OUT, 7, 1, False), ([1.0], 1, 7, False)],
        ),
    ],
)
def test_send_and_recv_have_fewer_arguments(names, key, given, others):
    messages = Messages(names, key)
    assert messages.call(*given) is messages.message
    for other in others:
        assert messages.call(*other) == "slow"
    assert messages.slow == others


@pytest.mark.parametrize(
    "given",
    [
        {"x": [1.0]},
        {"out": None},
        {"to": 0},
        {"to": True},
        {"tag": 0.0},
        {"source": np.int64(2)},
        {"recv_tag": None},
    ],
)
def test_other_arguments_are_left_to_python(given):
    messages = Messages()
    full = {"x": X, "to": 1, "tag": 0, "out": OUT, "source": 2, "recv_tag": -1} | given
    assert messages.sendrecv(**given) == "slow"
    assert messages.slow == [tuple(full.values())]
    assert messages.seen == []


def _refuse(messages):
    messages.state.refusal = ValueError


def _open_a_group(messages):
    messages.groups.append(1)


def _take_the_turn(messages):
    messages.turn.is_repeating = True


def _forget(messages):
    messages.calls.clear()


@pytest.mark.parametrize("change", [_refuse, _open_a_group, _take_the_turn, _forget])
def test_in_other_states_messages_are_left_to_python(change):
    messages = Messages()
    change(messages)
    assert messages.sendrecv() == "slow"
    assert messages.seen == []


def test_arrays_of_another_form_are_left_to_python():
    messages = Messages()
    messages.results = [CHANGED]
    assert messages.sendrecv() == "slow"
    assert messages.turn.is_repeating is False


@pytest.mark.parametrize("result", [OPEN, FINISHED_OTHER])
def test_python_continues_other_results(result):
    messages = Messages()
    messages.results = [result]
    assert messages.sendrecv() == "continued"
    assert messages.continued == [(messages.calls[0], X, OUT, result, True)]
    assert messages.failures == []


def test_an_error_after_the_turn_was_returned_is_raised():
    messages = Messages()
    messages.results, messages.error = [OPEN], KeyError("a peer")
    with pytest.raises(KeyError, match="a peer"):
        messages.sendrecv()
    assert messages.failures == []


def test_an_error_before_the_turn_returns_is_noted():
    messages = Messages()
    messages.results, messages.error, messages.keeps_turn = [OPEN], KeyboardInterrupt(), True
    with pytest.raises(KeyboardInterrupt):
        messages.sendrecv()
    assert messages.failures == [messages.error]
    assert messages.turn.is_repeating is False


def test_the_turn_of_another_thread_is_not_returned():
    messages = Messages()
    messages.results, messages.error, messages.keeps_turn = [OPEN], KeyError(), True
    messages.other = get_ident() + 1
    with pytest.raises(KeyError):
        messages.sendrecv()
    assert messages.failures == []
    assert messages.turn.is_repeating is True


def test_threads_that_wait_for_the_turn_are_woken():
    messages = Messages()
    messages.turn.is_awaited = True
    messages.sendrecv()
    assert messages.nwakes == 1


def test_the_message_is_that_of_this_call():
    messages = Messages()
    message, messages.turn.is_awaited = messages.message, True
    messages.turn_over = lambda: messages.calls[0][2].__setitem__(0, "of another thread")
    assert messages.sendrecv() is message
    assert messages.nwakes == 1


def test_ctrl_c_as_threads_are_woken_is_noted_too():
    messages = Messages()
    messages.turn.is_awaited, messages.wake_error = True, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        messages.sendrecv()
    assert messages.failures == [messages.wake_error]
    assert messages.turn.is_repeating is False


def test_ctrl_c_during_a_message_ends_the_communicator():
    messages = Messages()
    words, libc_raise = messages.call.__self__[0], ctypes.CDLL(None)["raise"]
    # The direct call of this test is raise(3); it returns FINISHED.
    words[DIRECT], words[STATE] = ctypes.cast(libc_raise, ctypes.c_void_p).value, signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        messages.sendrecv()
    assert list(map(type, messages.failures)) == [KeyboardInterrupt]
    assert messages.turn.is_repeating is False


@pytest.mark.parametrize(
    ("result", "error", "failure", "keeps_turn"),
    [
        (FINISHED, None, None, False),
        (CHANGED, None, None, False),
        (OPEN, None, None, False),
        (OPEN, KeyError("a peer"), None, False),
        (OPEN, KeyError("a peer"), None, True),
        (OPEN, KeyError("a peer"), KeyError("second"), True),
    ],
)
def test_no_reference_is_kept_or_dropped_too_often(result, error, failure, keeps_turn):
    messages = Messages()
    messages.results, messages.error, messages.failure = [result], error, failure
    messages.keeps_turn = keeps_turn
    x, out, tag = X.copy(), OUT.copy(), 1 << 40
    messages.calls[:] = [(messages.words, (1, 1 << 40, 2, -1), [messages.message])]
    objects = x, out, tag, messages.calls[0], messages.turn, messages.message, error, failure, True
    before = [sys.getrefcount(each) for each in objects]
    for _ in range(2000):
        with suppress(KeyError):
            messages.sendrecv(x=x, tag=tag, out=out)
        for each in (messages.seen, messages.slow, messages.continued, messages.failures):
            each.clear()
        for each in (error, failure):
            if each is not None:
                each.__traceback__ = each.__context__ = None
    after = [sys.getrefcount(each) for each in objects]
    assert max(abs(late - early) for late, early in zip(after, before, strict=True)) < 20
