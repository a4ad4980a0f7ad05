"""Settings that have more than one spelling."""

from __future__ import annotations

import pytest

from r2ccl.config import MODES, Config
from r2ccl.errors import InvalidArgument


@pytest.mark.parametrize(("number", "name"), list(enumerate(MODES[:4])))
def test_a_mode_is_known_by_its_number_too(number: int, name: str) -> None:
    by_number = Config.from_env({"R2CC_MODE": str(number)})
    assert by_number.mode == name
    assert by_number.digest() == Config(mode=name).digest()


def test_a_mode_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"R2CC_MODE.*failstop, migrate"):
        Config.from_env({"R2CC_MODE": "4"})
