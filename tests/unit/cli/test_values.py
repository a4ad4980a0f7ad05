"""Tests of the values in command lines: limits that waits of the operating system have."""

from __future__ import annotations

import pytest

from r2ccl.cli import main


@pytest.mark.parametrize("command", ["netlab", "rdmalab"])
@pytest.mark.parametrize("value", ["inf", "nan", "-1", "0", "1e7", "soon"])
def test_a_timeout_out_of_range_is_a_usage_error(
    command: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, f"--timeout={value}", "--", "true"])
    assert ended.value.code == 2
    assert f"--timeout: {value!r}; allowed is more than 0 and less" in capsys.readouterr().err
