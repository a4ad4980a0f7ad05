"""What the variables for logs, ours and NCCL's, let through."""

import logging
from collections.abc import Iterator

import pytest

from r2ccl.config import Config
from r2ccl.errors import InvalidArgument
from r2ccl.factory import _set_log_level


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    found = logging.getLogger("r2ccl")
    level, handlers = found.level, list(found.handlers)
    yield found
    found.setLevel(level)
    found.handlers[:] = handlers


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
def test_levels_are_mapped_and_our_own_variable_wins(
    env: dict[str, str], level: int, logger: logging.Logger
) -> None:
    _set_log_level(Config.from_env(env))
    assert logger.level == level
    assert logger.hasHandlers()


def test_without_a_variable_logging_is_left_alone(logger: logging.Logger) -> None:
    logger.setLevel(logging.CRITICAL)
    _set_log_level(Config.from_env({}))
    assert logger.level == logging.CRITICAL


def test_another_level_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="R2CC_DEBUG"):
        Config.from_env({"R2CC_DEBUG": "LOUD"})
