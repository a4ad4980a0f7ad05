"""The variables for logs, ours and NCCL's, set the level; records have one form."""

import io
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from r2ccl.bootstrap.logs import TERMINAL_VARIABLE, progress, set_level, set_rank
from r2ccl.config import Config
from r2ccl.errors import InvalidArgument


@contextmanager
def bare() -> Iterator[logging.Logger]:
    """Give the logger ``r2ccl`` without the handlers that pytest adds for each test."""
    found = logging.getLogger("r2ccl")
    kept = found.level, found.handlers, found.propagate
    found.handlers, found.propagate = [], False
    try:
        yield found
    finally:
        found.setLevel(kept[0])
        found.handlers, found.propagate = kept[1:]


@pytest.mark.parametrize(
    ("env", "level"),
    [
        ({"NCCL_DEBUG": "INFO"}, logging.INFO),
        ({"NCCL_DEBUG": "warn"}, logging.WARNING),
        ({"NCCL_DEBUG": "VERSION"}, logging.WARNING),
        ({"NCCL_DEBUG": "ABORT"}, logging.INFO),
        ({"NCCL_DEBUG": "TRACE"}, logging.DEBUG),
        ({"R2CC_DEBUG": "TRACE", "NCCL_DEBUG": "WARN"}, logging.DEBUG),
    ],
)
def test_levels_are_mapped_and_our_own_variable_wins(env: dict[str, str], level: int) -> None:
    with bare() as logger:
        set_level(Config.from_env(env))
        assert logger.level == level
        assert logger.hasHandlers()


def test_without_a_variable_the_level_stays() -> None:
    with bare() as logger:
        logger.setLevel(logging.CRITICAL)
        set_level(Config.from_env({}))
        assert logger.level == logging.CRITICAL


def test_without_a_variable_warnings_have_the_form(capsys: pytest.CaptureFixture[str]) -> None:
    with bare() as logger:
        set_level(Config())
        set_rank(2)
        logger.setLevel(logging.INFO)
        logging.getLogger("r2ccl.part").warning("a setting has no effect")
        logger.info("not shown")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(" WARNING r2ccl.part: rank 2: a setting has no effect")


def test_a_variable_of_a_later_init_counts(capsys: pytest.CaptureFixture[str]) -> None:
    with bare() as logger:
        set_level(Config())
        set_level(Config(debug="INFO"))
        logger.info("shown")
    assert "shown" in capsys.readouterr().err


@pytest.mark.parametrize("debug", ["", "INFO"])
def test_a_later_handler_of_the_program_replaces_ours(
    debug: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with bare() as logger:
        set_level(Config(debug=debug))
        logger.addHandler(logging.NullHandler())
        logging.getLogger("r2ccl.part").warning("taken by the program")
    assert capsys.readouterr().err == ""


def test_a_handler_of_the_program_is_left_alone() -> None:
    own = logging.NullHandler()
    with bare() as logger:
        logger.addHandler(own)
        set_level(Config(debug="INFO"))
        set_rank(1)
        assert (logger.handlers, own.formatter) == ([own], None)


def test_another_level_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="R2CC_DEBUG"):
        Config.from_env({"R2CC_DEBUG": "LOUD"})


def test_a_record_has_time_level_logger_and_rank_once(capsys: pytest.CaptureFixture[str]) -> None:
    with bare() as logger:
        set_level(Config(debug="INFO"))
        part = logging.getLogger("r2ccl.some.part")
        part.info("compiling %s", "this")
        set_rank(3)
        part.info("compiling %s", "that")
        logger.warning("rank 3: a rail failed")
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    wanted = [
        rf"{time} INFO r2ccl\.some\.part: pid \d+: compiling this",
        rf"{time} INFO r2ccl\.some\.part: rank 3: compiling that",
        rf"{time} WARNING r2ccl: rank 3: a rail failed",
    ]
    for line, pattern in zip(capsys.readouterr().err.splitlines(), wanted, strict=True):
        assert re.fullmatch(pattern, line), line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("debug", "stream", "launcher", "shown"),
    [
        ("", Terminal(), "", "r2ccl: waiting\n"),
        ("", io.StringIO(), "", ""),
        ("", io.StringIO(), "1", "r2ccl: waiting\n"),
        ("INFO", Terminal(), "1", ""),
    ],
)
def test_progress_is_a_line_on_a_terminal_or_a_record(
    debug: str,
    stream: io.StringIO,
    launcher: str,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TERMINAL_VARIABLE, launcher)
    monkeypatch.setattr("sys.stderr", stream)
    with bare() as logger:
        logger.addHandler(logging.NullHandler())
        logger.setLevel(logging.WARNING)
        set_level(Config(debug=debug))
        progress(logger, "waiting")
    assert stream.getvalue() == shown


def test_a_warning_takes_no_lock_of_logging() -> None:
    """`dictConfig` holds it while it waits for the handler."""
    with bare() as logger:
        set_level(Config())
        logger.warning("rank 0: this fills the cache of levels")
        with logging._lock:  # type: ignore[attr-defined]
            warns = threading.Thread(target=logger.warning, args=("rank 0: TEST",))
            warns.start()
            warns.join(30.0)
            assert not warns.is_alive()
