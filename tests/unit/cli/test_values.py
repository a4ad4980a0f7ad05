"""The values in command lines: times, and sizes with units."""

from __future__ import annotations

import argparse

import pytest

from r2ccl.cli import main
from r2ccl.cli.values import parse_duration, parse_rate, parse_size, size_range


@pytest.mark.parametrize("command", ["netlab", "rdmalab"])
@pytest.mark.parametrize("value", ["inf", "nan", "-1", "0", "1e7", "soon"])
def test_a_timeout_out_of_range_is_a_usage_error(
    command: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, f"--timeout={value}", "--", "true"])
    assert ended.value.code == 2
    assert f"--timeout: {value!r}; allowed is more than 0 and less" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["bench", "explain"])
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("all_reduce", "did you mean allreduce? allowed are allreduce, allgather, "),
        ("all_gather", "did you mean allgather? "),
        ("reduce-scatter", "did you mean reduce_scatter? "),
        ("ping", "'ping'; allowed are allreduce, "),
    ],
)
def test_a_wrong_collective_is_told_the_nearest_one(
    command: str, name: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([command, "--collective", name])
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("256", 256), ("64K", 65536), ("1.5m", 3 << 19), ("2GiB", 2 << 30), ("8B", 8)],
)
def test_sizes_are_powers_of_1024(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "K", "-1", "1T", "0.3", "1 2", "nan", "inf"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        parse_size(text)


def test_ranges_of_sizes_end() -> None:
    assert list(size_range(4, 100, step=1, factor=3)) == [4, 12, 36]
    assert list(size_range(4, 12, step=4, factor=1)) == [4, 8, 12]
    assert list(size_range(0, 9, step=0, factor=2)) == [0, 1, 2, 4, 8]
    assert list(size_range(8, 16, step=0, factor=1e308)) == [8]
    with pytest.raises(ValueError, match="never reach"):
        list(size_range(0, 9, step=0, factor=1))


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("400gbit", 50_000_000_000),
        ("400Gbit/s", 50_000_000_000),
        ("1.5gbps", 187_500_000),
        ("50GB/s", 50_000_000_000),
        ("400Gb/s", 50_000_000_000),
        ("800mbit", 100_000_000),
        ("8bit", 1),
    ],
)
def test_rates_have_decimal_units(text: str, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "400", "gbit", "0gbit", "1xbit", "1e9gbit", "4kkgbit"])
def test_other_rates_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a rate"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "time_s"), [("5us", 5e-6), ("0.5ms", 5e-4), ("2s", 2), ("9ns", 9e-9)]
)
def test_times_have_units(text: str, time_s: float) -> None:
    assert parse_duration(text) == pytest.approx(time_s)


@pytest.mark.parametrize("text", ["", "5", "us", "0s", "-1s", "nans", "1hs", "5mus", "5nus"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a time"):
        parse_duration(text)
