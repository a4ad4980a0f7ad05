"""A dump on a signal: taken only when asked for, given back, and never in the program's way."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import r2ccl
from r2ccl.config import Config
from r2ccl.errors import InvalidArgument
from r2ccl.runtime.signal_dump import SignalDump, write_line


def raise_signal() -> None:
    signal.raise_signal(signal.SIGUSR1)


def test_the_former_handler_is_called_after_and_put_back() -> None:
    calls: list[str] = []
    former = signal.signal(signal.SIGUSR1, lambda *_: calls.append("program"))
    try:
        dump = SignalDump(signal.SIGUSR1, lambda: calls.append("dump"))
        raise_signal()
        assert calls == ["dump", "program"]
        dump.close()
        dump.close()
        raise_signal()
        assert calls == ["dump", "program", "program"]
    finally:
        signal.signal(signal.SIGUSR1, former)


def test_a_signal_may_arrive_while_the_handler_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    install = signal.signal
    former = install(signal.SIGUSR1, lambda *_: calls.append("program"))

    def install_and_raise(*given: Any) -> Any:
        previous = install(*given)
        raise_signal()
        return previous

    try:
        with monkeypatch.context() as patch:
            patch.setattr(signal, "signal", install_and_raise)
            SignalDump(signal.SIGUSR1, lambda: calls.append("dump"))
        assert calls == ["dump", "program"]
    finally:
        install(signal.SIGUSR1, former)


def test_two_dumps_of_one_signal_end_in_any_order() -> None:
    calls: list[str] = []
    former = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        first = SignalDump(signal.SIGUSR1, lambda: calls.append("first"))
        second = SignalDump(signal.SIGUSR1, lambda: calls.append("second"))
        raise_signal()
        first.close()
        raise_signal()
        assert calls == ["second", "first", "second"]
        second.close()
        raise_signal()
        assert calls == ["second", "first", "second"]
    finally:
        signal.signal(signal.SIGUSR1, former)


def test_a_closed_dump_ends_in_another_thread_with_no_handler() -> None:
    calls: list[str] = []
    former = signal.signal(signal.SIGUSR1, lambda *_: calls.append("program"))
    try:
        dump = SignalDump(signal.SIGUSR1, lambda: calls.append("dump"))
        thread = threading.Thread(target=dump.close)
        thread.start()
        thread.join()
        raise_signal()
        assert calls == ["program"]
    finally:
        signal.signal(signal.SIGUSR1, former)


def test_another_thread_is_refused_with_what_to_do() -> None:
    refused: list[str] = []

    def ask() -> None:
        try:
            SignalDump(signal.SIGUSR1, lambda: None)
        except InvalidArgument as exc:
            refused.append(str(exc))

    thread = threading.Thread(target=ask, name="worker")
    thread.start()
    thread.join()
    (message,) = refused
    assert "'worker'" in message
    assert "call dump()" in message


@pytest.mark.parametrize("given", [signal.SIGKILL, -1, 1 << 70, 10.5, "USR1", None, [10]])
def test_a_signal_that_cannot_be_handled_is_refused(given: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^signum=.* cannot be handled .*SIGUSR1"):
        SignalDump(given, lambda: None)


def test_init_in_another_thread_refuses_the_setting_beforehand() -> None:
    refused: list[str] = []

    def start() -> None:
        try:
            r2ccl.init(dump_signal="SIGUSR1")
        except InvalidArgument as exc:
            refused.append(str(exc))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    (message,) = refused
    assert "R2CC_DUMP_SIGNAL" in message


def test_signals_with_a_meaning_of_their_own_are_no_setting() -> None:
    with pytest.raises(InvalidArgument, match=r"R2CC_DUMP_SIGNAL.*SIGUSR1, SIGUSR2"):
        Config(dump_signal="SIGINT")


def test_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    for text in ("one", "two"):
        write_line(text, os.fspath(path))
    assert path.read_text() == "one\ntwo\n"


def test_a_file_that_refuses_leaves_stderr(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_line("the status", os.fspath(tmp_path / "missing" / "status.json"))
    written = capfd.readouterr().err
    assert "R2CC_DUMP_FILE" in written
    assert written.endswith("the status\n")


def test_without_a_file_it_is_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    write_line("the status", "")
    assert capfd.readouterr().err == "the status\n"
