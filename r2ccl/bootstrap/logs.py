"""Log of r2ccl: the level that ``R2CC_DEBUG`` sets, and the form of the lines on stderr.

Without ``R2CC_DEBUG``, only warnings and errors are written. If the program has configured handlers
that receive the records, only the level is set. `progress` reports long waits, on a terminal even
without ``R2CC_DEBUG``.
"""

from __future__ import annotations

import logging
import os
import sys

from r2ccl.config import DEBUG_LEVELS, Config

_ROOT = "r2ccl"
#: Variable that ``r2ccl launch`` sets for its ranks: not empty if it writes their output to a
#: terminal.
TERMINAL_VARIABLE = "R2CC_TERMINAL"


class RankFormatter(logging.Formatter):
    """Formatter that writes a record as time, level, logger, rank and message.

    The rank is left out if the message begins with ``rank``. Before the rank of the process is
    known, the process id is written instead.

    Attributes
    ----------
    rank : int
        Rank of this process; -1 if it is not known yet.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self.rank = -1

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Implement `logging.Formatter.formatMessage`."""
        if not record.message.startswith("rank "):
            who = f"pid {record.process}" if self.rank < 0 else f"rank {self.rank}"
            record.message = f"{who}: {record.message}"
        return super().formatMessage(record)


class FallbackHandler(logging.Handler):
    """Handler that writes to ``sys.stderr`` the records that no other handler receives.

    A handler that the program configures later thus replaces this one, just as such a handler
    replaces `logging.lastResort`.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Implement `logging.Handler.emit`."""
        if sys.stderr is None or self._is_received(record):
            return
        try:
            sys.stderr.write(f"{self.format(record)}\n")  # one write, so that the line stays whole
            sys.stderr.flush()
        except Exception:
            self.handleError(record)

    def _is_received(self, record: logging.LogRecord) -> bool:
        # Not getLogger, which takes a lock that a program may hold while it waits for this handler.
        logger = logging.root.manager.loggerDict.get(record.name)
        while isinstance(logger, logging.Logger):
            if any(not isinstance(handler, FallbackHandler) for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


def set_level(config: Config) -> None:
    """Apply ``R2CC_DEBUG`` to the logger ``r2ccl``; add a handler for stderr if there is none.

    The handler is added if neither this logger nor any logger to which it propagates has a handler.
    Without ``R2CC_DEBUG``, the level of the logger stays, and the added handler writes warnings and
    errors.
    """
    level = DEBUG_LEVELS[config.debug.upper()]
    logger = logging.getLogger(_ROOT)
    if not logger.hasHandlers():
        added = FallbackHandler(logging.WARNING)
        added.setFormatter(RankFormatter())
        logger.addHandler(added)
    if level:
        logger.setLevel(level)
        for handler in logger.handlers:
            if isinstance(handler, FallbackHandler):
                handler.setLevel(logging.NOTSET)


def set_rank(rank: int) -> None:
    """Give the rank of this process to the handler that `set_level` has added, if any."""
    for handler in logging.getLogger(_ROOT).handlers:
        if isinstance(handler.formatter, RankFormatter):
            handler.formatter.rank = rank


def progress(logger: logging.Logger, text: str) -> None:
    """Report a long wait: as an INFO record or, if INFO is off, on a terminal.

    The terminal is stderr, or the terminal of an ``r2ccl launch`` that reads stderr. If INFO is off
    and there is no terminal, nothing is reported.
    """
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", text)
    elif sys.stderr is not None and (sys.stderr.isatty() or os.environ.get(TERMINAL_VARIABLE)):
        sys.stderr.write(f"r2ccl: {text}\n")
        sys.stderr.flush()


__all__ = [
    "TERMINAL_VARIABLE",
    "FallbackHandler",
    "RankFormatter",
    "progress",
    "set_level",
    "set_rank",
]
